"""Environments with one planted fault each, for the tests of `agentgym check`; the first of each kind has none."""

import os
import random
import threading
from typing import Any, ClassVar

from agentgym.env import AECEnv, Env, ParallelEnv
from agentgym.messages import user
from agentgym.policy.scripted import SeededPolicy
from agentgym.spaces import Text
from agentgym.tools import ToolEnv, tool

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Sound(Env):
    """Say the word that is shown, four times."""

    isolation = "shared"
    words: tuple[str, ...] = ("ant", "bee", "cat", "dog", "elk", "fox")
    system_prompt: str | None = "Say it."
    scripted: ClassVar[dict[str, str]] = {"echo": "broken_envs:Echo"}

    def __init__(self) -> None:
        self.action_space = Text(choices=self.words)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.turn = 0
        return self.show(), {}

    def step(self, action: str) -> Any:
        right = float(action == self.word)
        self.turn += 1
        info = {"rewards": {"said": right}, "success": right}
        return self.show(), right, self.turn == 4, False, info

    def show(self) -> Any:
        self.word = str(self.np_random.choice(list(self.words)))
        return self.word


class Echo(SeededPolicy):
    """Says what it read."""

    def act(self, messages: list[Any], tools: list[Any], info: dict[str, Any]) -> Any:
        return {"role": "assistant", "content": messages[-1]["content"]}


class Lost(SeededPolicy):
    def act(self, messages: list[Any], tools: list[Any], info: dict[str, Any]) -> Any:
        return info["map"]


class CannotBeBuilt(Sound):
    def __init__(self) -> None:
        raise OSError("the words are gone")


class Raises(Sound):
    def step(self, action: str) -> Any:
        return {}[action] if self.turn == 2 else super().step(action)


class RewardIsNotANumber(Sound):
    def step(self, action: str) -> Any:
        text, _, over, cut, info = super().step(action)
        return text, float("nan"), over, cut, info


class PartsDoNotSum(Sound):
    def step(self, action: str) -> Any:
        text, reward, over, cut, info = super().step(action)
        return text, reward + 0.5, over, cut, info


class ObservationIsANumber(Sound):
    def show(self) -> Any:
        super().show()
        return self.turn


class IgnoresItsSeed(Sound):
    def show(self) -> Any:
        self.word = self.words[int.from_bytes(os.urandom(1), "big") % len(self.words)]
        return self.word


class DrawsGlobally(Sound):
    """Seeds the global generator in reset: alone it looks deterministic."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        random.seed(seed)
        return super().reset(seed=seed)

    def show(self) -> Any:
        self.word = random.choice(self.words)
        return self.word


class DrawsGloballyAlone(DrawsGlobally):
    """The same in a process of its own, where it does no harm."""

    isolation = "process"


class SharesItsState(Sound):
    """Keeps its turn in the class."""

    shared: ClassVar[list[int]] = [0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.shared[0] = 0
        return super().reset(seed=seed)

    def step(self, action: str) -> Any:
        self.shared[0] += 1
        text, reward, _, cut, info = super().step(action)
        return text, reward, self.shared[0] >= 4, cut, info


class RemembersItsPast(Sound):
    """Forgets to begin at turn 0 again."""

    turn = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        turn = self.turn % 4
        made = super().reset(seed=seed)
        self.turn = turn
        return made


class HashesTexts(Sound):
    """Orders its words by their hashes, which differ between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = tuple(sorted((f"word{number}" for number in range(50)), key=hash))


