"""Environments for the tests of the worker: each does one thing, right or wrong."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgym.env import AECEnv, Env, ParallelEnv
from agentgym.messages import assistant, user
from agentgym.policy.scripted import SeededPolicy
from agentgym.spaces import Text
from agentgym.tools import ToolEnv, tool

Step = tuple[Any, Any, Any, Any, Any]


class Scripted(Env):
    """Returns what it was given: first from reset, then from each step; the last step for ever."""

    system_prompt = "Obey."

    def __init__(self, *steps: Any, first: Any = ("begin", {})) -> None:
        self.first, self.steps = first, list(steps)
        self.heard: list[Any] = []
        self.seeds: list[int | None] = []
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.left = list(self.steps)
        return self.first() if callable(self.first) else self.first

    def step(self, action: Any) -> Any:
        self.heard.append(action)
        made = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return made() if callable(made) else made

    def close(self) -> None:
        self.closed += 1


def says(
    text: Any = "go on", reward: Any = 0.0, *, over: bool = False, cut: bool = False, **info: Any
) -> Step:
    """What a step returns."""
    return text, reward, over, cut, info


class Adder(ToolEnv):
    """Wants its tools used: `add`, then `submit`."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "1+1?", {}

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    @tool
    def submit(self, answer: int) -> str:
        """Submit."""
        self.finish(float(answer == 2), success=float(answer == 2))
        return "done"


class Relay(AECEnv):
    """Agents by turns for some rounds; who speaks gives the other, or else itself, a reward of 1."""

    def __init__(
        self, rounds: int = 2, *, prompt: str | None = None, end: str = "termination", pays: str = "other"
    ) -> None:
        self.pays = pays
        self.possible_agents, self.rounds, self.prompt, self.end = ["a", "b"], rounds, prompt, end
        self.heard: list[tuple[str, Any]] = []

    def system_prompt(self, agent: str) -> str | None:
        return f"{self.prompt} {agent}" if self.prompt else None

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.agent_selection, self.spoken, self.last_text = "a", 0, "begin"
        for table in ("rewards", "_cumulative_rewards"):
            setattr(self, table, dict.fromkeys(self.agents, 0.0))
        self.terminations, self.truncations = (
            dict.fromkeys(self.agents, False),
            dict.fromkeys(self.agents, False),
        )
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def observe(self, agent: str) -> Any:
        return {"messages": [user(self.last_text)], "action_mask": [1]}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self.heard.append((agent, action))
        other = "b" if agent == "a" else "a"
        self._cumulative_rewards[agent] = 0.0
        self.infos[agent] = {}
        paid = other if self.pays == "other" else agent
        self.rewards = {agent: 0.0, other: 0.0, paid: 1.0}
        self._accumulate_rewards()
        self.infos[paid] = {"rewards": {"heard": self._cumulative_rewards[paid]}}
        self.spoken, self.last_text = self.spoken + 1, str(action)
        if self.spoken >= 2 * self.rounds:
            ended = dict.fromkeys(self.agents, True)
            if self.end != "truncation":
                self.terminations = ended
            if self.end != "termination":
                self.truncations = dict(ended)
        self.agent_selection = other


class Together(ParallelEnv):
    """Agents at once; returns what it was given, or one reward for each agent per step until `rounds` are over."""

    def __init__(
        self, *steps: Any, first: Any = None, rounds: int = 2, agents: Sequence[str] = ("a", "b")
    ) -> None:
        self.possible_agents, self.first, self.steps, self.rounds = list(agents), first, list(steps), rounds
        self.heard: list[Mapping[str, Any]] = []

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.round = list(self.possible_agents), 0
        if self.first is not None:
            return self.first
        return self._all({"messages": [user("begin")]}), self._all({})

    def step(self, actions: Any) -> Any:
        self.heard.append(actions)
        self.round += 1
        if self.steps:
            return self.steps[min(self.round, len(self.steps)) - 1]
        over = self.round >= self.rounds
        rewards = {agent: float(number) for number, agent in enumerate(self.agents)}
        result = (
            self._all({"messages": [user(f"round {self.round}")]}),
            rewards,
            self._all(over),
            self._all(False),
            {agent: {"success": 1.0} for agent in self.agents} if over else self._all({}),
        )
        if over:
            self.agents = []
        return result

    def _all(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.agents, value)


class Crowd(Env):
    """All its copies wait for each other in `step`, wherever they are: only concurrent plays end."""

    isolation = "shared"

    def __init__(self, size: int, folder: str, seconds: float = 100.0) -> None:
        self.size, self.folder, self.seconds = size, Path(folder), seconds

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "begin", {}

    def step(self, action: Any) -> Any:
        (self.folder / f"here-{os.getpid()}-{threading.get_ident()}").touch()
        deadline = time.monotonic() + self.seconds
        while (here := len(list(self.folder.glob("here-*")))) < self.size and time.monotonic() < deadline:
            time.sleep(0.05)
        return "end", 1.0, True, False, {"metrics": {"together": float(here)}}


class Counted(Env):
    """One turn; refuses to say anything sensible when its seed is 13. Its copies are in `counted`."""

    isolation = "shared"

    def __init__(self) -> None:
        self.plays, self.closed = 0, threading.Event()
        counted.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.plays += 1
        return ("begin", {}) if seed != 13 else "nonsense"

    def step(self, action: Any) -> Any:
        return "end", 1.0, True, False, {"success": 1.0}

    def close(self) -> None:
        self.closed.set()


counted: list[Counted] = []


class Stuck(Env):
    """Never comes back from `step` until it is released."""

    isolation = "shared"

    def __init__(self) -> None:
        self.released = threading.Event()
        stuck.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "begin", {}

    def step(self, action: Any) -> Any:
        self.released.wait()
        return "end", 0.0, True, False, {}

    def close(self) -> None:
        self.released.set()


stuck: list[Stuck] = []
"""Every `Stuck` that was made in this process."""


class Deaf(Env):
    """Comes back from `reset` when `ends` is set, and not from being closed."""

    isolation = "shared"

    def __init__(self, ends: threading.Event) -> None:
        self.ends = ends

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.ends.wait()
        return "begin", {}


class Hello(SeededPolicy):
    """Says hello."""

    def act(self, messages: Any, tools: Any, info: Any) -> Any:
        return assistant("hello")


class Unmakeable(Env):
    """Cannot be built."""

    isolation = "shared"

    def __init__(self) -> None:
        raise OSError("no licence for this game")


def raising(error: BaseException) -> Callable[[], Any]:
    """A step that raises."""

    def step() -> Any:
        raise error

    return step


class Naps(Env):
    """Sleeps in `step` for as many seconds as it is told."""

    isolation = "inline"

    def __init__(self) -> None:
        self.action_space = Text(choices=["0.03"])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return f"thread {threading.get_ident()}", {}

    def step(self, action: str) -> Any:
        time.sleep(float(action))
        return "", 0.0, True, False, {}
