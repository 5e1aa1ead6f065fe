"""How an environment is found by its id.

    agentgym/GuessNumber-v0    registered by `register`, or by a package with an entry point "agentgym.envs"
    my_module:MyEnv            a class; the module may lie in the working directory
    my_module:my/Env-v0        registered by importing the module
    gymnasium:FrozenLake-v1    registered with gymnasium

An entry point of the group `agentgym.envs` names a module, or a function without arguments, that registers.
It is loaded only when an id is not known yet, or when all are listed; the core imports no environment by
name.
"""

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import gymnasium
import pettingzoo

from agentgym.errors import ConfigError, EnvError

ENTRY_POINT_GROUP = "agentgym.envs"
GYMNASIUM_PREFIX = "gymnasium:"

Kind = Literal["single", "aec", "parallel"]
"""How its agents act: one alone, several by turns, several at once."""

_NUMERIC_SPACES = (
    gymnasium.spaces.Box,
    gymnasium.spaces.Discrete,
    gymnasium.spaces.MultiBinary,
    gymnasium.spaces.MultiDiscrete,
)

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


_specs: dict[str, EnvSpec] = {}


def register(
    id: str,
    entry_point: str | type[Any],
    *,
    kind: Kind,
    max_turns: int | None = None,
    kwargs: dict[str, Any] | None = None,
    scripted: dict[str, str] | None = None,
) -> None:
    """Make an environment known by an id, here and in the registry of gymnasium or PettingZoo.

    Registering the same again changes nothing. Raises ConfigError where the id stands for something else.
    """
    target = _import_path(id, entry_point) if inspect.isclass(entry_point) else str(entry_point)
    new = EnvSpec(id, target, kind, max_turns, dict(kwargs or {}), dict(scripted or {}))
    if id in _specs:
        if _specs[id] == new:
            return
        raise ConfigError(f"{id} is registered already as {_specs[id]}; choose another id or version")
    if kind not in ("single", "aec", "parallel"):
        raise ConfigError(f"{id}: kind = {kind!r}; use 'single', 'aec' or 'parallel'")
    _split(target)
    if kind == "single":
        gymnasium.register(id, target, max_episode_steps=max_turns, kwargs=new.kwargs)
    else:
        pettingzoo.register(kind, id, target, kwargs=new.kwargs)
    _specs[id] = new


def spec(env_id: str) -> EnvSpec:
    """Return what is known about an environment. Raises ConfigError for an id that leads nowhere."""
    if env_id.startswith(GYMNASIUM_PREFIX):
        return _spec_from_gymnasium(env_id)
    if env_id in _specs:
        return _specs[env_id]
    if ":" in env_id:
        return _spec_from_module(env_id)
    problems = _load_entry_points()
    if env_id in _specs:
        return _specs[env_id]
    close = difflib.get_close_matches(env_id, _specs, n=3, cutoff=0.4)
    known = f"the nearest ids are {', '.join(close)}" if close else "`agentgym list` shows all ids"
    broken = f" (not loaded: {'; '.join(problems)})" if problems else ""
    raise ConfigError(
        f"there is no environment {env_id!r}; {known}{broken}. Register it with agentgym.register, "
        "or name its class as 'module:Class'"
    )


def make(env_id: str, **kwargs: Any) -> Any:
    """Build an environment; `kwargs` go to its constructor.

    Raises ConfigError for an unknown id, unknown arguments or an environment that does not speak in text,
    EnvError where its constructor fails.
    """
    found = spec(env_id)
    arguments = {**found.kwargs, **kwargs}
    if env_id.startswith(GYMNASIUM_PREFIX):
        creator: Any = functools.partial(gymnasium.make, env_id.removeprefix(GYMNASIUM_PREFIX))
    else:
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


def list_envs() -> list[EnvSpec]:
    """Return all registered environments, by id; those of installed packages included."""
    _load_entry_points()
    return [_specs[env_id] for env_id in sorted(_specs)]


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


def _spec_from_gymnasium(env_id: str) -> EnvSpec:
    """Return the spec of an environment that gymnasium knows."""
    try:
        gymnasium.spec(env_id.removeprefix(GYMNASIUM_PREFIX))
    except gymnasium.error.Error as error:
        raise ConfigError(f"{env_id}: gymnasium says: {error}") from error
    return EnvSpec(env_id, env_id, "single")


def _spec_from_module(env_id: str) -> EnvSpec:
    """Return the spec of "module:Class", or of an id that importing the module registers."""
    module_name, name = _split(env_id)
    _import(module_name)
    if name in _specs:
        return _specs[name]
    creator = load_attribute(env_id)
    max_turns = getattr(creator, "max_turns", None)
    scripted = getattr(creator, "scripted", {})
    return EnvSpec(
        env_id,
        env_id,
        kind_of(creator),
        max_turns if isinstance(max_turns, int) else None,
        scripted=dict(scripted) if isinstance(scripted, dict) else {},
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
            "install it, or start in its folder"
        ) from error


def _load_entry_points() -> list[str]:
    """Let every installed package register its environments; return what failed."""
    problems = []
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
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
    """Raise ConfigError where a single-agent environment speaks in numbers."""
    if found.kind != "single":
        return
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if isinstance(space, _NUMERIC_SPACES):
            raise ConfigError(
                f"{found.id}: its {name} is {space}, and agents read and write text; write an agentgym.Env "
                "that holds it, describes its observations and reads its actions from text"
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
