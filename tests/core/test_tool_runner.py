"""agentgym.tool_runner: where tools come from, what they may know, and calls that run at the same time."""

import enum
import threading

import pytest
from pydantic import BaseModel

from agentgym.env import ParallelEnv
from agentgym.errors import ConfigError, EnvError, EnvTimeoutError
from agentgym.messages import assistant, tool_call, user
from agentgym.tool_runner import MAX_STUCK, ToolRunner, Toolset
from agentgym.tool_schema import Context, Tool, ToolError
from agentgym.tools import ToolEnv, tool


class Size(enum.Enum):
    SMALL = "small"


class Item(BaseModel):
    title: str


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


class Counter(Toolset):
    """A tool with a state that lives for one episode."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.log: list[str] = []

    def open(self, context: Context) -> None:
        self.value = self.start
        self.log.append(f"open {context.seed}")

    def close(self) -> None:
        self.log.append("close")

    @tool
    def count(self) -> int:
        """Count one more."""
        self.value += 1
        return self.value


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


def test_tools_come_from_functions_toolsets_and_methods_in_this_order():
    class Mixed(Talk):
        toolsets = (double, Counter())

        @tool
        def own(self) -> str:
            """Be the environment's own."""
            return "own"

    env = Mixed()
    env.reset(seed=0)
    assert [schema["function"]["name"] for schema in env.tools] == ["double", "count", "own"]
    assert step(env, ("double", '{"number": 4}'), ("count", ""), ("own", "{}")) == ["8", "1", "own"]


def test_rich_arguments_reach_a_plain_function_as_values():
    def order(item: Item, size: Size = Size.SMALL, note: str | None = None) -> str:
        """Order."""
        return f"{item.title} {size.name} {note}"

    runner = ToolRunner([order])
    answers = runner.run(calls(("order", '{"item": {"title": "tea"}, "note": "hot"}')))
    assert contents(answers) == ["tea SMALL hot"]


def test_two_tools_of_the_same_name_are_refused():
    class Twice(Talk):
        toolsets = (double,)

        @tool(max_chars=3)
        def double(self) -> str:
            """Double."""
            return ""

    with pytest.raises(ConfigError, match=r"two tools are called 'double': double and .*Twice\.double"):
        Twice().reset(seed=0)


@pytest.mark.parametrize("source", [object(), Counter, 3])
def test_a_source_without_tools_is_refused(source):
    with pytest.raises(ConfigError, match="has no tools"):
        ToolRunner([source])


def test_a_function_without_a_schema_is_refused_where_the_class_offers_it():
    def many(*words: str) -> str:
        """Take many."""
        return ""

    with pytest.raises(ConfigError, match="args"):

        class Bad(Talk):
            toolsets = (many,)


def test_a_tool_sees_the_state_of_its_episode_and_the_model_does_not():
    """verifiers#220: a tool needs what the rollout knows."""
    seen: list[Context] = []

    def remember(word: str, context: Context) -> str:
        """Remember a word.

        Args:
            word: Any.
            context: Never shown.
        """
        seen.append(context)
        context.scratch.setdefault("words", []).append(word)
        return ",".join(context.scratch["words"])

    class Remember(Talk):
        toolsets = (remember,)

        @tool
        async def recall(self, context: Context) -> list[str]:
            """Recall the words."""
            return context.scratch["words"]

    env = Remember()
    env.reset(seed=7)
    parameters = env.tools[0]["function"]["parameters"]
    assert parameters["properties"] == {"word": {"type": "string", "description": "Any."}}
    assert step(env, ("remember", '{"word": "a"}'), ("remember", '{"word": "b"}')) == ["a", "a,b"]
    assert step(env, ("recall", "")) == ['["a","b"]']
    assert (seen[0].env, seen[0].agent, seen[0].seed) == (env, "agent", 7)
    refused = step(env, ("remember", '{"word": "c", "context": {}}'))[0]
    assert "context: Extra inputs are not permitted" in refused
    env.reset(seed=8)
    assert step(env, ("remember", '{"word": "c"}')) == ["c"]


def test_a_counter_counts_its_own_episode_while_another_one_runs():
    """inspect_ai#186: stateful tools across one conversation."""

    class Counting(Talk):
        toolsets = (Counter(),)

    first, second = Counting(), Counting()
    first.reset(seed=0)
    assert step(first, ("count", "")) == ["1"]
    second.reset(seed=0)
    counted = [(step(first, ("count", "")), step(second, ("count", ""))) for _ in range(3)]
    assert counted == [(["2"], ["1"]), (["3"], ["2"]), (["4"], ["3"])]
    first.reset(seed=1)
    assert (step(first, ("count", "")), step(second, ("count", ""))) == (["1"], ["4"])