class ClosesOnce(Sound):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class ClosesForAll(Sound):
    """Its words are the class's, and close removes them."""

    pool: ClassVar[list[str]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.pool[:] = Sound.words
        return super().reset(seed=seed)

    def show(self) -> Any:
        text = super().show()
        return text if self.pool else "nothing"

    def close(self) -> None:
        self.pool.clear()


class RepeatsTheHistory(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.said: list[str] = []
        return super().reset(seed=seed)

    def show(self) -> Any:
        self.said.append(super().show())
        return "\n".join(self.said)


class SaysNothing(Sound):
    system_prompt = None

    def show(self) -> Any:
        text = super().show()
        return text if self.turn else ""


class ChangesItsPrompt(Sound):
    def show(self) -> Any:
        text = super().show()
        self.system_prompt = f"Say {text}."
        return text


class SucceedsTwice(Sound):
    def step(self, action: str) -> Any:
        text, reward, over, cut, info = super().step(action)
        return text, reward, over, cut, {**info, "success": 2.0}


class TalksTooMuch(Sound):
    def show(self) -> Any:
        return super().show() * 10_000


class HasALostPolicy(Sound):
    scripted: ClassVar[dict[str, str]] = {"lost": "broken_envs:Lost", "echo": "broken_envs:Echo"}


class Hangs(Sound):
    """Waits for ever in its second step."""

    def step(self, action: str) -> Any:
        if self.turn == 1:
            threading.Event().wait()
        return super().step(action)


class Dies(Sound):
    def step(self, action: str) -> Any:
        os._exit(3)


class TooLongForItsSpace(Sound):
    """Declares that its texts have two characters at most."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Text(2)


class SoundTools(ToolEnv):
    """Add two numbers with a tool and submit the sum."""

    isolation = "shared"
    system_prompt = "Add."

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.a, self.b = (int(number) for number in self.np_random.integers(10, size=2))
        return f"{self.a}+{self.b}", {}

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a + b

    @tool
    def submit(self, answer: int) -> str:
        """Give the answer.

        Args:
            answer: The sum.
        """
        self.finish(float(answer == self.a + self.b))
        return "ended"


class ToolWithoutWords(SoundTools):
    @tool
    def half(self, number: int) -> float:
        """"""
        return number / 2


class SchemaIsWrong(SoundTools):
    @property
    def tools(self) -> list[Any]:
        tools = super().tools
        tools[0]["function"]["parameters"]["properties"]["a"]["type"] = "int"
        return tools


class SchemaAllowsMore(SoundTools):
    """Its schema says text, its code wants a number."""

    @property
    def tools(self) -> list[Any]:
        tools = super().tools
        for parameter in tools[0]["function"]["parameters"]["properties"].values():
            parameter["type"] = "string"
        return tools


class AnswersOneCall(SoundTools):
    def step(self, action: Any) -> Any:
        messages, *rest = super().step(action)
        return messages[:1], *rest


class TrustsItsCalls(SoundTools):
    """Raises for a tool that is not there."""

    def step(self, action: Any) -> Any:
        for call in action.get("tool_calls", ()):
            {"add": 1, "submit": 1}[call["function"]["name"]]
        return super().step(action)


class SoundTurns(AECEnv):
    """Two agents count by turns; the mover gets a point for a digit."""

    metadata: ClassVar[dict[str, Any]] = {"name": "counting", "render_modes": [], "is_parallelizable": False}

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]
        self.spaces = {agent: Text(choices="0123456789") for agent in self.possible_agents}

    def action_space(self, agent: str) -> Any:
        return self.spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.agent_selection, self.count = "a", 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.words = {agent: "count" for agent in self.agents}

    def observe(self, agent: str) -> Any:
        return {"messages": [user(self.words[agent])]}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.count += 1
        self.words = {other: f"number {self.count}" for other in self.agents}
        self.rewards = {other: float(other == agent and action.isdigit()) for other in self.agents}
        self._accumulate_rewards()
        if self.count == 6:
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = "b" if agent == "a" else "a"


class ObserveCounts(SoundTurns):
    """Each look changes what is seen."""

    looks = 0

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.looks = 0
        super().reset(seed)

    def observe(self, agent: str) -> Any:
        self.looks += 1
        return {"messages": [user(f"look {self.looks}")]}


class SoundTogether(ParallelEnv):
    """Two agents say a digit at once, three times."""

    metadata: ClassVar[dict[str, Any]] = {"name": "together", "render_modes": []}

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]
        self.spaces = {agent: Text(choices="0123456789") for agent in self.possible_agents}

    def action_space(self, agent: str) -> Any:
        return self.spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.count = list(self.possible_agents), 0
        return {agent: {"messages": [user("begin")]} for agent in self.agents}, {
            agent: {} for agent in self.agents
        }

    def step(self, actions: Any) -> Any:
        agents, self.count = self.agents, self.count + 1
        over = self.count == 3
        if over:
            self.agents = []
        tables = (
            {agent: {"messages": [user(f"round {self.count}")]} for agent in agents},
            {agent: float(actions[agent].isdigit()) for agent in agents},
            dict.fromkeys(agents, over),
            dict.fromkeys(agents, False),
            {agent: {} for agent in agents},
        )
        return self.spoiled(*tables)

    def spoiled(self, *tables: Any) -> Any:
        return tables


class ForgetsAnAgent(SoundTogether):
    def spoiled(self, *tables: Any) -> Any:
        tables[0].pop("b")
        return tables
