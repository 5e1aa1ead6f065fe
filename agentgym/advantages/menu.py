"""The advantages of a step, chosen by name."""

from collections.abc import Callable, Hashable, Mapping, Sequence

from agentgym.advantages import plays, running, teams, turns
from agentgym.advantages.returns import Joint, Nested
from agentgym.algorithm_config import AlgorithmConfig
from agentgym.messages import AgentId

Baselines = Mapping[AgentId, float]
"""What an advantage remembers from step to step, for each agent."""

PLAYS: dict[str, Callable[[Nested], Nested]] = {
    function.__name__: function
    for function in (plays.group_mean, plays.group_mean_std, plays.leave_one_out, plays.dr_mas)
}
TURNS: dict[str, Callable[[Nested, float], Nested]] = {
    function.__name__: function
    for function in (turns.turn_group_mean, turns.turn_group_mean_std, turns.turn_batch_mean)
}
ADVANTAGES = (*PLAYS, *TURNS, "at_grpo", "magrpo", "rae")
"""The names that `estimate` knows."""


def estimate(
    rewards_B_G: Joint,
    settings: AlgorithmConfig,
    baselines: Baselines,
    lineups_B: Sequence[Hashable] | None = None,
) -> tuple[Joint, Baselines]:
    """Return the advantages of all turns, and what is to be remembered for the next step.

    `lineups_B`: who plays whom in each group, for the advantages that compare plays of several; None: all the same.
    """
    name, discount = settings.advantage, settings.discount
    if name == "at_grpo":
        return teams.at_grpo(rewards_B_G, discount, settings.team_weight), baselines
    if name == "magrpo":
        return teams.magrpo(rewards_B_G, discount), baselines
    if name == "rae":
        moved = dict(baselines)

        def against_running_mean(agent: AgentId, rewards_B_G_T: Nested) -> Nested:
            found, moved[agent] = running.rae(rewards_B_G_T, moved.get(agent, 0.0), settings.baseline_decay)
            return found

        return _agent_by_agent(rewards_B_G, against_running_mean), moved
    if name in PLAYS:
        return _agent_by_agent(rewards_B_G, lambda _, nested: PLAYS[name](nested)), baselines
    out: Joint = [[] for _ in rewards_B_G]
    for same in _together(lineups_B or [None] * len(rewards_B_G)):
        found = _agent_by_agent(
            [rewards_B_G[b] for b in same], lambda _, nested: TURNS[name](nested, discount)
        )
        for b, advantages_G in zip(same, found, strict=True):
            out[b] = advantages_G
    return out, baselines


def _together(lineups_B: Sequence[Hashable]) -> list[list[int]]:
    """Return the groups of each line-up: what an agent earns depends on who plays with it, whatever it does."""
    same: dict[Hashable, list[int]] = {}
    for b, lineup in enumerate(lineups_B):
        same.setdefault(lineup, []).append(b)
    return list(same.values())


def _agent_by_agent(rewards_B_G: Joint, function: Callable[[AgentId, Nested], Nested]) -> Joint:
    """Compare each agent with itself only; plays and groups without it are not among those that are compared."""
    out: Joint = [[{} for _ in group] for group in rewards_B_G]
    for agent in dict.fromkeys(agent for group in rewards_B_G for play in group for agent in play):
        where = [[n for n, play in enumerate(group) if agent in play] for group in rewards_B_G]
        there = [g for g, members in enumerate(where) if members]
        found = function(agent, [[rewards_B_G[g][n][agent] for n in where[g]] for g in there])
        for g, advantages_G in zip(there, found, strict=True):
            for n, advantages_T in zip(where[g], advantages_G, strict=True):
                out[g][n][agent] = advantages_T
    return out
