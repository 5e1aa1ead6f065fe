"""What `agentgym list` prints: environments with one line each on what they are."""

import ast
import importlib.util
from collections.abc import Iterable

from agentgym.registry import EnvSpec


def table(specs: Iterable[EnvSpec]) -> list[str]:
    """Return a line for each environment: id, kind, isolation, scripted policies, what it is."""
    rows = [
        (one.id, one.kind, one.isolation, ",".join(one.scripted) or "-", describe(one.entry_point))
        for one in specs
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def describe(entry_point: str) -> str:
    """Return the first line of the docstring of "module:Class", read from the source: nothing is imported for it.

    Empty where there is none, and for functions: they make many environments.
    """
    module, _, attribute = entry_point.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return ""
    with open(found.origin, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return (ast.get_docstring(node) or "").split("\n")[0]
    return ""
