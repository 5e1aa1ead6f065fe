"""`reasoning_gym:NAME`: reasoning-gym's data sets; see `agentgym_envs.reasoning_gym`."""

import importlib

from agentgym.registry import EnvSpec, unknown
from agentgym_envs.sources.library import need

_NEEDS_ARGUMENTS = "composite"
"""A mixture of other data sets, which have to be named."""
_MAX_TURNS = 8
"""Answers with tools; without there is one."""


class ReasoningGymSource:
    """Data sets by name."""

    extra = "reasoning-gym"

    def spec(self, name: str) -> EnvSpec:
        """Return what is known about a data set."""
        known = self.names()
        if name not in known:
            raise unknown(f"reasoning_gym:{name}", (f"reasoning_gym:{one}" for one in known))
        policies = "agentgym_envs.reasoning_gym.policies"
        return EnvSpec(
            f"reasoning_gym:{name}",
            "agentgym_envs.reasoning_gym.env:make",
            "single",
            _MAX_TURNS,
            {"name": name},
            {"oracle": f"{policies}:Oracle", "noisy": f"{policies}:Noisy", "coder": f"{policies}:Coder"},
        )

    def names(self) -> list[str]:
        """Return all data sets but the one that is made of others."""
        need("reasoning_gym")
        datasets = importlib.import_module("reasoning_gym.factory").DATASETS
        return sorted(name for name in datasets if name != _NEEDS_ARGUMENTS)


SOURCE = ReasoningGymSource()
