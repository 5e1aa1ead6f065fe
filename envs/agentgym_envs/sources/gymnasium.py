"""`gymnasium:ID`: the toy-text environments in the views of `toy_text`, and every id that speaks text already."""

from importlib import import_module
from typing import Any

import gymnasium

from agentgym.registry import EnvSpec, unknown
from agentgym.wrappers.single import TextWrapper
from agentgym_envs.sources.view import take_rule

_TOY_TEXT = "agentgym_envs.sources.toy_text"
_VIEWS = {
    "Blackjack-v1": ("blackjack", "noisy_blackjack", "BasicStrategy"),
    "CliffWalking-v1": ("cliff_walking", "noisy_cliff", "CliffWay"),
    "CliffWalkingSlippery-v1": ("cliff_walking", "noisy_cliff", "CliffWay"),
    "FrozenLake-v1": ("frozen_lake", "noisy_lake", "LakeWay"),
    "FrozenLake8x8-v1": ("frozen_lake", "noisy_lake", "LakeWay"),
    "Taxi-v4": ("taxi", "noisy_taxi", "TaxiDriver"),
}
"""By id: the module of the view, and its noisy and its best scripted policy."""
_MAX_TURNS = 100
"""Of an environment with a view that has no time limit of its own."""


class GymnasiumSource:
    """Environments by their gymnasium id."""

    extra = ""

    def spec(self, name: str) -> EnvSpec:
        """Return what is known about an id."""
        try:
            found = gymnasium.spec(name)
        except gymnasium.error.Error as error:
            known = [*_VIEWS, *gymnasium.registry]
            raise unknown(f"gymnasium:{name}", (f"gymnasium:{one}" for one in known)) from error
        scripted, max_turns = {}, found.max_episode_steps
        if name in _VIEWS:
            _, noisy, expert = _VIEWS[name]
            scripted = {
                "random": "agentgym.policy.scripted:RandomLegal",
                "noisy": f"{_TOY_TEXT}.policies:{noisy}",
                "expert": f"{_TOY_TEXT}.policies:{expert}",
            }
            max_turns = max_turns or _MAX_TURNS
        return EnvSpec(
            f"gymnasium:{name}",
            f"{__name__}:make",
            "single",
            max_turns,
            kwargs={"name": name},
            scripted=scripted,
            isolation="shared" if name in _VIEWS else "process",
        )

    def names(self) -> list[str]:
        """Return the ids that have a view."""
        return list(_VIEWS)


SOURCE = GymnasiumSource()


def make(name: str, **kwargs: Any) -> Any:
    """Return an environment as text; `illegal`, `illegal_reward` and `max_retries` are the view's arguments."""
    if name not in _VIEWS:
        return gymnasium.make(name, **kwargs)
    rule = take_rule(kwargs)
    env = gymnasium.make(name, **kwargs)
    return import_module(f"{_TOY_TEXT}.{_VIEWS[name][0]}").view(env).wrap(TextWrapper, env, rule)
