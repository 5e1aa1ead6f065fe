"""One way to play every kind of environment: who must answer now, and what came of the last answers.

    driver = DRIVERS[kind](env)
    state = driver.reset(seed)
    while not state.over:
        state = driver.act({request.agent: answer for request in state.requests})

Drivers are synchronous and check the environment's contract: what it breaks is an EnvError that says what was
returned and what was expected. They know no tokens and no policies.

What they return is made anew in every turn, and frozen records would take three times as long to make.

Rewards reach an agent's *previous* answer. In an AEC environment `last()` gives an agent what it accumulated since
it acted; the driver reports it when the agent is selected again, or when it is stepped out with None.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentgym.env import system_prompt_of, tools_of
from agentgym.episode import Episode
from agentgym.errors import EnvError
from agentgym.messages import SINGLE_AGENT, AgentId, Message, ToolSchema, as_messages
from agentgym.rewards import Score, reward_methods, score

Info = Mapping[str, Any]


@dataclass(slots=True)
class Request:
    """An agent that must answer now."""

    agent: AgentId
    messages: list[Message]
    """What is new to it since its last answer."""
    info: Info
    """The environment's info for this agent, with "action_mask" if the observation has one. For scripted players: what
    is in it stays in the environment's process."""


@dataclass(slots=True)
class Outcome:
    """What an agent got since its last answer."""

    agent: AgentId
    reward: float
    info: Info
    """Read for its three keys that `agentgym.env` names."""
    truncated: bool = False


@dataclass(slots=True)
class State:
    """Where a play stands."""

    requests: list[Request] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether nobody can answer any more."""
        return not self.requests


class Driver(Protocol):
    """A play of one environment."""

    @property
    def scores(self) -> bool:
        """Whether the environment has reward functions, so that `score` is worth a call."""

    def reset(self, seed: int) -> State:
        """Begin a new episode."""

    def act(self, actions: Mapping[AgentId, Message]) -> State:
        """Hand the answers of all requested agents to the environment."""

    def outstanding(self) -> list[Outcome]:
        """Return what agents that are not asked now have got since their last answers; the play is cut here."""

    def score(self, episode: Episode) -> list[Score]:
        """Return what the environment's reward functions say about the episode it has just played."""

    def agents(self) -> list[AgentId]:
        """Return the agents that take part in the episode as it began."""

    def system_prompt(self, agent: AgentId) -> str | None:
        """Return the system prompt of an agent."""

    def tools(self, agent: AgentId) -> list[ToolSchema]:
        """Return the tools of an agent."""

    def close(self) -> None:
        """Close the environment."""


class _EnvDriver:
    """What the drivers have in common."""

    def __init__(self, env: Any) -> None:
        """Drive `env`."""
        self._env = env
        self._rewards = reward_methods(env)

    @property
    def scores(self) -> bool:
        """Whether the environment has reward functions."""
        return bool(self._rewards)

    def outstanding(self) -> list[Outcome]:
        """Return nothing: every agent has heard of all its rewards when one is asked."""
        return []

    def score(self, episode: Episode) -> list[Score]:
        """Ask the environment's reward functions about the episode."""
        return score(self._rewards, episode)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


