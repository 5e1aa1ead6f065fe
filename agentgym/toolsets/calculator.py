"""Arithmetic on text: a tool that works out an expression without `eval`."""

import ast
import math
import operator
import re
from collections.abc import Callable

from agentgym.tool_runner import Toolset
from agentgym.tool_schema import ToolError
from agentgym.tools import tool

MAX_EXPRESSION = 100
"""The longest expression that is worked out, in characters."""
MAX_VALUE = 10**15
"""The largest absolute value, of the result and on the way."""

Number = int | float


class Calculator(Toolset):
    """A pocket calculator."""

    @tool(max_chars=200, parallel=True)
    def calculate(self, expression: str) -> str:
        """Work out an expression.

        Args:
            expression: Numbers, + - * / // % ** and parentheses.
        """
        try:
            return str(calculate(expression))
        except ValueError as error:
            raise ToolError(str(error)) from error


def calculate(expression: str) -> Number:
    """Return the value of an expression of numbers, + - * / // % ** and parentheses.

    A whole number comes back as an int, any other rounded to 15 significant digits. Raises ValueError for anything
    else, and for expressions or values that are too large.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_EXPRESSION}")
    if not re.fullmatch(r"[0-9.+\-*/%() ]+", expression):
        raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError("the expression is not complete or not well-formed") from error
    value = _value(tree.body)
    return int(value) if value == int(value) else float(f"{value:.15g}")


def _value(node: ast.AST) -> Number:
    """Return the value of one node of the expression."""
    match node:
        case ast.Constant(value=int() | float() as number):
            value: Number = number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            try:
                value = _OPERATORS[type(op)](_value(left), _value(right))
            except ZeroDivisionError as error:
                raise ValueError("division by zero") from error
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(operand))
        case _:
            raise ValueError(f"{type(node).__name__} is not allowed; use + - * / // % ** and parentheses")
    if not abs(value) <= MAX_VALUE:
        raise ValueError(f"a value is larger than {MAX_VALUE}")
    return value


def _power(base: Number, exponent: Number) -> Number:
    """Return a power whose size is known before it is computed."""
    if base < 0 and exponent != int(exponent):
        raise ValueError("a root of a negative number")
    if base and exponent * math.log10(abs(base)) > math.log10(MAX_VALUE) + 1:
        raise ValueError(f"a value is larger than {MAX_VALUE}")
    result: Number = base**exponent
    return result


_OPERATORS: dict[type[ast.AST], Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
