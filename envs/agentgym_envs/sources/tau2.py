"""`tau2:DOMAIN`: tau2-bench's customer service; see `agentgym_envs.tau2`."""

from agentgym.registry import EnvSpec, unknown
from agentgym_envs.sources.library import need

_DOMAINS = ("airline", "mock", "retail", "telecom")
_MAX_TURNS = 100
"""Answers of each of the two; tau2 itself ends a conversation after 200 steps."""


class Tau2Source:
    """The domains."""

    extra = "tau2"

    def spec(self, name: str) -> EnvSpec:
        """Return what is known about a domain."""
        need("tau2")
        if name not in _DOMAINS:
            raise unknown(f"tau2:{name}", (f"tau2:{one}" for one in _DOMAINS))
        policies = "agentgym_envs.tau2.policies"
        return EnvSpec(
            f"tau2:{name}",
            "agentgym_envs.tau2.env:CustomerService",
            "aec",
            _MAX_TURNS,
            {"name": name},
            {
                "replay": f"{policies}:Replay",
                "noisy": f"{policies}:Noisy",
                "customer": f"{policies}:Customer",
            },
        )

    def names(self) -> list[str]:
        """Return the domains; all come with their data."""
        return list(_DOMAINS)


SOURCE = Tau2Source()
