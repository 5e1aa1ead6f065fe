"""What runs inside vLLM's worker: the live weight update.

vLLM mixes `WeightLoader` into its worker class (`worker_extension_cls`) and calls its methods by name between
two engine steps. So one call can change the weights and tell exactly how many tokens each request had then.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from agentgym.adapters import DOWN, SCALE, UP, merged
from agentgym.policy.vllm_plugin import repack_tied_head

REMEMBERED = 4096
"""Finished requests whose token counts are kept: far more than have their answers on the way."""


class WeightLoader:
    """The worker's extra methods; names begin with `agentgym_`, since they join the worker's own."""

    model_runner: Any
    model_config: Any
    device: torch.device

    def agentgym_attach(self) -> None:
        """Remember finished requests from now on; called once, before the first request."""
        # It warns at each update of buffers that no checkpoint holds (rotary embeddings). What a checkpoint
        # must hold is compared before: `Engine.load_weights`.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        self.model_runner.requests = Requests(self.model_runner.requests)

    def agentgym_load_weights(self, paths: list[str], adapters: str | None) -> dict[str, int]:
        """Load safetensors files with Hugging Face names in place of the current weights.

        A file of adapters is merged into them on the way, on the device of the model.

        Returns:
            By request id of the engine: the tokens sampled so far, all of them with the old weights. Requests
            that are not named have none yet.
        """
        model = self.model_runner.get_model()
        with torch.no_grad():
            initialize_layerwise_reload(model)
            tensors = _tensors(paths)
            if adapters is not None:
                tensors = _adapted(tensors, adapters, self.device, self.model_config.dtype)
            model.load_weights(tensors)
            finalize_layerwise_reload(model, self.model_config)
        if current_platform.is_cpu():
            repack_tied_head(model)
        requests: Requests = self.model_runner.requests
        return requests.token_counts()


def _tensors(paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with safe_open(path, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                yield name, weights.get_tensor(name)


def _adapted(
    tensors: Iterator[tuple[str, torch.Tensor]], path: str, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, "pt", str(device)) as opened:
        scale, names = float(opened.metadata()[SCALE]), set(opened.keys())
        for name, tensor in tensors:
            down, up = (name.removesuffix(".weight") + ending for ending in (DOWN, UP))
            if down in names:
                pair = opened.get_tensor(down), opened.get_tensor(up)
                yield name, merged(tensor.to(device), *pair, scale).to(dtype)
            else:
                yield name, tensor


class Requests(dict[str, Any]):
    """The model runner's requests by id, with a memory of those that finished lately.

    When weights change, the answer of a finished request may still be on its way to the server; it must not
    be taken for one that has not begun.
    """

    def __init__(self, requests: dict[str, Any]) -> None:
        """Take over the entries of `requests`."""
        super().__init__(requests)
        self._finished: OrderedDict[str, int] = OrderedDict()

    def pop(self, request_id: str, *default: Any) -> Any:
        """Remove a request that finished, as `dict.pop` does."""
        state = super().pop(request_id, *default)
        if state is not None:
            self._finished[request_id] = len(state.output_token_ids)
            if len(self._finished) > REMEMBERED:
                self._finished.popitem(last=False)
        return state

    def token_counts(self) -> dict[str, int]:
        """Return the sampled tokens of running and lately finished requests."""
        return dict(self._finished) | {name: len(state.output_token_ids) for name, state in self.items()}
