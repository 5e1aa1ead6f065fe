'''Environments with tools: typed functions that the model calls, answered by id.

    import agentgym
    from agentgym.toolsets import Calculator


    def convert(amount: float, currency: str) -> float:
        """Convert an amount to euros."""
        return amount * {"EUR": 1.0, "USD": 0.9}[currency]


    class Shop(agentgym.ToolEnv):
        system_prompt = "Find the price in euros, then submit it."
        toolsets = [convert, Calculator()]

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.price = int(self.np_random.integers(1, 10))
            return "What does tea cost?", {}

        @agentgym.tool
        def look_up(self, item: str, context: agentgym.Context) -> str:
            """Look up the price of an item, named in one word."""
            context.scratch["seen"] = context.scratch.get("seen", 0) + 1
            return f"{item}: {self.price} USD"

        @agentgym.tool(timeout=2.0)
        def submit(self, euros: float) -> str:
            """Give the answer."""
            self.finish(1.0 if abs(euros - 0.9 * self.price) < 0.01 else 0.0)
            return "recorded"

The model reads a tool's name, its docstring and its parameters, described by the docstring's "Args:" section (or
NumPy's, or Sphinx's); the parameter `context` is hidden from it. Failures come back to it as text and are counted (see
`agentgym.tool_runner`); only `agentgym.errors.EnvError` fails the play.
'''

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar, overload

import gymnasium

from agentgym.env import Env
from agentgym.messages import Action, Observation, ToolSchema, user
from agentgym.spaces import AssistantMessage
from agentgym.tool_runner import ToolRunner, mark, marked_tools, runs_too_late

Function = TypeVar("Function", bound=Callable[..., Any])

_BOOKS = threading.Lock()
"""Tools that run at the same time may add to the same reward."""


@overload
def tool(function: Function, /) -> Function: ...


@overload
def tool(
    *, timeout: float | None = None, max_chars: int | None = None, parallel: bool = False
) -> Callable[[Function], Function]: ...


def tool(
    function: Function | None = None,
    /,
    *,
    timeout: float | None = None,
    max_chars: int | None = None,
    parallel: bool = False,
) -> Function | Callable[[Function], Function]:
    """Mark a function or a method, plain or async, as a tool that the model may call.

    `timeout` (seconds) lets the model go on when a call takes too long; the call itself cannot be stopped, so
    its thread runs on and its result is thrown away. `max_chars` cuts longer results, visibly. Calls of one turn
    run at once where all of them are of `parallel` tools. Raises ConfigError where the signature has no schema.
    """

    def declare(declared: Function) -> Function:
        mark(declared, timeout=timeout, max_chars=max_chars, parallel=parallel)
        return declared

    return declare if function is None else declare(function)


class ToolEnv(Env):
    """An environment whose agent acts through tools: its own methods marked `@tool`, and `toolsets`.

    An action is an assistant message or a text. `step` runs the message's calls and returns one tool message for
    each, in the same order. A turn without a call goes to `on_text`. A tool ends the episode with
    `self.finish(...)`; later calls of the same turn are not run. Toolsets are opened by `reset` and closed at the
    end of the episode: by the step that ends it or fails, by the next `reset`, or by `close`.
    """

    toolsets: Sequence[Any] = ()
    """More tools: functions, `Toolset`s, objects with marked methods; the model reads them first. Those of the
    class are copied for each environment; `__init__` or `reset` (before `super().reset`) may set others."""
    max_tool_calls: int = 8
    """Calls run in one turn; the surplus ones are answered with "not run"."""
    max_tool_chars: int = 20_000
    """Characters of a result, where its tool names no other limit; what is longer is cut, visibly."""

    _finished: bool = False
    _success: float | None = None
    _parts: dict[str, float]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a function whose signature has no schema where it is offered, not where it is called."""
        super().__init_subclass__(**kwargs)
        if isinstance(cls.toolsets, Sequence):
            ToolRunner(cls.toolsets)

    @cached_property
    def _runner(self) -> ToolRunner:
        return ToolRunner(
            self._sources(), env=self, max_calls=self.max_tool_calls, max_chars=self.max_tool_chars
        )

    def _sources(self) -> list[Any]:
        if "toolsets" not in vars(self):
            self.toolsets = copy.deepcopy(self.toolsets)
        return [*self.toolsets, *marked_tools(self)]

    @cached_property
    def action_space(self) -> gymnasium.Space[Action]:  # type: ignore[override]  # lazy default
        """Assistant messages that call the tools, or their text alone."""
        return AssistantMessage(self.tools)

    @property
    def tools(self) -> list[ToolSchema]:
        """The tools' schemas; some toolsets know theirs only after `reset`."""
        return self._runner.schemas

    def on_text(self, text: str) -> str | None:
        """Answer a turn without a tool call; None says nothing. Override to change."""
        return f"Error: no tool was called. Tools: {', '.join(self._runner.names)}"

    def add_reward(self, **parts: float) -> None:
        """Add named parts to the reward of the current step.

        Raises TimeoutError in a tool whose timeout has passed: the episode has gone on without it.
        """
        if runs_too_late():
            raise TimeoutError("this call took too long; what it does no longer counts")
        with _BOOKS:
            for name, value in parts.items():
                self._parts[name] = self._parts.get(name, 0.0) + value

    def finish(self, reward: float = 0.0, *, success: float | None = None, **parts: float) -> None:
        """End the episode after the current call; `reward` is the part named "success"."""
        self.add_reward(**({"success": reward} if reward else {}), **parts)
        self._finished = True
        self._success = success

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Seed the random generator and open the toolsets; call this first in a `reset` of your own."""
        self._begin_step()
        observation = super().reset(seed=seed, options=options)
        self._runner.sources = self._sources()
        self._runner.open(seed)
        space = self.action_space
        if isinstance(space, AssistantMessage):
            space.tools = self.tools
        return observation

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the answer's tool calls, or `on_text` where it has none."""
        self._begin_step()
        calls = [] if isinstance(action, str) else action.get("tool_calls", [])
        metrics: dict[str, float] = {}
        with contextlib.ExitStack() as ending:
            ending.callback(self._runner.close)
            if calls:
                answers = self._runner.run(calls, ended=lambda: self._finished)
                messages, metrics = answers.messages, answers.metrics
            else:
                reply = self.on_text(action if isinstance(action, str) else action["content"])
                messages = [user(reply)] if reply else []
            if not self._finished:
                ending.pop_all()
        info: dict[str, Any] = {"rewards": self._parts, "metrics": metrics}
        if self._success is not None:
            info["success"] = self._success
        return messages, float(sum(self._parts.values())), self._finished, False, info

    def close(self) -> None:
        """Close the toolsets; call this in a `close` of your own."""
        if "_runner" in vars(self):
            self._runner.close()
        super().close()

    def _begin_step(self) -> None:
        self._finished, self._success, self._parts = False, None, {}
