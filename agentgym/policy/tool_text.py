"""Tools for chat templates that know none: described in the system message, called and answered in words.

The format is the one that most open models were shown (Hermes): a call is JSON in `<tool_call>` tags, a result is a
user message in `<tool_response>` tags. A template that knows tools writes them itself and needs nothing of this.
"""

import json
from collections.abc import Sequence
from typing import Any

from agentgym.messages import Message, ToolCall, ToolSchema, assistant, system, user

_OFFER = """\
You have tools. Each line describes one:
{tools}
To use one, write <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>. Its result follows in
<tool_response></tool_response>."""


def in_words(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """Return the same conversation without tools, calls and messages of role "tool"."""
    plain: list[Message] = []
    results = False
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            # Some templates refuse two user messages in a row.
            plain.append(user(f"{plain.pop()['content']}\n{text}" if results else text))
        else:
            plain.append(
                assistant(answer_text(message)) if "tool_calls" in message else message,
            )
        results = message["role"] == "tool"
    if tools:
        offer = _OFFER.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
        if plain and plain[0]["role"] == "system":
            plain[0] = system(f"{plain[0]['content']}\n\n{offer}")
        else:
            plain.insert(0, system(offer))
    return plain


def answer_text(message: Message) -> str:
    """Return an answer with its calls as text."""
    calls = (with_object(call) for call in message.get("tool_calls", []))
    written = [f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls]
    return "\n".join([message["content"], *written] if message["content"] else written)


def with_object(call: ToolCall) -> dict[str, Any]:
    """Return the name of a call, and its arguments as an object where they are one."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return {"name": name, "arguments": value if isinstance(value, dict) else arguments}
