import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ModelError
from agentgym.messages import Message, assistant, system, tool_call, tool_result, user
from agentgym.policy.template import ChatTokenizer
from agentgym.tiny_model import init_model

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = tool_call("add", '{"a": 1}', "call_0")
CONVERSATIONS = [
    ([user("Hi")], ()),
    ([system("Be brief."), user("Hi <b> & 'so'")], ()),
    ([system("Be brief."), user("Hi")], (TOOL,)),
    ([user("Hi")], (TOOL, TOOL)),
    ([user("1+1?"), assistant("", [CALL]), tool_result("2", CALL)], (TOOL,)),
    (
        [
            user("1+1?"),
            assistant("Let me see.", [CALL, CALL]),
            tool_result("2", CALL),
            tool_result("2", CALL),
        ],
        (),
    ),
    ([user("Hi"), assistant("Hello"), user("Bye")], ()),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    init_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer(model)


def with_objects(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as transformers wants them: the arguments of calls as objects."""
    plain: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in plain:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return plain


@pytest.mark.parametrize(("messages", "tools"), CONVERSATIONS)
def test_prompts_are_those_of_transformers(model: Path, messages: list[Message], tools: tuple[Any, ...]):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model)
    expected = theirs.apply_chat_template(
        with_objects(messages), tools=list(tools) or None, add_generation_prompt=True, return_dict=False
    )
    assert ChatTokenizer(model).encode_chat(messages, tools) == expected


def test_the_tiny_template_writes_nothing_superfluous(tokenizer: ChatTokenizer):
    rendered = tokenizer.render([system("S"), user("U"), assistant("A"), user("B")])
    assert rendered == "<|system|>S<|end|><|user|>U<|end|><|assistant|>A<|end|><|user|>B<|end|><|assistant|>"


def test_the_tiny_template_names_tools_and_their_parameters(tokenizer: ChatTokenizer):
    bare = {"type": "function", "function": {"name": "roll", "description": "", "parameters": {}}}
    assert tokenizer.render([system("S"), user("U")], [TOOL, bare], generation_prompt=False) == (
        "<|system|>S\nadd(a)\nroll()<|end|><|user|>U<|end|>"
    )
    assert tokenizer.render([user("U")], [TOOL], generation_prompt=False) == (
        "<|system|>add(a)<|end|><|user|>U<|end|>"
    )


@pytest.mark.parametrize(
    "message",
    [assistant("Hello"), assistant(""), assistant("", [CALL]), assistant("First.", [CALL, CALL])],
)
def test_a_written_answer_parses_to_itself(tokenizer: ChatTokenizer, message: Message):
    ids = tokenizer.encode_answer(message)
    assert ids[-1] == tokenizer.stop_token_ids[0]
    parsed = tokenizer.parse(ids, [TOOL])
    assert parsed["content"] == message["content"]
    assert [c["function"] for c in parsed.get("tool_calls", [])] == [
        c["function"] for c in message.get("tool_calls", [])
    ]


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"name": "add", "arguments": {"a": }}', "add", '{"name": "add", "arguments": {"a": }}'),
        ("add(1)", "", "add(1)"),
        ('{"arguments": {}}', "", '{"arguments": {}}'),
        ('{"name": 7}', "", '{"name": 7}'),
        ("[1]", "", "[1]"),
        ('{"name": "add"}', "add", "{}"),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "add", '{"a": 1}'),
        ('{"name": "add", "arguments": null}', "add", "null"),
    ],
)
def test_malformed_calls_stay_calls(tokenizer: ChatTokenizer, text: str, name: str, arguments: str):
    message = tokenizer.parse(tokenizer.encode(f"<tool_call>{text}</tool_call><|end|>"), [TOOL])
    [call] = message["tool_calls"]
    assert call["function"] == {"name": name, "arguments": arguments}


def test_a_call_that_was_cut_off_is_a_malformed_call(tokenizer: ChatTokenizer):
    message = tokenizer.parse(tokenizer.encode('Well <tool_call>{"name": "add", "argu'), [TOOL])
    assert message["content"] == "Well"
    assert message["tool_calls"][0]["function"]["name"] == "add"


@given(st.lists(st.integers(0, 104), max_size=30))
def test_anything_that_can_be_sampled_can_be_parsed(tokenizer: ChatTokenizer, ids: list[int]):
    assert tokenizer.parse(ids, [TOOL])["role"] == "assistant"


def test_a_conversation_that_the_template_refuses_is_a_model_error(tmp_path: Path):
    init_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system message, please') }}")
    with pytest.raises(ModelError, match="refuses the pattern system, user: no system message"):
        ChatTokenizer(tmp_path).encode_chat([system("S"), user("U")])
