"""AdamW over the trained parameters of a model, in float32 whatever the model's dtype.

A bfloat16 model is trained through float32 master copies: a step of Adam is often smaller than the distance
between two bfloat16 numbers.
"""

from collections.abc import Mapping

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.optim.adamw import adamw

from agentgym.errors import ModelError, RunError
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron import gradients
from agentgym_trainers.megatron.convert import fill
from agentgym_trainers.megatron.export import Stream, prefixed, stream_trained
from agentgym_trainers.megatron.lora import trained_entries


class Optimizer:
    """Clips the gradients, takes an AdamW step, and gives its state with Hugging Face's names.

    The state of a parameter lies where the parameter does, so that it goes on in any parallel layout.
    """

    def __init__(self, model: GPTModel, config: TrainerConfig) -> None:
        """Take over the trained parameters of the model. Weight decay is on matrices only."""
        self._model = model
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float()
            for name, parameter in self._parameters.items()
        }
        self._config = config
        self._moments = {
            key: {name: torch.zeros_like(master) for name, master in self._masters.items()}
            for key in ("exp_avg", "exp_avg_sq")
        }
        self._steps = {name: torch.zeros((), device=master.device) for name, master in self._masters.items()}

    @property
    def steps(self) -> int:
        """The updates so far."""
        return int(next(iter(self._steps.values())))

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, learning_rate: float) -> float:
        """Clip, update and return the norm of the gradient before clipping.

        The gradients must be those of the whole batch on every rank; without any, nothing happens.

        Raises:
            RunError: the norm is not finite; nothing was updated.
        """
        found = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._masters[name].grad = found[parameter] = parameter.grad.float()
        norm = torch.tensor(gradients.norm(self._model, found))
        if not norm.isfinite():
            raise RunError(
                f"the norm of the gradient is {norm}; look at the learning rate and the rewards of the batch"
            )
        torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._config.max_grad_norm, norm)
        with torch.no_grad():
            self._update(learning_rate)
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])
                    self._masters[name].grad = None
        return norm.item()

    def _update(self, learning_rate: float) -> None:
        """Take a step of AdamW with the masters that have a gradient."""
        config = self._config
        moved = {name: master for name, master in self._masters.items() if master.grad is not None}
        for matrices in (True, False):
            some = {name: master for name, master in moved.items() if (master.ndim >= 2) == matrices}
            # The class torch.optim.AdamW calls this function, too, but imports torch's compiler, which takes a second.
            adamw(
                list(some.values()),
                [master.grad for master in some.values() if master.grad is not None],
                [self._moments["exp_avg"][name] for name in some],
                [self._moments["exp_avg_sq"][name] for name in some],
                [],
                [self._steps[name] for name in some],
                fused=True,  # reads and writes each tensor once, on CPUs too
                amsgrad=False,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                lr=learning_rate,
                weight_decay=config.weight_decay if matrices else 0.0,
                eps=config.adam_eps,
                maximize=False,
            )

    def stream(self) -> Stream:
        """Return the state but `steps`: "exp_avg.NAME", "exp_avg_sq.NAME"; bfloat16: "master.NAME"."""
        return prefixed({key: stream_trained(self._model, part) for key, part in self._state().items()})

    def load(self, steps: int, tensors: Mapping[str, Tensor]) -> None:
        """Take over the state of after `steps` updates, which `stream` returned.

        Raises:
            ModelError: the state is of another model.
        """
        state = self._state()
        unknown = {name for name in tensors if name.partition(".")[0] not in state}
        try:
            for key, targets in state.items():
                named = {n.partition(".")[2]: t for n, t in tensors.items() if n.partition(".")[0] == key}
                unknown |= named.keys() - fill(trained_entries(self._model), targets, named)
        except ModelError as error:
            raise ModelError(f"the optimizer's state does not fit the model: {error}") from error
        if unknown:
            raise ModelError(f"the optimizer's state does not fit the model: {sorted(unknown)[:3]}")
        for count in self._steps.values():
            count.fill_(steps)

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each kind, by parameter."""
        separate = any(self._masters[name] is not self._parameters[name] for name in self._masters)
        return self._moments | ({"master": self._masters} if separate else {})
