"""Where a play happens: an environment, and those of its players that are scripted.

Everything here runs code that users wrote, so a table stands in a thread or in a process of its own (`worker.threads`,
`worker.isolated`), and what it exchanges with a rollout is plain data: answers and scripts in, `Hop`s out.

    table = Table.make("agentgym/TicTacToe-v0", {})
    hop = table.reset(seed)
    hop = table.act({}, {"player_2": Script("other", "expert", seed=7, max_turns=5)})
    hop = table.act({"player_1": answer}, {})    # then player_2's answer, and the state after it

A hop is as long as it can be: while only scripted players are to answer, they answer and the environment goes on. So
a scripted episode costs a worker two hops, whatever its length.
"""

import functools
import random
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from agentgym.episode import Episode
from agentgym.errors import AgentGymError, ConfigError, EnvError, PolicyError
from agentgym.messages import AgentId, Message, ToolSchema, shortened, system
from agentgym.policy.scripted import Script, ScriptedPolicy
from agentgym.registry import EnvSpec, make, spec
from agentgym.rewards import Score, load_functions, score
from agentgym.worker.driver import DRIVERS, Driver, Outcome, Request, State

SLICE_SECONDS = 0.05
"""A hop of scripted turns ends after this long, so that who waits for it sees that it goes on."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opening:
    """How an agent's conversation begins; fixed for the episode."""

    system_prompt: str | None
    tools: list[ToolSchema]


@dataclass(slots=True)
class Move:
    """One call of the environment."""

    answers: dict[AgentId, Message]
    """What scripted players answered before it."""
    state: State
    """What came of it."""
    outstanding: list[Outcome] = field(default_factory=list)
    """What agents that are not asked have got since their last answers; it counts if the play is cut here."""


@dataclass(slots=True)
class Hop:
    """What happened until an answer is needed from elsewhere, or the play is over, or it failed."""

    moves: list[Move] = field(default_factory=list)
    openings: dict[AgentId, Opening] = field(default_factory=dict)
    """Of the agents that appear for the first time in the episode."""
    scores: bool = False
    """After a reset: whether the environment has reward functions, so that `Table.score` is worth a call."""
    failure: EnvError | PolicyError | None = None
    """Why the play cannot go on after these moves."""


