"""What an agent sees and says: chat messages, as plain dictionaries that every chat template understands.

A message is a `dict` with the keys of the OpenAI chat format, so that environments can be written, compared
and sent between processes without a class. An environment returns only messages that are *new*, of role
"user" or "tool" ("system" only from `reset`); the worker owns the conversation.
"""

from collections.abc import Sequence
from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic wants these below Python 3.12
)

from typing_extensions import TypedDict

Role = Literal["system", "user", "assistant", "tool"]

AgentId = str
"""The name of a seat in an environment: PettingZoo's agent name, or "agent" for a single-agent environment."""

SINGLE_AGENT: AgentId = "agent"


class FunctionCall(TypedDict):
    """The function a tool call names, and its arguments as the model wrote them."""

    name: str
    arguments: str
    """JSON text, not yet validated: it may be malformed."""


class ToolCall(TypedDict):
    """One call of a tool by the model."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """One chat message."""

    role: Role
    content: str
    tool_calls: NotRequired[list[ToolCall]]
    """Only on role "assistant": the calls in the order in which the model wrote them."""
    tool_call_id: NotRequired[str]
    """Only on role "tool": the call that this message answers."""
    name: NotRequired[str]
    """Only on role "tool": the tool's name."""


Observation = str | Sequence[Message]
"""What a text environment returns: the text of one user message, or the new messages."""

Action = str | Message
"""What a text environment receives: the text of the answer, or (environments with tools) the whole message."""

ToolSchema = dict[str, Any]
"""A tool in the OpenAI format: {"type": "function", "function": {"name", "description", "parameters"}}."""


def system(content: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant(content: str, tool_calls: Sequence[ToolCall] = ()) -> Message:
    """Return an assistant message, with tool calls if there are any."""
    message: Message = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return message


def tool_call(name: str, arguments: str, call_id: str) -> ToolCall:
    """Return one tool call; `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(content: str, call: ToolCall) -> Message:
    """Return the message that answers `call`."""
    return {
        "role": "tool",
        "content": content,
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
    }


def as_messages(observation: Observation) -> list[Message]:
    """Return an observation as a list of messages; text becomes one user message, empty text none."""
    if isinstance(observation, str):
        return [user(observation)] if observation else []
    return list(observation)


def shortened(messages: Sequence[Message], limit: int) -> list[Message]:
    """Return messages with at most `limit` characters of each content: its beginning, a mark, and its end."""
    return [message | {"content": shortened_text(message["content"], limit)} for message in messages]


def shortened_text(text: str, limit: int) -> str:
    """Return a text with at most `limit` of its characters: its beginning, a mark, and its end."""
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[head + left_out :]}"
