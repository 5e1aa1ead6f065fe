"""Advantages of agents that work together. The team are the agents given: those that learn."""

import numpy as np

from agentgym.advantages.returns import Floats, Joint, over_turns, reward_to_go
from agentgym.messages import AgentId


def at_grpo(rewards_B_G: Joint, discount: float, team_weight: float) -> Joint:
    """A_t = (V_t - mean(V_t)) / (std(V_t) + 1e-6) over the plays of the group with such a turn of the same agent.

    V_t is the reward-to-go of r_t + team_weight * (mean over the agents of their rewards in their turn t). Groups
    by (agent, turn) and the mixture of a team's and an agent's own reward are AT-GRPO's, arXiv:2510.11062, which
    takes the turn's own reward (discount = 0) of several answers to the same state; plays of a group share the
    first state and then part.
    """
    out = []
    for group in rewards_B_G:
        values_G = []
        for play in group:
            team_T = team_weight * _joint(play) / max(1, len(play))
            values_G.append(
                {agent: reward_to_go(r_T + team_T[: len(r_T)], discount) for agent, r_T in play.items()}
            )
        out.append(_over_agents(values_G, std=True))
    return out


def magrpo(rewards_B_G: Joint, discount: float) -> Joint:
    """A_t = R_t - mean of R_t over the group, the same for every agent in turn t.

    R_t is the joint reward-to-go: that of the sum over the agents of their rewards. MAGRPO, arXiv:2508.04652.
    """
    out = []
    for group in rewards_B_G:
        advantages_G = over_turns([reward_to_go(_joint(play), discount) for play in group])
        out.append(
            [
                {agent: joint_T[: len(r_T)] for agent, r_T in play.items()}
                for play, joint_T in zip(group, advantages_G, strict=True)
            ]
        )
    return out


def _joint(play: dict[AgentId, Floats]) -> Floats:
    """Return the sum over the agents of their rewards in turn t, for each turn that some agent has."""
    total = np.zeros(max((len(r_T) for r_T in play.values()), default=0))
    for r_T in play.values():
        total[: len(r_T)] += r_T
    return total


def _over_agents(values_G: list[dict[AgentId, Floats]], *, std: bool) -> list[dict[AgentId, Floats]]:
    out: list[dict[AgentId, Floats]] = [{} for _ in values_G]
    for agent in dict.fromkeys(agent for play in values_G for agent in play):
        members = [n for n, play in enumerate(values_G) if agent in play]
        for n, a_T in zip(members, over_turns([values_G[n][agent] for n in members], std=std), strict=True):
            out[n][agent] = a_T
    return out
