"""The answers of a record as players, and the first difference between a record and what was played again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentgym.episode import EndReason, Episode, Trajectory, Turn
from agentgym.errors import PolicyError
from agentgym.messages import AgentId, Message, ToolSchema
from agentgym.policy.client import Completion, Sampling, Speaker
from agentgym.replay.source import turns_of

CUT = (EndReason.TIMEOUT, EndReason.POLICY_FAILED)
"""Ends that have nothing to do with what was said: a play may go on where the record ends by one of them."""
SHOWN = 60
"""Characters of a difference that are shown."""

Decode = Callable[[AgentId, Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class _Asked:
    agent: AgentId
    number: int
    """Which answer of the agent, from 0 on."""
    prompt: list[int] | None
    """What it was to answer; None where it was asked in words."""


@dataclass(slots=True)
class Log:
    """What was asked in a play, in order."""

    record: Episode
    asked: list[_Asked] = field(default_factory=list)
    stopped: bool = False
    """Whether the play was ended because the record has no answer to what was asked."""

    def next(self, agent: AgentId, prompt: list[int] | None) -> tuple[Trajectory, Turn]:
        """Return the recorded answer to what an agent is asked now.

        Raises:
            PolicyError: the record has none.
        """
        number = sum(one.agent == agent for one in self.asked)
        self.asked.append(_Asked(agent, number, prompt))
        mine = turns_of(self.record, agent)
        if number < len(mine):
            trajectory, turn = mine[number]
            if prompt is None or prompt == trajectory.tokens[: turn.start].tolist():
                return trajectory, turn
        self.stopped = True
        raise PolicyError("the record has no answer to this")


class RecordedPolicy:
    """Answers with recorded tokens."""

    def __init__(self, agent: AgentId, log: Log) -> None:
        """Play an agent."""
        self._agent, self._log = agent, log

    async def complete(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        routes_start: int,
        timeout: float,
        affinity: object = None,
    ) -> Completion:
        """Return the recorded answer, if it was to this prompt; see `Policy.complete`."""
        trajectory, turn = self._log.next(self._agent, list(prompt))
        answer = slice(turn.start, turn.end)
        routes = trajectory.routes
        return Completion(
            tokens=trajectory.tokens[answer],
            logprobs=trajectory.logprobs[answer],
            versions=trajectory.versions[answer],
            routes=None if routes is None else routes[routes_start : turn.end - 1],
            finish_reason="length" if turn.finish_reason == "length" else "stop",
            seconds=turn.seconds,
        )


class RecordedSpeaker(Speaker):
    """Answers with recorded words."""

    def __init__(self, agent: AgentId, log: Log) -> None:
        """Play an agent."""
        self._agent, self._log = agent, log

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, timeout: float
    ) -> tuple[Message, str]:
        """Return the recorded answer; see `Speaker.chat`."""
        _, turn = self._log.next(self._agent, None)
        return turn.message, turn.finish_reason


def first_difference(log: Log, played: Episode, decode: Decode) -> str | None:
    """Say where what was played first differs from the record; None where it does not.

    Everything is compared but times: tokens, rewards and their parts, metrics, the end; of the answers the
    log-probabilities, versions and expert routes, too.
    """
    record = log.record
    for position, one in enumerate(log.asked):
        mine, theirs = turns_of(record, one.agent), turns_of(played, one.agent)
        where = f"agent {one.agent!r}, answer {one.number + 1}"
        if one.number >= len(mine):
            if record.end_reason in CUT:
                return None
            return f"{where}: asked for; the record ends by {record.end_reason.value!r} before it"
        there = theirs[one.number] if one.number < len(theirs) else None
        expected, turn = mine[one.number]
        prompt = one.prompt if there is None else there[0].tokens[: there[1].start].tolist()
        spell = partial(decode, one.agent)
        difference = _texts(expected.tokens[: turn.start].tolist(), prompt or [], spell)
        if difference:
            return f"{where}: it read {difference}"
        if there is None:
            continue
        again = there[1]
        said = there[0].tokens[again.start : again.end].tolist()
        difference = _texts(expected.tokens[turn.start : turn.end].tolist(), said, spell)
        if difference:
            return f"{where}: it said {difference}"
        paid = not log.stopped or any(later.agent == one.agent for later in log.asked[position + 1 :])
        if paid and (turn.reward, turn.rewards) != (again.reward, again.rewards):
            before, after = ({"": t.reward, **t.rewards} for t in (turn, again))
            return f"{where}: it earned {after}, and in the record {before}"
    return None if log.stopped or record.end_reason in CUT else _ends(record, played)


def _ends(record: Episode, played: Episode) -> str | None:
    for agent in record.agents:
        mine, theirs = turns_of(record, agent), turns_of(played, agent)
        if len(theirs) < len(mine):
            return (
                f"agent {agent!r}, answer {len(theirs) + 1}: not asked for; the play ended by "
                f"{played.end_reason.value!r} {played.error}".rstrip()
            )
    if played.end_reason is not record.end_reason:
        return f"the end: {played.end_reason.value!r}, and in the record {record.end_reason.value!r} {played.error}"
    if played.agent_metrics != record.agent_metrics:
        return f"the end: metrics {played.agent_metrics}, and in the record {record.agent_metrics}"
    if played.checksums != record.checksums:
        return "the end: what was read after the last answers, or the numbers of the sampled tokens"
    return None


def _texts(expected: list[int], found: list[int], decode: Callable[[list[int]], str]) -> str:
    """Say where two rows of tokens part; "" where they do not."""
    if expected == found:
        return ""
    pairs = zip(expected, found, strict=False)
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    return f"{decode(found[at:])[:SHOWN]!r} from token {at} on, and in the record {decode(expected[at:])[:SHOWN]!r}"
