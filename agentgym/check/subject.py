"""The environment that is checked, and episodes of it that are recorded and played again.

    subject = Subject("agentgym/GuessNumber-v0")
    for play in subject.plays:            # random legal actions, and the best scripted policy
        again = subject.replay(play)      # the same seed and actions in a new instance
        difference(play, again)           # None, or one sentence

Plays go through the worker's drivers, so that what is checked is what a run will do. They never raise: what an
environment or a policy does wrong is kept on the play.
"""

import copy
import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from agentgym.errors import EnvError
from agentgym.messages import AgentId, Message, ToolSchema, assistant, system
from agentgym.policy.scripted import ScriptedPolicy, load_scripted
from agentgym.registry import EnvSpec, make, spec
from agentgym.spaces import AssistantMessage, Text
from agentgym.worker.driver import DRIVERS, Driver, Info, Request, State

T = TypeVar("T")

RANDOM = "random legal actions"
SEEDS = (0, 1, 2)
MAX_CALLS = 200
"""Calls of one play, the reset included; a longer episode is left there."""
MAX_TURNS = 32
RECORD_SECONDS = 4.0
"""After this time no further play is recorded, and one that runs is left where it is."""

Actions = dict[AgentId, Message]


@dataclass(frozen=True)
class Options:
    """What is being asked, besides the id."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    tokenizer: str | None = None
    """A model folder; None: the rules about its chat template and context are skipped."""
    max_chars: int = 20_000
    """The longest text that one observation may hold."""
    timeout: float = 30.0
    """Seconds that one call may take; as many as in a run whose settings say nothing else."""


@dataclass(frozen=True)
class Frame:
    """What one call of `reset` or `step` gave, as plain values that can be compared."""

    requests: tuple[tuple[AgentId, list[Message], dict[str, Any]], ...]
    """Who must answer: agent, new messages, and the parts of the info that mean something."""
    outcomes: tuple[tuple[AgentId, float, dict[str, Any], bool], ...]
    """Who got what: agent, reward, info, truncated."""
    prompts: dict[AgentId, tuple[str | None, list[ToolSchema]]]
    """System prompt and tools of the agents that must answer."""


@dataclass(frozen=True)
class Record:
    """What a play gave."""

    seed: int
    by: str
    """Who played: a scripted policy's name, or RANDOM."""
    frames: list[Frame]
    error: str


@dataclass(frozen=True)
class Instance:
    """One environment, and the driver that plays it."""

    env: Any
    driver: Driver


