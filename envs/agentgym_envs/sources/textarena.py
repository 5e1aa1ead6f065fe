"""`textarena:ID`: textarena's games that run offline; see `agentgym_envs.textarena`."""

from agentgym.registry import EnvSpec, unknown
from agentgym_envs.sources.library import need
from agentgym_envs.textarena.games import PLAYERS


class TextArenaSource:
    """Games by their textarena id."""

    extra = "textarena"

    def spec(self, name: str) -> EnvSpec:
        """Return what is known about a game."""
        need("textarena")
        if name not in PLAYERS:
            raise unknown(f"textarena:{name}", (f"textarena:{one}" for one in PLAYERS))
        return EnvSpec(
            f"textarena:{name}",
            "agentgym_envs.textarena.env:TextArena",
            "aec",
            kwargs={"name": name},
            scripted={"menu": "agentgym_envs.textarena.policies:FromMenu"},
        )

    def names(self) -> list[str]:
        """Return the games that run offline."""
        return list(PLAYERS)


SOURCE = TextArenaSource()
