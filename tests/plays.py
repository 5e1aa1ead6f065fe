"""A referee for tests: plays whole episodes with scripted policies, as `agentgym.env` promises."""

from dataclasses import dataclass, field
from typing import Any

from agentgym.env import action_text, system_prompt_of, tools_of
from agentgym.messages import SINGLE_AGENT, Message, as_messages, system
from agentgym.policy.scripted import ScriptedPolicy


@dataclass
class Seat:
    """What one agent saw, said and got."""

    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """What each answer earned."""
    parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    success: float | None = None

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    @property
    def answers(self) -> list[str]:
        return [m["content"] for m in self.messages if m["role"] == "assistant"]

    def take(self, reward: float, info: dict[str, Any]) -> None:
        """Book what the latest answer earned."""
        self.rewards.append(float(reward))
        parts = info.get("rewards", {})
        assert abs(sum(parts.values()) - float(reward)) < 1e-9, f"{parts} do not sum to {reward}"
        for total, new in ((self.parts, parts), (self.metrics, info.get("metrics", {}))):
            for name, value in new.items():
                total[name] = total.get(name, 0.0) + value
        self.success = info.get("success", self.success)


def opening(env: Any, agent: str) -> Seat:
    prompt = system_prompt_of(env, agent)
    return Seat(messages=[system(prompt)] if prompt else [])


def play_single(env: Any, policy: ScriptedPolicy, seed: int, max_turns: int = 100) -> Seat:
    observation, info = env.reset(seed=seed)
    policy.reset(SINGLE_AGENT, seed)
    seat, tools = opening(env, SINGLE_AGENT), tools_of(env, SINGLE_AGENT)
    for _ in range(max_turns):
        seat.messages += as_messages(observation)
        answer = policy.act(seat.messages, tools, info)
        seat.messages.append(answer)
        action = answer if tools else answer["content"]
        observation, reward, terminated, truncated, info = env.step(action)
        seat.take(reward, info)
        if terminated or truncated:
            break
    return seat


def play_aec(env: Any, policies: dict[str, ScriptedPolicy], seed: int) -> dict[str, Seat]:
    env.reset(seed=seed)
    seats = {agent: opening(env, agent) for agent in env.agents}
    for agent, policy in policies.items():
        policy.reset(agent, seed)
    acted: set[str] = set()
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, info = env.last()
        seat = seats[agent]
        if agent in acted:
            seat.take(reward, info)
        if terminated or truncated:
            env.step(None)
            continue
        seat.messages += observation["messages"]
        extras = {**info, **{key: value for key, value in observation.items() if key != "messages"}}
        tools = tools_of(env, agent)
        answer = policies[agent].act(seat.messages, tools, extras)
        seat.messages.append(answer)
        acted.add(agent)
        env.step(answer if tools else answer["content"])
    return seats


def play_parallel(env: Any, policies: dict[str, ScriptedPolicy], seed: int) -> dict[str, Seat]:
    observations, infos = env.reset(seed=seed)
    seats = {agent: opening(env, agent) for agent in env.agents}
    for agent, policy in policies.items():
        policy.reset(agent, seed)
    while env.agents:
        actions = {}
        for agent in env.agents:
            seat = seats[agent]
            seat.messages += observations[agent]["messages"]
            answer = policies[agent].act(seat.messages, tools_of(env, agent), infos[agent])
            seat.messages.append(answer)
            actions[agent] = action_text(answer)
        observations, rewards, _, _, infos = env.step(actions)
        for agent in actions:
            seats[agent].take(rewards[agent], infos[agent])
    return seats


class Says:
    """A policy that says given texts, one after the other, and the last one for ever."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def reset(self, agent: str, seed: int) -> None:
        self.left = list(self.texts)

    def act(self, messages: list[Message], tools: list[Any], info: dict[str, Any]) -> Message:
        return {"role": "assistant", "content": self.left.pop(0) if len(self.left) > 1 else self.left[0]}
