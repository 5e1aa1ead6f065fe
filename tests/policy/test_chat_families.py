"""What the chat templates of the known families do to a conversation, and that its tokens follow them."""

from pathlib import Path

import pytest
from chat_families import FAMILIES, family, write_family

from agentgym.errors import ModelError
from agentgym.messages import Message, assistant, system, tool_call, tool_result, user
from agentgym.policy.patterns import converse, template_report
from agentgym.policy.template import ChatTokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALLS = [tool_call("add", '{"a": 1}', f"call_{i}") for i in range(2)]
RESULTS = [tool_result(str(i), call) for i, call in enumerate(CALLS)]
THOUGHT = "<think>\nhm\n</think>\n\n"
THINKING_CALL = assistant(THOUGHT.strip(), CALLS[:1])

PATTERNS: dict[str, list[Message]] = {
    "user, thinking and answer, user": [user("U"), assistant(THOUGHT + "A"), user("V")],
    "user, answer, user": [user("U"), assistant("A"), user("V")],
    "user, thinking and tool call, tool": [user("U"), THINKING_CALL, RESULTS[0]],
    "user, tool call, tool": [user("U"), assistant("", CALLS[:1]), RESULTS[0]],
    "two tool calls, two results": [user("U"), assistant(THOUGHT.strip(), CALLS), *RESULTS],
}
COLUMNS = ("qwen2_5", "llama3_2", "qwen3", "qwen3_2507", "qwen3_5", "qwen3_training")
OK, NO, ER = "extends", "branches", "refused"
# What was found with the families' own templates: ok, unstable, or an error of the template.
TABLE = {
    "user, thinking and answer, user": (OK, OK, NO, OK, NO, OK),
    "user, answer, user": (OK, OK, NO, OK, NO, OK),
    "user, thinking and tool call, tool": (OK, OK, OK, OK, OK, OK),
    "user, tool call, tool": (OK, OK, NO, OK, OK, OK),
    "two tool calls, two results": (OK, ER, OK, OK, OK, OK),
}
CELLS = [
    pytest.param(pattern, name, verdict, id=f"{name}: {pattern}")
    for pattern, row in TABLE.items()
    for name, verdict in zip(COLUMNS, row, strict=True)
]


@pytest.mark.parametrize(("pattern", "name", "verdict"), CELLS)
def test_the_templates_here_are_as_stable_as_those_of_the_families(
    pattern: str, name: str, verdict: str
) -> None:
    tokenizer, said = family(name), PATTERNS[pattern]
    answered = 1 + max(i for i, message in enumerate(said) if message["role"] == "assistant")
    if verdict == ER:
        with pytest.raises(ModelError, match=r"the pattern user, assistant \(2 tool calls\): one tool call"):
            tokenizer.render(said[:answered], [TOOL], generation_prompt=False)
        return
    before = tokenizer.render(said[:answered], [TOOL], generation_prompt=False)
    whole = tokenizer.render(said, [TOOL])
    assert whole.startswith(before) == (verdict == OK)


@pytest.mark.parametrize(("pattern", "name", "verdict"), CELLS)
def test_a_stable_pattern_goes_on_in_place_and_an_unstable_one_opens_a_branch(
    pattern: str, name: str, verdict: str
) -> None:
    tokenizer, said = family(name), PATTERNS[pattern]
    if verdict == ER:
        with pytest.raises(ModelError, match=r"the pattern user, assistant \(2 tool calls\): one tool call"):
            converse(tokenizer, said, [TOOL])
        return
    conversation = converse(tokenizer, said, [TOOL])
    assert len(conversation.branches) == (1 if verdict == OK else 2)
    # Never a wrong prefix: either way the next prompt is what the template writes.
    assert tokenizer.decode(conversation.prompt) == tokenizer.render(said, [TOOL])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_next_prompt_is_token_for_token_what_the_template_writes(name: str) -> None:
    tokenizer = family(name)
    said = [user("U"), assistant("A"), user("V\n"), assistant("hello"), user("\nthey thought")]
    for end in (3, 5):
        assert converse(tokenizer, said[:end]).prompt == tokenizer.encode_chat(said[:end])


def test_line_breaks_that_an_end_token_swallows_are_not_in_the_next_prompt(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_family(tmp_path / "model", "qwen2_5", rstrip=True))
    said = [user("U"), assistant("A"), user("V")]
    conversation = converse(tokenizer, said)
    assert len(conversation.branches) == 1
    assert conversation.prompt == tokenizer.encode_chat(said)
    assert "\n<|im_start|>user\nV" not in tokenizer.decode(conversation.prompt)


def test_the_report_says_what_becomes_of_every_pattern() -> None:
    report = dict(template_report(family("qwen3"), [TOOL]))
    assert report["user, answer, user"] == "branches"
    assert report["user, thinking and tool call, result"] == "extends"
    assert report["user, thinking and tool call, result, answer, user"] == "branches"
    report = dict(template_report(family("gemma")))
    assert report["user, answer, user"] == "extends"
    assert report["system, user, answer, user"] == "refused: there is no system role"
    assert report["user, answer, user, user"] == "refused: roles must take turns"
    report = dict(template_report(family("llama3_2"), [TOOL]))
    assert report["user, two tool calls, two results"] == "refused: one tool call an answer"
    assert report["user, words and tool call, result"] == "branches"
    assert set(dict(template_report(family("qwen2_5"), [TOOL])).values()) == {"extends"}


def test_a_template_without_tools_gets_them_in_words() -> None:
    tokenizer = family("smollm2")
    said = [system("S"), user("U"), assistant("Well.", CALLS), *RESULTS, assistant("B"), user("V")]
    conversation = converse(tokenizer, said, [TOOL])
    text = tokenizer.decode(conversation.prompt)
    assert '{"name": "add", "description": "Add."' in text.split("<|im_end|>")[0]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert f"<|im_start|>assistant\nWell.\n{call}\n{call}<|im_end|>\n" in text
    results = "<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response>"
    assert f"<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n" in text
    assert len(conversation.branches) == 1
    # Nothing is said about tools where there are none, and a first message of the system is made if need be.
    assert tokenizer.render([user("U")]).startswith("<|im_start|>system\nBe small.<|im_end|>")
    assert tokenizer.render([user("U")], [TOOL]).startswith("<|im_start|>system\nYou have tools.")
