from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_builders import CPU, samples_of

from agentgym.errors import IntegrityError
from agentgym_trainers.megatron.microbatch import build_microbatch
from agentgym_trainers.megatron.sequences import pack_sequences


def test_a_trained_token_is_read_from_the_row_before_it():
    first, second = samples_of((6, 4), routes=False)
    packed = build_microbatch([first, second], 0, None, CPU)
    assert packed.tokens[0].tolist() == [*first.tokens, *second.tokens]
    assert packed.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 6, 10]
    assert packed.rows.tolist() == [2, 3, 4, 7, 8]
    assert packed.targets.tolist() == [*first.tokens[3:], *second.tokens[2:]]
    assert packed.advantages.tolist() == [*first.advantages[3:], *second.advantages[2:]]


def test_only_tokens_of_the_trained_version_are_current():
    sample = samples_of((6,), routes=False)[0]
    sample.versions[3:] = (4, 5, 5)
    assert build_microbatch([sample], 5, None, CPU).current.tolist() == [False, True, True]


def test_a_trained_first_token_is_refused():
    sample = samples_of((6,), routes=False)[0]
    mask = np.ones(6, np.bool_)
    with pytest.raises(IntegrityError, match="first token"):
        build_microbatch([replace(sample, loss_mask=mask)], 0, None, CPU)


def test_buckets_hold_every_token_once_in_sequences_of_similar_length():
    lengths = [5, 60, 1, 33, 64, 2, 65, 40]
    packed = pack_sequences(lengths, CPU)
    placed = torch.cat([bucket.index[bucket.valid] for bucket in packed.buckets])
    assert placed[packed.order].tolist() == list(range(sum(lengths)))
    assert sum(bucket.rows for bucket in packed.buckets) == len(lengths)
    # Short of the smallest ones, less than half of a rectangle is padding.
    assert all(len(bucket.index) <= 2 * len(bucket.valid) for bucket in packed.buckets)
