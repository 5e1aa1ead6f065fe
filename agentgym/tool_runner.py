"""Tools run for an agent: sets of tools that open and close with the episode, and calls answered by id.

    runner = ToolRunner([look_up, Calculator(), self], env=self)   # functions, toolsets, objects with @tool methods
    runner.open(seed)                                              # in `reset`: a new episode
    answers = runner.run(message["tool_calls"])                    # in `step`: a tool message for each call
    runner.close()                                                 # at the end; `open` closes as well

`agentgym.tools.ToolEnv` does this for environments of one agent; an environment of several keeps a runner for each
agent that has tools, and returns `runner.schemas` from `tools(agent)`.

Nothing that the model writes can stop an episode. An unknown tool, malformed JSON, wrong arguments, an exception or
a timeout inside a tool come back to the model as a tool message that starts with "Error: ", and are counted:

    tools/NAME/calls      calls of a tool that exists
    tools/invalid         calls that name no tool, repeat an id of the turn, or whose arguments do not fit
    tools/double_encoded  arguments that were a JSON string of JSON; they are read as what they mean
    tools/errors          calls whose tool raised or ran out of time
    tools/not_run         calls after the episode's end, or beyond the limit of a turn

Only `agentgym.errors.EnvError`, raised by a tool on purpose, goes up: the environment itself is broken.
"""

import asyncio
import contextlib
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pydantic_core

from agentgym.errors import ConfigError, EnvError, EnvTimeoutError
from agentgym.messages import SINGLE_AGENT, AgentId, Message, ToolCall, ToolSchema, tool_result
from agentgym.tool_schema import ArgumentsError, Context, Tool, ToolError, build_tool

_MARK = "__agentgym_tool__"
"""The attribute in which `@agentgym.tool` leaves the `Tool` of a function."""

MAX_STUCK = 4
"""Calls of one runner that may be stuck after their timeout; with more, its environment is given up."""


class Toolset:
    """Tools that belong together, with a state that lives for one episode.

    Its methods marked `@agentgym.tool` are the tools. A toolset in the class attribute `ToolEnv.toolsets` is a
    pattern: every environment works on a copy of its own, so that episodes at the same time never meet.
    """

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools; read after `open`, and fixed for the episode."""
        return marked_tools(self)

    def open(self, context: Context) -> None:
        """Begin an episode: forget everything of the one before."""

    def close(self) -> None:
        """Release what the episode held; may be called more than once."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of the calls of one turn."""

    messages: list[Message]
    """One tool message for each call, in the order of the calls."""
    metrics: dict[str, float]
    """The counters above, for `info["metrics"]`."""


