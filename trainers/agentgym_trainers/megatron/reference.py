"""A frozen model beside the one that is trained: what the policy was when reinforcement learning began."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron.convert import load_hf, read_safetensors
from agentgym_trainers.megatron.microbatch import Microbatch
from agentgym_trainers.megatron.model import build_model, read_config
from agentgym_trainers.megatron.pipeline import forward_only
from agentgym_trainers.megatron.predictions import predict


class Reference:
    """Says what another policy thinks of the trained tokens. Its own routers choose its experts."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, trainer: TrainerConfig | None = None
    ) -> None:
        """Load the Hugging Face folder, in the layout of `trainer`.

        It takes the memory of the weights, and none for gradients.

        Raises:
            ModelError: the folder cannot be used.
        """
        self._model = build_model(read_config(folder), dtype, device, trainer).requires_grad_(False)
        load_hf(self._model, read_safetensors(folder))

    @torch.no_grad()
    def logprobs(self, microbatches: Sequence[Microbatch], temperature: float) -> list[Tensor]:
        """Return the log-probability [N] of each trained token, per microbatch; on the last pipeline stage only."""
        every = forward_only(self._model, microbatches)
        return [
            predict(self._model, hidden, microbatch, temperature)[0]
            for hidden, microbatch in zip(every, microbatches, strict=False)
        ]
