import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError, ModelError
from agentgym.model import check_model
from agentgym.tiny_model import ALPHABET, PRESETS, VOCABULARY, character_tokenizer, init_model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, preset: str):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert init_model(tmp_path / name, preset, seed)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert a["model.safetensors"] != c["model.safetensors"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_tiny_model_is_complete(tmp_path: Path, preset: str):
    sizes = PRESETS[preset]
    init_model(tmp_path, preset)
    info = check_model(tmp_path)
    assert info.architecture == "Qwen3MoeForCausalLM"
    assert (info.moe_layers, info.num_experts, info.top_k) == (sizes.layers, sizes.experts, sizes.top_k)
    assert info.vocab_size == len(VOCABULARY)
    assert info.stop_token_ids == (VOCABULARY.index("<|end|>"),)
    assert info.tied == sizes.tied


def test_a_complete_model_is_kept(tmp_path: Path):
    init_model(tmp_path, seed=1)
    before = contents(tmp_path)
    assert not init_model(tmp_path, seed=2)
    assert contents(tmp_path) == before


def test_a_folder_with_other_things_is_not_overwritten(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ModelError, match="holds no complete model"):
        init_model(tmp_path)
    assert contents(tmp_path) == {"thesis.tex": b"precious"}


def test_an_unknown_preset_names_the_known_ones(tmp_path: Path):
    with pytest.raises(ConfigError, match="tiny-moe"):
        init_model(tmp_path / "new", "huge-moe")
    assert not (tmp_path / "new").exists()


@given(st.text(ALPHABET))
def test_text_of_the_alphabet_survives_encoding(text: str):
    tokenizer = character_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_other_characters_become_the_unknown_token():
    tokenizer = character_tokenizer()
    assert tokenizer.encode("a\u00e9\u4e16b").tokens == ["a", "<|unk|>", "<|unk|>", "b"]


def test_special_tokens_are_one_token_each():
    tokenizer = character_tokenizer()
    assert tokenizer.encode("<|user|>x<tool_call>").tokens == ["<|user|>", "x", "<tool_call>"]


def edit(folder: Path, name: str, **fields: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def damaged(folder: Path, damage: str) -> Path:
    """A tiny model in which one thing is wrong."""
    init_model(folder)
    match damage:
        case "architecture":
            edit(folder, "config.json", architectures=["GPT2LMHeadModel"])
        case "half-copied weights":
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "no chat template":
            edit(folder, "tokenizer_config.json", chat_template=None)
        case "no end token":
            edit(folder, "tokenizer_config.json", eos_token=None)
            edit(folder, "config.json", eos_token_id=None)
            (folder / "generation_config.json").unlink()
        case "other vocabulary":
            edit(folder, "config.json", vocab_size=999)
        case "broken json":
            (folder / "config.json").write_text("{")
        case "no folder":
            shutil.rmtree(folder)
        case name:
            (folder / name.removeprefix("no ")).unlink()
    return folder


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("no folder", "there is no model folder"),
        ("no config.json", "has no config.json"),
        ("broken json", "cannot read"),
        ("architecture", "is a GPT2LMHeadModel; supported are Qwen3MoeForCausalLM"),
        ("no model.safetensors", "no weight file"),
        ("half-copied weights", "damaged or incomplete"),
        ("other vocabulary", "config.json says"),
        ("no tokenizer.json", "has no tokenizer.json"),
        ("no tokenizer_config.json", "has no tokenizer_config.json"),
        ("no chat template", "has no chat template"),
        ("no end token", "names no end token"),
    ],
)
def test_what_is_wrong_with_a_model_folder_is_said(tmp_path: Path, damage: str, text: str):
    with pytest.raises(ModelError, match=text):
        check_model(damaged(tmp_path / "model", damage))


def test_transformers_reads_a_tiny_model(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for preset, sizes in PRESETS.items():
        init_model(tmp_path / preset, preset)
        model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / preset, output_loading_info=True)
        assert not loading["missing_keys"]
        assert not loading["unexpected_keys"]
        assert model.config.rope_parameters["rope_theta"] == sizes.rope_theta
        assert AutoTokenizer.from_pretrained(tmp_path / preset).eos_token == "<|end|>"
