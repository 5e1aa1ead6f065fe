"""What the text of an answer means: thinking, words, and tool calls in the formats that chat templates write.

    read_answer(text, read_tagged, tools)    -> the assistant message
    thinking_of(text)                        -> Thinking.FULL

Readers, what a call is to them, and who writes so:

    read_tagged     <tool_call>{"name": NAME, "arguments": {...}}</tool_call>, or a list of such objects in the
                    tags: Hermes, Qwen 2.5, Qwen 3, SmolLM2
    read_functions  <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>: Qwen3-Coder
    read_bare       {"name": NAME, "parameters": {...}} and nothing else in the answer: Llama 3

What looks like a call but cannot be read stays a call, so that the environment can tell the model: its arguments are
the raw text, its name is empty or what can be read of it. Calls inside of the thinking are thoughts.
"""

import json
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from agentgym.messages import Message, ToolCall, ToolSchema, assistant, tool_call

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"

Calls = list[ToolCall]
Reader = Callable[[str, Sequence[ToolSchema]], tuple[str, Calls]]
"""Takes the words of an answer and the tools, returns the words that are left and the calls."""


class Thinking(StrEnum):
    """What an answer holds of thinking; templates treat the four differently."""

    NONE = "none"
    EMPTY = "empty"
    """A closed block without a thought."""
    FULL = "full"
    OPEN = "open"
    """A thought that was cut off before its end."""


def thinking_of(text: str) -> Thinking:
    """Return what an answer holds of thinking. The prompt may have opened it: only the close tag is needed."""
    if "<" not in text:  # nearly every answer of a small model
        return Thinking.NONE
    thought, close, _ = text.rpartition(THINK_CLOSE)
    if close:
        return Thinking.FULL if thought.replace(THINK_OPEN, "").strip() else Thinking.EMPTY
    return Thinking.OPEN if THINK_OPEN in text else Thinking.NONE


def words_of(text: str) -> str:
    """Return what an answer says after its thinking."""
    if thinking_of(text) is Thinking.OPEN:
        return ""
    return text.rpartition(THINK_CLOSE)[2]


def read_answer(text: str, reader: Reader, tools: Sequence[ToolSchema]) -> Message:
    """Return the message that an answer's text means."""
    words = words_of(text)
    left, calls = reader(words, tools)
    if not calls:
        return assistant(text)
    return assistant((text[: len(text) - len(words)] + left).strip(), calls)


def read_tagged(text: str, tools: Sequence[ToolSchema]) -> tuple[str, Calls]:
    """Read JSON in `<tool_call>` tags; the last tag may be unclosed."""
    found = _TAGGED.findall(text)
    values = [value for raw in found for value in _values(raw)]
    return _TAGGED.sub("", text), [_call(value, raw, i) for i, (value, raw) in enumerate(values)]


def read_functions(text: str, tools: Sequence[ToolSchema]) -> tuple[str, Calls]:
    """Read parameters in tags of their own; what is no text by the tool's schema is read as JSON."""
    calls = []
    for index, raw in enumerate(_TAGGED.findall(text)):
        function = _FUNCTION.fullmatch(raw)
        if function is None:
            started = re.search(r"<function=([^>\n]+)>", raw)
            calls.append(tool_call(started[1] if started else "", raw, f"call_{index}"))
            continue
        types = _types(function[1], tools)
        values = {key: _typed(value, types.get(key)) for key, value in _PARAMETER.findall(function[2])}
        calls.append(tool_call(function[1], json.dumps(values), f"call_{index}"))
    return _TAGGED.sub("", text), calls


def read_bare(text: str, tools: Sequence[ToolSchema]) -> tuple[str, Calls]:
    """Read an answer that is one JSON object, a name with parameters; any other answer is words."""
    raw = text.strip().removeprefix(_PYTHON_TAG).strip()
    [(value, raw)] = _values(raw) if raw.startswith("{") else [("", raw)]
    broken = value is None and re.match(r'\{\s*"name"\s*:', raw)
    if broken or (isinstance(value, dict) and "name" in value and value.keys() & {"parameters", "arguments"}):
        return "", [_call(value, raw, 0)]
    return text, []


READERS: dict[str, Reader] = {"tagged": read_tagged, "functions": read_functions, "bare": read_bare}
"""In the order in which they are tried on what a template writes."""


def _values(raw: str) -> list[tuple[Any, str]]:
    """Return the JSON values in a text, each with its own text; None where it is no JSON."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return [(None, raw)]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [(item, json.dumps(item)) for item in value]
    return [(value, raw)]


def _call(value: Any, raw: str, index: int) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if name is None:
        readable = _NAME.search(raw)
        return tool_call(readable[1] if readable else "", raw, f"call_{index}")
    if not isinstance(name, str):
        return tool_call("", raw, f"call_{index}")
    arguments = value.get("arguments", value.get("parameters", {}))
    # Some models write the arguments as a string of JSON: it is the JSON that counts.
    return tool_call(
        name, arguments if isinstance(arguments, str) else json.dumps(arguments), f"call_{index}"
    )


def _types(name: str, tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """Return the type of each parameter of a tool, as far as its schema names one."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = tool["function"].get("parameters", {}).get("properties", {})
            return {key: schema.get("type") for key, schema in properties.items()}
    return {}


def _typed(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
