"""Policies without a model: opponents, teachers and reference players.

A scripted policy sees what an agent sees and nothing else: its conversation, its tools and the `info` that
the environment sends along. It is deterministic in its seed and the episode's.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from agentgym.errors import ConfigError, PolicyError
from agentgym.messages import AgentId, Message, ToolSchema, assistant
from agentgym.registry import EnvSpec, load_attribute


class ScriptedPolicy(Protocol):
    """Answers by rules; its class is built as `cls(seed=..., **kwargs)`, once for each seat of an episode."""

    def reset(self, agent: AgentId, seed: int) -> None:
        """Start an episode as `agent`; `seed` is the episode's."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return the assistant message that follows the agent's whole conversation so far.

        `info` is the environment's latest for this agent, with "action_mask" where the observation has one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Script:
    """A scripted player by name, so that it can be built where the environment runs, which may be another process."""

    policy: str
    """The policy's name in the configuration."""
    path: str
    """"module:attribute", or a name in the environment's `scripted`."""
    seed: int
    """The policy's own seed."""
    max_turns: int
    """Answers that it may give in the episode."""
    max_observation_chars: int | None = None
    """See `env.max_observation_chars`."""

    def build(self, agent: AgentId, episode_seed: int, env_spec: EnvSpec) -> ScriptedPolicy:
        """Return the policy, ready to play `agent`. Raises ConfigError where there is none of this name."""
        policy = load_scripted(self.path, self.seed, env_spec=env_spec)
        policy.reset(agent, episode_seed)
        return policy


class SeededPolicy:
    """The base of the shipped scripted policies: a random generator that is new in each episode."""

    def __init__(self, seed: int) -> None:
        """Take the policy's own seed; `reset` adds the episode's."""
        self.seed = seed
        self.agent: AgentId = ""
        self._stream: list[int] = [seed]

    def reset(self, agent: AgentId, seed: int) -> None:
        """Start an episode: draw from a stream of its own for each seed, seat and episode."""
        self.agent = agent
        self._stream = [self.seed, crc32(agent.encode()), seed]
        self.__dict__.pop("rng", None)

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """The generator of the episode; to make one takes as long as some turns, and not every policy draws."""
        return np.random.default_rng(self._stream)


class RandomLegal(SeededPolicy):
    """Says one of the answers that the environment lists in `info["legal"]`, each as likely."""

    def act(self, messages: list[Message], tools: list[ToolSchema], info: dict[str, Any]) -> Message:
        """Return a legal answer. Raises PolicyError where the environment lists none."""
        legal = info.get("legal")
        if not legal:
            raise PolicyError(
                f"the environment's info for {self.agent} has no 'legal': no answers to choose from"
            )
        return assistant(legal[int(self.rng.integers(len(legal)))])


def load_scripted(
    path: str, seed: int, *, env_spec: EnvSpec | None = None, kwargs: dict[str, Any] | None = None
) -> ScriptedPolicy:
    """Build the scripted policy "module:attribute", or the one that `env_spec.scripted` has by this name."""
    names = env_spec.scripted if env_spec is not None else {}
    if ":" not in path and path not in names:
        known = (
            f"{env_spec.id} has {', '.join(names) or 'none'}"
            if env_spec is not None
            else "no environment given"
        )
        raise ConfigError(f"there is no scripted policy {path!r}; {known}. Or name it as 'module:Class'")
    target = names.get(path, path)
    creator = load_attribute(target)
    try:
        policy: ScriptedPolicy = creator(seed=seed, **(kwargs or {}))
    except TypeError as error:
        raise ConfigError(f"{target} could not be built with seed={seed}: {error}") from error
    if not (hasattr(policy, "reset") and hasattr(policy, "act")):  # isinstance takes as long as a turn
        raise ConfigError(f"{target} made a {type(policy).__name__}, which has no methods `reset` and `act`")
    return policy


def last_text(messages: Sequence[Message], role: str = "user") -> str:
    """Return the content of the latest message of a role; empty where there is none."""
    return next((m["content"] for m in reversed(messages) if m["role"] == role), "")
