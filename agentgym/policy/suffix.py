"""What a chat template writes between an answer and the next one, and whether it leaves the earlier text alone.

    suffix(tokenizer, tools, pattern, answer, new)    -> ids from the end token of the answer on, or None

A template would write a parsed answer back differently from how it was sampled, so a stand-in is rendered in its
place: a short answer of the same kind (with or without thinking, with as many calls). Two things must hold, or
the answer to "does the conversation go on in place?" is no:

1. In a skeleton of the whole conversation, every message a stand-in of its kind, the text up to the answer stays
   as it was when it was the prompt, and the answer keeps its thinking, its words and its calls. Qwen 3 fails here
   when a user message follows thinking: it strips the thinking of earlier turns.
2. The text behind the answer does not depend on what lies before it but the system message, so that it may be
   taken from a conversation of one question and one answer, which is rendered once for all episodes.

Skeletons are remembered by their patterns: the episodes of an environment share them.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from agentgym.errors import ModelError
from agentgym.messages import Message, Role, ToolSchema, assistant, tool_call, user
from agentgym.policy.answers import THINK_CLOSE, THINK_OPEN, Thinking, thinking_of, words_of
from agentgym.policy.template import ChatTokenizer

REMEMBERED = 4096
"""Skeletons and suffixes that are remembered."""
_THOUGHT, _SAID, _CALLED, _HEARD = "Thought1", "Said1", "Called1", "Heard1"
"""The words of the stand-ins, recognized in the rendered text."""
_ASKED = user("?")


class Kind(NamedTuple):
    """What a template may decide on in a message."""

    role: Role
    speaks: bool
    """There are words; of an answer, words besides the thinking and the calls."""
    thinking: Thinking = Thinking.NONE
    calls: int = 0
    system: str = ""
    """The words of a system message: some templates find switches in them."""


class Pattern:
    """The kinds of the messages of a conversation.

    Conversations of the same kinds share one object, which is a key, as long as it is remembered.
    """

    __slots__ = ("_shorter", "kind")

    def __init__(self, shorter: "Pattern | None" = None, kind: Kind | None = None) -> None:
        """Do not call: begin with `EMPTY` and go on with `then`."""
        self.kind = kind
        """Of the last message; None where there is none."""
        self._shorter = shorter

    def then(self, *kinds: Kind) -> "Pattern":
        """Return the pattern with these behind it."""
        pattern = self
        for kind in kinds:
            pattern = _longer(pattern, kind)
        return pattern

    def kinds(self) -> list[Kind]:
        """Return the kinds of all messages."""
        kinds: list[Kind] = []
        pattern = self
        while pattern._shorter is not None:
            assert pattern.kind is not None
            kinds.append(pattern.kind)
            pattern = pattern._shorter
        return kinds[::-1]


_longer = functools.lru_cache(16 * REMEMBERED)(Pattern)

EMPTY = Pattern()
"""Of a conversation that has not begun."""


def kind_of(message: Message, written: str | None = None) -> Kind:
    """Return the kind of a message; of an answer, `written` is its text as it was sampled."""
    role, content = message["role"], message["content"]
    if role != "assistant":
        return Kind(role, bool(content), system=content if role == "system" else "")
    thinking = thinking_of(content if written is None else written)
    speaks = bool(words_of(content).strip())
    return Kind("assistant", speaks, thinking, len(message["tool_calls"]) if "tool_calls" in message else 0)


def suffix(
    tokenizer: ChatTokenizer, tools: bytes, pattern: Pattern, answer: Message, new: Sequence[Message]
) -> tuple[int, ...] | None:
    """Return the ids behind the last answer, its end token first; None if a new prompt must be rendered.

    Args:
        tokenizer: of the policy.
        tools: of the conversation, as msgpack.
        pattern: of all messages up to the answer.
        answer: the last answer, as parsed.
        new: what follows it.
    """
    if pattern.kind is None or pattern.kind.role != "assistant":
        return None  # nothing to stand behind: two observations in a row
    calls = answer.get("tool_calls")
    named = tuple((call["function"]["name"], call["id"]) for call in calls) if calls else ()
    return _suffix(tokenizer, tools, pattern, named, msgpack.packb(new))


@functools.lru_cache(REMEMBERED)
def _suffix(
    tokenizer: ChatTokenizer,
    tools: bytes,
    said: Pattern,
    calls: tuple[tuple[str, str], ...],
    new: bytes,
) -> tuple[int, ...] | None:
    messages: list[Message] = msgpack.unpackb(new, strict_map_key=False)
    try:
        if not _keeps(tokenizer, tools, said, tuple(map(kind_of, messages))):
            return None
        kinds = said.kinds()
        # The calls keep their names and ids: some templates repeat them above the results.
        stand_in = assistant(_text(kinds[-1]), [tool_call(name, "{}", call_id) for name, call_id in calls])
        schemas = msgpack.unpackb(tools, strict_map_key=False)
        text = _behind(tokenizer, schemas, _short(kinds), stand_in, kinds[-1], messages)
    except ModelError:
        return None  # whether the template refuses the conversation itself is seen when it is rendered
    ids = tokenizer.encode(text) if text else []
    return tuple(ids) if ids and ids[0] in tokenizer.stop_token_ids else None


@functools.lru_cache(REMEMBERED)
def _keeps(tokenizer: ChatTokenizer, tools: bytes, said: Pattern, new: tuple[Kind, ...]) -> bool:
    schemas, kinds = msgpack.unpackb(tools, strict_map_key=False), said.kinds()
    *before, answer = skeleton(kinds)
    behind = skeleton(new)
    text = _behind(tokenizer, schemas, before, answer, kinds[-1], behind)
    return text is not None and text == _behind(tokenizer, schemas, _short(kinds), answer, kinds[-1], behind)


def _short(kinds: Sequence[Kind]) -> list[Message]:
    return [*skeleton([kind for kind in kinds[:1] if kind.role == "system"]), _ASKED]


def _behind(
    tokenizer: ChatTokenizer,
    tools: Sequence[ToolSchema],
    before: Sequence[Message],
    answer: Message,
    kind: Kind,
    new: Sequence[Message],
) -> str | None:
    """Return the text from the answer's end token on; None if the new messages change what lies before it."""
    prompt = tokenizer.render(before, tools)
    whole = tokenizer.render([*before, answer, *new], tools)
    end = tokenizer.end_of_turn(whole, len(prompt)) if whole.startswith(prompt) else None
    if end is None:
        return None
    turn = whole[len(prompt) : end[0]]
    words = [_THOUGHT] * (kind.thinking in (Thinking.FULL, Thinking.OPEN)) + [_SAID] * kind.speaks
    words += [call["function"]["name"] for call in answer.get("tool_calls", [])]
    # Thinking that appears where there was none is as wrong as thinking that was stripped.
    closed = kind.thinking in (Thinking.FULL, Thinking.EMPTY)
    kept = all(word in turn for word in words) and (THINK_CLOSE in turn) == closed
    return whole[end[0] :] if kept else None


def skeleton(kinds: Sequence[Kind]) -> list[Message]:
    """Return a conversation of stand-ins."""
    messages: list[Message] = []
    results = 0
    for kind in kinds:
        if kind.role == "assistant":
            calls = [tool_call(f"{_CALLED}{i}", "{}", f"call_{i}") for i in range(kind.calls)]
            messages.append(assistant(_text(kind), calls))
            results = 0
            continue
        message: Message = {"role": kind.role, "content": kind.system or _HEARD * kind.speaks}
        if kind.role == "tool":
            message |= {"tool_call_id": f"call_{results}", "name": f"{_CALLED}{results}"}
            results += 1
        messages.append(message)
    return messages


def _text(kind: Kind) -> str:
    thinking = {
        Thinking.NONE: "",
        Thinking.EMPTY: f"{THINK_OPEN}\n\n{THINK_CLOSE}\n\n",
        Thinking.FULL: f"{THINK_OPEN}\n{_THOUGHT}\n{THINK_CLOSE}\n\n",
        Thinking.OPEN: f"{THINK_OPEN}\n{_THOUGHT}",
    }
    return thinking[kind.thinking] + _SAID * kind.speaks
