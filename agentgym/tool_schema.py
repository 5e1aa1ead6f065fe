"""A tool made from a Python function: its JSON schema, and its arguments checked.

The schema comes from the signature by pydantic, the descriptions from the docstring by griffelib (Google,
NumPy and Sphinx style); a description in `Annotated[..., Field(description=...)]` wins. A parameter annotated
`Context` is hidden from the model and filled in by whoever runs the tool. Arguments arrive as the JSON text that
the model wrote and leave as validated Python values, or as an `ArgumentsError` whose text is meant for the model.
"""

import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import griffe
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agentgym.errors import ConfigError
from agentgym.messages import SINGLE_AGENT, AgentId, ToolSchema

_SHOWN_ERRORS = 3
"""How many of the mistakes in a call's arguments are told to the model."""

_KEYED_BY_NAME = ("properties", "$defs")
"""The parts of a JSON schema whose keys are names that the author chose."""

_QUIET: griffe.PerStyleOptions = {
    "google": {"warnings": False},
    "numpy": {"warnings": False},
    "sphinx": {"warnings": False},
}
"""griffelib warns about parameters without a type in the docstring; ours are in the signature."""


class ArgumentsError(ValueError):
    """The arguments of a call do not fit the tool; the text says how, for the model."""


class ToolError(Exception):
    """Raised by a tool to tell the model what went wrong: it reads "Error: " and this text."""


@dataclass(slots=True)
class Context:
    """What a tool may know beyond its arguments: for whom, and in which episode, it runs."""

    env: Any = None
    """The environment, unwrapped."""
    agent: AgentId = SINGLE_AGENT
    """The agent that calls."""
    seed: int | None = None
    """The episode's seed."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """Anything that tools want to keep; empty at the start of each episode, never shared between episodes."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: how the model sees it, how its arguments are checked, and what is called."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    function: Callable[..., Any]
    """What is called, with the arguments by name; plain or async."""
    arguments: type[BaseModel] | None = None
    """Validates them; the parameters' names are its fields' aliases. None: any object; the function checks it."""
    context: str | None = None
    """The parameter that receives the `Context`."""
    timeout: float | None = None
    """Seconds a call may take; None: no limit."""
    max_chars: int | None = None
    """Characters a result may have; what is longer is cut, visibly. None: whoever runs the tool decides."""
    parallel: bool = False
    """Whether calls may run at the same time as other calls of the same turn."""

    @property
    def schema(self) -> ToolSchema:
        """The tool in the OpenAI format."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": json.loads(json.dumps(self.parameters)),
            },
        }

    @property
    def usage(self) -> str:
        """The call in one line, as an error message shows it: `name(first: integer, second?: string)`."""
        required = self.parameters.get("required", [])
        parts = [
            f"{name}{'' if name in required else '?'}: {_type_name(schema)}"
            for name, schema in self.parameters.get("properties", {}).items()
        ]
        return f"{self.name}({', '.join(parts)})"

    def parse(self, arguments: str | None) -> dict[str, Any]:
        """Return the arguments of a call by parameter name; those left out are absent.

        No text and `null` mean no arguments. Raises ArgumentsError for malformed JSON and for arguments that do
        not fit.
        """
        text = (arguments or "").strip()
        text = "{}" if text in ("", "null") else text
        if self.arguments is None:
            return self._object(text)
        try:
            values = self.arguments.model_validate_json(text)
        except ValidationError as error:
            raise ArgumentsError(f"{_explain(error)}; expected {self.usage}") from error
        fields = self.arguments.model_fields
        given = values.model_fields_set
        return {str(item.alias): getattr(values, name) for name, item in fields.items() if name in given}

    def _object(self, text: str) -> dict[str, Any]:
        try:
            value = pydantic_core.from_json(text)
        except ValueError as error:
            raise ArgumentsError(f"Invalid JSON: {error}; expected {self.usage}") from error
        if not isinstance(value, dict):
            raise ArgumentsError(f"Input should be an object; expected {self.usage}")
        return value


def build_tool(
    function: Callable[..., Any],
    *,
    timeout: float | None = None,
    max_chars: int | None = None,
    parallel: bool = False,
) -> Tool:
    """Return the tool that a function (or a method, whose `self` is left out) describes.

    Raises ConfigError where the signature cannot be described: *args, **kwargs, positional-only parameters
    and parameters without a type.
    """
    text, descriptions = _documentation(function)
    fields: dict[str, Any] = {}
    context: str | None = None
    hints = _type_hints(function)
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if index == 0 and parameter.name == "self":
            continue
        _refuse_unusable(function, parameter, hints)
        annotation = hints[parameter.name]
        if annotation is Context:
            context = parameter.name
            continue
        # Neutral field names: a parameter may be called `json`, `copy` or `_x`, which pydantic would refuse.
        settings: dict[str, Any] = {"alias": parameter.name}
        if parameter.default is not parameter.empty:
            settings["default"] = parameter.default
        if parameter.name in descriptions and not _is_described(annotation):
            settings["description"] = descriptions[parameter.name]
        fields[f"argument_{index}"] = (annotation, Field(**settings))
    model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    parameters = _without_titles(model.model_json_schema())
    parameters.setdefault("properties", {})
    return Tool(function.__name__, text, parameters, function, model, context, timeout, max_chars, parallel)


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the docstring's text before its sections, and the parameters' descriptions."""
    docstring = griffe.Docstring(inspect.getdoc(function) or "")
    text = ""
    descriptions: dict[str, str] = {}
    for section in griffe.parse_auto(docstring, per_style_options=_QUIET):
        if isinstance(section, griffe.DocstringSectionText) and not text:
            text = section.value
        elif isinstance(section, griffe.DocstringSectionParameters):
            descriptions |= {
                item.name: " ".join(item.description.split()) for item in section.value if item.description
            }
    return text, descriptions


