"""How an environment is found by its id.

    agentgym/GuessNumber-v0    registered by `register`, or by a package with an entry point "agentgym.envs"
    my_module:MyEnv            a class; the module may lie in the working directory
    my_module:my/Env-v0        registered by importing the module
    gymnasium:FrozenLake-v1    found by the source "gymnasium"

An entry point of the group `agentgym.envs` names a module, or a function without arguments, that registers.
It is loaded only when an id is not known yet, or when all are listed; the core imports no environment by
name. An entry point "prefix" of the group `agentgym.sources` names a `Source`: the environments of a whole
library, by the library's own names.
"""

import difflib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Literal, Protocol, get_args

import gymnasium
import pettingzoo

from agentgym.errors import ConfigError, EnvError

ENVS_GROUP = "agentgym.envs"
SOURCES_GROUP = "agentgym.sources"

Kind = Literal["single", "aec", "parallel"]
"""How its agents act: one alone, several by turns, several at once."""

Isolation = Literal["inline", "shared", "process"]
"""What instances of an environment may share with each other; see `EnvSpec.isolation`."""

_NUMERIC_SPACES = (
    gymnasium.spaces.Box,
    gymnasium.spaces.Discrete,
    gymnasium.spaces.MultiBinary,
    gymnasium.spaces.MultiDiscrete,
    gymnasium.spaces.Tuple,
)
_WRAPPERS: dict[Kind, tuple[str, str]] = {
    "single": ("TextWrapper", "env"),
    "aec": ("TextAECWrapper", "env, agent"),
    "parallel": ("TextParallelWrapper", "env, agent"),
}
"""The class that makes text of such an environment, and what its functions are given first."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What is known about an environment without building it."""

    id: str
    entry_point: str
    """"module:attribute" of the class or of a function that returns the environment."""
    kind: Kind
    max_turns: int | None = None
    """Answers an agent may give before the worker cuts the episode; None: the environment ends by itself."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the entry point; those given to `make` win."""
    scripted: dict[str, str] = field(default_factory=dict)
    """Scripted policies for this environment: name to "module:attribute"."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """What named parts of the reward are multiplied by; parts that are not named count once."""
    isolation: Isolation = "process"
    """"shared": its instances keep no state outside of themselves (no global random generator, no module variables,
    no working directory), so they may run in threads of one process. "inline": in addition, `reset` and `step` take
    microseconds and wait for nothing (no tools, no files, no event loop), so they may be called one after the other in
    one thread. "process": each needs a process of its own."""


class Source(Protocol):
    """Another library's environments under a prefix: "prefix:name".

    The spec that it returns points to a function that any process can import, with the name among its kwargs.
    It imports its library when it is asked, not before: a ModuleNotFoundError then names the extra to install.
    """

    extra: str
    """The extra of agentgym-rl that installs the library; "" where agentgym itself needs it."""

    def spec(self, name: str) -> EnvSpec:
        """Return what is known about one environment; raises `unknown(...)` for a name that it does not have."""

    def names(self) -> list[str]:
        """Return the names of all that can be made without a network."""


_specs: dict[str, EnvSpec] = {}


def register(
    id: str,
    entry_point: str | type[Any],
    *,
    kind: Kind,
    max_turns: int | None = None,
    kwargs: dict[str, Any] | None = None,
    scripted: dict[str, str] | None = None,
    reward_weights: dict[str, float] | None = None,
    isolation: Isolation = "process",
) -> None:
    """Make an environment known by an id, here and in the registry of gymnasium or PettingZoo.

    Registering the same again changes nothing. Raises ConfigError where the id stands for something else.
    """
    target = _import_path(id, entry_point) if inspect.isclass(entry_point) else str(entry_point)
    new = EnvSpec(
        id,
        target,
        kind,
        max_turns,
        dict(kwargs or {}),
        dict(scripted or {}),
        dict(reward_weights or {}),
        isolation,
    )
    if id in _specs:
        if _specs[id] == new:
            return
        raise ConfigError(f"{id} is registered already as {_specs[id]}; choose another id or version")
    if kind not in ("single", "aec", "parallel"):
        raise ConfigError(f"{id}: kind = {kind!r}; use 'single', 'aec' or 'parallel'")
    if isolation not in get_args(Isolation):
        raise ConfigError(f"{id}: isolation = {isolation!r}; use 'inline', 'shared' or 'process'")
    _split(target)
    if kind == "single":
        gymnasium.register(id, target, max_episode_steps=max_turns, kwargs=new.kwargs)
    else:
        pettingzoo.register(kind, id, target, kwargs=new.kwargs)
    _specs[id] = new


def spec(env_id: str) -> EnvSpec:
    """Return what is known about an environment. Raises ConfigError for an id that leads nowhere."""
    if env_id in _specs:
        return _specs[env_id]
    prefix, colon, name = env_id.partition(":")
    if colon and _normal(prefix) in _sources():
        with _source(prefix) as source:
            return source.spec(name)
    if colon:
        return _spec_from_module(env_id)
    problems = _load_entry_points()
    if env_id in _specs:
        return _specs[env_id]
    broken = f" (not loaded: {'; '.join(problems)})" if problems else ""
    raise ConfigError(
        f"{unknown(env_id, _specs)}{broken}. Register it with agentgym.register, "
        "or name its class as 'module:Class'"
    )


def unknown(env_id: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an id that is none of the known ones; it names the nearest."""
    close = difflib.get_close_matches(env_id, list(known), n=3, cutoff=0.4)
    prefix, colon, _ = env_id.partition(":")
    nearest = f"the nearest are {', '.join(close)}; " if close else ""
    return ConfigError(
        f"there is no environment {env_id!r}; {nearest}`agentgym list{f' {prefix}:' if colon else ''}` shows all"
    )


