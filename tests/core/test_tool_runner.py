"""agentgym.tool_runner: calls that run at the same time, are malformed, or never return."""

import threading

import pytest

from agentgym.errors import EnvTimeoutError
from agentgym.messages import assistant, tool_call
from agentgym.tool_runner import MAX_STUCK, ToolRunner
from agentgym.tool_schema import Tool, ToolError
from agentgym.tools import ToolEnv, tool


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


def calls(*pairs: tuple[str, str]):
    return [tool_call(name, text, f"id_{i}") for i, (name, text) in enumerate(pairs)]


def contents(answers) -> list[str]:
    return [message["content"] for message in answers.messages]


def step(env: ToolEnv, *pairs: tuple[str, str]) -> list[str]:
    return [message["content"] for message in env.step(assistant("", calls(*pairs)))[0]]


class Talk(ToolEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "?", {}


def test_parallel_calls_run_at_once_and_are_answered_in_order():
    meeting = threading.Barrier(3, timeout=10)

    @tool(parallel=True)
    def meet(name: str) -> str:
        """Wait for the others."""
        meeting.wait()
        return name

    @tool(parallel=True)
    async def meet_too(name: str) -> str:
        """Wait for the others."""
        meeting.wait()
        return name

    answers = ToolRunner([meet, meet_too]).run(
        calls(("meet", '{"name": "a"}'), ("meet_too", '{"name": "b"}'), ("meet", '{"name": "c"}'))
    )
    assert contents(answers) == ["a", "b", "c"]
    assert [message["tool_call_id"] for message in answers.messages] == ["id_0", "id_1", "id_2"]


def test_calls_run_one_after_the_other_where_one_is_not_parallel():
    running: list[str] = []
    seen: list[list[str]] = []

    @tool(parallel=True)
    def harmless(name: str) -> str:
        """Do no harm."""
        running.append(name)
        seen.append(list(running))
        running.remove(name)
        return name

    def careful() -> str:
        """Be alone."""
        return harmless("careful")

    answers = ToolRunner([harmless, careful]).run(
        calls(("harmless", '{"name": "a"}'), ("careful", "{}"), ("harmless", '{"name": "b"}'))
    )
    assert contents(answers) == ["a", "careful", "b"]
    assert seen == [["a"], ["careful"], ["b"]]


def test_parallel_calls_may_earn_together_and_the_surplus_is_not_run():
    class Earning(Talk):
        max_tool_calls = 4

        @tool(parallel=True, timeout=30)
        def earn(self) -> None:
            """Earn."""
            self.add_reward(coins=1.0)

    env = Earning()
    env.reset(seed=0)
    messages, reward, _, _, info = env.step(assistant("", calls(*[("earn", "{}")] * 6)))
    assert [m["content"] for m in messages] == ["ok"] * 4 + [
        "Error: not run: only 4 calls are allowed in one turn"
    ] * 2
    assert reward == 4.0
    assert info["metrics"] == {"tools/earn/calls": 4.0, "tools/not_run": 2.0}


def test_a_slow_call_among_parallel_ones_does_not_take_their_answers():
    release = threading.Event()

    @tool(parallel=True, timeout=0.05)
    def hang() -> str:
        """Hang."""
        release.wait(30)
        return "late"

    @tool(parallel=True)
    def answer() -> str:
        """Answer."""
        return "here"

    try:
        answers = ToolRunner([hang, answer]).run(calls(("hang", ""), ("answer", "")))
    finally:
        release.set()
    assert contents(answers) == ["Error: TimeoutError: no result within 0.05 seconds", "here"]


def test_the_same_id_twice_runs_the_first_call_only():
    done: list[int] = []

    def do(number: int) -> None:
        """Do."""
        done.append(number)

    twice = [tool_call("do", f'{{"number": {n}}}', "same") for n in (1, 2)]
    answers = ToolRunner([do]).run(twice)
    assert contents(answers) == [
        "ok",
        "Error: DuplicateId: an earlier call of this turn has the id 'same'; not run",
    ]
    assert (done, answers.metrics) == ([1], {"tools/do/calls": 1.0, "tools/invalid": 1.0})


def test_arguments_encoded_twice_are_read_as_what_they_mean_and_counted():
    answers = ToolRunner([double]).run(calls(("double", '"{\\"number\\": 4}"'), ("double", '"four"')))
    assert contents(answers)[0] == "8"
    assert contents(answers)[1].startswith("Error: ArgumentsError: Invalid JSON")
    assert answers.metrics == {"tools/double/calls": 2.0, "tools/double_encoded": 2.0, "tools/invalid": 1.0}


@pytest.mark.parametrize("nothing", ["", " ", "null", "{}", None])
def test_no_arguments_in_any_form_are_no_arguments(nothing):
    def count(step: int = 1) -> int:
        """Count."""
        return step

    runner = ToolRunner([count, double])
    answers = runner.run(calls(("count", nothing), ("double", nothing), ("count", '{"step": null}')))
    assert contents(answers)[0] == "1"
    assert "number: Field required" in contents(answers)[1]
    assert "step: Input should be a valid integer" in contents(answers)[2]
    assert answers.metrics["tools/invalid"] == 2.0


def test_a_tool_error_is_told_in_its_own_words():
    def refuse() -> str:
        """Refuse."""
        raise ToolError("the shop is closed")

    answers = ToolRunner([refuse]).run(calls(("refuse", "")))
    assert contents(answers) == ["Error: the shop is closed"]
    assert answers.metrics == {"tools/refuse/calls": 1.0, "tools/errors": 1.0}


def test_results_are_cut_for_every_tool():
    def talk() -> str:
        """Talk."""
        return "x" * 100

    assert contents(ToolRunner([talk], max_chars=10).run(calls(("talk", "")))) == [
        f"{'x' * 10} [cut: 90 more characters]"
    ]


def test_a_call_that_returns_too_late_changes_nothing_and_earns_nothing():
    release, returned = threading.Event(), threading.Event()

    class Late(Talk):
        @tool(timeout=0.05)
        def linger(self) -> str:
            """Take long."""
            release.wait(30)
            try:
                self.finish(1.0, success=1.0)
            finally:
                returned.set()
            return "late"

        @tool
        def wait(self) -> str:
            """Wait for it."""
            release.set()
            assert returned.wait(30)
            return "waited"

    env = Late()
    env.reset(seed=0)
    assert step(env, ("linger", "")) == ["Error: TimeoutError: no result within 0.05 seconds"]
    messages, reward, terminated, _, info = env.step(assistant("", calls(("wait", ""))))
    assert (messages[0]["content"], reward, terminated) == ("waited", 0.0, False)
    assert "success" not in info


def test_an_environment_whose_calls_never_return_is_given_up_by_name():
    release = threading.Event()

    @tool(timeout=0.01)
    def hang() -> str:
        """Hang."""
        release.wait(30)
        return ""

    runner = ToolRunner([hang])
    try:
        for _ in range(MAX_STUCK):
            runner.run(calls(("hang", "")))
        with pytest.raises(EnvTimeoutError, match="5 calls never returned, of the tools: hang"):
            runner.run(calls(("hang", "")))
    finally:
        release.set()


def test_a_tool_with_a_schema_of_its_own_takes_any_object():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    runner = ToolRunner([Tool("raw", "Raw.", schema, lambda **values: values)])
    assert runner.schemas[0]["function"]["parameters"] == schema
    answers = runner.run(calls(("raw", '{"x": 1, "y": 2}'), ("raw", "[1]"), ("raw", "{")))
    assert contents(answers)[0] == '{"x":1,"y":2}'
    assert (
        contents(answers)[1] == "Error: ArgumentsError: Input should be an object; expected raw(x: integer)"
    )
    assert contents(answers)[2].startswith("Error: ArgumentsError: Invalid JSON")
