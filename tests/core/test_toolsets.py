"""agentgym.tool_runner: where tools come from, what they may know, and how long their state lives."""

import enum

import pytest
from pydantic import BaseModel

from agentgym.env import ParallelEnv
from agentgym.errors import ConfigError, EnvError
from agentgym.messages import assistant, tool_call, user
from agentgym.tool_runner import ToolRunner, Toolset
from agentgym.tool_schema import Context
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