class ToolRunner:
    """The tools of one agent."""

    def __init__(
        self,
        sources: Iterable[Any],
        *,
        env: Any = None,
        agent: AgentId = SINGLE_AGENT,
        max_calls: int = 8,
        max_chars: int = 20_000,
    ) -> None:
        """Take the tools of functions (marked or not), `Tool`s, toolsets and objects with marked methods.

        `max_calls` of a turn are run, the surplus is answered with "not run". A result is cut at `max_chars`
        characters unless its tool says otherwise. Raises ConfigError for a source without tools and for two tools
        of the same name.
        """
        self.sources = list(sources)
        """May be exchanged between episodes."""
        self._max_calls = max_calls
        self._max_chars = max_chars
        self._context = Context(env=env, agent=agent)
        self._open = contextlib.ExitStack()
        self._stuck: list[_Attempt] = []
        self._tools = _by_name(self.sources)

    @property
    def names(self) -> list[str]:
        """The tools' names, in the order of their sources."""
        return list(self._tools)

    @property
    def schemas(self) -> list[ToolSchema]:
        """The tools' schemas, as the model reads them."""
        return [found.schema for found in self._tools.values()]

    def open(self, seed: int | None = None, *, scratch: dict[str, Any] | None = None) -> None:
        """Begin an episode; agents that share a `scratch` dictionary see each other's entries."""
        self.close()
        self._context = replace(self._context, seed=seed, scratch={} if scratch is None else scratch)
        with contextlib.ExitStack() as opened:
            for source in self.sources:
                if isinstance(source, Toolset):
                    opened.callback(source.close)
                    source.open(self._context)
            self._tools = _by_name(self.sources)
            self._open = opened.pop_all()

    def close(self) -> None:
        """End the episode; may be called more than once."""
        self._open.close()

    def run(self, calls: Sequence[ToolCall], *, ended: Callable[[], bool] = lambda: False) -> Answers:
        """Answer every call; those that are not run say why.

        Calls run one after the other, and none after one that made `ended()` true; they run at once where all
        tools that the turn names are declared parallel. Raises EnvError where a tool raised it, and
        EnvTimeoutError where too many calls never returned.
        """
        turn = _Turn(Counter(), set())
        together = self._start_together(calls, turn)
        contents = []
        for index, call in enumerate(calls):
            if ended() and not together:
                contents.append(turn.not_run("the episode has ended"))
                continue
            attempt = together[index] if together else self._plan(call, index, turn)
            contents.append(attempt if isinstance(attempt, str) else self._finish(attempt, turn))
        messages = [tool_result(content, call) for content, call in zip(contents, calls, strict=True)]
        return Answers(messages, {name: float(count) for name, count in turn.metrics.items()})

    def _start_together(self, calls: Sequence[ToolCall], turn: "_Turn") -> list["_Attempt | str"]:
        """Start all calls of a turn that names parallel tools only; return none where it names others."""
        named = [self._tools.get(call["function"]["name"]) for call in calls]
        if len(calls) < 2 or not all(found is None or found.parallel for found in named):
            return []
        attempts = [self._plan(call, index, turn) for index, call in enumerate(calls)]
        for attempt in attempts:
            if isinstance(attempt, _Attempt):
                attempt.start()
        return attempts

    def _plan(self, call: ToolCall, index: int, turn: "_Turn") -> "_Attempt | str":
        """Return the call ready to run, or the answer to one that cannot be run."""
        if index >= self._max_calls:
            return turn.not_run(f"only {self._max_calls} calls are allowed in one turn")
        if call["id"] in turn.ids:
            return turn.invalid(
                f"DuplicateId: an earlier call of this turn has the id {call['id']!r}; not run"
            )
        turn.ids.add(call["id"])
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        found = self._tools.get(name)
        if found is None:
            return turn.invalid(f"UnknownTool: there is no tool {name!r}. Tools: {', '.join(self._tools)}")
        turn.metrics[f"tools/{name}/calls"] += 1
        inner = _encoded_twice(arguments)
        if inner is not None:
            turn.metrics["tools/double_encoded"] += 1
        try:
            values = found.parse(arguments if inner is None else inner)
        except ArgumentsError as error:
            return turn.invalid(f"ArgumentsError: {error}")
        if found.context is not None:
            values[found.context] = self._context
        return _Attempt(found, values)

    def _finish(self, attempt: "_Attempt", turn: "_Turn") -> str:
        """Run one call, or wait for one that runs, and return what the model reads."""
        limit = self._max_chars if attempt.tool.max_chars is None else attempt.tool.max_chars
        try:
            return _cut(_as_text(attempt.result()), limit)
        except EnvError:
            raise
        except ToolError as error:
            text = str(error)
        except Exception as error:  # a tool's failure, of whatever type, is the model's to read
            text = f"{type(error).__name__}: {error}"
        turn.metrics["tools/errors"] += 1
        if attempt.abandoned:
            self._give_up_if_stuck(attempt)
        return _cut(f"Error: {text}", limit)

    def _give_up_if_stuck(self, attempt: "_Attempt") -> None:
        self._stuck = [*(other for other in self._stuck if other.is_alive()), attempt]
        if len(self._stuck) > MAX_STUCK:
            names = ", ".join(sorted({other.tool.name for other in self._stuck}))
            raise EnvTimeoutError(f"{len(self._stuck)} calls never returned, of the tools: {names}")


@dataclass(frozen=True, slots=True)
class _Turn:
    """The books of one turn."""

    metrics: Counter[str]
    ids: set[str]

    def not_run(self, reason: str) -> str:
        self.metrics["tools/not_run"] += 1
        return f"Error: not run: {reason}"

    def invalid(self, reason: str) -> str:
        self.metrics["tools/invalid"] += 1
        return f"Error: {reason}"


