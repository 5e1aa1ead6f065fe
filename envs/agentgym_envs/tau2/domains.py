"""The domains of tau2: their tasks, and worlds (databases with tools) to play them in."""

import functools
import importlib
import json
import pickle
from dataclasses import dataclass
from typing import Any

from tau2.data_model.tasks import Task
from tau2.utils import DATA_DIR

from agentgym.errors import ConfigError

SIMULATOR = DATA_DIR / "tau2" / "user_simulator"

World = Any
"""A `tau2.environment.environment.Environment`."""


@dataclass(frozen=True, slots=True)
class Domain:
    """What all worlds of a domain have in common."""

    policy: str
    """The policy document of the company's agent."""
    tools: tuple[Any, ...]
    """The agent's tools, as tau2 describes them."""
    user_tools: tuple[Any, ...]
    """The user's tools; empty in most domains."""
    databases: bytes
    """The databases as they are at first, pickled: reading them again from their files would take far longer."""


@functools.cache
def load_domain(name: str) -> Domain:
    """Read a domain's files, once in a process."""
    world = _module(name).get_environment()
    databases = {"db": world.tools.db}
    if world.user_tools is not None:
        databases["user_db"] = world.user_tools.db
    user_tools = tuple(world.get_user_tools()) if world.user_tools is not None else ()
    return Domain(world.get_policy(), tuple(world.get_tools()), user_tools, pickle.dumps(databases))


@functools.cache
def load_tasks(domain: str, split: str) -> dict[str, str]:
    """Return the tasks of a split by id, as JSON. Raises ConfigError for a split that does not exist."""
    folder = DATA_DIR / "tau2" / "domains" / domain
    splits = json.loads((folder / "split_tasks.json").read_text())
    if split not in splits:
        raise ConfigError(f"tau2:{domain} has no split {split!r}; it has {', '.join(sorted(splits))}")
    wanted = set(splits[split])
    return {
        task["id"]: json.dumps(task)
        for task in json.loads((folder / "tasks.json").read_text())
        if task["id"] in wanted and not (task.get("initial_state") or {}).get("message_history")
    }


def make_task(text: str) -> Task:
    """Return a task of its own: tau2's tools keep and change the arguments that they are called with."""
    return Task.model_validate_json(text)


def make_world(domain: str, task: Task | None = None) -> World:
    """Return a new world, in the task's initial state."""
    world = _module(domain).get_environment(**pickle.loads(load_domain(domain).databases))
    state = task.initial_state if task is not None else None
    if state is not None:
        world.set_state(state.initialization_data, state.initialization_actions, message_history=[])
    return world


def _module(domain: str) -> Any:
    return importlib.import_module(f"tau2.domains.{domain}.environment")
