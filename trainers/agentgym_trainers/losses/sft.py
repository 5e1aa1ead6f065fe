"""Imitation."""

from torch import Tensor

from agentgym_trainers.losses.terms import Stats


def sft(logprobs: Tensor) -> tuple[Tensor, Stats]:
    """Return -log pi_theta: the cross-entropy of supervised training."""
    return -logprobs, {}