class Play:
    """One episode, call by call, by a policy or with recorded actions."""

    def __init__(
        self,
        instance: Instance,
        seed: int,
        players: Callable[[AgentId], ScriptedPolicy] | None = None,
        *,
        recorded: Sequence[Actions] = (),
        by: str = "",
        alone: bool = False,
        on_call: Callable[[str], None] = lambda what: None,
        max_turns: int = MAX_TURNS,
    ) -> None:
        """Prepare; nothing is called yet. Without `players`, the recorded actions are played as far as they go.

        `alone`: as in a process of its own, where a worker seeds the global generators before each reset.
        """
        self.instance, self.driver, self.seed, self.by = instance, instance.driver, seed, by
        self.frames: list[Frame] = []
        self.actions: list[Actions] = []
        self.conversations: dict[AgentId, list[Message]] = {}
        self.error = ""
        """What the environment did wrong; the play ends there."""
        self.policy_error = ""
        self.over = False
        self.draws_globally = False
        """Whether a call changed the state of the process-global generators."""
        self._players, self._recorded, self._alone = players, recorded, alone
        self._seated: dict[AgentId, ScriptedPolicy] = {}
        self._on_call = on_call
        self._max_turns = max_turns
        self._state = State()

    def advance(self) -> bool:
        """Make the next call; False where there is none or it failed."""
        if self.over or self.error or self.policy_error or len(self.frames) >= MAX_CALLS:
            return False
        actions = self._answers() if self.frames else {}
        if actions is None:
            return False
        what = "step" if self.frames else "reset"
        if self._alone and not self.frames:
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)
        before = _global_state()
        self._on_call(what)
        made, problem = attempt(lambda: self._call(actions))
        self.draws_globally = self.draws_globally or _global_state() != before
        self._on_call("the policy")
        if actions:
            self.actions.append(actions)
        if made is None:
            self.error = f"{what} {problem}"
            return False
        self._state, frame = made
        self.frames.append(frame)
        self.over = self._state.over
        for request in self._state.requests:
            self._conversation(request.agent).extend(copy.deepcopy(request.messages))
        return True

    def finish(self, *, calls: int = MAX_CALLS, until: float = float("inf")) -> "Play":
        """Go on to the end, for at most so many calls and until that time on the monotonic clock; return itself."""
        while len(self.frames) < calls and time.monotonic() < until and self.advance():
            pass
        return self

    @property
    def record(self) -> Record:
        """What it gave so far."""
        return Record(self.seed, self.by, self.frames, self.error)

    def _call(self, actions: Actions) -> tuple[State, Frame]:
        state = self.driver.act(copy.deepcopy(actions)) if self.frames else self.driver.reset(self.seed)
        return state, _frame(state, self.driver)

    def _conversation(self, agent: AgentId) -> list[Message]:
        if agent not in self.conversations:
            prompt = self.driver.system_prompt(agent)
            self.conversations[agent] = [system(prompt)] if prompt else []
        return self.conversations[agent]

    def _answers(self) -> Actions | None:
        number = len(self.frames) - 1
        if self._players is None:
            actions = self._recorded[number] if number < len(self._recorded) else None
            wanted = {request.agent for request in self._state.requests}
            if actions is None or actions.keys() != wanted:  # it went another way than the recorded one
                return None
        elif any(self._turns(request.agent) >= self._max_turns for request in self._state.requests):
            return None
        else:
            actions = {request.agent: self._ask(request) for request in self._state.requests}
            if self.policy_error:
                return None
        for agent, answer in actions.items():
            self.conversations[agent].append(answer)
        return actions

    def _turns(self, agent: AgentId) -> int:
        return sum(message["role"] == "assistant" for message in self.conversations[agent])

    def _ask(self, request: Request) -> Message:
        agent = request.agent

        def answer() -> Message:
            assert self._players is not None
            if agent not in self._seated:
                self._seated[agent] = self._players(agent)
                self._seated[agent].reset(agent, self.seed)
            messages = copy.deepcopy(self.conversations[agent])
            return self._seated[agent].act(messages, self.driver.tools(agent), dict(request.info))

        message, problem = attempt(answer)
        if message is None:
            self.policy_error = problem
            return assistant("")
        return message


class Subject:
    """The environment that is checked."""

    def __init__(
        self,
        env_id: str,
        options: Options | None = None,
        *,
        on_call: Callable[[str], None] = lambda what: None,
    ) -> None:
        """Look the id up; `on_call` hears what is called next.

        Raises:
            ConfigError: there is no such environment.
        """
        self.env_id = env_id
        self.options = options or Options()
        self.spec: EnvSpec = spec(env_id)
        self.on_call = on_call
        self.notes: list[str] = []
        """What the rule that is being tried has to say besides what is wrong."""
        self._made: list[Instance] = []

    @property
    def alone(self) -> bool:
        """Whether each instance plays in a process of its own."""
        return self.spec.isolation == "process"

    def new(self) -> Instance:
        """Return a new instance.

        Raises:
            AgentGymError: it could not be built.
        """
        self.on_call("making it")
        env = make(self.env_id, **self.options.kwargs)
        self._made.append(Instance(env, DRIVERS[self.spec.kind](env)))
        return self._made[-1]

    def note(self, text: str) -> None:
        """Say something that breaks no promise."""
        self.notes.append(text)

    def close(self) -> None:
        """Close all instances that were made."""
        for instance in self._made:
            attempt(instance.driver.close)  # what it does wrong is a rule of its own

    def play(self, by: str, seed: int) -> Play:
        """Return an episode that is about to begin in a new instance, by a scripted policy's name or RANDOM."""
        instance = self.new()

        def player(agent: AgentId) -> ScriptedPolicy:
            if by == RANDOM:
                return _RandomPlayer(_action_space(instance, agent))
            return load_scripted(by, seed, env_spec=self.spec)

        turns = min(MAX_TURNS, self.spec.max_turns or MAX_TURNS)
        return Play(instance, seed, player, by=by, alone=self.alone, on_call=self.on_call, max_turns=turns)

    def replay(self, recorded: Play, instance: Instance | None = None) -> Play:
        """Return the same episode, about to begin again, in the given instance or a new one."""
        return Play(
            instance or self.new(),
            recorded.seed,
            recorded=recorded.actions,
            by=recorded.by,
            alone=self.alone,
            on_call=self.on_call,
        )

    @functools.cached_property
    def plays(self) -> list[Play]:
        """Recorded episodes: of random legal actions and of the last scripted policy, by custom the best."""
        until = time.monotonic() + RECORD_SECONDS
        plays: list[Play] = []
        for seed in SEEDS:
            for by in [RANDOM, *list(self.spec.scripted)[-1:]]:
                if not plays or time.monotonic() < until:
                    plays.append(self.play(by, seed).finish(until=until))
        return plays

    @functools.cached_property
    def wanders(self) -> str | None:
        """How the first recorded episode that plays differently in a new instance differs; None: they all are kept."""
        for play in self.plays:
            found = difference(play, self.replay(play).finish())
            if found:
                return found
        return None


