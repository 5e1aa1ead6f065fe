"""agentgym.tools: calls, their answers, and every way in which a call goes wrong."""

import asyncio
import enum
import json
import textwrap
import threading
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

import agentgym.tools
from agentgym.errors import EnvError
from agentgym.messages import assistant, tool_call
from agentgym.tool_runner import marked_tools
from agentgym.tools import ToolEnv, tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Shop(ToolEnv):
    """An environment with a tool for every kind of trouble."""

    max_tool_calls = 3

    def __init__(self) -> None:
        self.log: list[str] = []
        self.release = threading.Event()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "What does tea cost?", {}

    @tool
    def look_up(self, item: str, limit: int = 3) -> str:
        """Look up a price.

        Args:
            item: What to look up,
                on one line.
            limit: How many.
        """
        self.log.append(item)
        return f"{item} {limit}"

    @tool
    def fail(self) -> str:
        """Fail."""
        raise KeyError("tea")

    @tool
    def break_down(self) -> str:
        """Break the environment."""
        raise EnvError("the database is gone")

    @tool(timeout=0.05)
    def hang(self) -> str:
        """Never return."""
        self.release.wait(30)
        return "late"

    @tool(max_chars=5)
    def talk(self) -> str:
        """Say too much."""
        return "abcdefghij"

    @tool
    async def wait(self) -> dict[str, int]:
        """Take its time."""
        await asyncio.sleep(0)
        return {"tea": 3}

    @tool(timeout=30)
    def submit(self, price: int) -> None:
        """Give the answer."""
        self.finish(1.0 if price == 3 else 0.0, success=float(price == 3), style=-0.25)


@pytest.fixture
def shop():
    env = Shop()
    env.reset(seed=0)
    yield env
    env.release.set()


def calls(*pairs: tuple[str, str]):
    return assistant("", [tool_call(name, text, f"id_{i}") for i, (name, text) in enumerate(pairs)])


def only_answer(env: ToolEnv, name: str, arguments: str) -> tuple[str, dict[str, float]]:
    messages, _, _, _, info = env.step(calls((name, arguments)))
    assert len(messages) == 1
    return messages[0]["content"], info["metrics"]


def test_calls_are_run_in_order_and_answered_by_id(shop):
    messages, reward, terminated, truncated, info = shop.step(
        calls(("look_up", '{"item": "tea"}'), ("look_up", '{"item": "milk", "limit": 1}'))
    )
    assert messages == [
        {"role": "tool", "content": "tea 3", "tool_call_id": "id_0", "name": "look_up"},
        {"role": "tool", "content": "milk 1", "tool_call_id": "id_1", "name": "look_up"},
    ]
    assert shop.log == ["tea", "milk"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"rewards": {}, "metrics": {"tools/look_up/calls": 2.0}}


def test_an_unknown_tool_is_answered_with_the_tools_there_are(shop):
    """verl#4198: a name that the model made up raised KeyError."""
    content, metrics = only_answer(shop, "buy", "{}")
    assert content.startswith("Error: UnknownTool: there is no tool 'buy'")
    assert "look_up" in content
    assert metrics == {"tools/invalid": 1.0}


@pytest.mark.parametrize("text", ['{"item": ', "tea", "[1]", "null", '{"item": "tea"} {}'])
def test_malformed_arguments_are_answered_with_what_was_expected(shop, text):
    content, metrics = only_answer(shop, "look_up", text)
    assert content.startswith("Error: ArgumentsError: ")
    assert content.endswith("expected look_up(item: string, limit?: integer)")
    assert metrics == {"tools/look_up/calls": 1.0, "tools/invalid": 1.0}
    assert shop.log == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", "item: Field required"),
        ('{"item": "tea", "size": 1}', "size: Extra inputs are not permitted"),
        ('{"item": "tea", "limit": "many"}', "limit: Input should be a valid integer"),
        ('{"item": 3}', "item: Input should be a valid string"),
    ],
)
def test_wrong_arguments_are_named(shop, text, found):
    content, metrics = only_answer(shop, "look_up", text)
    assert found in content
    assert metrics["tools/invalid"] == 1.0


def test_an_exception_in_a_tool_is_told_to_the_model(shop):
    content, metrics = only_answer(shop, "fail", "{}")
    assert content == "Error: KeyError: 'tea'"
    assert metrics == {"tools/fail/calls": 1.0, "tools/errors": 1.0}


def test_an_env_error_goes_up(shop):
    with pytest.raises(EnvError, match="the database is gone"):
        shop.step(calls(("break_down", "{}")))


def test_a_tool_that_hangs_is_left_behind(shop):
    content, metrics = only_answer(shop, "hang", "")
    assert content == "Error: TimeoutError: no result within 0.05 seconds"
    assert metrics == {"tools/hang/calls": 1.0, "tools/errors": 1.0}


