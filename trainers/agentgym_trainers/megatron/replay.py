"""Router replay: send each token to the experts that were chosen for it before.

By the policy server (R3), where a token whose row is the sentinel (the dtype's largest value, see
`agentgym.episode.no_route`) is routed by the trainer's own router; or by that router in the first of the updates on a
batch (R2, see `FirstRoutes`). Only the choice of experts is replayed: their gate weights are computed from the router's
live logits, so the router still gets a gradient.

Shapes: T packed tokens, L MoE layers, k experts per token, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from numpy.typing import NDArray
from torch import Tensor

from agentgym.episode import no_route
from agentgym.errors import IntegrityError

NATIVE = -1
"""In checked routes: this row is for the trainer's own router."""

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True)
class FirstRoutes:
    """The routes of a microbatch that its first forward pass chooses natively, and all later ones replay."""

    layers: list[Tensor | None] = field(default_factory=list)
    """int64 [T, k] of the tokens of this rank, by MoE layer of this rank; empty before that pass."""


class Action(Enum):
    """What a router does when it is asked for its experts."""

    NATIVE = "native"
    """Choose by its own logits."""
    FORWARD = "forward"
    """Use the routes of the microbatch that runs forward."""
    BACKWARD = "backward"
    """Forward again, for activation recompute: use the routes of the oldest microbatch not yet asked for."""


class LayerReplay:
    """The replay of one router; it has the method that megatron-core asks its own `RouterReplay` for.

    megatron-core's class keeps every instance of the process in a global list and has no native rows.
    """

    def __init__(self) -> None:
        """Start with native routing."""
        self.action = Action.NATIVE
        self.target: Tensor | None = None
        """The routes of the forward pass: those that it replays, or has chosen."""
        self.waiting: list[Tensor | None] = []

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the indices [T, k] of the experts of each token."""
        native = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.action is Action.NATIVE:
            return native
        target = self.target if self.action is Action.FORWARD else self.waiting.pop(0)
        if target is None:
            self.target = native[1]
            return native
        if target.shape != (len(scores), topk):
            raise IntegrityError(
                f"a router got routes of shape {tuple(target.shape)} for {(len(scores), topk)} (tokens, experts)"
            )
        experts = torch.where(target == NATIVE, native[1], target)
        return scores.gather(1, experts), experts


class ReplayController:
    """Gives each MoE layer of one model its routes, microbatch by microbatch.

    A pipeline stage takes the routes of its own layers, and with sequence parallelism a rank those of its own tokens;
    with expert parallelism the tokens travel after they were routed.
    """

    def __init__(self, model: GPTModel) -> None:
        """Bind to the routers of this model, in the order of its modules. All layers are MoE layers, or none is."""
        routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        self._layers = [LayerReplay() for _ in routers]
        for router, layer in zip(routers, self._layers, strict=True):
            if router.config.moe_router_fusion:
                raise ValueError("moe_router_fusion skips the replay; build the model without it")
            router.router_replay = layer
        self.layers = model.config.num_layers if routers else 0
        """The number of MoE layers of all pipeline stages, L."""
        self._first = get_transformer_layer_offset(model.config)
        self._experts = routers[0].config.num_moe_experts if routers else 0
        self._topk = routers[0].config.moe_router_topk if routers else 0

    def check(self, routes: NDArray[np.unsignedinteger[Any]], tokens: int) -> Tensor:
        """Return routes [T, L, k] as int64 [L, T, k] with NATIVE rows for the sentinel rows.

        Raises:
            IntegrityError: a wrong shape or dtype, an expert that does not exist or is named twice for a
            token,
                or a row of which only a part is the sentinel.
        """
        expected = (tokens, self.layers, self._topk)
        if routes.shape != expected or routes.dtype not in (np.uint8, np.uint16):
            raise IntegrityError(
                f"routes are {routes.dtype}{list(routes.shape)}; this model needs uint8 or uint16 "
                f"{list(expected)} (tokens, MoE layers, experts per token)"
            )
        missing = routes == no_route(routes.dtype)
        native = missing.all(axis=-1)
        if (missing.any(axis=-1) != native).any():
            token, layer = np.argwhere(missing.any(axis=-1) != native)[0]
            raise IntegrityError(
                f"the route of token {token} in layer {layer} is partly missing: {routes[token, layer]}"
            )
        out_of_range = (routes >= self._experts) & ~missing
        ordered = np.sort(routes, axis=-1)
        repeated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1) & ~native
        if out_of_range.any() or repeated.any():
            token, layer = np.argwhere(out_of_range.any(axis=-1) | repeated)[0]
            raise IntegrityError(
                f"the route of token {token} in layer {layer} is {routes[token, layer]}; expected "
                f"{self._topk} different experts below {self._experts}"
            )
        checked = np.where(native[..., None], NATIVE, routes.astype(np.int64))
        return torch.from_numpy(np.ascontiguousarray(checked.transpose(1, 0, 2)))

    @contextmanager
    def forward(self, routes: Tensor | FirstRoutes | None) -> Iterator[None]:
        """Replay checked routes [L, T, k] in the forward pass inside; None is native routing.

        T are the tokens of the whole microbatch. Afterwards the routers are set for the recompute in the backward
        pass, which asks in the order of forwards.
        """
        for layer, target in zip(self._layers, self._targets(routes), strict=True):
            layer.action, layer.target = Action.FORWARD, target
        yield
        if isinstance(routes, FirstRoutes):
            routes.layers = [layer.target for layer in self._layers]
        for layer in self._layers:
            layer.waiting.append(layer.target)
            layer.action = Action.BACKWARD

    def _targets(self, routes: Tensor | FirstRoutes | None) -> Sequence[Tensor | None]:
        """Return what each layer of this rank replays, of the tokens of this rank."""
        if isinstance(routes, Tensor):
            group = parallel_state.get_tensor_model_parallel_group()
            mine = routes.chunk(group.size(), 1)[group.rank()]
            return list(mine[self._first : self._first + len(self._layers)])
        known = routes.layers if routes is not None else []
        return known or [None] * len(self._layers)

    def clear(self) -> None:
        """Forget all routes; called where a pass over the batch is over, so that none is replayed in another one."""
        for layer in self._layers:
            layer.action, layer.target = Action.NATIVE, None
            layer.waiting.clear()


def coverage(routes: NDArray[np.unsignedinteger[Any]], fed: NDArray[np.bool_]) -> float:
    """Return the share of (token, layer) rows that have a route, among the tokens [T] marked in `fed`."""
    rows = routes[fed]
    return float((rows[..., 0] != no_route(routes.dtype)).mean()) if rows.size else 1.0
