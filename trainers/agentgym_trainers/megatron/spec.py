"""What a transformer layer is made of, on any device.

megatron-core 0.16.1 moves tensors to CUDA in places that have no switch, and its router needs
TransformerEngine. Its layer spec lets a model name the classes of its parts, so four small classes here take
the place of those parts, and nothing inside megatron-core is replaced at run time.
"""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
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
    """Causal attention inside each packed sequence, with torch's scaled_dot_product_attention.

    megatron-core's own attention refuses packed sequences. A call per sequence would cost more than the
    arithmetic where hundreds of short sequences are packed, so sequences of similar lengths go through one
    call, padded on the right. A causal query never sees the padding after it, so the result is exact.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        """Keep the softmax scale; the other arguments of the spec have no meaning here."""
        super().__init__(config=config)
        self.scale = options.get("softmax_scale")

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
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.valid))
        joined = torch.cat(parts).index_select(0, packed_seq_params.order)
        return joined.flatten(1)


class Rope(RotaryEmbedding):  # type: ignore[misc]
    """Rotary embedding that leaves its table on the device of the model."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles [max_seq_len, 1, 1, d] of the positions from `offset` on."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def fused_attention_available() -> bool:
    """Say whether TransformerEngine's attention kernels can be used: it is installed and there is a GPU."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def layer_spec(config: TransformerConfig, trainer: TrainerConfig) -> TransformerBlockSubmodules:
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
    attention.core_attention = _attention()
    if config.num_moe_experts:
        parts.mlp.submodules.router = Router
    if trainer.lora_rank:
        add_adapters(parts, trainer, config)
    count = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)


def _attention() -> type:
    if fused_attention_available():
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention  # type: ignore[no-any-return]
    return SDPAttention
