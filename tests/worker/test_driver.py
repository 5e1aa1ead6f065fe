import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from toy_envs import Adder, Relay, Scripted, Together, says

from agentgym.errors import EnvError
from agentgym.messages import Message, assistant, system, tool_call, user
from agentgym.worker.driver import AECDriver, Outcome, ParallelDriver, SingleDriver

HELLO = assistant("hello")


def act_single(step: Any, **fields: Any) -> Any:
    driver = SingleDriver(Scripted(step, **fields))
    driver.reset(1)
    return driver.act({"agent": HELLO})


def test_a_single_agent_is_asked_until_its_environment_ends() -> None:
    env = Scripted(says("more", 0.5, rewards={"half": 0.5}), says("bye", 1, over=True, success=True))
    driver = SingleDriver(env)
    state = driver.reset(7)
    assert env.seeds == [7]
    assert [(r.agent, r.messages, r.info) for r in state.requests] == [("agent", [user("begin")], {})]
    state = driver.act({"agent": HELLO})
    assert (state.over, state.requests[0].messages) == (False, [user("more")])
    assert state.outcomes == [Outcome("agent", 0.5, {"rewards": {"half": 0.5}})]
    state = driver.act({"agent": assistant("again")})
    assert (state.over, state.outcomes) == (True, [Outcome("agent", 1.0, {"success": True})])
    assert env.heard == ["hello", "again"]
    assert (driver.system_prompt("agent"), driver.tools("agent")) == ("Obey.", [])
    driver.close()
    assert env.closed == 1


def test_an_environment_with_tools_gets_the_whole_message() -> None:
    driver = SingleDriver(Adder())
    driver.reset(1)
    call = tool_call("submit", '{"answer": 2}', "c")
    state = driver.act({"agent": assistant("", [call])})
    assert state.over
    assert state.outcomes[0].reward == 1.0
    assert [schema["function"]["name"] for schema in driver.tools("agent")] == ["add", "submit"]


def test_wrappers_of_gymnasium_do_not_hide_prompt_and_tools() -> None:
    wrapped = gymnasium.wrappers.TimeLimit(Adder(), max_episode_steps=1)
    driver = SingleDriver(wrapped)
    driver.reset(1)
    state = driver.act({"agent": assistant("", [tool_call("add", '{"a": 1, "b": 1}', "c")])})
    assert state.over
    assert state.outcomes[0].truncated
    assert SingleDriver(gymnasium.wrappers.TimeLimit(Scripted(), 1)).system_prompt("agent") == "Obey."


def test_what_is_over_is_not_truncated() -> None:
    assert act_single(says(over=True, cut=True)).outcomes[0].truncated is False
    assert act_single(says(cut=True)).outcomes[0].truncated is True


def test_empty_text_and_numpy_numbers_are_fine() -> None:
    state = act_single(says("", np.float32(0.25), metrics={"n": np.int64(3)}, success=np.bool_(True)))
    assert (state.requests[0].messages, state.outcomes[0].reward) == ([], 0.25)
    assert act_single(says([user("a"), user("b")])).requests[0].messages == [user("a"), user("b")]


