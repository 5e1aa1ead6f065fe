import pytest
import torch
from torch import Tensor

from agentgym_trainers.megatron.predictions import log_probabilities

HIDDEN, WORDS, TEMPERATURE = 8, 31, 0.7


@pytest.fixture
def numbers() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, words and targets, in float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    words = torch.randn(WORDS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, words, torch.randint(WORDS, (13,), generator=generator)


def plainly(hidden: Tensor, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    table = (hidden @ words.T / TEMPERATURE).log_softmax(dim=-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(dim=-1)


@pytest.mark.parametrize("rows_at_once", [100, 13, 5, 1, 0])
def test_log_probabilities_and_entropies_and_their_gradients_are_those_of_the_formulas(
    numbers: tuple[Tensor, Tensor, Tensor], rows_at_once: int
):
    hidden, words, targets = numbers
    found = log_probabilities(hidden, words, targets, TEMPERATURE, rows_at_once * WORDS)
    expected = plainly(hidden, words, targets)
    scale = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    for loss in (
        lambda logprobs, entropies: (scale * logprobs).sum(),
        lambda logprobs, entropies: (scale * entropies).sum(),
        lambda logprobs, entropies: (logprobs * entropies).sum(),
    ):
        ours = torch.autograd.grad(loss(*found), (hidden, words), retain_graph=True)
        theirs = torch.autograd.grad(loss(*expected), (hidden, words), retain_graph=True)
        torch.testing.assert_close(ours, theirs)


def test_extreme_logits_stay_finite(numbers: tuple[Tensor, Tensor, Tensor]):
    hidden, words, targets = numbers
    logprobs, entropies = log_probabilities(1e4 * hidden.float(), words.float(), targets, 1.0)
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.isfinite().all()
    assert entropies.abs().max() <= 1e-6
    assert hidden.grad.isfinite().all()


def test_nothing_is_trained_where_nothing_was_sampled(numbers: tuple[Tensor, Tensor, Tensor]):
    hidden, words, targets = numbers
    logprobs, entropies = log_probabilities(hidden[:0], words, targets[:0], 1.0)
    (logprobs.sum() + entropies.sum()).backward()
    assert len(logprobs) == len(entropies) == 0
    assert not hidden.grad.any()
    assert not words.grad.any()


def test_no_row_of_the_vocabulary_waits_for_the_backward_pass(numbers: tuple[Tensor, Tensor, Tensor]):
    hidden, words, targets = numbers
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probabilities(hidden, words, targets, TEMPERATURE)
    assert sorted(kept) == sorted([hidden.numel(), words.numel(), *3 * [len(targets)]])
    assert len(targets) * WORDS > max(kept)
