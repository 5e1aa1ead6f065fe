"""Who beats whom: win rates and Elo ratings of the policies that meet in episodes.

Two agents of an episode that different policies played have met: the one with the higher reward has won, equal
rewards are half a win for each. Failed episodes count for nothing.

Elo's formulas (A. E. Elo, The Rating of Chessplayers, Past and Present, 1978): a policy rated R_a is expected to take
1 / (1 + 10^((R_b - R_a) / 400)) of the points from one rated R_b, and each meeting moves R_a by K times what it took
beyond that. With K = 16 a rating wanders by about 40 points around its true value.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from agentgym.episode import Episode, Status

K = 16.0
START = 1000.0
"""The rating of a policy that never met another."""


class Ratings:
    """The record of all meetings."""

    def __init__(self, *, decay: float = 1.0) -> None:
        """Know no policy yet; each meeting of a pair multiplies what was known of it by `decay`.

        Below 1 the win rates follow a policy that learns.
        """
        self._decay = decay
        self._games: dict[tuple[str, str], float] = defaultdict(float)
        self._points: dict[tuple[str, str], float] = defaultdict(float)
        self.elo: dict[str, float] = {}
        """By policy."""

    def enter(self, policy: str, like: str) -> None:
        """Give a new policy the rating of another one, as for a snapshot of it."""
        self.elo.setdefault(policy, self.elo.get(like, START))

    def add(self, episode: Episode) -> None:
        """Take in the meetings of an episode."""
        if episode.status is Status.FAILED:
            return
        moves: dict[str, float] = defaultdict(float)
        for policy, other, score in meetings(episode):
            for a, b, points in ((policy, other, score), (other, policy, 1.0 - score)):
                self._games[a, b] = self._games[a, b] * self._decay + 1.0
                self._points[a, b] = self._points[a, b] * self._decay + points
                moves[a] += K * (points - self.expected(a, b))
        for policy, move in moves.items():
            self.elo[policy] = self.elo.get(policy, START) + move

    def expected(self, policy: str, other: str) -> float:
        """Return the share of the points that the ratings let a policy expect."""
        difference = self.elo.get(other, START) - self.elo.get(policy, START)
        return float(1.0 / (1.0 + 10.0 ** (difference / 400.0)))

    def games(self, policy: str, other: str) -> float:
        """Return how often two policies met; with a decay, how much is known of them."""
        return self._games.get((policy, other), 0.0)

    def win_rate(self, policy: str, other: str) -> float | None:
        """Return the share of the points that a policy took from another; None if they never met."""
        games = self.games(policy, other)
        return self._points[policy, other] / games if games else None

    def matrix(self) -> dict[str, dict[str, float]]:
        """Return the win rates: `matrix[policy][other]` for every pair that met."""
        table: dict[str, dict[str, float]] = {}
        for policy, other in sorted(self._games):
            table.setdefault(policy, {})[other] = self._points[policy, other] / self._games[policy, other]
        return table

    def tags(self, episodes: Iterable[Episode]) -> dict[str, float]:
        """Return the numbers of the policies that met in some episodes, by TensorBoard tag."""
        tags = {}
        for policy, other in sorted({(a, b) for e in episodes for a, b, _ in meetings(e)}):
            for a, b in ((policy, other), (other, policy)):
                tags[f"rating/elo/{a}"] = self.elo.get(a, START)
                if (rate := self.win_rate(a, b)) is not None:
                    tags[f"rating/win_rate/{a}/{b}"] = rate
        return tags

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        pairs = [[a, b, games, self._points[a, b]] for (a, b), games in self._games.items()]
        return {"elo": dict(self.elo), "pairs": pairs}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the `state` of an earlier run."""
        self.elo = dict(state["elo"])
        for a, b, games, points in state["pairs"]:
            self._games[a, b], self._points[a, b] = games, points


def meetings(episode: Episode) -> list[tuple[str, str, float]]:
    """Return (policy, other policy, points of the first) of each pair of agents that different policies played."""
    policy_of = {t.agent: t.policy for t in episode.trajectories}
    found = []
    for a, b in combinations(policy_of, 2):
        if policy_of[a] != policy_of[b]:
            mine, theirs = episode.reward(a), episode.reward(b)
            score = 0.5 if mine == theirs else float(mine > theirs)
            found.append((policy_of[a], policy_of[b], score))
    return found