class SingleDriver(_EnvDriver):
    """A `gymnasium.Env`; its one agent is called "agent"."""

    def __init__(self, env: Any) -> None:
        """Drive `env`."""
        super().__init__(env)
        self._tools: list[ToolSchema] = []

    def reset(self, seed: int) -> State:
        """Begin a new episode."""
        result = self._env.reset(seed=seed)
        # Tools are fixed for an episode, and some are known only when it has begun (an MCP server's).
        self._tools = tools_of(self._env, SINGLE_AGENT)
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(f"reset returned {result!r:.100}; expected (observation, info)")
        observation, info = result
        return State([Request(SINGLE_AGENT, _messages(observation), _info(info))])

    def act(self, actions: Mapping[AgentId, Message]) -> State:
        """Hand the answer to the environment."""
        answer = actions[SINGLE_AGENT]
        result = self._env.step(answer if self._tools else answer["content"])
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                f"step returned {result!r:.100}; expected (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = result
        outcome = _outcome(SINGLE_AGENT, reward, info, bool(truncated) and not terminated)
        if terminated or truncated:
            return State([], [outcome])
        return State([Request(SINGLE_AGENT, _messages(observation), outcome.info)], [outcome])

    def agents(self) -> list[AgentId]:
        """Return the one agent."""
        return [SINGLE_AGENT]

    def system_prompt(self, agent: AgentId) -> str | None:
        """Return the system prompt."""
        return system_prompt_of(self._env, agent)

    def tools(self, agent: AgentId) -> list[ToolSchema]:
        """Return the tools."""
        return self._tools


class _SeatedDriver(_EnvDriver):
    """What AEC and parallel environments have in common: prompts and tools per agent."""

    def agents(self) -> list[AgentId]:
        """Return the agents that are there."""
        return list(self._env.agents)

    def system_prompt(self, agent: AgentId) -> str | None:
        """Return the system prompt of an agent."""
        return system_prompt_of(self._env, agent)

    def tools(self, agent: AgentId) -> list[ToolSchema]:
        """Return the tools of an agent."""
        return tools_of(self._env, agent)

    def _action(self, agent: AgentId, answer: Message) -> Any:
        return answer if self.tools(agent) else answer["content"]


class AECDriver(_SeatedDriver):
    """A `pettingzoo.AECEnv`: agents by turns."""

    def reset(self, seed: int) -> State:
        """Begin a new episode."""
        self._env.reset(seed=seed)
        return self._next()

    def act(self, actions: Mapping[AgentId, Message]) -> State:
        """Hand the answer of the selected agent to the environment."""
        agent = self._env.agent_selection
        self._env.step(self._action(agent, actions[agent]))
        return self._next()

    def outstanding(self) -> list[Outcome]:
        """Return what the agents that wait for their turn have got since they acted."""
        outcomes = []
        for agent in self._env.agents:
            if agent != self._env.agent_selection:
                reward = getattr(self._env, "_cumulative_rewards", {}).get(agent, 0.0)  # as `last()` reads it
                info = self._env.infos.get(agent, {})
                outcomes.append(_outcome(agent, reward, info, truncated=False))
        return outcomes

    def _next(self) -> State:
        outcomes = []
        while self._env.agents:
            agent = self._env.agent_selection
            result = self._env.last()
            if not isinstance(result, tuple) or len(result) != 5:
                raise EnvError(
                    f"last() returned {result!r:.100}; expected (observation, reward, terminated, truncated, info)"
                )
            observation, reward, terminated, truncated, info = result
            outcomes.append(_outcome(agent, reward, info, bool(truncated) and not terminated))
            if not (terminated or truncated):
                return State([_seat_request(agent, observation, info)], outcomes)
            self._env.step(None)
        return State([], outcomes)


