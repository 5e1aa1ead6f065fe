"""Spaces of text: any Unicode string, lists of chat messages, and answers with tool calls.

Gymnasium's own `Text` knows a finite alphabet only. These spaces hold what chat agents exchange, compare by
value (vector environments need that), cannot be flattened to numbers, and sample from a seed, so that the
public checkers and fuzz tests exercise an environment, its tools included.
"""

import json
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from agentgym.messages import Action, Observation, ToolSchema, assistant, tool_call, user

ANY_LENGTH = 1_000_000
"""The longest text of a space that names no limit, in characters."""

_SAMPLE_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789 .,:;?!+-*/=()[]{}<>\"'_#|&%\n"
_SAMPLE_LENGTH = 12

Seed = int | np.random.Generator | None


class _TextSpace(gymnasium.Space[Any]):
    """What the spaces of this module share: no shape, no numbers, equality by value."""

    def __init__(self, seed: Seed = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed-size numeric form."""
        return False

    def _key(self) -> tuple[Any, ...]:
        return ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, _TextSpace) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]  # as gymnasium's spaces: they carry a generator

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(part) for part in self._key())})"

    def _sample_text(self, max_length: int = _SAMPLE_LENGTH) -> str:
        length = int(self.np_random.integers(0, min(max_length, _SAMPLE_LENGTH) + 1))
        return "".join(self.np_random.choice(list(_SAMPLE_ALPHABET), size=length))


class Text(_TextSpace):
    """Any Unicode string of at most `max_length` characters.

    `choices` are the texts that make sense as answers: `sample` draws one of them, and an action mask says
    which of them are legal now. Other texts still belong to the space, because an agent may say anything.
    """

    def __init__(
        self, max_length: int = ANY_LENGTH, *, choices: Sequence[str] = (), seed: Seed = None
    ) -> None:
        """Take the longest length and, where there is a menu of answers, the choices."""
        super().__init__(seed)
        self.max_length = max_length
        self.choices = tuple(choices)

    def _key(self) -> tuple[Any, ...]:
        return (self.max_length, self.choices)

    def contains(self, x: Any) -> bool:
        """Say whether `x` is a string that is short enough."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: NDArray[np.int8] | None = None, probability: Any | None = None) -> str:
        """Draw one of the choices (that the mask allows), or a short random text where there are none."""
        if not self.choices:
            return self._sample_text(self.max_length)
        allowed = np.arange(len(self.choices)) if mask is None else np.flatnonzero(mask)
        if len(allowed) == 0:
            return self._sample_text(self.max_length)
        return self.choices[int(self.np_random.choice(allowed))]


class Messages(_TextSpace):
    """The new chat messages of an observation: roles "system", "user" and "tool".

    With `text=True`, a bare string belongs to the space as well and stands for one user message.
    """

    def __init__(self, *, text: bool = False, seed: Seed = None) -> None:
        """Say whether a bare string belongs to the space."""
        super().__init__(seed)
        self.text = text

    def _key(self) -> tuple[Any, ...]:
        return (self.text,)

    def contains(self, x: Any) -> bool:
        """Say whether `x` is a sequence of well-formed messages that are not the agent's own."""
        if isinstance(x, str):
            return self.text
        return isinstance(x, list | tuple) and all(_is_prompt_message(message) for message in x)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Observation:
        """Draw a list with one user message."""
        return [user(self._sample_text())]


class AssistantMessage(_TextSpace):
    """An answer: an assistant message with or without tool calls, or its text alone.

    `sample` draws calls whose arguments fit the tools' schemas, and now and then plain text.
    """

    def __init__(self, tools: Sequence[ToolSchema] = (), *, seed: Seed = None) -> None:
        """Take the schemas of the tools that may be called."""
        super().__init__(seed)
        self.tools = list(tools)

    def _key(self) -> tuple[Any, ...]:
        return (json.dumps(self.tools, sort_keys=True),)

    def __repr__(self) -> str:
        return f"AssistantMessage({[tool['function']['name'] for tool in self.tools]})"

    def contains(self, x: Any) -> bool:
        """Say whether `x` is a string or a well-formed assistant message."""
        if isinstance(x, str):
            return True
        return (
            isinstance(x, dict)
            and x.get("role") == "assistant"
            and isinstance(x.get("content"), str)
            and all(_is_tool_call(call) for call in x.get("tool_calls", ()))
        )

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Action:
        """Draw one or two tool calls with valid arguments, or (one time in four) a text."""
        if not self.tools or self.np_random.random() < 0.25:
            return assistant(self._sample_text())
        calls = []
        for index in range(int(self.np_random.integers(1, 3))):
            function = self.tools[int(self.np_random.integers(len(self.tools)))]["function"]
            arguments = self._sample_value(function["parameters"], function["parameters"].get("$defs", {}))
            calls.append(tool_call(function["name"], json.dumps(arguments), f"call_{index}"))
        return assistant("", calls)

    def _sample_value(self, schema: dict[str, Any], definitions: dict[str, Any]) -> Any:
        """Draw a value that a JSON schema as pydantic writes it allows."""
        if "$ref" in schema:
            return self._sample_value(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
        if "const" in schema:
            return schema["const"]
        for options in (schema.get("enum"), schema.get("examples")):
            if options:
                return options[int(self.np_random.integers(len(options)))]
        variants = schema.get("anyOf") or schema.get("oneOf")
        if variants:
            return self._sample_value(variants[int(self.np_random.integers(len(variants)))], definitions)
        match schema.get("type"):
            case "object":
                return self._sample_object(schema, definitions)
            case "array":
                length = max(schema.get("minItems", 0), 1)
                return [self._sample_value(schema.get("items", {}), definitions) for _ in range(length)]
            case "integer" | "number" as kind:
                low, high = _bounds(schema, 1 if kind == "integer" else 1e-6)
                return (
                    int(self.np_random.integers(int(low), int(high) + 1))
                    if kind == "integer"
                    else float(self.np_random.uniform(low, high))
                )
            case "boolean":
                return bool(self.np_random.integers(2))
            case "null":
                return None
            case _:
                text = self._sample_text(schema.get("maxLength", _SAMPLE_LENGTH))
                return text.ljust(schema.get("minLength", 0), "a")

    def _sample_object(self, schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
        """Draw an object: the required properties, and each other one half of the time."""
        required = schema.get("required", [])
        return {
            name: self._sample_value(child, definitions)
            for name, child in schema.get("properties", {}).items()
            if name in required or self.np_random.random() < 0.5
        }


def _bounds(schema: dict[str, Any], margin: float) -> tuple[float, float]:
    """Return the closed interval that a numeric schema allows; a side without a limit is 100 wide."""
    low: float | None = schema.get("minimum")
    high: float | None = schema.get("maximum")
    if low is None and "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + margin
    if high is None and "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - margin
    if low is None:
        low = -100 if high is None else high - 100
    return low, low + 200 if high is None else high


def _is_prompt_message(message: Any) -> bool:
    """Say whether a value is a message that an environment may send."""
    return (
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "tool")
        and isinstance(message.get("content"), str)
    )


def _is_tool_call(call: Any) -> bool:
    """Say whether a value is a tool call whose name and arguments are texts."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return False
    function = call["function"]
    return (
        isinstance(call.get("id"), str)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str)
    )


def agent_observation_space(*, mask_size: int | None = None) -> gymnasium.spaces.Dict:
    """Return a multi-agent observation's space: {"messages"}, and "action_mask" where a size is given."""
    spaces: dict[str, gymnasium.Space[Any]] = {"messages": Messages()}
    if mask_size is not None:
        spaces["action_mask"] = gymnasium.spaces.Box(0, 1, (mask_size,), np.int8)
    return gymnasium.spaces.Dict(spaces)
