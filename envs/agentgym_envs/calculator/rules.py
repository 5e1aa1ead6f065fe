"""The rules: making a question, and arithmetic on text without `eval`."""

import ast
import operator
import re
from collections.abc import Callable

import numpy as np

MAX_EXPRESSION = 100
"""The longest expression that is worked out, in characters."""
MAX_VALUE = 10**15
"""The largest absolute value, of the result and on the way."""

_OPERATORS: dict[type[ast.AST], Callable[..., int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def make_question(rng: np.random.Generator, *, max_number: int, max_terms: int) -> str:
    """Draw an expression of two to `max_terms` numbers, joined by +, - and *."""
    text = str(rng.integers(1, max_number + 1))
    for _ in range(int(rng.integers(1, max_terms))):
        text += f"{'+-*'[int(rng.integers(3))]}{rng.integers(1, max_number + 1)}"
    return text


def calculate(expression: str) -> int | float:
    """Return the value of an expression of integers, + - * / // % and parentheses.

    Raises ValueError for anything else, and for expressions or values that are too large.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_EXPRESSION}")
    if not re.fullmatch(r"[0-9+\-*/%() ]+", expression):
        raise ValueError("only integers, + - * / // % and parentheses are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError("the expression is not complete or not well-formed") from error
    value = _value(tree.body)
    return int(value) if value == int(value) else value


def _value(node: ast.AST) -> int | float:
    """Return the value of one node of the expression."""
    match node:
        case ast.Constant(value=int(number)):
            value: int | float = number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            try:
                value = _OPERATORS[type(op)](_value(left), _value(right))
            except ZeroDivisionError as error:
                raise ValueError("division by zero") from error
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(operand))
        case _:
            raise ValueError(f"{type(node).__name__} is not allowed; use + - * / // % and parentheses")
    if abs(value) > MAX_VALUE:
        raise ValueError(f"a value is larger than {MAX_VALUE}")
    return value
