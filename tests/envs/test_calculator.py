"""agentgym/Calculator-v0."""

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from plays import Says, play_single

from agentgym.messages import assistant, tool_call
from agentgym.policy.scripted import load_scripted
from agentgym.registry import make, spec
from agentgym_envs import register_envs
from agentgym_envs.calculator.env import Calculator
from agentgym_envs.calculator.policies import CalculatorExpert, NoisyCalculator

register_envs()
ENV_ID = "agentgym/Calculator-v0"


def test_gymnasium_accepts_it():
    check_env(gymnasium.make(ENV_ID).unwrapped)


def test_the_expert_is_always_right():
    for seed in range(200):
        seat = play_single(Calculator(), CalculatorExpert(seed=0), seed, max_turns=4)
        assert seat.success == 1.0
        assert seat.parts == {"success": 1.0}
        assert seat.metrics == {"tools/calculate/calls": 1.0, "tools/submit/calls": 1.0}


def test_the_noisy_player_is_sometimes_right():
    policy = NoisyCalculator(seed=1)
    plays = [play_single(make(ENV_ID), policy, seed, max_turns=4) for seed in range(400)]
    rate = sum(seat.success or 0.0 for seat in plays) / len(plays)
    assert 0.65 < rate < 0.88
    assert {"tools/invalid", "tools/calculate/calls", "tools/submit/calls"} <= {
        name for seat in plays for name in seat.metrics
    }
    assert any(seat.parts.get("format", 0.0) < 0 for seat in plays)


def test_the_noisy_player_submits_the_result_where_it_has_one():
    for seed in range(200):
        seat = play_single(Calculator(), NoisyCalculator(seed=seed, p=0.5), seed, max_turns=100)
        before = seat.messages[-2]
        knew = before["role"] == "tool" and before["content"].lstrip("-").isdigit()
        assert seat.success == 1.0 or not knew


def test_a_turn_without_a_call_costs_a_little_and_does_not_end_the_episode():
    seat = play_single(Calculator(), Says("42"), 0, max_turns=3)
    assert seat.rewards == pytest.approx([-0.1, -0.1, -0.1])
    assert seat.parts == {"format": pytest.approx(-0.3)}
    assert seat.success == 0.0


def test_a_wrong_answer_ends_the_episode_without_success():
    env = Calculator()
    env.reset(seed=0)
    answer = assistant("", [tool_call("submit", '{"answer": 123456}', "a")])
    messages, reward, terminated, truncated, info = env.step(answer)
    assert messages[0]["content"] == "wrong"
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, 0.0)


def test_several_questions_are_asked_after_one_another():
    for seed in range(20):
        seat = play_single(Calculator(questions=3), CalculatorExpert(seed=0), seed, max_turns=6)
        assert seat.rewards == pytest.approx([0.0, 1 / 3] * 3)
        assert seat.success == 1.0
        asked = [m["content"] for m in seat.messages if m["content"].endswith("=?")]
        assert len(asked) == 3
        assert len(set(asked)) > 1


def test_a_wrong_answer_costs_its_question_only():
    env, expert = Calculator(questions=2), CalculatorExpert(seed=0)
    env.reset(seed=0)
    wrong = assistant("", [tool_call("submit", '{"answer": 123456}', "a")])
    messages, reward, terminated, _, info = env.step(wrong)
    assert [m["role"] for m in messages] == ["tool", "user"]
    assert (reward, terminated, info["success"]) == (0.0, False, 0.0)
    for _ in range(2):
        answer = expert.act(messages, env.tools, {})
        new, reward, terminated, _, info = env.step(answer)
        messages += [answer, *new]
    assert (reward, terminated, info["success"]) == (0.5, True, 0.5)


def test_two_answers_at_once_are_not_both_to_the_same_question():
    env, expert = Calculator(questions=2), CalculatorExpert(seed=0)
    question, _ = env.reset(seed=0)
    result = env.step(expert.act([{"role": "user", "content": question}], env.tools, {}))[0][0]["content"]
    twice = assistant("", [tool_call("submit", f'{{"answer": {result}}}', name) for name in ("a", "b")])
    messages, reward, terminated, _, info = env.step(twice)
    assert [m["content"] for m in messages] == ["right", "wrong"]
    assert (reward, terminated, info["success"]) == (0.5, True, 0.5)


def test_questions_follow_the_settings():
    env = Calculator(max_number=3, max_terms=2)
    for seed in range(50):
        question, _ = env.reset(seed=seed)
        assert len(question) == len("1+1=?")
        assert set(question) <= set("123+-*=?")


def test_scripted_policies_are_registered():
    for name in ("expert", "noisy"):
        assert load_scripted(name, 0, env_spec=spec(ENV_ID))
    assert spec(ENV_ID).max_turns == 4
