"""Who plays whom: from a lease to the seat of each agent.

A lease names a policy for every agent. A policy that servers answer for plays with its own tokenizer and context; the
words of the others are written down with the tokenizer of the model that is trained.
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from agentgym.config import EnvConfig, SamplingConfig
from agentgym.messages import AgentId
from agentgym.policy.client import Policy, Sampling, Speaker
from agentgym.policy.endpoint import Endpoint
from agentgym.policy.scripted import Script
from agentgym.policy.template import ChatTokenizer
from agentgym.policy_config import PolicyConfig
from agentgym.protocol import Lease
from agentgym.registry import EnvSpec
from agentgym.worker.seat import Limits, Player, Seat
from agentgym.worker.table import Opening

DEFAULT_MAX_TURNS = 32


@dataclass(slots=True)
class Served:
    """A policy that policy servers answer for."""

    client: Policy
    tokenizer: ChatTokenizer
    max_model_len: int
    """Its context length in tokens."""


class Seating:
    """Seats the agents of an environment; `seat` is what `Rollout` asks for."""

    def __init__(
        self,
        env: EnvConfig,
        env_spec: EnvSpec,
        policies: Mapping[str, PolicyConfig],
        *,
        sampling: SamplingConfig,
        tokenizer: ChatTokenizer,
        served: Mapping[str, Served] | None = None,
        speakers: Mapping[str, Speaker] | None = None,
        trained: Collection[str] = (),
    ) -> None:
        """Know the policies by name; models and pools must be `served`, those in `trained` are trainable.

        `speakers` are policies of other kinds, by name.

        Raises:
            ConfigError: the API key of an endpoint is missing.
        """
        self._env = env
        self._max_turns = env.max_turns or env_spec.max_turns or DEFAULT_MAX_TURNS
        self._policies = policies
        self._sampling = sampling.model_dump()
        self._tokenizer = tokenizer
        self._trained = trained
        self.served: Mapping[str, Served] = served or {}
        self._endpoints = {
            name: Endpoint(name, policy, sampling)
            for name, policy in policies.items()
            if policy.kind == "endpoint"
        }
        self._speakers: dict[str, Speaker] = {**self._endpoints, **(speakers or {})}

    def seat(self, agent: AgentId, opening: Opening, lease: Lease) -> Seat:
        """Return a new seat for an agent of the episode of `lease`."""
        name = lease.policies.get(agent) or lease.policies["*"]
        policy, _, _ = name.partition("@")  # a pool's snapshot: which one its servers hold is not ours to say
        served = self.served.get(policy)
        tokenizer = served.tokenizer if served else self._tokenizer
        return Seat(
            agent,
            name,
            self._player(policy, lease),
            trainable=policy in self._trained,
            tokenizer=tokenizer,
            sampling=Sampling(**self._sampling, stop_token_ids=tuple(tokenizer.stop_token_ids)),
            limits=self._limits(served),
            system_prompt=opening.system_prompt,
            tools=opening.tools,
            keep_thinking=policy in self._policies and self._policies[policy].history == "keep",
        )

    async def close(self) -> None:
        """Close the connections to endpoints; those of the served policies are their owner's."""
        for endpoint in self._endpoints.values():
            await endpoint.close()

    def _player(self, policy: str, lease: Lease) -> Player:
        kind = self._policies.get(policy)
        scripted = (kind and kind.scripted) or lease.teacher
        if not scripted:
            return self._speakers.get(policy) or self.served[policy].client
        return Script(policy, scripted, lease.sampling_seed, self._max_turns, self._env.max_observation_chars)

    def _limits(self, served: Served | None) -> Limits:
        context = served.max_model_len if served else sys.maxsize
        budget = self._env.max_tokens
        return Limits(
            max_turns=self._max_turns,
            max_tokens=context if budget is None else min(context, budget),
            context=budget is None or context <= budget,
            request_timeout=self._env.episode_timeout,
            max_observation_chars=self._env.max_observation_chars,
        )
