from dataclasses import replace

import numpy as np
import pytest
from builders import trajectory_of
from hypothesis import given
from hypothesis import strategies as st

from agentgym.batch import Sample, concatenate, pack_microbatches, share_of, split
from agentgym.errors import IntegrityError


def sample_of(turns: int, *, routes: bool = True) -> Sample:
    """The sample of a trajectory with this many turns, whose first turn is too old to be trained."""
    trajectory = trajectory_of([1.0] * turns, routes=routes)
    trained = trajectory.loss_mask & (np.arange(len(trajectory.tokens)) > 5)
    return Sample(
        tokens=trajectory.tokens,
        loss_mask=trained,
        logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        routes=trajectory.routes,
        advantages=np.where(trained, 0.5, 0).astype(np.float32),
        weights=np.where(trained, 0.1, 0).astype(np.float32),
        checksum=trajectory.checksum(),
        sampled=trajectory.loss_mask,
    )


@pytest.mark.parametrize("routes", [True, False])
def test_samples_survive_the_concatenation(routes: bool) -> None:
    samples = [sample_of(turns, routes=routes) for turns in (1, 3, 2)]
    arrays = {name: array for name, array in concatenate(samples).items() if array is not None}
    assert ("routes" in arrays) == routes
    back = split(arrays, [len(s.tokens) for s in samples], [s.checksum for s in samples])
    for mine, theirs in zip(back, samples, strict=True):
        mine.verify()
        for name in Sample.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


@pytest.mark.parametrize("name", ["tokens", "sampled", "logprobs", "versions", "routes"])
def test_a_sample_that_was_changed_on_the_way_is_found(name: str) -> None:
    sample = sample_of(2)
    changed = getattr(sample, name).copy()
    changed.flat[4] = not changed.flat[4]
    with pytest.raises(IntegrityError, match=r"a trajectory of 10 tokens has checksum .* changed on the way"):
        replace(sample, **{name: changed}).verify()


def test_what_the_coordinator_adds_is_not_part_of_the_checksum() -> None:
    sample = sample_of(2)
    replace(sample, advantages=sample.advantages * 2, loss_mask=sample.loss_mask & False).verify()


def test_a_batch_whose_arrays_do_not_fit_is_refused() -> None:
    samples = [sample_of(1), sample_of(2)]
    arrays = {name: array for name, array in concatenate(samples).items() if array is not None}
    sums = [s.checksum for s in samples]
    with pytest.raises(IntegrityError, match=r"weights is missing; expected float32\[15\]"):
        split({name: array for name, array in arrays.items() if name != "weights"}, [5, 10], sums)
    with pytest.raises(IntegrityError, match=r"tokens is int32\[14\]; expected int32\[15\]"):
        split({**arrays, "tokens": arrays["tokens"][1:]}, [5, 10], sums)
    with pytest.raises(IntegrityError, match=r"weights is float64\[15\]; expected float32"):
        split({**arrays, "weights": arrays["weights"].astype(np.float64)}, [5, 10], sums)
    with pytest.raises(IntegrityError, match=r"routes is uint8\[14, 2, 2\]; expected uint8 or uint16 \[15,"):
        split({**arrays, "routes": arrays["routes"][1:]}, [5, 10], sums)
    with pytest.raises(IntegrityError, match="a batch of 2 samples has 1 checksums"):
        split(arrays, [5, 10], sums[:1])


def test_samples_with_and_without_routes_make_no_batch() -> None:
    with pytest.raises(IntegrityError, match="1 of 2 samples have no routes"):
        concatenate([sample_of(1), sample_of(1, routes=False)])


def test_microbatches_are_filled_with_the_longest_samples_first() -> None:
    assert pack_microbatches([2, 7, 3, 5, 1], 8) == [[1, 4], [3, 2], [0]]
    assert pack_microbatches([20, 1], 8) == [[0], [1]]
    assert pack_microbatches([], 8) == []


@given(lengths=st.lists(st.integers(1, 40), max_size=40), budget=st.integers(1, 60))
def test_every_sample_is_in_one_microbatch_within_the_budget(lengths: list[int], budget: int) -> None:
    packed = pack_microbatches(lengths, budget)
    assert sorted(index for part in packed for index in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= budget for part in packed)
    # First fit: no two microbatches would have fitted into one.
    sums = [sum(lengths[i] for i in part) for part in packed]
    assert all(a + b > budget for n, a in enumerate(sums) for b in sums[n + 1 :])


@given(lengths=st.lists(st.integers(1, 40), max_size=40), budget=st.integers(1, 60), ranks=st.integers(1, 4))
def test_ranks_get_as_many_microbatches_and_about_as_many_tokens(
    lengths: list[int], budget: int, ranks: int
) -> None:
    packed = pack_microbatches(lengths, budget, ranks)
    assert sorted(index for part in packed for index in part) == list(range(len(lengths)))
    shares = [share_of(rank, ranks, packed) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    tokens = [sum(lengths[i] for part in share for i in part) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


def test_a_rank_without_a_microbatch_of_its_own_gets_an_empty_one() -> None:
    assert share_of(0, 2, [[0], [1], [2]]) == [[0], [2]]
    assert share_of(1, 2, [[0], [1], [2]]) == [[1], []]


def test_a_mask_beyond_the_sampled_tokens_is_refused() -> None:
    sample = sample_of(3)
    with pytest.raises(IntegrityError, match="trains tokens that were not sampled"):
        replace(sample, loss_mask=np.ones(len(sample.tokens), np.bool_)).verify()
