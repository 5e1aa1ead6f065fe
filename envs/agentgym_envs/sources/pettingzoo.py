"""`pettingzoo:ID`: classic games in the views of `classic`, and every id that speaks text already.

A game that PettingZoo has for agents by turns and at once is played by turns, where its view does not say otherwise.
"""

from importlib import import_module
from typing import Any

import pettingzoo
from pettingzoo.env_registry.registration import aec_registry, parallel_registry

from agentgym.registry import EnvSpec, Kind, unknown
from agentgym.wrappers.aec import TextAECWrapper
from agentgym.wrappers.parallel import TextParallelWrapper
from agentgym_envs.sources.view import take_rule

_RANDOM = {"random": "agentgym.policy.scripted:RandomLegal"}
_CONNECT_FOUR = "agentgym_envs.sources.classic.connect_four"
_TICTACTOE = "agentgym_envs.tictactoe.policies"
_VIEWS: dict[str, tuple[str, Kind, dict[str, str]]] = {
    "classic/connect_four-v3": (
        _CONNECT_FOUR,
        "aec",
        {**_RANDOM, "noisy": f"{_CONNECT_FOUR}:noisy", "expert": f"{_CONNECT_FOUR}:LineSeer"},
    ),
    "classic/rps-v2": ("agentgym_envs.sources.classic.rps", "parallel", _RANDOM),
    "classic/tictactoe-v3": (
        "agentgym_envs.sources.classic.tictactoe",
        "aec",
        {**_RANDOM, "noisy": f"{_TICTACTOE}:NoisyMove", "expert": f"{_TICTACTOE}:Minimax"},
    ),
}
"""By id: the module of the view, who acts when, scripted policies."""


class PettingZooSource:
    """Games by their PettingZoo id."""

    extra = ""

    def spec(self, name: str) -> EnvSpec:
        """Return what is known about an id."""
        scripted: dict[str, str] = {}
        if name in _VIEWS:
            _, kind, scripted = _VIEWS[name]
        elif name in aec_registry:
            kind = "aec"
        elif name in parallel_registry:
            kind = "parallel"
        else:
            known = [*_VIEWS, *aec_registry, *parallel_registry]
            raise unknown(f"pettingzoo:{name}", (f"pettingzoo:{one}" for one in known))
        kwargs = {"name": name, "kind": kind}
        return EnvSpec(
            f"pettingzoo:{name}",
            f"{__name__}:make",
            kind,
            kwargs=kwargs,
            scripted=scripted,
            isolation="shared" if name in _VIEWS else "process",
        )

    def names(self) -> list[str]:
        """Return the ids that have a view."""
        return list(_VIEWS)


SOURCE = PettingZooSource()


def make(name: str, kind: Kind, **kwargs: Any) -> Any:
    """Return a game as text; `illegal`, `illegal_reward` and `max_retries` are the view's arguments."""
    if name not in _VIEWS:
        return pettingzoo.make(kind, name, **kwargs)
    rule = take_rule(kwargs)
    env = pettingzoo.make(kind, name, **kwargs)
    wrapper = TextAECWrapper if kind == "aec" else TextParallelWrapper
    return import_module(_VIEWS[name][0]).view(env).wrap(wrapper, env, rule)
