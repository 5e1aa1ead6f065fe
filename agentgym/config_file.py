"""Reads and writes the settings of a run.

    config = load_config(Path("run.toml"), ["run.steps=20", "rollout.group_size=4"])

Unknown keys are refused with the nearest right key. The resolved settings are saved in the run directory and are
what every process of the run reads.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from agentgym.config import Config
from agentgym.errors import ConfigError
from agentgym.section import Section


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML (or resolved JSON) file and apply `section.key=value` overrides, whose values are TOML.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown (with the nearest right one) or a value
            is wrong.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}") from error
    try:
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix.lstrip('.').upper()}: {error}") from error
    for override in overrides:
        _apply(tables, override)
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        raise ConfigError("\n".join([f"{path}:", *(f"  {line}" for line in _explain(error))])) from error


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what `key=value` arguments with TOML values say, as in `turns=7`.

    Raises:
        ConfigError: an argument is not of this form.
    """
    tables: dict[str, Any] = {}
    for argument in arguments:
        if "=" not in argument:
            raise ConfigError(f"argument {argument!r} is not of the form key=value, as in turns=7")
        _apply(tables, argument)
    return tables


def save_config(config: Config, path: Path) -> None:
    """Write the resolved settings as JSON; what was there before stays where they do not fit on the disk."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(config.model_dump_json(indent=2) + "\n")
    partial.replace(path)


def _apply(tables: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, as in run.steps=20")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # bare words are strings: run.name=first
    for part in parts[:-1]:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
    tables[parts[-1]] = parsed


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden":
            known = _fields_at(place[:-1])
            near = difflib.get_close_matches(place[-1], known, n=1) or difflib.get_close_matches(
                place[-1], [name for name, _ in all_keys()], n=1
            )
            known_keys = ", ".join(sorted(known))
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {known_keys}"
            yield f"unknown key {'.'.join(place)!r}; {hint}"
        elif problem["type"] == "missing":
            yield f"{'.'.join(place)} is required and was not given"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            found = f" (found {problem['input']!r:.60})" if not isinstance(problem["input"], Mapping) else ""
            yield f"{'.'.join(place) + ': ' if place else ''}{message}{found}"


def _fields_at(place: Sequence[str]) -> list[str]:
    section: type[BaseModel] = Config
    for part in place:
        field = section.model_fields.get(part)
        if field is None:  # a name inside a dict, as in policies.learner
            continue
        options = [field.annotation, *get_args(field.annotation)]
        inner = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if not inner:
            return []
        section = inner[0]
    return list(section.model_fields)


def all_keys() -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of the configuration with its pydantic field, for the reference in the README."""
    for name, field in Config.model_fields.items():
        options = [field.annotation, *get_args(field.annotation)]
        inner = [o for o in options if isinstance(o, type) and issubclass(o, Section)]
        if not inner:
            yield name, field
            continue
        prefix = f"{name}.NAME" if field.annotation not in inner else name
        for key, part in inner[0].model_fields.items():
            yield f"{prefix}.{key}", part
