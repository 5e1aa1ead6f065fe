"""`openspiel:NAME`: games by turns of OpenSpiel, as text; NAME may carry parameters, "leduc_poker(players=3)"."""

from typing import Any

from agentgym.errors import ConfigError
from agentgym.registry import EnvSpec, unknown
from agentgym.wrappers.aec import TextAECWrapper
from agentgym_envs.sources.view import take_rule

_POLICIES = "agentgym_envs.sources.spiel.policies"
_SCRIPTED = {
    "kuhn_poker": {
        "beginner": f"{_POLICIES}:KuhnBeginner",
        "noisy": f"{_POLICIES}:noisy_kuhn",
        "expert": f"{_POLICIES}:KuhnEquilibrium",
    }
}

_MAX_TURNS = 1000
"""A game's own end comes first, in nearly all of them."""
_NOT_LOADABLE = {"crossword"}
"""What says that it needs no parameters, and does."""


class OpenSpielSource:
    """Games by OpenSpiel's short name."""

    extra = "openspiel"

    def spec(self, name: str) -> EnvSpec:
        """Return what is known about a game."""
        import pyspiel

        from agentgym_envs.sources.spiel.game import plays_by_turns

        short_name = name.partition("(")[0]
        kinds = {kind.short_name: kind for kind in pyspiel.registered_games()}
        if short_name not in kinds:
            raise unknown(f"openspiel:{short_name}", (f"openspiel:{one}" for one in kinds))
        if not plays_by_turns(kinds[short_name]):
            raise ConfigError(
                f"openspiel:{short_name} is not played by turns in text, or draws its chances by itself; "
                "`agentgym list openspiel:` shows the games that can be played"
            )
        scripted = {"random": "agentgym.policy.scripted:RandomLegal", **_SCRIPTED.get(short_name, {})}
        return EnvSpec(
            f"openspiel:{name}",
            f"{__name__}:make",
            "aec",
            _MAX_TURNS,
            kwargs={"name": name},
            scripted=scripted,
            isolation="shared",
        )

    def names(self) -> list[str]:
        """Return the games that need no parameters."""
        import pyspiel

        from agentgym_envs.sources.spiel.game import plays_by_turns

        return [
            kind.short_name
            for kind in pyspiel.registered_games()
            if kind.default_loadable and plays_by_turns(kind) and kind.short_name not in _NOT_LOADABLE
        ]


SOURCE = OpenSpielSource()


def make(name: str, **kwargs: Any) -> TextAECWrapper:
    """Return a game as text.

    `illegal`, `illegal_reward` and `max_retries` are the view's arguments, the others parameters of the game.
    """
    import pyspiel

    from agentgym_envs.sources.spiel.game import SpielGame
    from agentgym_envs.sources.spiel.views import view

    rule = take_rule(kwargs)
    env = SpielGame(pyspiel.load_game(name, kwargs) if kwargs else pyspiel.load_game(name))
    wrapped: TextAECWrapper = view(env).wrap(TextAECWrapper, env, rule)
    return wrapped