class _Attempt(threading.Thread):
    """One call: in a thread of its own where it has a time limit, is async or runs beside others.

    Elsewhere it runs in the caller's thread, to which a tool's database connection may be bound. A thread can be
    left behind, and an async tool gets an event loop that is surely free.
    """

    def __init__(self, tool: Tool, arguments: dict[str, Any]) -> None:
        super().__init__(name=f"tool {tool.name}", daemon=True)
        self.tool = tool
        self.started = False
        self.abandoned = False
        self._arguments = arguments
        self._deadline: float | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    def start(self) -> None:
        self.started = True
        if self.tool.timeout is not None:
            self._deadline = time.monotonic() + self.tool.timeout
        super().start()

    def run(self) -> None:
        try:
            if inspect.iscoroutinefunction(self.tool.function):
                self._value = asyncio.run(self.tool.function(**self._arguments))
            else:
                self._value = self.tool.function(**self._arguments)
        except BaseException as error:  # handed over to the thread that waits
            self._error = error

    def result(self) -> Any:
        """Return the tool's value or raise its error; TimeoutError where it took too long."""
        if not self.started:
            self.started = True
            if self.tool.timeout is None and not inspect.iscoroutinefunction(self.tool.function):
                return self.tool.function(**self._arguments)
            self.start()
        self.join(None if self._deadline is None else max(0.0, self._deadline - time.monotonic()))
        if self.is_alive():
            self.abandoned = True
            raise TimeoutError(f"no result within {self.tool.timeout:g} seconds")
        if self._error is not None:
            raise self._error
        return self._value


def runs_too_late() -> bool:
    """Say whether the current thread is a tool call whose timeout has passed: the episode went on without it."""
    thread = threading.current_thread()
    return isinstance(thread, _Attempt) and thread.abandoned


def mark(function: Callable[..., Any], **settings: Any) -> Tool:
    """Make a function a tool, with settings of `build_tool`, and remember that at the function."""
    found = build_tool(function, **settings)
    setattr(getattr(function, "__func__", function), _MARK, found)
    return found


def tool_of(function: Any) -> Tool | None:
    """Return the tool that a function or a method was marked as; None where it was not."""
    found = getattr(function, _MARK, None)
    return found if isinstance(found, Tool) else None


def marked_tools(owner: Any) -> list[Tool]:
    """Return the tools that an object's marked methods are, in the order of their declaration, bases first."""
    cls = type(owner)
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    marks = {name: tool_of(getattr(cls, name, None)) for name in names}
    return [
        replace(found, function=getattr(owner, name)) for name, found in marks.items() if found is not None
    ]


def _by_name(sources: Iterable[Any]) -> dict[str, Tool]:
    """Return the tools of all sources; a name may occur once."""
    tools: dict[str, Tool] = {}
    for source in sources:
        for found in _tools_of(source):
            if found.name in tools:
                raise ConfigError(
                    f"two tools are called {found.name!r}: {_origin(tools[found.name])} and {_origin(found)}"
                )
            tools[found.name] = found
    return tools


def _tools_of(source: Any) -> Sequence[Tool]:
    """Return the tools of one source; a toolset may have none before it is open."""
    if isinstance(source, Tool):
        return [source]
    if isinstance(source, Toolset):
        return source.tools
    if inspect.isfunction(source) or inspect.ismethod(source):
        return [replace(tool_of(source) or mark(source), function=source)]
    found = [] if inspect.isclass(source) else marked_tools(source)
    if not found:
        raise ConfigError(
            f"{source!r:.100} has no tools; expected a function, a toolset, or an object with methods marked @tool"
        )
    return found


def _origin(tool: Tool) -> str:
    return str(getattr(tool.function, "__qualname__", tool.function))


def _encoded_twice(arguments: str | None) -> str | None:
    """Return the JSON text within arguments that are a JSON string; None where they are anything else."""
    if not (arguments or "").lstrip().startswith('"'):
        return None
    try:
        inner = pydantic_core.from_json(arguments or "")
    except ValueError:
        return None
    return inner if isinstance(inner, str) else None


def _as_text(value: Any) -> str:
    """Return a tool's value as text: a string as it is, None as "ok", all else as JSON."""
    if isinstance(value, str):
        return value
    return "ok" if value is None else pydantic_core.to_json(value, fallback=str).decode()


def _cut(text: str, max_chars: int) -> str:
    """Return a text no longer than allowed, with a mark that says what is missing."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]} [cut: {len(text) - max_chars} more characters]"
