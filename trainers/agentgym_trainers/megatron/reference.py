"""What the policy was when reinforcement learning began: a frozen model, or the same one with other adapters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron.convert import fill, load_hf, read_safetensors
from agentgym_trainers.megatron.lora import trained_entries
from agentgym_trainers.megatron.microbatch import Microbatch
from agentgym_trainers.megatron.model import build_model, read_config
from agentgym_trainers.megatron.pipeline import forward_only
from agentgym_trainers.megatron.predictions import predict


class Reference:
    """Says what another policy thinks of the trained tokens. Its own routers choose its experts."""

    def __init__(self, model: GPTModel, values: Mapping[str, Tensor]) -> None:
        """Ask a model as it is when some of its parameters, given by name, have these values; see the class methods."""
        self._model = model
        self._values = {model.get_parameter(name): value for name, value in values.items()}

    @classmethod
    def load(
        cls, folder: Path, dtype: torch.dtype, device: torch.device, trainer: TrainerConfig
    ) -> "Reference":
        """Load the Hugging Face folder, in the layout of `trainer`.

        It takes the memory of the weights, and none for gradients.

        Raises:
            ModelError: the folder cannot be used.
        """
        model = build_model(read_config(folder), dtype, device, trainer).requires_grad_(False)
        load_hf(model, read_safetensors(folder))
        return cls(model, {})

    @classmethod
    def with_adapters(cls, model: GPTModel, adapters: Mapping[str, Tensor] | None) -> "Reference":
        """Take the model that is trained, with other adapters, which are all the memory that is needed; None: without.

        Raises:
            ModelError: the adapters do not fit.
        """
        values = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
        if adapters is not None:
            fill(trained_entries(model), values, adapters)
        return cls(model, values)

    @torch.no_grad()
    def logprobs(self, microbatches: Sequence[Microbatch], temperature: float) -> list[Tensor]:
        """Return the log-probability [N] of each trained token, per microbatch; on the last pipeline stage only."""
        with self._as_it_was():
            every = forward_only(self._model, microbatches)
            return [
                predict(self._model, hidden, microbatch, temperature)[0]
                for hidden, microbatch in zip(every, microbatches, strict=False)
            ]

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        now = {parameter: parameter.data for parameter in self._values}
        try:
            for parameter, value in self._values.items():
                parameter.data = value
            yield
        finally:
            for parameter, value in now.items():
                parameter.data = value
