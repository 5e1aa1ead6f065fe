"""Tokenizers and chat templates that behave like those of known model families, in model folders.

The templates in tests/templates are our own; they do what the originals do where it matters to a conversation:
default system messages, thinking that is stripped or inserted, formats of calls, what follows an end token. The
tokenizers are byte-level BPEs with the families' special tokens, so that the same text can be tokenized in
several ways.
"""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentgym.policy.template import ChatTokenizer
from agentgym.tiny_model import init_model

TEMPLATES = Path(__file__).parent / "templates"
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
WORD = r" ?\p{L}+|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s+| ?[^\s\p{L}\p{N}]+[\r\n]*"
"""No token reaches over the end of a word; line breaks stay together, whatever follows them."""


@dataclass(frozen=True)
class Family:
    """What a family's tokenizer is made of; the chat format's end token stands first in `stops`."""

    special: tuple[str, ...] = CHATML
    tags: tuple[str, ...] = TAGS
    stops: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    bos: str | None = None


LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
FAMILIES = {
    "qwen2_5": Family(),
    "qwen3": Family(),
    "qwen3_2507": Family(),
    "qwen3_5": Family(),
    "qwen3_training": Family(),
    "llama3_2": Family((*LLAMA, "<|python_tag|>"), (), ("<|eot_id|>", "<|eom_id|>"), "<|begin_of_text|>"),
    "smollm2": Family(tags=()),
    "gemma": Family(
        ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"), (), ("<end_of_turn>", "<eos>"), "<bos>"
    ),
}


@functools.cache
def family(name: str) -> ChatTokenizer:
    """The tokenizer of a family, made once."""
    with tempfile.TemporaryDirectory() as folder:
        return ChatTokenizer(write_family(Path(folder) / name, name))


def write_family(folder: Path, name: str, *, template: str | None = None, rstrip: bool = False) -> Path:
    """Write a model folder with a family's tokenizer and template; `rstrip`: end tokens swallow what follows."""
    parts = FAMILIES[name]
    init_model(folder)
    tokenizer = byte_tokenizer(parts, rstrip)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": parts.stops[0], "bos_token": parts.bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    stops = [tokenizer.token_to_id(text) for text in parts.stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    model = json.loads((folder / "config.json").read_text()) | {"eos_token_id": stops[0]}
    (folder / "config.json").write_text(json.dumps(model))
    source = (TEMPLATES / f"{name}.jinja").read_text() if template is None else template
    (folder / "chat_template.jinja").write_text(source)
    return folder


def byte_tokenizer(parts: Family, rstrip: bool = False) -> Tokenizer:
    """A byte-level BPE that has merged the commonest pairs of a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    words = [
        "the thing they thought\n\n",
        '{"name": "add", "arguments": {"a": 1}}',
        "user assistant hello",
    ] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, rstrip=rstrip and t in parts.stops) for t in parts.special]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in parts.tags])
    return tokenizer