def _is_described(annotation: Any) -> bool:
    """Say whether an annotation carries a description of its own."""
    return any(getattr(note, "description", None) for note in getattr(annotation, "__metadata__", ()))


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the resolved annotations of a function."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"tool {function.__qualname__}: the annotation {error.name!r} is not defined where the tool is "
            "declared; define the type at module level, above the class"
        ) from error


def _refuse_unusable(
    function: Callable[..., Any], parameter: inspect.Parameter, hints: dict[str, Any]
) -> None:
    """Raise ConfigError for a parameter that a model could not be told about."""
    where = f"tool {function.__qualname__}, parameter {parameter.name!r}"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise ConfigError(f"{where}: *args and **kwargs have no schema; name every argument")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ConfigError(f"{where}: positional-only arguments cannot be called by name; remove the '/'")
    if parameter.name not in hints:
        raise ConfigError(f"{where}: it has no type; annotate it, for example `{parameter.name}: str`")


def _without_titles(schema: Any) -> Any:
    """Return a JSON schema without the titles that pydantic adds; names chosen by the author are kept."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(child) for name, child in value.items()}
        if key in _KEYED_BY_NAME
        else value
        if key in ("default", "enum", "const", "examples")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title"
    }


def _type_name(schema: dict[str, Any]) -> str:
    """Return a short name for the type of a JSON schema."""
    if "enum" in schema:
        return "|".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return "|".join(_type_name(variant) for variant in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[-1])
    return str(schema.get("type", "any"))


def _explain(error: ValidationError) -> str:
    """Return the mistakes in one line."""
    lines = []
    for mistake in error.errors(include_url=False)[:_SHOWN_ERRORS]:
        place = ".".join(str(part) for part in mistake["loc"])
        lines.append(f"{place}: {mistake['msg']}" if place else mistake["msg"])
    hidden = error.error_count() - len(lines)
    return "; ".join(lines) + (f"; and {hidden} more" if hidden > 0 else "")
