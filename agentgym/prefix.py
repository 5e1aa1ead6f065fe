"""The first answers of a recorded episode, given once more: how a play comes to the turn where it is forked.

    prefix = Prefix(prefix_of(record, 2))       # two answers of each agent
    again = prefix.next({"agent": prompt})      # the recorded answer; later None: the agent answers by itself

An environment that does the same again shows the same prompts again, token for token. Where it does not, the record's
answers are answers to something else.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from agentgym.episode import REPLAYED, SCRIPTED, Episode, checksum
from agentgym.errors import DivergedError
from agentgym.messages import AgentId
from agentgym.protocol import Recorded

Answers = Mapping[AgentId, Sequence[Recorded]]


def prefix_of(record: Episode, turn: int) -> dict[AgentId, list[Recorded]]:
    """Return the first `turn` answers of each agent and what it reads before the next one.

    Scripted players are left out: they say the same by themselves, given the same seed.
    """
    answers: dict[AgentId, list[Recorded]] = {}
    for trajectory in record.trajectories if turn else ():
        mine = answers.setdefault(trajectory.agent, [])
        for said in trajectory.turns:
            if said.finish_reason == SCRIPTED or len(mine) > turn:
                continue
            tokens = trajectory.tokens[said.start : said.end].tolist() if len(mine) < turn else []
            prompt = checksum(trajectory.tokens[: said.start])
            mine.append(Recorded(prompt=prompt, tokens=tokens, message=dict(said.message) if tokens else {}))
    return {agent: mine for agent, mine in answers.items() if mine}


def replayed(episode: Episode) -> int:
    """Return how many recorded answers of an agent, the most of any, an episode began with."""
    again = [t.agent for t in episode.trajectories for turn in t.turns if turn.finish_reason == REPLAYED]
    return max(Counter(again).values()) if again else 0


class Prefix:
    """Says the recorded answers again, until an agent is asked for one that is to be its own."""

    def __init__(self, answers: Answers) -> None:
        """Begin with the first answers; with none of them it is `over`."""
        self._answers = {agent: iter(mine) for agent, mine in answers.items()}
        self.over = not answers
        """Whether the agents answer by themselves."""

    def next(self, prompts: Mapping[AgentId, Sequence[int]]) -> dict[AgentId, Recorded] | None:
        """Return what the agents that are asked together say again; None: they answer by themselves from now on.

        Args:
            prompts: what each of them has read, as token ids.

        Raises:
            DivergedError: one of them has read something else than in the record.
        """
        if self.over:
            return None
        again: dict[AgentId, Recorded] = {}
        for agent, prompt in prompts.items():
            recorded = next(self._answers.get(agent, iter(())), None)
            if recorded is not None and recorded["prompt"] != checksum(np.asarray(prompt, np.int32)):
                raise DivergedError(f"agent {agent!r} read something else than in the record")
            if recorded is not None and recorded["tokens"]:
                again[agent] = recorded
        if len(again) == len(prompts):
            return again
        self.over = True
        return None
