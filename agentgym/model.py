"""A model folder in the Hugging Face format, looked at before anything heavy is started.

    info = check_model(Path("models/tiny"))

Everything that the policy server, the workers and the trainer will need from the folder is checked here, so
that a wrong path or a half-copied download ends in one clear sentence, not in three tracebacks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from agentgym.errors import ModelError
from agentgym.trainer_config import TrainerConfig

SUPPORTED = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
"""The architectures that the trainer can build and the policy server can update while it runs."""
MOE = ("Qwen3MoeForCausalLM", "MixtralForCausalLM")
"""Those of them with experts."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model folder says about its model."""

    architecture: str
    vocab_size: int
    layers: int
    moe_layer_indices: tuple[int, ...]
    """The layers with experts, counted from 0; empty for dense models."""
    num_experts: int
    """Experts per MoE layer; 0 for dense models."""
    top_k: int
    """Experts per token; 0 for dense models."""
    context_length: int
    """Tokens; the model's own limit, not the server's."""
    tied: bool
    """The output layer shares the matrix of the input embedding."""
    stop_token_ids: tuple[int, ...]
    """The tokens that end an answer, the tokenizer's own end token first; never empty."""

    @property
    def moe_layers(self) -> int:
        """How many layers have experts."""
        return len(self.moe_layer_indices)