OBSERVATIONS: list[tuple[Any, str]] = [
    (None, "an observation is NoneType; expected text or a list of messages"),
    (5, "an observation is int"),
    (np.zeros(3), "an observation is ndarray"),
    ({"role": "user", "content": "x"}, "an observation is dict"),
    (["hello"], "an observation holds 'hello'; expected {'role': ..., 'content': text}"),
    ([{"role": "user"}], "an observation holds {'role': 'user'}"),
    ([{"role": "user", "content": ["x"]}], "an observation holds"),
    ([{"content": "x"}], "an observation holds a message of role None; expected user or tool"),
    ([assistant("I am you")], "an observation holds a message of role 'assistant'"),
    ("\ud800", "an observation is not valid Unicode text"),
    ([user("\ud800")], "an observation is not valid Unicode text"),
]
INFOS: list[tuple[Any, str]] = [
    (None, "info is NoneType; expected a dictionary"),
    ({"success": "yes"}, "info['success'] is 'yes'; expected a number from 0 to 1"),
    ({"success": None}, "info['success'] is None"),
    ({"rewards": [1.0]}, "info['rewards'] is [1.0]; expected a dictionary of names and numbers"),
    ({"rewards": {"x": "1"}}, "info['rewards'] is {'x': '1'}"),
    ({"rewards": None}, "info['rewards'] is None"),
    ({"rewards": {"x": 1.0}}, "info['rewards'] = {'x': 1.0} does not sum to the reward 0.0"),
    ({"metrics": 3}, "info['metrics'] is 3"),
    ({"metrics": {5: 1.0}}, "info['metrics'] is {5: 1.0}"),
    ({"metrics": {"x": float("nan")}}, "info['metrics'] is {'x': nan}"),
]
REWARDS: list[tuple[Any, str]] = [
    (None, "the reward is None; expected a finite number"),
    ("1", "the reward is '1'"),
    (float("nan"), "the reward is nan"),
    (float("inf"), "the reward is inf"),
    ([1.0, 2.0], "the reward is [1.0, 2.0]"),
]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, "step returned None; expected (observation, reward, terminated, truncated, info)"),
        (("x", 0.0, False, {}), "step returned ('x', 0.0, False, {}); expected"),
        (["x", 0.0, False, False, {}], "step returned ['x'"),
        *((("x", 0.0, False, False, info), message) for info, message in INFOS),
        *((("x", reward, False, False, {}), message) for reward, message in REWARDS),
        *(((text, 0.0, False, False, {}), message) for text, message in OBSERVATIONS),
    ],
)
def test_what_a_single_agent_environment_returns_wrongly_is_named(step: Any, message: str) -> None:
    with pytest.raises(EnvError, match=re.escape(message)):
        act_single(step)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("begin", "reset returned 'begin'; expected (observation, info)"),
        (("begin", {}, 1), "reset returned ('begin', {}, 1)"),
        (None, "reset returned None"),
        *((("begin", info), message) for info, message in INFOS if "sum" not in message),
        *(((text, {}), message) for text, message in OBSERVATIONS),
    ],
)
def test_what_reset_returns_wrongly_is_named(first: Any, message: str) -> None:
    with pytest.raises(EnvError, match=re.escape(message)):
        SingleDriver(Scripted(first=first)).reset(1)


def test_only_reset_may_speak_as_the_system_and_tools_may_answer() -> None:
    state = SingleDriver(Scripted(first=([system("rules"), user("go")], {}))).reset(1)
    assert state.requests[0].messages == [system("rules"), user("go")]
    answer: Message = {"role": "tool", "content": "3", "tool_call_id": "c", "name": "add"}
    assert act_single(says([answer])).requests[0].messages == [answer]


def test_agents_by_turns_get_what_happened_since_they_acted() -> None:
    env = Relay(rounds=2, prompt="You are")
    driver = AECDriver(env)
    state = driver.reset(1)
    heard, rewards = [], []
    while not state.over:
        (request,) = state.requests
        heard.append((request.agent, request.messages[0]["content"], list(request.info["action_mask"])))
        state = driver.act({request.agent: assistant(f"{request.agent} speaks")})
        rewards += [(outcome.agent, outcome.reward) for outcome in state.outcomes]
    assert heard == [
        ("a", "begin", [1]),
        ("b", "a speaks", [1]),
        ("a", "b speaks", [1]),
        ("b", "a speaks", [1]),
    ]
    # b gets 1 before it ever acted; at the end both are stepped out with what they still have to get.
    assert rewards == [("b", 1.0), ("a", 1.0), ("b", 1.0), ("a", 1.0), ("b", 0.0)]
    assert env.agents == []
    assert driver.system_prompt("b") == "You are b"


@pytest.mark.parametrize("end", ["termination", "truncation", "both"])
def test_the_end_by_turns_says_whether_it_was_cut(end: str) -> None:
    driver = AECDriver(Relay(rounds=1, end=end))
    state = driver.reset(1)
    while not state.over:
        state = driver.act({state.requests[0].agent: HELLO})
    assert [outcome.truncated for outcome in state.outcomes] == [end == "truncation"] * 2


