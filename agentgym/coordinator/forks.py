"""Forks: groups whose members go on from a turn of an earlier episode, each in its own way.

A group that a step has taken, and whose plays did not all come to the same, leaves one of its episodes behind, cut
after a turn that is drawn at random. A later group plays that episode's task: its members give the recorded answers up
to there and sample the rest. They share all that came before, so that what they are compared by is the rest alone. The
common answers are trained where they were sampled: in the earlier group, once.

What a fork begins from depends on nothing that its members do, so that the mean of their gradients is that of the
expected return from there on.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from agentgym.config import Config
from agentgym.coordinator.groups import Group
from agentgym.coordinator.lineup import EVERYBODY_ELSE
from agentgym.episode import Episode
from agentgym.messages import AgentId
from agentgym.prefix import prefix_of, replayed
from agentgym.protocol import Recorded


@dataclass(frozen=True, slots=True)
class Fork:
    """A turn of an episode that others can begin from."""

    task_index: int
    sampling_seed: int
    """Of its scripted players, which must say the same again."""
    policies: dict[AgentId, str]
    """Who played whom, by the names in the configuration."""
    prefix: dict[AgentId, list[Recorded]]

    def fits(self, lineup: Mapping[AgentId, str]) -> bool:
        """Whether its agents are played by the same policies in a lineup; snapshots of a pool are one policy."""
        return all(lineup.get(a, lineup[EVERYBODY_ELSE]) == policy for a, policy in self.policies.items())


def fork_at(episode: Episode, turn: int) -> Fork:
    """Return the fork after the first `turn` answers of each agent."""
    return Fork(
        episode.task_index,
        episode.sampling_seed,
        {t.agent: t.policy.partition("@")[0] for t in episode.trajectories},
        prefix_of(episode, turn),
    )


def fork_like(members: Iterable[Episode]) -> Fork | None:
    """Return the fork that some episodes of a group began from; None where they began at the beginning."""
    return next((fork_at(episode, turn) for episode in members if (turn := replayed(episode))), None)


class Forks:
    """What groups that are opened from now on may begin from."""

    def __init__(self, config: Config) -> None:
        """Begin with nothing."""
        self._seed = config.run.seed
        self._share = config.rollout.fork_share
        self._found: deque[Fork] = deque(maxlen=config.rollout.tasks_per_step)

    def offer(self, groups: Iterable[Group], teaches: Callable[[Group], bool]) -> None:
        """Take note of an episode of each group that played from the beginning, and has more than one turn."""
        for group in groups if self._share else ():
            if group.forked or not teaches(group):
                continue
            rng = np.random.default_rng([self._seed, crc32(b"fork at"), group.group_id])
            long = [(episode, turns) for episode in group.members if (turns := _turns(episode)) > 1]
            if long:
                episode, turns = long[rng.integers(len(long))]
                self._found.append(fork_at(episode, int(rng.integers(1, turns))))

    def draw(self, group_id: int, lineup: Callable[[int], Mapping[AgentId, str]]) -> Fork | None:
        """Return what a group begins from; None: at the beginning. `lineup`: who plays whom in it, by its task."""
        if (
            not self._found
            or np.random.default_rng([self._seed, crc32(b"fork"), group_id]).random() >= self._share
        ):
            return None
        fork = next((fork for fork in reversed(self._found) if fork.fits(lineup(fork.task_index))), None)
        if fork is not None:
            self._found.remove(fork)
        return fork


def _turns(episode: Episode) -> int:
    """Return the most answers that a trained agent gave."""
    counts = [
        sum(len(t.turns) for t in episode.trajectories if t.agent == agent and t.trainable)
        for agent in episode.agents
    ]
    return max(counts, default=0)
