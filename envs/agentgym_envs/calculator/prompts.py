"""Every text the agent reads, but for the tools' descriptions, which stand at the tools."""

import re

SYSTEM = "Use calculate, then submit the answer."
NO_CALL = "Call a tool."
RIGHT = "right"
WRONG = "wrong"


def question(expression: str) -> str:
    """Return the question."""
    return f"{expression}=?"


def read_question(text: str) -> str | None:
    """Return the expression of a question."""
    found = re.fullmatch(r"(.+)=\?", text)
    return found[1] if found else None