def check_model(directory: Path) -> ModelInfo:
    """Check a model folder and return what it says.

    Raises:
        ModelError: the folder, its configuration, weights, tokenizer or chat template is missing or damaged,
            or the architecture is not supported.
    """
    if not directory.is_dir():
        raise ModelError(f"there is no model folder at {directory}; give a local Hugging Face folder")
    config = _read_json(directory, "config.json")
    architectures = config.get("architectures") or ["none"]
    if architectures[0] not in SUPPORTED:
        raise ModelError(
            f"the model in {directory} is a {architectures[0]}; supported are {', '.join(SUPPORTED)}"
        )
    _check_weights(directory, config)
    read_chat_template(directory)
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    if architectures[0] not in MOE:
        experts = 0
    return ModelInfo(
        architecture=architectures[0],
        vocab_size=int(config["vocab_size"]),
        layers=int(config["num_hidden_layers"]),
        moe_layer_indices=_moe_layers(config) if experts else (),
        num_experts=experts,
        top_k=int(config["num_experts_per_tok"]) if experts else 0,
        context_length=int(config["max_position_embeddings"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        stop_token_ids=_stop_token_ids(directory, config),
    )


def check_context(directory: Path, info: ModelInfo, max_model_len: int) -> None:
    """Raise ModelError where the server's context is longer than the model's own."""
    if max_model_len > info.context_length:
        raise ModelError(
            f"server.max_model_len = {max_model_len} is more than the {info.context_length} "
            f"tokens that the model in {directory} can take; lower it"
        )


def check_ranks(directory: Path, trainer: TrainerConfig) -> None:
    """Raise ModelError where the ranks of a trainer cannot divide the model of a folder."""
    try:
        check_layout(_read_json(directory, "config.json"), trainer)
    except KeyError as error:
        raise ModelError(f"config.json in {directory} lacks {error.args[0]!r}") from error


def check_layout(config: Mapping[str, Any], trainer: TrainerConfig) -> None:
    """Raise ModelError where the ranks of a trainer cannot divide a model with this `config.json`."""
    heads = config["num_attention_heads"]
    divided = [
        ("tp", trainer.tp, "num_attention_heads", heads),
        ("tp", trainer.tp, "num_key_value_heads", config.get("num_key_value_heads") or heads),
        ("pp", trainer.pp, "num_hidden_layers", config["num_hidden_layers"]),
    ]
    size = config["intermediate_size"]
    if config["architectures"][0] in MOE:
        experts = config.get("num_experts") or config["num_local_experts"]
        size = config.get("moe_intermediate_size", size)
        divided += [
            ("ep", trainer.ep, "num_experts", experts),
            ("etp", trainer.expert_tp, "expert size", size),
        ]
    else:
        divided += [("ep", trainer.ep, "number of experts", 1), ("tp", trainer.tp, "intermediate_size", size)]
    for setting, ranks, name, number in divided:
        if number % ranks:
            raise ModelError(
                f"trainer.{setting} = {ranks} cannot divide the model's {name} = {number}; choose a divisor of it"
            )


def read_chat_template(directory: Path) -> str:
    """Return the chat template of a model folder, in Jinja.

    Raises:
        ModelError: the folder has none.
    """
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text()
    template = read_tokenizer_config(directory).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ModelError(
            f"the model in {directory} has no chat template (neither chat_template.jinja nor an entry in "
            "tokenizer_config.json); use an instruction-tuned model, or add the template of its family"
        )
    return template


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; the tokenizer itself must be there too.

    Raises:
        ModelError: one of the two files is missing or damaged.
    """
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json; load its tokenizer with transformers and save it again"
        )
    return _read_json(directory, "tokenizer_config.json")


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((directory / name).read_text())
    except FileNotFoundError as error:
        raise ModelError(
            f"{directory} has no {name}; it is not a complete Hugging Face model folder"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {directory / name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{directory / name} holds a {type(value).__name__}, not a JSON object")
    return value


def weight_shapes(path: Path) -> dict[str, list[int]]:
    """Return the names and shapes in a safetensors file, from its header alone.

    Raises:
        ModelError: the file is missing, damaged or incomplete.
    """
    if not path.is_file():
        raise ModelError(f"there is no weight file {path}; weights must be safetensors files")
    try:
        with safe_open(path, "np") as weights:
            return {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or incomplete: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model folder; a file itself is its only one.

    Raises:
        ModelError: the list of the files is damaged.
    """
    if not path.is_dir():
        return [path]
    if (path / "model.safetensors.index.json").is_file():
        files = set(_read_json(path, "model.safetensors.index.json").get("weight_map", {}).values())
    else:
        files = {"model.safetensors"}
    return [path / file for file in sorted(files)]


def model_shapes(path: Path) -> dict[str, list[int]]:
    """Return the names and shapes of all weights of a model folder, or of a safetensors file.

    Raises:
        ModelError: a file is missing, damaged or incomplete.
    """
    return {name: shape for file in weight_files(path) for name, shape in weight_shapes(file).items()}


def _check_weights(directory: Path, config: dict[str, Any]) -> None:
    embedding = model_shapes(directory).get("model.embed_tokens.weight")
    expected = [config.get("vocab_size"), config.get("hidden_size")]
    if embedding != expected:
        raise ModelError(
            f"the weights in {directory} have an embedding (model.embed_tokens.weight) of shape {embedding}, "
            f"config.json says {expected}"
        )


def _moe_layers(config: dict[str, Any]) -> tuple[int, ...]:
    # As Qwen3MoeDecoderLayer decides: a layer is dense if it is listed or falls between the sparse steps.
    step, dense = int(config.get("decoder_sparse_step", 1)), set(config.get("mlp_only_layers") or [])
    layers = range(int(config["num_hidden_layers"]))
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)


def _stop_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    # The chat format's end token is the tokenizer's; generation_config may name more, as Llama 3's does.
    end = token_text(read_tokenizer_config(directory).get("eos_token"))
    added = {
        entry["content"]: entry["id"] for entry in _read_json(directory, "tokenizer.json")["added_tokens"]
    }
    if end in added:
        found.append(added[end])
    sources = [config]
    if (directory / "generation_config.json").is_file():
        sources.insert(0, _read_json(directory, "generation_config.json"))
    for source in sources:
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not found:
        raise ModelError(f"the model in {directory} names no end token (eos_token, eos_token_id); add one")
    return tuple(dict.fromkeys(found))


def token_text(value: Any) -> str | None:
    """Return the text of a special token in tokenizer_config.json: a string, or an object with "content"."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
