"""A megatron-core model from the `config.json` of a Hugging Face folder.

Supported: Qwen3MoeForCausalLM (every layer MoE), MixtralForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, with tied or
untied embeddings. A field whose value the model built here would not honour is refused by name.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from agentgym.errors import ModelError
from agentgym.model import check_layout
from agentgym.trainer_config import TrainerConfig
from agentgym_trainers.megatron.lora import freeze
from agentgym_trainers.megatron.spec import fused_attention_available, layer_spec

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""A layer keeps its input only."""

ARCHITECTURES = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")

REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "decoder_sparse_step": (1,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "mlp_only_layers": ([], None),
    "pretraining_tp": (1,),
    "quantization_config": (None,),
    "rope_scaling": (None,),
    "router_jitter_noise": (0, 0.0),
    "use_sliding_window": (False, None),
}
"""Fields that must have one of these values where they are present."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of the folder's `config.json`, checked.

    Raises:
        ModelError: the file is missing or malformed, or the model is not supported.
    """
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(
            f"cannot read {path}: {error.strerror}; policies.*.model names a Hugging Face folder"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    check_supported(fields)
    return dict(fields)


def check_supported(fields: dict[str, Any]) -> None:
    """Raise ModelError, naming the field, if a model with these fields cannot be built."""
    names = fields.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ModelError(f"architectures = {names}; supported: {', '.join(ARCHITECTURES)}")
    for name, allowed in REQUIRED_VALUES.items():
        if name in fields and fields[name] not in allowed:
            raise ModelError(f"{name} = {fields[name]!r} is not supported; it must be {allowed[0]!r}")
    rope = fields.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(
            f"rope_parameters.rope_type = {rope['rope_type']!r} is not supported; it must be 'default'"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("rope_parameters.partial_rotary_factor is not supported; it must be 1.0")
    if names[0] == "MixtralForCausalLM" and fields.get("sliding_window") is not None:
        raise ModelError(f"sliding_window = {fields['sliding_window']} is not supported; it must be null")
    other_layers = {kind for kind in fields.get("layer_types") or [] if kind != "full_attention"}
    if other_layers:
        raise ModelError(f"layer_types has {sorted(other_layers)}; only 'full_attention' is supported")


def rope_theta(fields: dict[str, Any]) -> float:
    """Return the base of the rotary embedding; transformers 5 keeps it in `rope_parameters`."""
    theta = (fields.get("rope_parameters") or {}).get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise ModelError("neither rope_parameters.rope_theta nor rope_theta is set in config.json")
    return float(theta)


def transformer_config(
    fields: dict[str, Any], dtype: torch.dtype, trainer: TrainerConfig
) -> TransformerConfig:
    """Return megatron-core's settings of the model in the layout of the trainer.

    Raises:
        ModelError: a field that is needed is missing, or the ranks cannot divide the model.
    """
    architecture = fields["architectures"][0]
    moe: dict[str, Any] = {}
    try:
        if architecture == "Qwen3MoeForCausalLM":
            # transformers 5 writes the second name.
            experts = fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"]
            normalized = fields.get("norm_topk_prob", False)
            moe = _moe_settings(fields, experts, fields["moe_intermediate_size"], normalized)
        elif architecture == "MixtralForCausalLM":
            moe = _moe_settings(fields, fields["num_local_experts"], fields["intermediate_size"], True)
        heads = fields["num_attention_heads"]
        shape = {
            "num_layers": fields["num_hidden_layers"],
            "hidden_size": fields["hidden_size"],
            "ffn_hidden_size": fields["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": fields.get("num_key_value_heads") or heads,
            "kv_channels": fields.get("head_dim") or fields["hidden_size"] // heads,
            "layernorm_epsilon": fields["rms_norm_eps"],
        }
    except KeyError as error:
        raise ModelError(f"config.json of a {architecture} lacks {error.args[0]!r}") from error
    check_layout(fields, trainer)
    return TransformerConfig(
        **shape,
        **moe,
        **_layout(trainer),
        qk_layernorm=architecture.startswith("Qwen3"),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        # Built on the CPU and then moved; the weights come from the folder anyway.
        use_cpu_initialization=True,
        # Fused kernels need Apex or TransformerEngine, or compile at the first step, for no gain on a CPU.
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )


def _layout(trainer: TrainerConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": trainer.tp,
        "sequence_parallel": trainer.tp > 1,
        "pipeline_model_parallel_size": trainer.pp,
        "batch_p2p_comm": False,
        "expert_model_parallel_size": trainer.ep,
        "expert_tensor_parallel_size": trainer.expert_tp,
        **(RECOMPUTE if trainer.recompute else {}),
    }


def _moe_settings(fields: dict[str, Any], experts: int, size: int, normalized: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": experts,
        "moe_router_topk": fields["num_experts_per_tok"],
        "moe_ffn_hidden_size": size,
        # Gate weights that sum to 1 are the softmax over the chosen experts; otherwise it is over all of
        # them.
        "moe_router_pre_softmax": not normalized,
        "moe_router_dtype": "fp32",
        # Reinforcement learning keeps the balance that pretraining found.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        # This skips the replay hook.
        "moe_router_fusion": False,
    }


class Model(GPTModel):  # type: ignore[misc]
    """megatron-core's model, which returns its hidden states [T, 1, H]; `predictions` makes logits of those it needs.

    Its tied embedding needs no exchange between stages before it is loaded: both ends of a pipeline read it from the
    folder, and megatron-core would send it through a GPU.
    """

    architecture: str
    words: int
    """The model's vocabulary. `vocab_size` is the next number that the tensor-parallel ranks can divide; the rows
    beyond it are zeros, and stay so."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def _is_in_embd_group(self) -> bool:
        return False


def build_model(
    fields: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    trainer: TrainerConfig | None = None,
) -> GPTModel:
    """Return this rank's part of the model with arbitrary weights, in training mode, on the device.

    Its layout is that of `trainer`, in which `parallel.process_groups` connected the ranks; None: one rank. With
    `trainer.lora_rank` only its adapters, which are zero, are to be trained.

    Raises:
        ModelError: the ranks cannot divide the model, or its matrices are too small for the adapters.
    """
    trainer = trainer or TrainerConfig()
    config = transformer_config(fields, dtype, trainer)
    theta = rope_theta(fields)
    model = Model(
        config,
        layer_spec(config, trainer, theta),
        vocab_size=fields["vocab_size"] + -fields["vocab_size"] % config.tensor_model_parallel_size,
        max_sequence_length=fields["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope" if fused_attention_available() else "none",  # our attention has them
        rotary_base=theta,
        share_embeddings_and_output_weights=bool(fields.get("tie_word_embeddings", False)),
    )
    model.architecture, model.words = fields["architectures"][0], fields["vocab_size"]
    if trainer.lora_rank:
        freeze(model, trainer)
    return model.to(device).train()
