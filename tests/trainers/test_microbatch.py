from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_builders import CPU, samples_of

from agentgym.errors import IntegrityError
from agentgym_trainers.megatron.microbatch import build_microbatch, fed_at
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


def test_padding_is_a_sequence_of_its_own_that_trains_nothing():
    samples = samples_of((6, 5), routes=False)
    packed = build_microbatch(samples, 0, None, CPU, multiple=4)
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 6, 11, 12]
    assert (packed.padding, packed.rows.tolist()) == (
        1,
        build_microbatch(samples, 0, None, CPU).rows.tolist(),
    )


def test_a_microbatch_without_samples_is_padding():
    packed = build_microbatch([], 0, None, CPU, multiple=2)
    assert packed.tokens.tolist() == [[0, 0]]
    assert packed.padding == 2
    assert packed.targets.dtype == torch.int64
    assert len(packed.targets) == len(packed.rollout) == 0


def test_a_token_met_the_experts_of_the_version_that_sampled_the_next_token():
    #                        prompt   answer  prompt  answer
    versions = np.array([-1, -1, 3, 4, -1, -1, 5], np.int32)
    assert fed_at(versions).tolist() == [3, 3, 4, 5, 5, 5, -1]


def test_buckets_hold_every_token_once_in_sequences_of_similar_length():
    lengths = [5, 60, 1, 33, 64, 2, 65, 40]
    packed = pack_sequences(lengths, CPU)
    placed = torch.cat([bucket.index[bucket.valid] for bucket in packed.buckets])
    assert placed[packed.order].tolist() == list(range(sum(lengths)))
    assert sum(bucket.rows for bucket in packed.buckets) == len(lengths)
    # Short of the smallest ones, less than half of a rectangle is padding.
    assert all(len(bucket.index) <= 2 * len(bucket.valid) for bucket in packed.buckets)
