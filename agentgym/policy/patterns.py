"""How a model's chat template takes the patterns that conversations are made of.

    template_report(ChatTokenizer(folder), tools)  -> [("user, answer, user", "extends"), ...]

For every pattern a conversation is made, its answers written as the template itself writes them:

    "extends"       the conversation goes on in place; all its tokens are one sample
    "branches"      the template rewrites what was said before, so that the next prompt begins a new sample
    "refused: WHY"  the template raises on it
"""

from collections.abc import Sequence
from typing import NamedTuple

from agentgym.errors import ModelError
from agentgym.messages import Message, ToolSchema, assistant, system, tool_call, tool_result, user
from agentgym.policy.answers import THINK_CLOSE, THINK_OPEN
from agentgym.policy.template import ChatTokenizer
from agentgym.policy.tokens import Conversation


class PatternReport(NamedTuple):
    """What a template does with a pattern."""

    pattern: str
    verdict: str


def template_report(tokenizer: ChatTokenizer, tools: Sequence[ToolSchema] = ()) -> list[PatternReport]:
    """Return what the template does with every pattern; with tools, also with calls of the first of them.

    Raises:
        ModelError: there are tools, and the template writes calls in a format that cannot be read.
    """
    patterns = dict(WITHOUT_TOOLS)
    if tools:
        _ = tokenizer.reader
        patterns |= _with_tools(tools[0]["function"]["name"])
    return [PatternReport(name, _verdict(tokenizer, said, tools)) for name, said in patterns.items()]


_U, _A = user("Go on."), assistant("Yes.")
_THOUGHT = f"{THINK_OPEN}\nWell.\n{THINK_CLOSE}\n\n"
_T = assistant(_THOUGHT + "Yes.")

WITHOUT_TOOLS: dict[str, list[Message]] = {
    "user, answer, user": [_U, _A, _U],
    "user, thinking and answer, user": [_U, _T, _U],
    "user, thinking and answer, user, answer, user": [_U, _T, _U, _A, _U],
    "system, user, answer, user": [system("Obey."), _U, _A, _U],
    "system, answer, user": [system("Obey."), _A, _U],
    "user, user, answer, user": [_U, _U, _A, _U],
    "user, answer, user, user": [_U, _A, _U, _U],
}


def _with_tools(name: str) -> dict[str, list[Message]]:
    one, two = (tool_call(name, "{}", f"call_{i}") for i in range(2))
    call, both = assistant("", [one]), assistant("", [one, two])
    thinking = assistant(_THOUGHT.strip(), [one])
    result, other = tool_result("1", one), tool_result("2", two)
    return {
        "user, tool call, result": [_U, call, result],
        "user, words and tool call, result": [_U, assistant("Let me see.", [one]), result],
        "user, thinking and tool call, result": [_U, thinking, result],
        "user, two tool calls, two results": [_U, both, result, other],
        "user, tool call, result, answer, user": [_U, call, result, _A, _U],
        "user, thinking and tool call, result, answer, user": [_U, thinking, result, _A, _U],
        "user, tool call, result and user": [_U, call, result, _U],
    }


def _verdict(tokenizer: ChatTokenizer, said: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
    try:
        return "branches" if len(converse(tokenizer, said, tools).branches) > 1 else "extends"
    except ModelError as error:
        return f"refused: {error.__cause__ or error}"


def converse(
    tokenizer: ChatTokenizer, said: Sequence[Message], tools: Sequence[ToolSchema] = ()
) -> Conversation:
    """Return the conversation of these messages, its answers written as the template writes them.

    Raises:
        ModelError: the template refuses it.
    """
    conversation = Conversation(tokenizer)
    heard: list[Message] = []
    for message in said:
        if message["role"] != "assistant":
            heard.append(message)
            continue
        _hear(conversation, heard, tools)
        conversation.append_said(message, tokenizer.encode_answer(message))
        heard = []
    _hear(conversation, heard, tools)
    return conversation


def _hear(conversation: Conversation, heard: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
    if conversation.branches:
        conversation.append_messages(heard)
    else:
        conversation.initial(heard, tools)
