"""What a transformer layer is made of, on any device.

megatron-core 0.16.1 moves tensors to CUDA in places that have no switch, and its router needs
TransformerEngine. Its layer spec lets a model name the classes of its parts, so three small classes here take
the place of those parts, and nothing inside megatron-core is replaced at run time.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron.lora import add_adapters
from agentgym_trainers.megatron.sequences import PackedSequences

# megatron-core has no type information, so its classes are Any to mypy, which warns of a subclass of Any.


class Router(TopKRouter):  # type: ignore[misc]
    """The top-k router, with its gate as a plain linear map in float32.

    megatron-core's own `gating` calls a TransformerEngine function that is undefined where that is not
    installed.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [..., E] of the experts for hidden states [..., H]."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the arguments of a layer spec, and the mark that sequence parallelism needs."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """Make the weight [hidden_size] in the model's dtype."""
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Read by megatron's gradient all-reduce over the tensor-parallel ranks.
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class SDPAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each packed sequence, with torch's scaled_dot_product_attention and rotary positions.

    megatron-core's own attention refuses packed sequences. A call per sequence would cost more than the
    arithmetic where hundreds of short sequences are packed, so sequences of similar lengths go through one
    call, padded on the right. A causal query never sees the padding after it, so the result is exact.

    Positions (RoFormer, arXiv:2104.09864, equation 34) are given here, where a token's place in its sequence is its
    column: megatron-core would make the cosine of every packed token, in every layer, from a slice for each sequence.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        rotary_base: float,
        **options: Any,
    ) -> None:
        """Keep the softmax scale and the frequencies; the other arguments of the spec have no meaning here."""
        super().__init__(config=config)
        self.scale = options.get("softmax_scale")
        exponents = torch.arange(0, config.kv_channels, 2, dtype=torch.float32) / config.kv_channels
        self.register_buffer("frequencies", 1.0 / rotary_base**exponents, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Return [T, heads * d] for query [T, heads, d] and key and value [T, groups, d]."""
        if packed_seq_params is None:
            raise ValueError("SDPAttention needs packed sequences; pass packed_seq_params to the model")
        parts = []
        for bucket in packed_seq_params.buckets:
            q, k, v = (
                bucket.gather(tensor).transpose(1, 2) for tensor in (query, key, value)
            )  # [n, heads, S, d]
            angles = torch.arange(q.shape[2], device=q.device)[:, None] * self.frequencies
            cosine, sine = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
            q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.valid))
        joined = torch.cat(parts).index_select(0, packed_seq_params.order)
        return joined.flatten(1)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn [..., S, d] by angles [S, d / 2]: dimension i together with i + d / 2, as Hugging Face's models have it."""
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def fused_attention_available() -> bool:
    """Say whether TransformerEngine's attention kernels can be used: it is installed and there is a GPU."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def layer_spec(
    config: TransformerConfig, trainer: TrainerConfig, rotary_base: float
) -> TransformerBlockSubmodules:
    """Return the spec of all layers of a model: the parts above, inside megatron-core's local spec, and adapters.

    Names of parameters are the local spec's on every device, so weights are converted in one way only.
    """
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = _attention(rotary_base)
    if config.num_moe_experts:
        parts.mlp.submodules.router = Router
    if trainer.lora_rank:
        add_adapters(parts, trainer, config)
    count = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)


def _attention(rotary_base: float) -> Callable[..., Any]:
    if fused_attention_available():
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention  # type: ignore[no-any-return]
    return partial(SDPAttention, rotary_base=rotary_base)
