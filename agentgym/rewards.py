"""Rewards beyond those of an environment's steps: weights of named parts, and functions of what was played.

    class Haiku(agentgym.Env):
        reward_weights = {"rhyme": 0.2}            # of the parts that step names in info["rewards"]

        @agentgym.reward(weight=0.1)
        def brevity(self, episode, agent):         # after each episode, once per agent that answered
            return 1.0 - episode.trajectories[0].turns[-1].message["content"].count(" ") / 10

    def variety(episodes):                         # after each group: rollout.group_rewards = ["haiku:variety"]
        words = [episode.trajectories[0].turns[-1].message["content"] for episode in episodes]
        return [{"agent": 1.0 / words.count(word)} for word in words]

What a function gives is a named part of the reward of the agent's last turn, under the function's name. It is called
when the episode is over, `env.close` not yet called; functions do not see what the others give.

Parts are recorded and shown as they were given. A weight multiplies a part where it enters the turn's reward: the one
in `env.reward_weights` of the configuration, else the environment's `reward_weights`, else the decorator's, else 1.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, overload

from agentgym.config import Config, EnvConfig
from agentgym.episode import Episode
from agentgym.errors import ConfigError, EnvError
from agentgym.messages import AgentId
from agentgym.registry import EnvSpec, load_attribute

RewardFunction = Callable[[Episode, AgentId], float]
GroupReward = Callable[[list[Episode]], Sequence[Mapping[AgentId, float]]]

Method = TypeVar("Method", bound=Callable[..., float])

_MARK = "__agentgym_reward__"


class Score(NamedTuple):
    """What a function gives an agent."""

    agent: AgentId
    name: str
    value: float
    weight: float = 1.0
    """Where no settings name another one."""


@overload
def reward(method: Method, /) -> Method: ...


@overload
def reward(*, weight: float = 1.0) -> Callable[[Method], Method]: ...


def reward(method: Method | None = None, /, *, weight: float = 1.0) -> Method | Callable[[Method], Method]:
    """Mark a method `(self, episode, agent) -> float` of an environment as a reward function."""

    def mark(function: Method) -> Method:
        setattr(function, _MARK, float(weight))
        return function

    return mark if method is None else mark(method)


def reward_methods(env: Any) -> dict[str, tuple[RewardFunction, float]]:
    """Return an environment's methods marked `@reward` with their weights, by name, those of base classes first."""
    env = getattr(env, "unwrapped", env)
    names = dict.fromkeys(name for base in reversed(type(env).__mro__) for name in vars(base))
    marked = {name: getattr(inspect.getattr_static(env, name), _MARK, None) for name in names}
    return {name: (getattr(env, name), weight) for name, weight in marked.items() if weight is not None}


def score(functions: Mapping[str, tuple[RewardFunction, float]], episode: Episode) -> list[Score]:
    """Ask each function about each agent of an episode. Raises EnvError for one that raises or gives no number."""
    return [
        Score(agent, name, _number(_call(name, function, episode, agent), name), weight)
        for name, (function, weight) in functions.items()
        for agent in episode.agents
    ]


@dataclass(frozen=True, slots=True)
class Rewards:
    """What the settings say about rewards."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """By the name of a part; those of the configuration before those of the environment."""
    functions: Mapping[str, tuple[RewardFunction, float]] = field(default_factory=dict)
    """`env.rewards`, by the function's name."""
    paths: Sequence[str] = ()
    """`env.rewards`, to be loaded where the environment is."""

    @classmethod
    def of(cls, config: EnvConfig, spec: EnvSpec) -> "Rewards":
        """Load what the configuration names. Raises ConfigError where it names no function."""
        functions = {name: (function, 1.0) for name, function in load_functions(config.rewards).items()}
        return cls({**spec.reward_weights, **config.reward_weights}, functions, config.rewards)

    def weigh(self, reward: float, parts: Mapping[str, float]) -> float:
        """Return the reward of a step whose named parts have weights."""
        if not self.weights:
            return reward
        return reward + sum((self.weights.get(name, 1.0) - 1.0) * part for name, part in parts.items())

    def credit(self, episode: Episode, scores: Sequence[Score]) -> Episode:
        """Return the episode in which the scores are parts of the rewards of their agents' last turns."""
        trajectories = list(episode.trajectories)
        for agent, name, value, weight in scores:
            last = max(n for n, t in enumerate(trajectories) if t.agent == agent and t.turns)
            turn = trajectories[last].turns[-1]
            turn = turn._replace(
                reward=turn.reward + self.weights.get(name, weight) * value,
                rewards={**turn.rewards, name: turn.rewards.get(name, 0.0) + value},
            )
            trajectories[last] = replace(trajectories[last], turns=(*trajectories[last].turns[:-1], turn))
        return replace(episode, trajectories=tuple(trajectories))


def score_group(functions: Mapping[str, GroupReward], episodes: list[Episode]) -> list[list[Score]]:
    """Ask each function about the episodes of a group; return the scores of each of them.

    Raises:
        EnvError: a function raised, or did not return a dictionary of agents and numbers for each episode.
    """
    scores: list[list[Score]] = [[] for _ in episodes]
    for name, function in functions.items():
        given = _call(name, function, list(episodes))
        if not isinstance(given, Sequence) or len(given) != len(episodes):
            raise EnvError(
                f"group reward {name!r} returned {given!r:.100}; expected a list of {len(episodes)} "
                "dictionaries {agent: reward}, one per episode"
            )
        for episode, by_agent, found in zip(episodes, given, scores, strict=True):
            if not isinstance(by_agent, Mapping) or by_agent.keys() - set(episode.agents):
                raise EnvError(
                    f"group reward {name!r} gives {by_agent!r:.100} to an episode of the agents "
                    f"{episode.agents}; expected {{agent: reward}}"
                )
            found += [Score(agent, name, _number(value, name)) for agent, value in by_agent.items()]
    return scores


def load_functions(paths: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return the functions that "module:function" paths name, by name. Raises ConfigError where one names none."""
    functions: dict[str, Callable[..., Any]] = {}
    for path in paths:
        function = load_attribute(path)
        name = path.rpartition(":")[2].rpartition(".")[2]
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"{path} is {function!r:.80}; expected a plain function")
        if name in functions:
            raise ConfigError(
                f"two reward functions are called {name!r}; rewards are told apart by their names"
            )
        functions[name] = function
    return functions


def check_rewards(config: Config, spec: EnvSpec) -> None:
    """Raise ConfigError where the configuration names a reward function that is not there."""
    Rewards.of(config.env, spec)
    load_functions(config.rollout.group_rewards)


def _call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # the boundary to code that users wrote
        raise EnvError(f"reward {name!r} raised {type(error).__name__}: {error}") from error


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str):
        raise EnvError(f"reward {name!r} returned {value!r:.60}; expected a finite number")
    return number
