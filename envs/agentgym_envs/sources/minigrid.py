"""`minigrid:ID`: Minigrid and BabyAI in words."""

from typing import Any

import gymnasium

from agentgym.registry import EnvSpec, unknown
from agentgym.wrappers.single import TextWrapper
from agentgym_envs.sources.view import take_rule

_MAX_TURNS = 128
"""An environment's own limit of steps comes first where it is lower."""


class MinigridSource:
    """Environments by their gymnasium id, with the prefix "MiniGrid-" or "BabyAI-"."""

    extra = "minigrid"

    def spec(self, name: str) -> EnvSpec:
        """Return what is known about an id."""
        known = self.names()
        if name not in known:
            raise unknown(f"minigrid:{name}", (f"minigrid:{one}" for one in known))
        scripted = {
            "random": "agentgym.policy.scripted:RandomLegal",
            "seeker": "agentgym_envs.sources.grid_world.policies:Seeker",
        }
        return EnvSpec(
            f"minigrid:{name}",
            f"{__name__}:make",
            "single",
            _MAX_TURNS,
            kwargs={"name": name},
            scripted=scripted,
            isolation="shared",
        )

    def names(self) -> list[str]:
        """Return the ids; those of generated mazes ("WFC") need more packages than Minigrid itself."""
        import minigrid  # noqa: F401  it registers with gymnasium

        return [
            env_id
            for env_id in gymnasium.registry
            if env_id.startswith(("MiniGrid-", "BabyAI-")) and "-WFC-" not in env_id
        ]


SOURCE = MinigridSource()


def make(name: str, **kwargs: Any) -> TextWrapper:
    """Return an environment as text; `illegal`, `illegal_reward` and `max_retries` are the view's arguments."""
    import minigrid  # noqa: F401  it registers with gymnasium

    from agentgym_envs.sources.grid_world.view import view

    rule = take_rule(kwargs)
    env = gymnasium.make(name, **kwargs)
    wrapped: TextWrapper = view(env).wrap(TextWrapper, env, rule)
    return wrapped
