"""agentgym.spaces."""

import json
import pickle

import gymnasium
import numpy as np
import pytest

from agentgym.messages import assistant, system, tool_call, tool_result, user
from agentgym.spaces import AssistantMessage, Messages, Text, agent_observation_space

TOOL = {
    "type": "function",
    "function": {
        "name": "pay",
        "description": "Pay.",
        "parameters": {
            "type": "object",
            "properties": {
                "coins": {"type": "integer", "minimum": 1, "maximum": 3},
                "rate": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                "kind": {"enum": ["a", "b"]},
                "fixed": {"const": 4},
                "flag": {"type": "boolean"},
                "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
                "words": {"type": "array", "items": {"type": "string", "minLength": 2}},
                "deep": {"$ref": "#/$defs/Deep"},
            },
            "required": ["coins", "rate", "kind", "fixed", "flag", "note", "words", "deep"],
            "$defs": {"Deep": {"type": "object", "properties": {"x": {"type": "integer"}}}},
        },
    },
}
SPACES = [
    Text(),
    Text(5),
    Text(choices=["a", "b"]),
    Messages(),
    Messages(text=True),
    AssistantMessage(),
    AssistantMessage([TOOL]),
    agent_observation_space(),
    agent_observation_space(mask_size=3),
]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_samples_belong_to_the_space_and_repeat_with_the_seed(space):
    space.seed(3)
    first = [space.sample() for _ in range(20)]
    assert all(sample in space for sample in first)
    space.seed(3)
    second = [space.sample() for _ in range(20)]
    assert gymnasium.utils.env_checker.data_equivalence(first, second)
    assert len({str(sample) for sample in first}) > 1


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_spaces_survive_pickling_and_cannot_be_flattened(space):
    assert pickle.loads(pickle.dumps(space)) == space
    assert not space.is_np_flattenable


def test_spaces_are_equal_by_value():
    assert Text(5) == Text(5)
    assert Text(5) != Text(6)
    assert Text(choices=["a"]) != Text()
    assert AssistantMessage([TOOL]) == AssistantMessage([dict(TOOL)])
    assert AssistantMessage([TOOL]) != AssistantMessage()
    assert Messages() != Messages(text=True)
    assert Messages() != Text()


def test_text_is_any_unicode_string_up_to_its_length():
    assert "日本語 🎲\n" in Text()
    assert "" in Text()
    assert "abcdef" not in Text(5)
    assert 3 not in Text()
    assert "something else" in Text(choices=["a"])


def test_a_mask_says_which_choices_are_drawn():
    space = Text(choices=["a", "b", "c"], seed=0)
    assert {space.sample(np.array([0, 1, 0], dtype=np.int8)) for _ in range(20)} == {"b"}
    assert space.sample(np.zeros(3, dtype=np.int8)) in space


def test_messages_are_those_that_an_environment_may_send():
    call = tool_call("pay", "{}", "id")
    assert [system("s"), user("u"), tool_result("t", call)] in Messages()
    assert [] in Messages()
    assert [assistant("a")] not in Messages()
    assert [{"role": "user"}] not in Messages()
    assert "text" not in Messages()
    assert "text" in Messages(text=True)


def test_an_answer_is_a_text_or_a_well_formed_message():
    space = AssistantMessage([TOOL])
    assert "text" in space
    assert assistant("text") in space
    assert assistant("", [tool_call("unknown", "not json", "id")]) in space
    assert user("text") not in space
    assert {"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]} not in space
    assert {"role": "assistant", "content": None} not in space


def test_sampled_arguments_fit_the_schema():
    space = AssistantMessage([TOOL], seed=0)
    drawn = [call for _ in range(100) for call in space.sample().get("tool_calls", [])]
    assert len(drawn) > 50
    for call in drawn:
        values = json.loads(call["function"]["arguments"])
        assert values["coins"] in (1, 2, 3)
        assert 0 < values["rate"] < 1
        assert values["kind"] in ("a", "b")
        assert values["fixed"] == 4
        assert isinstance(values["flag"], bool)
        assert values["note"] is None or len(values["note"]) <= 3
        assert all(len(word) >= 2 for word in values["words"])
        assert set(values["deep"]) <= {"x"}


def test_vector_environments_of_text_work():
    class Echo(gymnasium.Env):
        observation_space = Text()
        action_space = Text()

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "start", {}

        def step(self, action):
            return f"{action}!", 0.0, False, False, {}

    env = gymnasium.vector.SyncVectorEnv([Echo, Echo])
    assert list(env.reset()[0]) == ["start", "start"]
    assert list(env.step(("a", "b"))[0]) == ["a!", "b!"]
