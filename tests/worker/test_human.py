import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from toy_envs import Adder

from agentgym.errors import ConfigError
from agentgym.messages import Message, assistant, system, tool_call, tool_result, user
from agentgym.worker.human import Human, parse_answer

TOOLS = Adder().tools


def typed(*lines: str) -> Any:
    """What stands in for the keyboard: these lines, then the end of the input."""
    left: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    return read


def ask(messages: list[Message], *lines: str, tools: Any = ()) -> tuple[Message, str]:
    """Let a person answer; return the answer and what was on the screen."""
    screen = io.StringIO()
    human = Human(Console(file=screen, width=200), typed(*lines))
    message, finish = asyncio.run(human.chat(messages, tools, timeout=1.0))
    assert finish == "stop"
    return message, screen.getvalue()


def test_a_person_reads_what_the_agent_reads_and_its_line_is_the_answer() -> None:
    message, screen = ask([system("Obey."), user("Guess \x1b[2J!")], "12")
    assert message == assistant("12")
    assert screen.splitlines() == ["Obey.", "Guess \\x1b[2J!"]


def test_only_what_is_new_is_shown() -> None:
    call = tool_call("add", "{}", "call_0")
    _, screen = ask(
        [system("Obey."), user("1+1?"), assistant("", [call]), tool_result("2", call)], "x", tools=TOOLS
    )
    assert screen.splitlines() == ["add: 2"]


def test_the_tools_are_shown_before_the_first_answer() -> None:
    _, screen = ask([user("1+1?")], "x", tools=TOOLS)
    assert screen.splitlines() == ["1+1?", "/add a=... b=...  Add.", "/submit answer=...  Submit."]


@pytest.mark.parametrize("line", ['/add {"a": 1, "b": 2}', "/add a=1 b=2"])
def test_a_slash_calls_a_tool(line: str) -> None:
    message = parse_answer(line, TOOLS)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}


def test_texts_with_spaces_are_quoted() -> None:
    (call,) = parse_answer('/add a="1 + 2" b=true', TOOLS)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "1 + 2", "b": True}


def test_a_slash_is_a_text_where_there_are_no_tools_or_it_is_doubled() -> None:
    assert parse_answer("/add", ()) == assistant("/add")
    assert parse_answer("//add", TOOLS) == assistant("/add")


def test_what_cannot_be_read_is_said_and_asked_again() -> None:
    message, screen = ask([user("?")], "/ad 1", "/add 1", '/add a="1', "ok", tools=TOOLS)
    assert message == assistant("ok")
    assert "there is no tool 'ad'; tools: add, submit" in screen
    assert "argument '1' is not of the form key=value" in screen
    assert "No closing quotation" in screen


def test_the_end_of_the_input_is_leaving() -> None:
    human = Human(Console(file=io.StringIO()), typed())
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(human.chat([user("?")], (), timeout=1.0))


def test_a_call_of_no_tool_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="there is no tool 'sum'; tools: add, submit"):
        parse_answer("/sum", TOOLS)
