"""A frozen model beside the one that is trained: what the policy was when reinforcement learning began."""

from pathlib import Path

import torch
from torch import Tensor

from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.forward import log_distributions, of_targets
from agentgym_trainers.megatron.microbatch import Microbatch
from agentgym_trainers.megatron.model import build_model, read_config


class Reference:
    """Says what another policy thinks of the trained tokens. Its own routers choose its experts."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Load the Hugging Face folder; it takes the memory of the weights, and none for gradients.

        Raises:
            ModelError: the folder cannot be used.
        """
        self._model = build_model(read_config(folder), dtype, device).requires_grad_(False)
        load_hf(self._model, read_safetensors(folder))

    @torch.no_grad()
    def logprobs(self, microbatch: Microbatch, temperature: float) -> Tensor:
        """Return the log-probability [N] of each trained token."""
        return of_targets(log_distributions(self._model, microbatch, temperature), microbatch)