class ParallelDriver(_SeatedDriver):
    """A `pettingzoo.ParallelEnv`: all agents at once."""

    def reset(self, seed: int) -> State:
        """Begin a new episode."""
        result = self._env.reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(f"reset returned {result!r:.100}; expected (observations, infos)")
        for part in result:
            if not isinstance(part, Mapping):
                raise EnvError(f"reset returned {part!r:.100} in its tuple; expected dictionaries by agent")
        return State(self._requests(*result))

    def act(self, actions: Mapping[AgentId, Message]) -> State:
        """Hand the answers of all agents to the environment."""
        result = self._env.step({agent: self._action(agent, answer) for agent, answer in actions.items()})
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(f"step returned {result!r:.100}; expected five dictionaries by agent")
        observations, rewards, terminations, truncations, infos = result
        for part in result:
            if not isinstance(part, Mapping):
                raise EnvError(
                    f"step returned {part!r:.100} in its tuple; expected five dictionaries by agent"
                )
        strangers = rewards.keys() - actions.keys()
        if strangers:
            raise EnvError(
                f"step gave rewards to {sorted(strangers)}, who took no part; acting: {sorted(actions)}"
            )
        outcomes = [
            _outcome(
                agent,
                rewards.get(agent, 0.0),
                infos.get(agent, {}),
                bool(truncations.get(agent)) and not terminations.get(agent),
            )
            for agent in actions
        ]
        return State(self._requests(observations, infos), outcomes)

    def _requests(self, observations: Mapping[AgentId, Any], infos: Mapping[AgentId, Any]) -> list[Request]:
        missing = set(self._env.agents) - observations.keys()
        if missing:
            raise EnvError(f"no observation for {sorted(missing)}, who must answer next")
        return [_seat_request(agent, observations[agent], infos.get(agent, {})) for agent in self._env.agents]


DRIVERS: dict[str, type[SingleDriver] | type[AECDriver] | type[ParallelDriver]] = {
    "single": SingleDriver,
    "aec": AECDriver,
    "parallel": ParallelDriver,
}


def _seat_request(agent: AgentId, observation: Any, info: Any) -> Request:
    info = _info(info)
    if isinstance(observation, Mapping):
        if "messages" not in observation:
            raise EnvError(
                f"the observation of {agent!r} has keys {sorted(observation)}; expected 'messages'"
            )
        if "action_mask" in observation:
            info = {**info, "action_mask": observation["action_mask"]}
        observation = observation["messages"]
    return Request(agent, _messages(observation), info)


def _messages(observation: Any) -> list[Message]:
    if isinstance(observation, str):
        return as_messages(_text(observation))
    if not isinstance(observation, (list, tuple)):
        raise EnvError(f"an observation is {type(observation).__name__}; expected text or a list of messages")
    for message in observation:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise EnvError(
                f"an observation holds {message!r:.100}; expected {{'role': ..., 'content': text}}"
            )
        _text(message["content"])
        if message.get("role") not in ("user", "tool", "system"):
            raise EnvError(
                f"an observation holds a message of role {message.get('role')!r}; expected user or tool"
            )
    return as_messages(observation)


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # no tokenizer and no message could take it
        raise EnvError(f"an observation is not valid Unicode text: {error}") from error
    return text


def _outcome(agent: AgentId, reward: Any, info: Any, truncated: bool) -> Outcome:
    if not _is_number(reward):
        raise EnvError(f"the reward is {reward!r:.60}; expected a finite number")
    value, info = float(reward), _info(info)
    if "rewards" in info and not math.isclose(sum(info["rewards"].values()), value, abs_tol=1e-6):
        raise EnvError(f"info['rewards'] = {info['rewards']} does not sum to the reward {value}")
    return Outcome(agent, value, info, truncated)


def _info(info: Any) -> Info:
    """Return an info whose three keys with a meaning mean it; see `agentgym.env`."""
    if type(info) is not dict and not isinstance(info, Mapping):  # the second question is slow
        raise EnvError(f"info is {type(info).__name__}; expected a dictionary")
    if not info:
        return info
    if "success" in info and not _is_number(info["success"]):
        raise EnvError(f"info['success'] is {info['success']!r:.60}; expected a number from 0 to 1")
    for name in ("rewards", "metrics"):
        if name in info and not _are_numbers(info[name]):
            raise EnvError(
                f"info[{name!r}] is {info[name]!r:.100}; expected a dictionary of names and numbers"
            )
    return info


def _are_numbers(parts: Any) -> bool:
    return isinstance(parts, Mapping) and all(
        isinstance(key, str) and _is_number(value) for key, value in parts.items()
    )


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value)) and not isinstance(value, str)
    except (TypeError, ValueError, OverflowError):
        return False