class _RandomPlayer:
    """Draws legal actions from a copy of the agent's action space."""

    def __init__(self, space: Any) -> None:
        self._space = copy.deepcopy(space)

    def reset(self, agent: AgentId, seed: int) -> None:
        self._space.seed(seed)

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        mask = info.get("action_mask")
        if mask is not None and isinstance(self._space, Text):
            drawn = self._space.sample(np.asarray(mask, np.int8))
        else:
            drawn = self._space.sample()
        return drawn if isinstance(drawn, dict) else assistant(str(drawn))


def _action_space(instance: Instance, agent: AgentId) -> Any:
    """Return an agent's action space; the default one where the environment has none."""
    space = getattr(instance.env, "action_space", None)
    if callable(space):
        space = space(agent)
    if space is not None:
        return space
    tools = instance.driver.tools(agent)
    return AssistantMessage(tools) if tools else Text()


def difference(expected: Record | Play, found: Record | Play) -> str | None:
    """Say where the second play is not the first, in one sentence; None where they are the same."""
    where = f"seed {expected.seed}, {expected.by}"
    for number, (before, after) in enumerate(zip(expected.frames, found.frames, strict=False)):
        call = f"{where}, " + (f"step {number}" if number else "reset")
        for what in ("requests", "outcomes", "prompts"):
            ours, theirs = getattr(before, what), getattr(after, what)
            if ours != theirs:
                return f"{call}: {_NAMES[what]} {_first_difference(ours, theirs)}"
    # A play that was left early was left by the clock; only ends that the environment made count.
    if found.error != expected.error:
        return (
            f"{where}: {expected.error or 'no error'} the first time, {found.error or 'no error'} the second"
        )
    if len(found.frames) < len(expected.frames):
        return f"{where}: {len(expected.frames)} calls the first time, {len(found.frames)} the second"
    return None


_NAMES = {"requests": "who must answer, or what it reads,", "outcomes": "who got what", "prompts": "a prompt"}


def _first_difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        for one, other in zip(ours, theirs, strict=False):
            if one != other:
                ours, theirs = one, other
                break
    return f"was {ours!r:.160} the first time and {theirs!r:.160} the second"


def _frame(state: State, driver: Driver) -> Frame:
    return Frame(
        tuple((r.agent, copy.deepcopy(r.messages), _meaning(r.info)) for r in state.requests),
        tuple((o.agent, o.reward, _meaning(o.info), o.truncated) for o in state.outcomes),
        {
            r.agent: (driver.system_prompt(r.agent), copy.deepcopy(driver.tools(r.agent)))
            for r in state.requests
        },
    )


def _meaning(info: Info) -> dict[str, Any]:
    """Return what policies and trainers use of an info; other numbers, such as times, may differ between plays."""
    kept: dict[str, Any] = {}
    if "rewards" in info:
        kept["rewards"] = {name: float(value) for name, value in info["rewards"].items()}
    if "success" in info:
        kept["success"] = float(info["success"])
    if "action_mask" in info:
        kept["action_mask"] = np.asarray(info["action_mask"]).tolist()
    return kept


def attempt(function: Callable[[], T]) -> tuple[T | None, str]:
    """Call code that users wrote; return its value, or None and what happened."""
    try:
        return function(), ""
    except EnvError as error:  # a driver's own words
        return None, f"failed: {error}"
    except Exception as error:  # the boundary to code that users wrote
        return None, f"raised {type(error).__name__}: {error}"


def _global_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return (random.getstate(), name, np.asarray(keys).tobytes(), *rest)
