"""agentgym.toolsets.calculator: arithmetic is right, and nothing else is worked out."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.messages import tool_call
from agentgym.tool_runner import ToolRunner
from agentgym.toolsets.calculator import MAX_VALUE, Calculator, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("-4 - -5", 1),
        ("7/2", 3.5),
        ("8/2", 4),
        ("7//2", 3),
        ("7%4", 3),
        (" 5 ", 5),
        ("0.1+0.2", 0.3),
        ("1.50", 1.5),
        ("2**10", 1024),
        ("-2**2", -4),
        ("(-2)**3", -8),
        ("2**-1", 0.5),
        ("2**0.5", 1.4142135623731),
        ("0**2", 0),
    ],
)
def test_arithmetic_is_right(expression, value):
    result = calculate(expression)
    assert result == value or result == pytest.approx(value, rel=1e-13)
    assert type(result) is type(value)


REFUSED = ["", "1+", "__import__('os')", "2**99", "1/0", "1%0", "9" * 101, "(" * 60 + "1" + ")" * 40, "1(2)"]
REFUSED += [
    "()",
    "007",
    "9" * 20,
    "999999999*999999999",
    "a",
    "1\n2",
    "9**9**9",
    "9**99999999999999",
    "(-8)**0.5",
]
REFUSED += ["0**-1", "1.2.3", "1e9", "(1,2)", "...", "2**(9**9)", "0.0000001**-9999"]


@pytest.mark.parametrize("expression", REFUSED)
def test_everything_else_is_refused_with_a_reason(expression):
    with pytest.raises(ValueError, match=r"\w"):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%() ", max_size=40))
def test_no_text_makes_the_calculator_fail_otherwise(expression):
    with contextlib.suppress(ValueError):
        assert abs(calculate(expression)) <= MAX_VALUE


def test_the_model_reads_the_value_or_what_was_wrong():
    runner = ToolRunner([Calculator()])
    calls = [tool_call("calculate", f'{{"expression": "{text}"}}', text) for text in ("2*3", "2/0")]
    answers = runner.run(calls)
    assert [m["content"] for m in answers.messages] == ["6", "Error: division by zero"]
    assert answers.metrics == {"tools/calculate/calls": 2.0, "tools/errors": 1.0}
