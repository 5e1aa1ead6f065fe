"""Tiny random models with a character tokenizer, for tests and for runs on a laptop.

    init_model(Path("models/tiny"), "tiny-moe", seed=1)

writes what `save_pretrained` would write for a Qwen3-MoE model: configuration, weights, tokenizer and chat
template. Nothing here needs torch, and the same preset and seed give the same bytes.

One token is one character of printable ASCII, a newline, a special token or a piece of what all tool calls share, so
every word costs its length; the chat template therefore writes nothing that a model without knowledge has no use for,
and of tools only what they and their parameters are called.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from agentgym.errors import ConfigError, ModelError
from agentgym.model import check_model

logger = logging.getLogger(__name__)

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unk|>"
CONTROL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", UNKNOWN)
TOOL_TOKENS = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {', '": ', "}}")
"""What all calls share; without them a call is twice as long, and what it copies twice as far away."""
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
VOCABULARY = (*CONTROL_TOKENS, *TOOL_TOKENS, *ALPHABET)

CHAT_TEMPLATE = """\
{%- set first = 1 if messages and messages[0].role == "system" else 0 -%}
{%- if first or tools -%}
    {{- "<|system|>" -}}
    {%- if first -%}{{- messages[0].content -}}{%- endif -%}
    {%- for tool in tools or [] -%}
        {{- "\\n" if first or not loop.first else "" -}}
        {%- set function = tool.function or tool -%}
        {{- function.name + "(" + (function.parameters.properties or {}) | join(", ") + ")" -}}
    {%- endfor -%}
    {{- "<|end|>" -}}
{%- endif -%}
{%- for message in messages[first:] -%}
    {{- "<|" + message.role + "|>" + (message.content or "") -}}
    {%- for call in message.tool_calls or [] -%}
        {%- set function = call.function or call -%}
        {{- "<tool_call>" -}}
        {{- {"name": function.name, "arguments": function.arguments} | tojson -}}
        {{- "</tool_call>" -}}
    {%- endfor -%}
    {{- "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The sizes of a tiny Qwen3-MoE model."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    """vLLM's attention on a CPU takes 32, 64 and larger multiples of 16."""
    experts: int = 8
    top_k: int = 2
    expert_size: int = 64
    """Intermediate size of one expert; the CPU kernels want multiples of 32."""
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    tied: bool = False
    """Share the matrix of the input embedding with the output layer."""
    init_std: float = 0.05
    """Standard deviation of all matrices; norms start at 1."""


PRESETS = {"tiny-moe": TinyModel(), "tiny-moe-tied": TinyModel(tied=True)}


def init_model(directory: Path, preset: str = "tiny-moe", seed: int = 1) -> bool:
    """Write a random model into a new or empty folder.

    Returns:
        True if it was written; False if the folder holds a complete model already, which is then kept.

    Raises:
        ConfigError: the preset is unknown.
        ModelError: the folder holds something else.
    """
    sizes = PRESETS.get(preset)
    if sizes is None:
        raise ConfigError(f"unknown model preset {preset!r}; known presets: {', '.join(PRESETS)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        try:
            check_model(directory)
        except ModelError as error:
            raise ModelError(
                f"{directory} exists and holds no complete model ({error}); remove it or name another folder"
            ) from error
        logger.info("%s holds a complete model already; it was kept, nothing was written", directory)
        return False
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(sizes))
    _write_json(
        directory / "generation_config.json",
        {"eos_token_id": VOCABULARY.index(END), "pad_token_id": VOCABULARY.index(PAD)},
    )
    tokenizer = character_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(sizes))
    # The weights come last: a folder that has them is complete.
    weights = dict(_weights(sizes, np.random.default_rng(seed)))
    path = directory / "model.safetensors"
    safetensors.numpy.save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that only their owner can read
    return True


def character_tokenizer() -> Tokenizer:
    """Return the tokenizer of the tiny models; characters outside its alphabet become `<|unk|>`."""
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOOL_TOKENS])
    return tokenizer


def _config(sizes: TinyModel) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "dtype": "float32",
        "eos_token_id": VOCABULARY.index(END),
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "initializer_range": sizes.init_std,
        "intermediate_size": sizes.expert_size * sizes.top_k,
        "max_position_embeddings": sizes.max_positions,
        "mlp_only_layers": [],
        "moe_intermediate_size": sizes.expert_size,
        "norm_topk_prob": True,
        "num_attention_heads": sizes.heads,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "pad_token_id": VOCABULARY.index(PAD),
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": sizes.rope_theta,
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": sizes.tied,
        "use_sliding_window": False,
        "vocab_size": len(VOCABULARY),
    }


def _tokenizer_config(sizes: TinyModel) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": sizes.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def _weights(sizes: TinyModel, rng: np.random.Generator) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield (Hugging Face name, array); matrices are [output size, input size]."""
    hidden, width = sizes.hidden_size, sizes.heads * sizes.head_dim

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(sizes.init_std)

    def norm(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    yield "model.embed_tokens.weight", matrix(len(VOCABULARY), hidden)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", norm(hidden)
        yield prefix + "self_attn.q_proj.weight", matrix(width, hidden)
        yield prefix + "self_attn.k_proj.weight", matrix(sizes.kv_heads * sizes.head_dim, hidden)
        yield prefix + "self_attn.v_proj.weight", matrix(sizes.kv_heads * sizes.head_dim, hidden)
        yield prefix + "self_attn.o_proj.weight", matrix(hidden, width)
        yield prefix + "self_attn.q_norm.weight", norm(sizes.head_dim)
        yield prefix + "self_attn.k_norm.weight", norm(sizes.head_dim)
        yield prefix + "post_attention_layernorm.weight", norm(hidden)
        yield prefix + "mlp.gate.weight", matrix(sizes.experts, hidden)
        for expert in range(sizes.experts):
            place = f"{prefix}mlp.experts.{expert}."
            yield place + "gate_proj.weight", matrix(sizes.expert_size, hidden)
            yield place + "up_proj.weight", matrix(sizes.expert_size, hidden)
            yield place + "down_proj.weight", matrix(hidden, sizes.expert_size)
    yield "model.norm.weight", norm(hidden)
    if not sizes.tied:
        yield "lm_head.weight", matrix(len(VOCABULARY), hidden)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
