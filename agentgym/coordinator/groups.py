"""Groups: the episodes of one task, gathered until they can be compared.

A group is complete when each of its members has an episode or is given up. With fewer usable members than a
comparison needs it is dropped, and its task is set aside with what went wrong. A group whose first member has waited
`timeout` seconds goes on with the members it has; the rest are not waited for. Where there are group rewards, a
complete group is scored before it is ready. A group that teaches nothing may be left out then: it is dropped at once,
so that the next one can be opened in its place with newer weights, and a step waits for as many groups as ever.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentgym.episode import Episode
from agentgym.messages import AgentId


@dataclass(slots=True)
class Group:
    """The episodes of one task."""

    group_id: int
    task_index: int
    size: int
    episodes: dict[int, Episode] = field(default_factory=dict)
    """By member."""
    given_up: dict[int, str] = field(default_factory=dict)
    """Why, by member."""
    deadline: float | None = None
    scoring: bool = False
    """Whether its group rewards were asked for."""
    forked: bool = False
    """Whether its members go on from an earlier episode; see `agentgym.coordinator.forks`."""
    lineup: Mapping[AgentId, str] = field(default_factory=dict)
    """Who plays whom in it; the snapshots of a pool are one policy."""

    @property
    def members(self) -> list[Episode]:
        """The episodes in the order of the members."""
        return [episode for _, episode in sorted(self.episodes.items())]

    @property
    def complete(self) -> bool:
        """Whether nothing more is expected."""
        return len(self.episodes) + len(self.given_up) >= self.size


@dataclass(frozen=True, slots=True)
class SetAside:
    """A task whose group was dropped, and why."""

    task_index: int
    size: int
    given_up: int
    """Members that were given up."""
    error: str
    """Of the last one, or why the others are of no use; empty where their plays teach nothing."""
    group_id: int = -1
    """-1: read from the disk, where its group is no more."""


class GroupBuffer:
    """Open groups, whose episodes are being played or scored, and ready ones, which wait for the trainer."""

    def __init__(
        self,
        *,
        timeout: float,
        scored: bool = False,
        max_filtered: int = 0,
        teaches: Callable[[Group], bool] = lambda group: True,
    ) -> None:
        """Make an empty buffer; `scored`: groups of two or more are ready only when `scored` says so.

        Up to `max_filtered` groups that do not teach are dropped between two calls of `take`.
        """
        self._timeout = timeout
        self._scored = scored
        self._max_filtered = max_filtered
        self._teaches = teaches
        self._filtered = 0
        self._unscored: dict[int, Group] = {}
        self._open: dict[int, Group] = {}
        self._ready: deque[Group] = deque()
        self.counts: Counter[str] = Counter()
        """opened, restored, ready, dropped (set_aside for an error, filtered because they taught nothing), short (went
        on without all members), late (episodes of closed groups)."""
        self._dropped: list[SetAside] = []

    @property
    def open(self) -> int:
        """Groups whose episodes are being played or scored."""
        return len(self._open) + len(self._unscored)

    @property
    def ready(self) -> int:
        """Groups that wait for the trainer."""
        return len(self._ready)

    def is_open(self, group_id: int) -> bool:
        """Whether episodes of this group are still expected."""
        return group_id in self._open

    def pending(self) -> list[tuple[int, int]]:
        """Return (group id, task) of all groups that no step has consumed, without forks, whose tasks are others'."""
        waiting = (*self._open.values(), *self._unscored.values(), *self._ready)
        return sorted((group.group_id, group.task_index) for group in waiting if not group.forked)

    def start(
        self,
        group_id: int,
        task_index: int,
        size: int,
        *,
        lineup: Mapping[AgentId, str] | None = None,
        forked: bool = False,
    ) -> None:
        """Open a group, in which the policies of `lineup` play."""
        group = Group(group_id, task_index, size, forked=forked)
        group.lineup = {agent: policy.partition("@")[0] for agent, policy in (lineup or {}).items()}
        self._open[group_id] = group
        self.counts["opened"] += 1

    def restore(
        self,
        group_id: int,
        task_index: int,
        size: int,
        episodes: dict[int, Episode],
        *,
        lineup: Mapping[AgentId, str] | None = None,
        forked: bool = False,
    ) -> None:
        """Open a group that has some of its episodes, or all."""
        self.start(group_id, task_index, size, lineup=lineup, forked=forked)
        self.counts["restored"] += 1
        self._open[group_id].episodes.update(episodes)
        self._close_if_complete(self._open[group_id])

    def add(self, episode: Episode, now: float) -> Group | None:
        """Put a finished episode into its group and return that; None where it is closed or has the member."""
        group = self._open.get(episode.group_id)
        if group is None or episode.member in group.episodes:
            self.counts["late"] += 1
            return None
        group.episodes[episode.member] = episode
        if group.deadline is None:
            group.deadline = now + self._timeout
        self._close_if_complete(group)
        return group

    def give_up(self, group_id: int, member: int, error: str) -> None:
        """Go on without a member, because of an error."""
        group = self._open.get(group_id)
        if group is not None:
            group.given_up[member] = error
            self._close_if_complete(group)

    def to_score(self) -> list[Group]:
        """Return the complete groups whose scores nobody has asked for yet."""
        found = [group for group in self._unscored.values() if not group.scoring]
        for group in found:
            group.scoring = True
        return found

    def unscored(self, group_id: int, error: str) -> None:
        """Drop a group that could not be scored."""
        self._drop(self._unscored.pop(group_id), error)

    def scored(self, group_id: int, episodes: list[Episode]) -> None:
        """Go on with the scored episodes of a group, in the order of its members."""
        group = self._unscored.pop(group_id)
        group.episodes = dict(zip(sorted(group.episodes), episodes, strict=True))
        self._make_ready(group)

    def take_dropped(self) -> list[SetAside]:
        """Return what was dropped since the last time."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def expire(self, now: float) -> list[Group]:
        """Close the groups past their deadline and return them."""
        late = [g for g in self._open.values() if g.deadline is not None and g.deadline < now]
        for group in late:
            self.counts["short"] += 1
            self._close(group)
        return late

    def take(self, count: int) -> list[Group]:
        """Remove and return the `count` groups that have been ready for longest."""
        self._filtered = 0
        return [self._ready.popleft() for _ in range(count)]

    def _close_if_complete(self, group: Group) -> None:
        if group.complete:
            self._close(group)

    def _close(self, group: Group) -> None:
        del self._open[group.group_id]
        if len(group.episodes) < min(2, group.size):
            late = f"only {len(group.episodes)} of {group.size} members finished in time"
            self._drop(group, next(reversed(group.given_up.values()), late))
        elif self._scored and group.size > 1:
            self._unscored[group.group_id] = group
        else:
            self._make_ready(group)

    def _drop(self, group: Group, error: str) -> None:
        self.counts["dropped"] += 1
        self.counts["set_aside"] += bool(error)
        self._dropped.append(
            SetAside(group.task_index, group.size, len(group.given_up), error, group.group_id)
        )

    def _make_ready(self, group: Group) -> None:
        if group.size > 1 and self._filtered < self._max_filtered and not self._teaches(group):
            self._filtered += 1
            self.counts["filtered"] += 1
            self._drop(group, "")
            return
        self._ready.append(group)
        self.counts["ready"] += 1