class Table:
    """One environment with its scripted players."""

    def __init__(self, env_spec: EnvSpec, driver: Driver, *, seed_globals: bool = False) -> None:
        """Set `driver` on the table; `seed_globals` only where nobody else draws from the global generators."""
        self._spec = env_spec
        self._driver = driver
        self._seed_globals = seed_globals
        self._seed = 0
        self._state = State()
        self._openings: dict[AgentId, Opening] = {}
        self._players: dict[AgentId, _Player] = {}

    @classmethod
    def make(cls, env_id: str, kwargs: Mapping[str, Any], *, seed_globals: bool = False) -> "Table":
        """Build the environment. Raises EnvError where that fails."""
        env_spec = spec(env_id)
        env = call_env(f"making {env_id}", functools.partial(make, env_id, **kwargs))
        return cls(env_spec, DRIVERS[env_spec.kind](env), seed_globals=seed_globals)

    def reset(self, seed: int) -> Hop:
        """Begin a new episode; the players of the last one leave."""
        self._seed = seed
        self._players.clear()
        self._openings.clear()
        if self._seed_globals:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        hop = Hop(scores=self._driver.scores)
        try:
            self._enter(hop, {}, "reset", self._driver.reset, seed)
        except EnvError as failure:
            hop.failure = failure
        return hop

    def act(self, answers: Mapping[AgentId, Message], scripts: Mapping[AgentId, Script]) -> Hop:
        """Hand over answers, and the scripts of new players; go on until somebody else must answer.

        Raises:
            ConfigError: a script names no scripted policy.
        """
        hop, until = Hop(), time.monotonic() + SLICE_SECONDS
        try:
            for agent, script in scripts.items():
                self._players[agent] = _Player(script, agent, self._openings[agent], self._seed, self._spec)
            while True:
                said = {
                    request.agent: self._players[request.agent].answer(request)
                    for request in self._state.requests
                    if request.agent in self._players
                }
                self._enter(hop, said, "step", self._driver.act, {**answers, **said})
                answers = {}
                if not self._goes_on() or time.monotonic() > until:
                    return hop
        except (EnvError, PolicyError) as failure:
            hop.failure = failure
            return hop

    def score(self, episode: Episode, paths: Sequence[str]) -> list[Score]:
        """Return what reward functions give for the episode: the environment's, then those that `paths` name."""
        functions = {name: (function, 1.0) for name, function in load_functions(paths).items()}
        return call_env("scoring", lambda: [*self._driver.score(episode), *score(functions, episode)])

    def close(self) -> None:
        """Close the environment."""
        call_env("close", self._driver.close)

    def _enter(
        self, hop: Hop, said: dict[AgentId, Message], what: str, call: Callable[..., State], *args: Any
    ) -> None:
        move = Move(said, State())  # what was said last is worth knowing, whatever comes of it
        hop.moves.append(move)

        def enter() -> None:
            state = self._state = call(*args)
            for agent in self._newcomers(state):
                self._openings[agent] = hop.openings[agent] = self._opening(agent)
            move.state, move.outstanding = state, self._driver.outstanding()

        call_env(what, enter)

    def _opening(self, agent: AgentId) -> Opening:
        return Opening(self._driver.system_prompt(agent), self._driver.tools(agent))

    def _newcomers(self, state: State) -> list[AgentId]:
        known = self._openings
        agents = [outcome.agent for outcome in state.outcomes]
        agents += [request.agent for request in state.requests]
        if not known:
            agents += self._driver.agents()
        return [agent for agent in dict.fromkeys(agents) if agent not in known]

    def _goes_on(self) -> bool:
        """Whether the next answers are all those of scripted players that may still give one."""
        requests = self._state.requests
        return bool(requests) and all(
            (player := self._players.get(request.agent)) is not None and player.turns_left > 0
            for request in requests
        )


class _Player:
    """A scripted policy in an episode."""

    def __init__(
        self, script: Script, agent: AgentId, opening: Opening, seed: int, env_spec: EnvSpec
    ) -> None:
        self.turns_left = script.max_turns
        self._name = script.policy
        self._limit = script.max_observation_chars
        self._tools = opening.tools
        self._messages = [system(opening.system_prompt)] if opening.system_prompt else []
        self._policy: ScriptedPolicy = self._ask(script.build, agent, seed, env_spec)

    def answer(self, request: Request) -> Message:
        """Return the answer to a request."""
        new = request.messages
        self._messages += new if self._limit is None else shortened(new, self._limit)
        message = self._ask(self._policy.act, list(self._messages), self._tools, dict(request.info))
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise PolicyError(
                f"policy {self._name!r} answered {message!r:.100}; expected {{'role': 'assistant', 'content': text}}"
            )
        self._messages.append(message)
        self.turns_left -= 1
        return message

    def _ask(self, call: Callable[..., T], *args: Any) -> T:
        value, error = attempt(call, *args)
        if isinstance(error, ConfigError):
            raise error
        if error is not None:
            raise PolicyError(f"policy {self._name!r} raised {describe(error)}") from error
        return value


def call_env(what: str, call: Callable[..., T], *args: Any) -> T:
    """Return what a call of an environment returns; whatever it raises is an EnvError with the cause chained."""
    value, error = attempt(call, *args)
    if isinstance(error, AgentGymError):
        raise EnvError(f"{what}: {error}") from error
    if error is not None:
        raise EnvError(f"{what} raised {describe(error)}") from error
    return value


def attempt(call: Callable[..., T], *args: Any) -> tuple[T, None] | tuple[Any, BaseException]:
    """Return a call's value or its exception, of whatever kind: users' code may raise SystemExit."""
    try:
        return call(*args), None
    except BaseException as error:  # the boundary to code that users wrote
        return None, error


def describe(error: BaseException) -> str:
    """Return an exception's type and text, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames and frames[-1].filename != __file__ else None
    place = f" ({last.filename}, line {last.lineno}, in {last.name})" if last else ""
    return f"{type(error).__name__}: {error}{place}"