def make(env_id: str, **kwargs: Any) -> Any:
    """Build an environment; `kwargs` go to its constructor.

    Raises ConfigError for an unknown id, unknown arguments or an environment that does not speak in text,
    EnvError where its constructor fails.
    """
    found = spec(env_id)
    arguments = {**found.kwargs, **kwargs}
    creator = load_attribute(found.entry_point)
    _check_arguments(found, creator, arguments)
    try:
        env = creator(**arguments)
    except Exception as error:  # the boundary to an author's constructor
        raise EnvError(
            f"{env_id} could not be built with {arguments}: {type(error).__name__}: {error}"
        ) from error
    _refuse_numbers(found, env)
    return env


def list_envs(source: str | None = None) -> list[EnvSpec]:
    """Return all registered environments, those of installed packages included, or all of one source, by id.

    Raises ConfigError where `source` is none of `list_sources()`, or its library is not installed.
    """
    if source is not None:
        with _source(source) as found:
            return sorted((found.spec(name) for name in found.names()), key=lambda one: one.id)
    _load_entry_points()
    return [_specs[env_id] for env_id in sorted(_specs)]


def list_sources() -> list[str]:
    """Return the prefixes under which the environments of other libraries are found."""
    return sorted(_sources())


def load_attribute(path: str) -> Any:
    """Return what "module:attribute" names; the module may lie in the working directory."""
    module_name, attribute = _split(path)
    module = _import(module_name)
    value: Any = module
    for name in attribute.split("."):
        if not hasattr(value, name):
            close = difflib.get_close_matches(name, dir(value), n=3)
            hint = f"did you mean {', '.join(close)}?" if close else f"it was read from {module.__file__}"
            raise ConfigError(f"module {module_name!r} has no {attribute!r}; {hint}")
        value = getattr(value, name)
    return value


def kind_of(creator: Any) -> Kind:
    """Return how the agents of an environment's class act, by its base class or else by its methods."""
    if not inspect.isclass(creator):
        raise ConfigError(
            f"{creator!r} is not a class, so its kind is unknown; name it in agentgym.register(kind=...)"
        )
    if issubclass(creator, pettingzoo.AECEnv) or hasattr(creator, "agent_iter"):
        return "aec"
    if issubclass(creator, pettingzoo.ParallelEnv) or hasattr(creator, "possible_agents"):
        return "parallel"
    if callable(getattr(creator, "reset", None)) and callable(getattr(creator, "step", None)):
        return "single"
    raise ConfigError(
        f"{creator.__module__}:{creator.__qualname__} is not an environment: it has no reset and step; "
        "derive it from agentgym.Env, agentgym.AECEnv or agentgym.ParallelEnv"
    )


@functools.cache
def _sources() -> dict[str, EntryPoint]:
    return {_normal(found.name): found for found in entry_points(group=SOURCES_GROUP)}