def test_toolsets_of_an_instance_are_used_as_they_are():
    class Given(Talk):
        def __init__(self) -> None:
            self.counter = Counter(10)
            self.toolsets = [self.counter]

    env = Given()
    env.reset(seed=0)
    assert step(env, ("count", "")) == ["11"]
    assert env.counter.value == 11


class Ending(Talk):
    def __init__(self) -> None:
        self.counter = Counter()
        self.toolsets = [self.counter]

    @tool
    def submit(self) -> str:
        """End."""
        self.finish(1.0)
        return "done"

    @tool
    def break_down(self) -> str:
        """Break."""
        raise EnvError("broken")


def test_toolsets_are_closed_by_the_step_that_ends_the_episode():
    env = Ending()
    env.reset(seed=1)
    step(env, ("count", ""))
    assert env.counter.log == ["open 1"]
    step(env, ("submit", ""), ("count", ""))
    assert env.counter.log == ["open 1", "close"]
    env.close()
    assert env.counter.log == ["open 1", "close"]


def test_toolsets_are_closed_by_a_step_that_fails():
    env = Ending()
    env.reset(seed=1)
    with pytest.raises(EnvError, match="broken"):
        step(env, ("break_down", ""))
    assert env.counter.log == ["open 1", "close"]


def test_toolsets_of_a_play_that_was_cut_are_closed_by_the_next_reset_or_by_close():
    env = Ending()
    env.reset(seed=1)
    env.reset(seed=2)
    assert env.counter.log == ["open 1", "close", "open 2"]
    env.close()
    env.close()
    assert env.counter.log == ["open 1", "close", "open 2", "close"]


def test_a_toolset_that_cannot_open_closes_those_before_it():
    class Broken(Toolset):
        def open(self, context: Context) -> None:
            raise EnvError("no server")

    counter = Counter()
    runner = ToolRunner([counter, Broken()])
    with pytest.raises(EnvError, match="no server"):
        runner.open(3)
    assert counter.log == ["open 3", "close"]


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


class Market(ParallelEnv):
    """Two agents with tools of their own, at once; the scratch is common to them."""

    metadata = {"name": "market", "render_modes": []}  # noqa: RUF012
    possible_agents = ["buyer", "seller"]  # noqa: RUF012

    def __init__(self) -> None:
        self.price = 0
        own = {"buyer": [self.look], "seller": [self.look, self.set_price, Counter()]}
        self.runners = {agent: ToolRunner(tools, env=self, agent=agent) for agent, tools in own.items()}

    def look(self, context: Context) -> str:
        """Look at the price."""
        return f"{context.agent} sees {self.price}"

    def set_price(self, price: int) -> None:
        """Set the price."""
        self.price = price

    def tools(self, agent):
        return self.runners[agent].schemas

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        for runner in self.runners.values():
            runner.open(seed)
        return {a: {"messages": [user("?")]} for a in self.agents}, {a: {} for a in self.agents}

    def step(self, actions):
        answers = {a: self.runners[a].run(action.get("tool_calls", [])) for a, action in actions.items()}
        return (
            {a: {"messages": answer.messages} for a, answer in answers.items()},
            dict.fromkeys(actions, 0.0),
            dict.fromkeys(actions, False),
            dict.fromkeys(actions, False),
            {a: {"metrics": answer.metrics} for a, answer in answers.items()},
        )


def test_agents_of_one_environment_have_tools_of_their_own():
    env = Market()
    env.reset(seed=0)
    names = {a: [schema["function"]["name"] for schema in env.tools(a)] for a in env.agents}
    assert names == {"buyer": ["look"], "seller": ["look", "set_price", "count"]}
    seen, _, _, _, infos = env.step(
        {
            "seller": assistant("", calls(("set_price", '{"price": 5}'), ("look", ""), ("count", ""))),
            "buyer": assistant("", calls(("look", ""), ("set_price", '{"price": 1}'))),
        }
    )
    assert [m["content"] for m in seen["seller"]["messages"]] == ["ok", "seller sees 5", "1"]
    assert seen["buyer"]["messages"][0]["content"] == "buyer sees 5"
    assert seen["buyer"]["messages"][1]["content"].startswith("Error: UnknownTool")
    assert infos["buyer"]["metrics"] == {"tools/look/calls": 1.0, "tools/invalid": 1.0}
