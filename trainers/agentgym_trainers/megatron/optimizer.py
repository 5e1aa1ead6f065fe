"""AdamW over the parameters of a model, in float32 whatever the model's dtype.

A bfloat16 model is trained through float32 master copies: a step of Adam is often smaller than the distance
between two bfloat16 numbers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from agentgym.config import TrainerConfig
from agentgym.errors import ModelError, RunError


class Optimizer:
    """Clips the gradients, takes an AdamW step, and gives its state as named tensors."""

    def __init__(self, model: torch.nn.Module, config: TrainerConfig) -> None:
        """Take over the parameters of the model. Weight decay is on matrices only."""
        self._parameters = dict(model.named_parameters())
        self._masters = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float()
            for name, parameter in self._parameters.items()
        }
        self._max_norm = config.max_grad_norm
        decayed = [master for master in self._masters.values() if master.ndim >= 2]
        others = [master for master in self._masters.values() if master.ndim < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, learning_rate: float) -> float:
        """Clip, update and return the norm of the gradient before clipping.

        Raises:
            RunError: the norm is not finite; nothing was updated.
        """
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                self._masters[name].grad = None if parameter.grad is None else parameter.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self._max_norm).item()
        if not torch.tensor(norm).isfinite():
            raise RunError(
                f"the norm of the gradient is {norm}; look at the learning rate and the rewards of the batch"
            )
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Return the state: "exp_avg.NAME", "exp_avg_sq.NAME", "step.NAME"; bfloat16: "master.NAME"."""
        state = {}
        for name, master in self._masters.items():
            for key, tensor in self._adam.state[master].items():
                state[f"{key}.{name}"] = tensor
            if master is not self._parameters[name]:
                state[f"master.{name}"] = master
        return state

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the state that `tensors` returned.

        Raises:
            ModelError: the state is of another model.
        """
        expected = {
            f"master.{name}" for name, master in self._masters.items() if master is not self._parameters[name]
        }
        if any(name.startswith("step.") for name in tensors):  # there is none before the first step
            expected |= {
                f"{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in self._masters
            }
        if tensors.keys() != expected:
            raise ModelError(
                f"the optimizer's state does not fit the model: {sorted(tensors.keys() ^ expected)[:3]}"
            )
        for full, tensor in tensors.items():
            key, _, name = full.partition(".")
            master = self._masters[name]
            if key == "master":
                with torch.no_grad():
                    master.copy_(tensor)
            else:
                self._adam.state[master][key] = (
                    tensor.clone() if key == "step" else tensor.to(master.device).clone()
                )
