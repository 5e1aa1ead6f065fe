"""What an evaluation found, as tables: how each policy did in each seat, how episodes ended, who beat whom."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentgym.episode import Episode, Status
from agentgym.evaluation.stats import pass_at_k, standard_error, wilson
from agentgym.messages import AgentId
from agentgym.ratings import START, Ratings

SHOWN_FAILURES = 5


@dataclass(slots=True)
class Score:
    """How a policy did in a seat: one number per play."""

    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Sampled ones."""
    points: list[float] = field(default_factory=list)
    """Against each agent that another policy played: 1 won, 0.5 drawn, 0 lost, by the rewards of the episode."""
    successes: list[float] = field(default_factory=list)
    """Only of plays whose environment says it."""
    tasks: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The successes by task."""

    def pass_at(self, k: int) -> float | None:
        """Return pass@k over the tasks that were played k times or more; None where there are none."""
        shares = [
            pass_at_k(len(found), sum(success >= 1.0 for success in found), k)
            for found in self.tasks.values()
            if len(found) >= k
        ]
        return sum(shares) / len(shares) if shares else None


def scores(episodes: Sequence[Episode]) -> dict[tuple[str, AgentId], Score]:
    """Return the scores by policy and agent; failed episodes count for nothing."""
    found: dict[tuple[str, AgentId], Score] = defaultdict(Score)
    for episode in episodes:
        if episode.status is Status.FAILED:
            continue
        for agent in episode.agents:
            mine = [t for t in episode.trajectories if t.agent == agent]
            score = found[mine[0].policy, agent]
            score.rewards.append(episode.reward(agent))
            score.points += _points(episode, agent)
            score.turns.append(sum(len(t.turns) for t in mine))
            score.tokens.append(sum(int(t.loss_mask.sum()) for t in mine))
            success = episode.agent_metrics.get(agent, {}).get("success")
            if success is not None:
                score.successes.append(success)
                score.tasks[episode.task_index].append(success)
    return dict(sorted(found.items()))


def print_summary(episodes: Sequence[Episode], group: int, console: Console) -> None:
    """Print the tables."""
    found = scores(episodes)
    console.print(_seats(found))
    for (policy, agent), score in found.items() if group > 1 else ():
        line = ", ".join(f"{k}: {share:.3f}" for k, share in _passes(score, group))
        if line:
            console.print(f"pass@k of {escape(policy)} as {escape(agent)}  {line}")
    ends = Counter(episode.end_reason.value for episode in episodes)
    console.print("ended by  " + ", ".join(f"{reason} {count}" for reason, count in ends.most_common()))
    ratings = Ratings()
    for episode in episodes:
        ratings.add(episode)
    if ratings.elo:
        console.print(_meetings(ratings))
    failures = [episode for episode in episodes if episode.status is Status.FAILED]
    for episode in failures[:SHOWN_FAILURES]:
        console.print(
            f"[red]failed: task {episode.task_index}, member {episode.member}: {escape(episode.error)}"
        )
    if len(failures) > SHOWN_FAILURES:
        console.print(f"[red]and {len(failures) - SHOWN_FAILURES} more failed")


def _passes(score: Score, group: int) -> Iterator[tuple[int, float]]:
    """Yield (k, pass@k) for the powers of two up to the group's size, and that size."""
    k = 1
    while k <= group:
        share = score.pass_at(k)
        if share is not None:
            yield k, share
        k = group if k < group < 2 * k else 2 * k


def _seats(found: dict[tuple[str, AgentId], Score]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("policy", "agent"):
        table.add_column(title, no_wrap=True)
    met = ["won / drawn / lost"] if any(score.points for score in found.values()) else []
    for title in ("episodes", "success", "95 % interval", "reward", *met, "turns", "tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    for (policy, agent), score in found.items():
        n = len(score.rewards)
        success, interval = "-", "-"
        if score.successes:
            share = _mean(score.successes)
            low, high = wilson(share, len(score.successes))
            success, interval = f"{share:.3f}", f"{low:.3f} to {high:.3f}"
        reward = f"{_mean(score.rewards):.3f} ± {standard_error(score.rewards):.3f}"
        table.add_row(
            escape(policy), escape(agent), str(n), success, interval, reward, *[_shares(score.points)][: len(met)],
            f"{_mean(score.turns):.1f}", f"{_mean(score.tokens):.1f}",
        )  # fmt: skip
    return table


def _meetings(ratings: Ratings) -> Table:
    """Return who took which share of the points from whom, and the Elo ratings."""
    names = sorted(ratings.elo)
    table = Table(box=None, pad_edge=False)
    table.add_column("took from", no_wrap=True)
    for name in names:
        table.add_column(escape(name), justify="right", no_wrap=True)
    table.add_column("Elo", justify="right", no_wrap=True)
    for name in names:
        rates = [ratings.win_rate(name, other) for other in names]
        cells = ["-" if rate is None else f"{rate:.3f}" for rate in rates]
        table.add_row(escape(name), *cells, f"{ratings.elo.get(name, START):.0f}")
    return table


def _points(episode: Episode, agent: AgentId) -> list[float]:
    policy_of = {trajectory.agent: trajectory.policy for trajectory in episode.trajectories}
    mine = episode.reward(agent)
    others = [episode.reward(other) for other, policy in policy_of.items() if policy != policy_of[agent]]
    return [0.5 if mine == theirs else float(mine > theirs) for theirs in others]


def _shares(points: Sequence[float]) -> str:
    return (
        " / ".join(f"{points.count(value) / len(points):.3f}" for value in (1.0, 0.5, 0.0)) if points else "-"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
