"""agentgym.tool_schema: the schema of a function, and its arguments checked."""

import contextlib
import enum
import json
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentgym.errors import ConfigError
from agentgym.tool_schema import ArgumentsError, build_tool
from agentgym.tools import tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    title: str
    count: int = 1


def look_up(self, item: str, limit: int = 3) -> str:
    """Look up a price.

    Args:
        item: What to look up,
            on one line.
        limit: How many.
    """
    return f"{item} {limit}"


@given(st.text(max_size=60))
def test_no_arguments_text_raises_anything_but_an_arguments_error(text):
    found = build_tool(look_up)
    with contextlib.suppress(ArgumentsError):
        assert "item" in found.parse(text)


def parameters_of(function):
    return build_tool(function).schema["function"]["parameters"]


def test_a_schema_has_types_descriptions_defaults_and_no_titles():
    assert build_tool(look_up).schema == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a price.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "What to look up, on one line."},
                    "limit": {"type": "integer", "description": "How many.", "default": 3},
                },
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    }


def numpy_style(query: str, size: int = 1) -> str:
    """Search.

    Parameters
    ----------
    query : str
        The words.
    size : int, optional
        How many.
    """
    return query * size


def sphinx_style(query: str, size: int = 1) -> str:
    """Search.

    :param query: The words.
    :param int size: How many.
    """
    return query * size


@pytest.mark.parametrize("function", [numpy_style, sphinx_style])
def test_descriptions_are_read_from_other_styles(function):
    assert build_tool(function).description == "Search."
    described = {name: p["description"] for name, p in parameters_of(function)["properties"].items()}
    assert described == {"query": "The words.", "size": "How many."}


def test_rich_types_are_described_and_arrive_as_values():
    def order(
        item: Item,
        colour: Colour,
        size: Literal["s", "l"],
        price: Annotated[float, Field(gt=0, description="In coins.")],
        tags: list[str] | None = None,
    ) -> str:
        """Order.

        Args:
            price: Not this one.
        """
        return ""

    found = build_tool(order)
    schema = found.parameters
    assert set(schema["$defs"]) == {"Item", "Colour"}
    assert schema["$defs"]["Item"]["properties"]["title"] == {"type": "string"}
    assert "title" not in schema["$defs"]["Item"]
    assert schema["properties"]["price"] == {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "In coins.",
    }
    assert schema["properties"]["size"]["enum"] == ["s", "l"]
    text = json.dumps({"item": {"title": "tea"}, "colour": "blue", "size": "s", "price": 2})
    assert found.parse(text) == {"item": Item(title="tea"), "colour": Colour.BLUE, "size": "s", "price": 2.0}


def test_a_parameter_may_have_a_name_that_pydantic_uses():
    def odd(json: str, copy: int, _hidden: int, model_config: str, title: str = "") -> str:
        """Be odd."""
        return json

    assert list(parameters_of(odd)["properties"]) == ["json", "copy", "_hidden", "model_config", "title"]
    values = {"json": "a", "copy": 1, "_hidden": 2, "model_config": "b"}
    assert build_tool(odd).parse(json.dumps(values)) == values


def test_a_signature_without_a_schema_is_refused_at_declaration():
    def many(*words: str) -> str:
        """Take many."""
        return ""

    def named(**words: str) -> str:
        """Take named ones."""
        return ""

    def untyped(word) -> str:
        """Take one."""
        return ""

    def positional(word: str, /) -> str:
        """Take one."""
        return ""

    def dangling(word: "Nowhere") -> str:  # noqa: F821
        """Take one."""
        return ""

    for function, complaint in [
        (many, "args"),
        (named, "kwargs"),
        (untyped, "no type"),
        (positional, "positional"),
        (dangling, "'Nowhere' is not defined"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            tool(function)


def search(query: str, size: int, exact: bool, words: list[str]) -> str:
    """Search.

    Args:
        query: The words.
        size: How many.
        exact: Whether to be exact.
        words: More words.
    """
    return ""


def order(prices: dict[str, float], parts: list[list[int]], note: str = "none", tip: float = 0.5) -> None:
    """Order something,
    described on two lines.

    Args:
        prices: What each costs.
        parts: How it is
            put together.
        note: For the kitchen.
        tip: More.
    """


def look() -> str:
    """Look around."""
    return ""


@pytest.mark.parametrize("function", [search, order, look])
def test_plain_schemas_equal_those_of_transformers(function):
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    ours = build_tool(function).schema["function"]
    theirs = chat.get_json_schema(function)["function"]
    assert ours["parameters"].pop("additionalProperties") is False
    for schema in ours["parameters"]["properties"].values():
        schema.pop("default", None)
    theirs.pop("return", None)
    assert ours == theirs