@contextmanager
def _source(prefix: str) -> Iterator[Source]:
    """Provide the source of a prefix; what its library lacks in the block becomes a ConfigError."""
    key = _normal(prefix.removesuffix(":"))
    if key not in _sources():
        raise ConfigError(f"there is no source {prefix!r} of environments; there are {_prefixes()}")
    try:
        source: Source = _sources()[key].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the source {key}: could not be loaded: {error}") from error
    try:
        yield source
    except ModuleNotFoundError as error:
        hint = f"pip install 'agentgym-rl[{source.extra}]'" if source.extra else f"install {error.name}"
        raise ConfigError(
            f"{key}: needs the module {error.name!r}, which is not installed; {hint}"
        ) from error


def _prefixes() -> str:
    return ", ".join(f"{prefix}:" for prefix in list_sources())


def _normal(prefix: str) -> str:
    return prefix.replace("-", "_").lower()


def _spec_from_module(env_id: str) -> EnvSpec:
    """Return the spec of "module:Class", or of an id that importing the module registers."""
    module_name, name = _split(env_id)
    _import(module_name)
    if name in _specs:
        return _specs[name]
    creator = load_attribute(env_id)
    max_turns = getattr(creator, "max_turns", None)
    scripted = getattr(creator, "scripted", {})
    weights = getattr(creator, "reward_weights", {})
    isolation: Any = getattr(creator, "isolation", "process")
    return EnvSpec(
        env_id,
        env_id,
        kind_of(creator),
        max_turns if isinstance(max_turns, int) else None,
        scripted=dict(scripted) if isinstance(scripted, dict) else {},
        reward_weights=dict(weights) if isinstance(weights, dict) else {},
        isolation=isolation if isolation in get_args(Isolation) else "process",
    )


def _import(module_name: str) -> ModuleType:
    """Import a module, from the working directory too."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{module_name} needs the module {error.name!r}; install it") from error
        raise ConfigError(
            f"there is no module {module_name!r} in {here} or among the installed packages; "
            f"install it, or start in its folder. Other libraries' environments start with {_prefixes()}"
        ) from error


def _load_entry_points() -> list[str]:
    """Let every installed package register its environments; return what failed."""
    problems = []
    for entry_point in entry_points(group=ENVS_GROUP):
        try:
            loaded = entry_point.load()
            if callable(loaded):
                loaded()
        except (ImportError, AttributeError) as error:
            problems.append(f"{entry_point.value}: {error}")
            _logger.warning("environments of %s could not be loaded: %s", entry_point.value, error)
    return problems


def _check_arguments(found: EnvSpec, creator: Any, arguments: dict[str, Any]) -> None:
    """Raise ConfigError where the entry point does not take the arguments."""
    if not callable(creator):
        raise ConfigError(
            f"{found.entry_point} is a {type(creator).__name__}; expected a class or a function"
        )
    signature = inspect.signature(creator)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{found.id}: {error}; {found.entry_point} takes {signature}") from error


def _refuse_numbers(found: EnvSpec, env: Any) -> None:
    """Raise ConfigError where an environment speaks in numbers."""
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if found.kind != "single":
            space = space(env.possible_agents[0]) if callable(space) and env.possible_agents else None
        if isinstance(space, _NUMERIC_SPACES) or (
            isinstance(space, gymnasium.spaces.Dict) and "messages" not in space.spaces
        ):
            wrapper, seat = _WRAPPERS[found.kind]
            raise ConfigError(
                f"{found.id}: its {name} is {space}, and agents read and write text; write two functions, "
                f"describe({seat}, observation) -> str and parse({seat}, text) -> action or None, and wrap "
                f"it: agentgym.{wrapper}(env, describe, parse)"
            )


def _import_path(id: str, entry_point: type[Any]) -> str:
    """Return "module:Class" for a class that other processes can import."""
    if entry_point.__module__ == "__main__" or "<locals>" in entry_point.__qualname__:
        raise ConfigError(
            f"{id}: workers cannot import {entry_point.__qualname__} from {entry_point.__module__}; "
            "put the class at the top level of a module of its own"
        )
    return f"{entry_point.__module__}:{entry_point.__qualname__}"


def _split(path: str) -> tuple[str, str]:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{path!r} is not of the form 'module:attribute'")
    return module_name, attribute
