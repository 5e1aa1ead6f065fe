"""Reward functions for tests, found as "toy_rewards:NAME", and environments that have some."""

import threading
from typing import Any

from toy_envs import Relay, Scripted, says

from agentgym.episode import Episode
from agentgym.messages import AgentId
from agentgym.rewards import reward

released = threading.Event()
"""Lets `never` and `never_group` return; a test clears it first and sets it at the end."""


def said(episode: Episode, agent: AgentId) -> list[str]:
    """What an agent said in an episode."""
    return [turn.message["content"] for t in episode.trajectories if t.agent == agent for turn in t.turns]


def words(episode: Episode, agent: AgentId) -> float:
    return float(sum(len(text.split()) for text in said(episode, agent)))


def earned(episode: Episode, agent: AgentId) -> float:
    return episode.reward(agent)


def broken(episode: Episode, agent: AgentId) -> float:
    raise KeyError(agent)


def nothing(episode: Episode, agent: AgentId) -> Any:
    return None


def never(episode: Episode, agent: AgentId) -> float:
    released.wait()
    return 0.0


async def later(episode: Episode, agent: AgentId) -> float:
    return 0.0


def best(episodes: list[Episode]) -> list[dict[AgentId, float]]:
    """A prize of 1 for the play of a group that earned the most."""
    totals = [sum(t.reward for t in episode.trajectories) for episode in episodes]
    return [
        dict.fromkeys(episode.agents, float(total == max(totals)))
        for episode, total in zip(episodes, totals, strict=True)
    ]


def broken_group(episodes: list[Episode]) -> list[dict[AgentId, float]]:
    raise LookupError(f"no judge for {len(episodes)} episodes")


def odd_groups_break(episodes: list[Episode]) -> list[dict[AgentId, float]]:
    if episodes[0].group_id % 2:
        raise LookupError("no judge for odd groups")
    return [{} for _ in episodes]


def never_group(episodes: list[Episode]) -> list[dict[AgentId, float]]:
    released.wait()
    return [{} for _ in episodes]


class Polite(Scripted):
    """Has two reward functions."""

    def __init__(self, *steps: Any) -> None:
        super().__init__(*(steps or (says("bye", 1.0, over=True, rewards={"done": 1.0}),)))

    @reward
    def thanks(self, episode: Episode, agent: AgentId) -> float:
        return float("thanks" in " ".join(said(episode, agent)))

    @reward(weight=0.5)
    def heard_turns(self, episode: Episode, agent: AgentId) -> float:
        return float(len(self.heard))


class Debate(Relay):
    """Each agent is paid for its own words; weights of the class make what it heard worth nothing."""

    reward_weights: dict[str, float] = {"heard": 0.0}  # noqa: RUF012  read from the class, never written

    @reward
    def own_words(self, episode: Episode, agent: AgentId) -> float:
        return words(episode, agent)