def test_a_long_result_is_cut_visibly(shop):
    assert only_answer(shop, "talk", "{}")[0] == "abcde [cut: 5 more characters]"


def test_an_async_tool_is_run_even_inside_an_event_loop(shop):
    async def step():
        return only_answer(shop, "wait", "{}")[0]

    assert only_answer(shop, "wait", "{}")[0] == '{"tea":3}'
    assert asyncio.run(step()) == '{"tea":3}'


def test_calls_beyond_the_limit_are_answered_as_not_run(shop):
    messages, _, _, _, info = shop.step(calls(*[("look_up", '{"item": "tea"}')] * 5))
    assert [m["tool_call_id"] for m in messages] == [f"id_{i}" for i in range(5)]
    assert [m["content"] for m in messages[3:]] == [
        "Error: not run: only 3 calls are allowed in one turn"
    ] * 2
    assert info["metrics"] == {"tools/look_up/calls": 3.0, "tools/not_run": 2.0}
    assert len(shop.log) == 3


def test_finish_ends_the_episode_and_names_the_rewards(shop):
    messages, reward, terminated, truncated, info = shop.step(
        calls(("submit", '{"price": 3}'), ("look_up", '{"item": "tea"}'))
    )
    assert [m["content"] for m in messages] == ["ok", "Error: not run: the episode has ended"]
    assert (reward, terminated, truncated) == (0.75, True, False)
    assert info["rewards"] == {"success": 1.0, "style": -0.25}
    assert info["success"] == 1.0
    assert shop.log == []


def test_rewards_and_counters_start_anew_with_each_step(shop):
    shop.step(calls(("submit", '{"price": 3}')))
    _, reward, terminated, _, info = shop.step(calls(("look_up", '{"item": "tea"}')))
    assert (reward, terminated) == (0.0, False)
    assert info == {"rewards": {}, "metrics": {"tools/look_up/calls": 1.0}}


@pytest.mark.parametrize("action", ["just text", assistant("just text")])
def test_a_turn_without_a_call_goes_to_on_text(shop, action):
    messages, reward, terminated, _, _ = shop.step(action)
    assert messages[0]["role"] == "user"
    assert "look_up" in messages[0]["content"]
    assert (reward, terminated) == (0.0, False)


def test_on_text_may_end_the_episode_and_say_nothing():
    class Talk(ToolEnv):
        def on_text(self, text):
            self.finish(0.5, success=1.0)

    env = Talk()
    env.reset(seed=0)
    messages, reward, terminated, _, info = env.step("hello")
    assert (messages, reward, terminated, info["success"]) == ([], 0.5, True, 1.0)


def test_tools_keep_their_state_per_environment():
    first, second = Shop(), Shop()
    for env in (first, second):
        env.reset(seed=0)
    first.step(calls(("look_up", '{"item": "tea"}')))
    assert (first.log, second.log) == (["tea"], [])


def test_tools_are_inherited_in_the_order_of_their_declaration():
    class Bigger(Shop):
        @tool
        def more(self) -> str:
            """Give more."""
            return "more"

    names = [found["function"]["name"] for found in Bigger().tools]
    assert names == ["look_up", "fail", "break_down", "hang", "talk", "wait", "submit", "more"]
    assert len(Shop().tools) == 7


def test_gymnasium_accepts_an_environment_with_tools():
    class Till(ToolEnv):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "?", {}

        @tool
        def pay(self, coins: int, colour: Colour = Colour.RED, note: str | None = None) -> str:
            """Pay."""
            self.add_reward(coins=float(coins))
            return colour.value

    with pytest.warns(UserWarning, match="not having a spec"):
        check_env(Till())


def test_sampled_actions_are_valid_calls(shop):
    space = shop.action_space
    space.seed(0)
    tools = {found.name: found for found in marked_tools(shop)}
    for _ in range(60):
        action = space.sample()
        assert action in space
        for call in action.get("tool_calls", []):
            tools[call["function"]["name"]].parse(call["function"]["arguments"])


def test_the_example_of_the_module_plays():
    names: dict[str, Any] = {}
    exec(textwrap.dedent(agentgym.tools.__doc__.split("\n\n", 1)[1].split("\n\nThe model reads")[0]), names)
    env = names["Shop"]()
    question, _ = env.reset(seed=3)
    assert question == "What does tea cost?"
    assert [schema["function"]["name"] for schema in env.tools] == [
        "convert",
        "calculate",
        "look_up",
        "submit",
    ]
    content, _ = only_answer(env, "look_up", '{"item": "tea"}')
    price = json.dumps({"amount": int(content.split()[1]), "currency": "USD"})
    euros = only_answer(env, "convert", price)[0]
    assert env.step(calls(("submit", f'{{"euros": {euros}}}')))[1:3] == (1.0, True)
