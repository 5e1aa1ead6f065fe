from pathlib import Path

import pytest
from chat_families import family, write_family

from agentgym.errors import ModelError
from agentgym.messages import assistant, tool_call, user
from agentgym.policy.answers import (
    Thinking,
    read_answer,
    read_bare,
    read_functions,
    read_tagged,
    thinking_of,
    words_of,
)
from agentgym.policy.template import ChatTokenizer

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
        },
    },
}
CALL = tool_call("find", '{"text": "5", "count": 2}', "call_0")


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("qwen2_5", read_tagged),
        ("qwen3", read_tagged),
        ("qwen3_5", read_functions),
        ("llama3_2", read_bare),
        ("smollm2", read_tagged),
    ],
)
def test_calls_are_read_in_the_format_that_the_template_writes(name: str, reader: object) -> None:
    tokenizer = family(name)
    assert tokenizer.reader is reader
    ids = tokenizer.encode_answer(assistant("", [CALL]))
    assert tokenizer.parse(ids, [FIND])["tool_calls"] == [CALL]
    assert "tool_calls" not in tokenizer.parse(ids)  # a model without tools calls none


def test_a_template_with_an_unknown_format_of_calls_is_one_clear_error(tmp_path: Path) -> None:
    template = """\
{%- for tool in tools or [] -%}{{- tool.function.name -}}{%- endfor -%}
{%- for message in messages -%}
    {{- message.role + message.content -}}
    {%- for call in message.tool_calls or [] -%}{{- "CALL " + call.function.name -}}{%- endfor -%}
    {{- "<|im_end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "assistant" -}}{%- endif -%}
"""
    tokenizer = ChatTokenizer(write_family(tmp_path / "model", "qwen2_5", template=template))
    assert tokenizer.parse(tokenizer.encode("CALL find<|im_end|>")) == assistant("CALL find")
    with pytest.raises(
        ModelError, match=r"a tool call as 'CALL probe_tool', which cannot be read.* tagged, func"
    ):
        tokenizer.parse(tokenizer.encode("CALL find<|im_end|>"), [FIND])


@pytest.mark.parametrize(
    ("text", "names", "content"),
    [
        ('<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>', ["a", "b"], ""),
        ('<tool_call>{"name": "a"}</tool_call> and <tool_call>{"name": "b"}</tool_call>', ["a", "b"], "and"),
        (
            "<think>\nshall I <tool_call>?\n</think>\n\nNo.",
            [],
            "<think>\nshall I <tool_call>?\n</think>\n\nNo.",
        ),
        ('<think>\nso <tool_call>{"name": "a"}', [], '<think>\nso <tool_call>{"name": "a"}'),
        ('<think>\nso\n</think>\n\n<tool_call>{"name": "a"}</tool_call>', ["a"], "<think>\nso\n</think>"),
        ("<tool_call></tool_call>", [""], ""),
        ("<tool_call>[]</tool_call>", [""], ""),
    ],
)
def test_tagged_calls(text: str, names: list[str], content: str) -> None:
    message = read_answer(text, read_tagged, [FIND])
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == names
    assert message["content"] == content
    assert len({call["id"] for call in message.get("tool_calls", [])}) == len(names)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ('{"name": "find", "parameters": {"count": 1}}', ("find", '{"count": 1}')),
        ('<|python_tag|>{"name": "find", "parameters": {}}', ("find", "{}")),
        ('{"name": "find", "parameters": {"cou', ("find", '{"name": "find", "parameters": {"cou')),
        ('{"name": "Bob", "age": 7}', None),
        ('{"answer": 3}', None),
        ('Say {"name": "find", "parameters": {}}', None),
        ("", None),
    ],
)
def test_bare_calls_are_whole_answers(text: str, function: tuple[str, str] | None) -> None:
    message = read_answer(text, read_bare, [FIND])
    found = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    assert found == ([function] if function else [])
    assert message["content"] == ("" if function else text)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("<function=find><parameter=text>\n5\n</parameter></function>", "find", '{"text": "5"}'),
        ("\n<function=find>\n<parameter=count>\n5\n</parameter>\n</function>\n", "find", '{"count": 5}'),
        ("<function=find><parameter=count>five</parameter></function>", "find", '{"count": "five"}'),
        ("<function=other><parameter=x>[1, 2]</parameter></function>", "other", '{"x": [1, 2]}'),
        ("<function=find></function>", "find", "{}"),
        ("<function=find><parameter=te", "find", "<function=find><parameter=te"),
        ("nonsense", "", "nonsense"),
    ],
)
def test_calls_with_a_tag_for_each_parameter(text: str, name: str, arguments: str) -> None:
    message = read_answer(f"<tool_call>{text}</tool_call>", read_functions, [FIND])
    assert message["tool_calls"] == [tool_call(name, arguments, "call_0")]


@pytest.mark.parametrize(
    ("text", "thinking", "words"),
    [
        ("A", Thinking.NONE, "A"),
        ("<think>\n\n</think>\n\nA", Thinking.EMPTY, "\n\nA"),
        ("\n</think>\n\nA", Thinking.EMPTY, "\n\nA"),
        ("<think>hm</think>A", Thinking.FULL, "A"),
        ("hm\n</think>", Thinking.FULL, ""),
        ("<think>hm", Thinking.OPEN, ""),
    ],
)
def test_thinking_is_told_from_words(text: str, thinking: Thinking, words: str) -> None:
    assert (thinking_of(text), words_of(text)) == (thinking, words)


def test_a_prompt_that_opens_the_thinking_leaves_only_its_end_to_the_answer() -> None:
    tokenizer = family("qwen3_5")
    text = tokenizer.decode(tokenizer.encode_answer(assistant("<think>\nhm\n</think>\n\nA")))
    assert tokenizer.render([user("?")]).endswith("<think>\n")
    assert text == "hm\n</think>\n\nA<|im_end|>"