class BadRelay(Relay):
    """Returns something else from `last`."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def last(self, observe: bool = True) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "last() returned None; expected (observation, reward, terminated, truncated, info)"),
        (("x", 0.0, False, {}), "last() returned ('x', 0.0, False, {})"),
        (
            ({"text": "x"}, 0.0, False, False, {}),
            "the observation of 'a' has keys ['text']; expected 'messages'",
        ),
        (({"messages": 3}, 0.0, False, False, {}), "an observation is int"),
        (({"messages": []}, None, False, False, {}), "the reward is None"),
        (({"messages": []}, 0.0, False, False, None), "info is NoneType"),
    ],
)
def test_what_an_environment_by_turns_returns_wrongly_is_named(result: Any, message: str) -> None:
    with pytest.raises(EnvError, match=re.escape(message)):
        AECDriver(BadRelay(result)).reset(1)


def test_agents_at_once_are_asked_together() -> None:
    env = Together(rounds=2)
    driver = ParallelDriver(env)
    state = driver.reset(1)
    assert [request.agent for request in state.requests] == ["a", "b"]
    state = driver.act({"a": assistant("x"), "b": assistant("y")})
    assert env.heard == [{"a": "x", "b": "y"}]
    assert [(o.agent, o.reward) for o in state.outcomes] == [("a", 0.0), ("b", 1.0)]
    state = driver.act({"a": assistant("x"), "b": assistant("y")})
    assert state.over
    assert [dict(o.info) for o in state.outcomes] == [{"success": 1.0}] * 2


SEEN = {"messages": [user("x")]}
BOTH = {"a": SEEN, "b": SEEN}


def test_an_agent_without_a_reward_got_nothing_and_its_info_counts() -> None:
    step = (BOTH, {"a": 1.0}, {}, {"b": True}, {"b": {"metrics": {"n": 1.0}}})
    driver = ParallelDriver(Together(step))
    driver.reset(1)
    state = driver.act({"a": HELLO, "b": HELLO})
    assert state.outcomes == [
        Outcome("a", 1.0, {}),
        Outcome("b", 0.0, {"metrics": {"n": 1.0}}, truncated=True),
    ]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, "step returned None; expected five dictionaries by agent"),
        ((BOTH, {}, {}, {}), "expected five dictionaries by agent"),
        ((BOTH, 1.0, {}, {}, {}), "step returned 1.0 in its tuple; expected five dictionaries by agent"),
        ((BOTH, {}, False, {}, {}), "step returned False in its tuple"),
        ((BOTH, {"c": 1.0}, {}, {}, {}), "step gave rewards to ['c'], who took no part; acting: ['a', 'b']"),
        (({"a": SEEN}, {}, {}, {}, {}), "no observation for ['b'], who must answer next"),
        ((BOTH, {"a": None}, {}, {}, {}), "the reward is None"),
        ((BOTH, {}, {}, {}, {"a": 3}), "info is int"),
        (({"a": {}, "b": SEEN}, {}, {}, {}, {}), "the observation of 'a' has keys []; expected 'messages'"),
    ],
)
def test_what_an_environment_of_many_returns_wrongly_is_named(step: Any, message: str) -> None:
    driver = ParallelDriver(Together(step))
    driver.reset(1)
    with pytest.raises(EnvError, match=re.escape(message)):
        driver.act({"a": HELLO, "b": HELLO})


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (BOTH, "expected (observations, infos)"),
        ((BOTH, 3), "reset returned 3 in its tuple; expected dictionaries by agent"),
        (([SEEN, SEEN], {}), "reset returned [{'messages'"),
        (({"a": SEEN}, {}), "no observation for ['b']"),
    ],
)
def test_what_reset_of_many_returns_wrongly_is_named(first: Any, message: str) -> None:
    with pytest.raises(EnvError, match=re.escape(message)):
        ParallelDriver(Together(first=first)).reset(1)
