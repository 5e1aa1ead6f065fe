"""Environments with tools: methods marked `@tool`, called by the model, answered by id.

    class Shop(ToolEnv):
        system_prompt = "Find the price, then submit it."

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "What does tea cost?", {}

        @tool
        def look_up(self, item: str) -> str:
            '''Look up the price of an item.'''
            return "tea: 3"

        @tool(timeout=2.0)
        def submit(self, price: int) -> str:
            '''Give the answer.'''
            self.finish(1.0 if price == 3 else 0.0)
            return "recorded"

Descriptions of arguments come from the docstring's "Args:" section (or NumPy's, or Sphinx's).

Nothing that the model writes can stop an episode. An unknown tool, malformed JSON, wrong arguments, an
exception or a timeout inside a tool come back to the model as a tool message that starts with "Error: ", and
are counted in `info["metrics"]`. Only `agentgym.errors.EnvError`, raised by a tool on purpose, goes up: the
environment itself is broken and the episode fails.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, overload

import pydantic_core

from agentgym.env import Env
from agentgym.errors import EnvError
from agentgym.messages import Action, Message, Observation, ToolCall, ToolSchema, tool_result, user
from agentgym.tool_schema import ArgumentsError, Tool, build_tool

_MARK = "__agentgym_tool__"

Method = TypeVar("Method", bound=Callable[..., Any])


@overload
def tool(method: Method, /) -> Method: ...


@overload
def tool(*, timeout: float | None = None, max_chars: int | None = None) -> Callable[[Method], Method]: ...


def tool(
    method: Method | None = None, /, *, timeout: float | None = None, max_chars: int | None = None
) -> Method | Callable[[Method], Method]:
    """Mark a method of a `ToolEnv`, plain or async, as a tool that the model may call.

    `timeout` (seconds) lets the model go on when a call takes too long; the call itself cannot be stopped, so
    its thread runs on and its result is thrown away. `max_chars` cuts long results, visibly.
    """

    def mark(function: Method) -> Method:
        setattr(function, _MARK, build_tool(function, timeout=timeout, max_chars=max_chars))
        return function

    return mark if method is None else mark(method)


class ToolEnv(Env):
    """An environment whose agent acts through tools.

    An action is an assistant message or a text. `step` runs the message's calls in the order in which they
    were written and returns one tool message for each, in the same order. A turn without a call goes to
    `on_text`. A tool ends the episode with `self.finish(...)`; later calls of the same turn are not run.
    """

    max_tool_calls: int = 8
    """Calls run in one turn; the surplus ones are answered with "not run"."""

    _tools: ClassVar[dict[str, Tool]] = {}
    _finished: bool = False
    _success: float | None = None
    _parts: dict[str, float]
    _metrics: dict[str, float]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the tools, in the order of their declaration, those of base classes first."""
        super().__init_subclass__(**kwargs)
        names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
        marked = (getattr(getattr(cls, name, None), _MARK, None) for name in names)
        cls._tools = {found.name: found for found in marked if found is not None}

    @property
    def tools(self) -> list[ToolSchema]:
        """The tools' schemas."""
        return [found.schema for found in self._tools.values()]

    def on_text(self, text: str) -> str | None:
        """Answer a turn without a tool call; None says nothing. Override to change."""
        return f"Error: no tool was called. Tools: {', '.join(self._tools)}"

    def add_reward(self, **parts: float) -> None:
        """Add named parts to the reward of the current step."""
        for name, value in parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + value

    def finish(self, reward: float = 0.0, *, success: float | None = None, **parts: float) -> None:
        """End the episode after the current call; `reward` is the part named "success"."""
        self._finished = True
        self._success = success
        if reward:
            self.add_reward(success=reward)
        self.add_reward(**parts)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Seed the random generator; call this first in a `reset` of your own."""
        self._begin_step()
        return super().reset(seed=seed, options=options)

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the answer's tool calls, or `on_text` where it has none."""
        self._begin_step()
        calls = [] if isinstance(action, str) else action.get("tool_calls", [])
        if calls:
            messages = self._run_calls(calls)
        else:
            reply = self.on_text(action if isinstance(action, str) else action["content"])
            messages = [user(reply)] if reply else []
        info: dict[str, Any] = {"rewards": self._parts, "metrics": self._metrics}
        if self._success is not None:
            info["success"] = self._success
        return messages, float(sum(self._parts.values())), self._finished, False, info

    def _begin_step(self) -> None:
        self._finished, self._success = False, None
        self._parts, self._metrics = {}, {}

    def _run_calls(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Answer every call, in order; those that are not run say why."""
        messages = []
        for index, call in enumerate(calls):
            if self._finished:
                content = self._not_run("the episode has ended")
            elif index >= self.max_tool_calls:
                content = self._not_run(f"only {self.max_tool_calls} calls are allowed in one turn")
            else:
                content = self._answer(call)
            messages.append(tool_result(content, call))
        return messages

    def _answer(self, call: ToolCall) -> str:
        """Run one call and return what the model reads."""
        name = call["function"]["name"]
        found = self._tools.get(name)
        if found is None:
            self._count("tools/invalid")
            return f"Error: UnknownTool: there is no tool {name!r}. Tools: {', '.join(self._tools)}"
        self._count(f"tools/{name}/calls")
        try:
            arguments = found.parse(call["function"]["arguments"])
        except ArgumentsError as error:
            self._count("tools/invalid")
            return f"Error: ArgumentsError: {error}"
        value, failure = _call(getattr(self, name), arguments, found.timeout)
        if isinstance(failure, EnvError):
            raise failure
        if failure is not None:
            self._count("tools/errors")
            return _cut(f"Error: {type(failure).__name__}: {failure}", found.max_chars)
        return _cut(_as_text(value), found.max_chars)

    def _not_run(self, reason: str) -> str:
        self._count("tools/not_run")
        return f"Error: not run: {reason}"

    def _count(self, name: str) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + 1.0


def _call(
    method: Callable[..., Any], arguments: dict[str, Any], timeout: float | None
) -> tuple[Any, Exception | None]:
    """Call a tool and return its value or its exception."""
    is_async = inspect.iscoroutinefunction(method)

    def attempt() -> tuple[Any, Exception | None]:
        try:
            if is_async:
                return asyncio.run(method(**arguments)), None
            return method(**arguments), None
        except Exception as error:  # a tool's failure, of whatever type, is the model's to read
            return None, error

    if timeout is None and not is_async:
        return attempt()
    # A thread of its own: it can be left behind, and an async tool gets an event loop that is surely free.
    outcome: list[tuple[Any, Exception | None]] = []
    thread = threading.Thread(target=lambda: outcome.append(attempt()), daemon=True)
    thread.start()
    thread.join(timeout)
    if outcome:
        return outcome[0]
    return None, TimeoutError(f"no result within {timeout} seconds")


def _as_text(value: Any) -> str:
    """Return a tool's value as text: a string as it is, None as "ok", all else as JSON."""
    if isinstance(value, str):
        return value
    return "ok" if value is None else pydantic_core.to_json(value, fallback=str).decode()


def _cut(text: str, max_chars: int | None) -> str:
    """Return a text no longer than allowed, with a mark that says what is missing."""
    if max_chars is None or len(text) <= max_chars:
        return text
    return f"{text[:max_chars]} [cut: {len(text) - max_chars} more characters]"
