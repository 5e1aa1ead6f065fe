"""reasoning-gym: every data set, its questions and verifiers, and answers that would do harm."""

import json
import random

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from plays import Says, play_single
from reasoning_gym.factory import DATASETS

from agentgym.errors import ConfigError, EnvError
from agentgym.messages import assistant, tool_call
from agentgym.policy.scripted import load_scripted
from agentgym.registry import list_envs, make, spec
from agentgym_envs.reasoning_gym.verifier import EVALUATED, Questions, is_arithmetic

NAMES = sorted(DATASETS.keys() - {"composite"})
NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Made without an answer: only the verifier knows."""
SLOW = {
    "arc_agi",
    "codeio",
    "figlet_font",
    "futoshiki",
    "group_anagrams",
    "knight_swap",
    "rearc",
    "zebra_puzzles",
}
"""Take more than half a second for a question."""
ODD = [
    "",
    "0",
    "hello",
    "[1,2]",
    "[[1,0],[0,1]]",
    '{"a": 1}',
    "1/0",
    "(",
    "a b c",
    "\u2660",
    "1" * 400,
    "None",
    "nan",
]


def oracle(env_id, **settings):
    policy = load_scripted("oracle", 0, env_spec=spec(env_id))
    return play_single(make(env_id, **settings), policy, 3)


def test_105_data_sets_can_be_made():
    assert len(NAMES) == 105
    assert [found.id for found in list_envs("reasoning_gym")] == [f"reasoning_gym:{name}" for name in NAMES]


@pytest.mark.parametrize("name", sorted(set(NAMES) - SLOW))
def test_every_verifier_gives_full_marks_to_the_answer_that_the_question_was_made_with(name):
    seat = oracle(f"reasoning_gym:{name}")
    score, success = (0.0, 0.0) if name in NO_ANSWER else (1.0, 1.0)
    assert seat.success == success
    assert seat.reward == score or name in NO_ANSWER
    assert seat.parts == {"verifier": seat.reward}


@pytest.mark.parametrize("name", sorted(set(NAMES) - SLOW))
def test_a_question_depends_on_the_seed_alone(name):
    """Whatever else in the process has drawn from the global generators in the meantime."""
    questions, again = Questions(name, {}), Questions(name, {})
    first = questions.draw(np.random.default_rng(1))
    random.seed(5)
    np.random.seed(5)
    assert again.draw(np.random.default_rng(1)) == first
    others = [again.draw(np.random.default_rng(seed))["question"] for seed in range(2, 12)]
    assert set(others) != {first["question"]}


@pytest.mark.parametrize("name", sorted(set(NAMES) - SLOW))
def test_no_answer_makes_a_verifier_fail(name):
    questions = Questions(name, {})
    entry = questions.draw(np.random.default_rng(0))
    for answer in ODD:
        assert 0.0 <= questions.score(answer, entry) <= 1.0


@pytest.mark.parametrize("name", sorted(EVALUATED))
@pytest.mark.parametrize(
    "attack",
    [
        "open('{path}', 'w').write('x')",
        "[open('{path}', 'w') for x in [1]]",
        "().__class__.__base__.__subclasses__()",
        "__import__('pathlib').Path('{path}').touch()",
        'S(\'\\137\\137import\\137\\137("os").mkdir("{path}")\')',
        "eval(chr(111))",
        "\N{MATHEMATICAL BOLD SMALL O}pen('{path}', 'w')",
    ],
)
def test_an_answer_is_never_run_as_a_program(name, attack, tmp_path):
    path = tmp_path / "was-here"
    questions = Questions(name, {})
    entry = questions.draw(np.random.default_rng(0))
    answer = attack.replace("{path}", str(path))
    assert not is_arithmetic(answer)
    assert questions.score(answer, entry) < 0.1
    assert not path.exists()


def test_the_evaluating_verifiers_are_known():
    """A data set that is missing in the list would run answers; the package is pinned, this finds an update."""
    import inspect

    found = set()
    for name, (dataset, _) in DATASETS.items():
        source = inspect.getsource(dataset.score_answer)
        if any(f"{word}(answer" in source for word in ("eval", "parse_expr", "exec")):
            found.add(name)
    assert found == EVALUATED


@pytest.mark.parametrize(
    "text", ["2*(x+1)**2", "[[1, 0], ['Q', '_']]", "(8 - 3)*4 + 4", "sin(x)*exp(2*x) + C"]
)
def test_formulas_and_lists_are_arithmetic(text):
    assert is_arithmetic(text)


def test_an_answer_may_stand_in_tags_or_alone():
    env_id = "reasoning_gym:chain_sum"
    answer = make(env_id).reset(seed=4)[1]["answer"]
    for text in (
        answer,
        f" {answer}\n",
        f"Let me see: 1+1 <answer>0</answer> no, <answer> {answer} </answer>",
    ):
        seat = play_single(make(env_id), Says(text), 4)
        assert (seat.reward, seat.success) == (1.0, 1.0)
    assert play_single(make(env_id), Says("<answer>no</answer>"), 4).success == 0.0


def test_a_part_of_the_verifiers_marks_is_a_reward_but_no_success():
    seat = play_single(make("reasoning_gym:countdown"), Says("1"), 0)
    assert 0.0 < seat.reward < 1.0
    assert seat.success == 0.0


def test_settings_are_the_data_sets_own():
    env_id = "reasoning_gym:chain_sum"
    question, _ = make(env_id, min_terms=2, max_terms=2, min_digits=1, max_digits=1).reset(seed=0)
    assert len(question) < len(make(env_id, min_terms=6, max_terms=6, min_digits=4).reset(seed=0)[0])
    with pytest.raises((ConfigError, EnvError), match=r"no setting max_term; it has .*max_terms"):
        make(env_id, max_term=2)
    with pytest.raises((ConfigError, EnvError), match="no tools hammer"):
        make(env_id, tools=["hammer"])
    with pytest.raises(
        ConfigError, match="no environment 'reasoning_gym:chain_sun'; the nearest are reasoning_gym:chain_sum"
    ):
        make("reasoning_gym:chain_sun")


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        (["calculator"], tool_call("calculate", '{"expression": "6*7"}', "a")),
        (["python"], tool_call("python", '{"code": "6 * 7"}', "a")),
    ],
)
def test_with_tools_the_answer_is_submitted(tools, call):
    env = make("reasoning_gym:basic_arithmetic", tools=tools)
    _, info = env.reset(seed=1)
    assert [tool["function"]["name"] for tool in env.tools] == [call["function"]["name"], "submit"]
    messages, reward, terminated, _, after = env.step(assistant("", [call]))
    assert (messages[0]["content"].strip(), reward, terminated, after["success"]) == ("42", 0.0, False, 0.0)
    _, reward, terminated, _, after = env.step(
        assistant("", [tool_call("submit", json.dumps({"answer": info["answer"]}), "b")])
    )
    assert (reward, terminated, after["success"]) == (1.0, True, 1.0)
    assert after["rewards"] == {"verifier": 1.0}
    env.close()
    assert oracle("reasoning_gym:basic_arithmetic", tools=tools).success == 1.0


def test_the_noisy_player_is_often_wrong():
    found = spec("reasoning_gym:chain_sum")
    env = make(found.id)
    plays = [play_single(env, load_scripted("noisy", 0, env_spec=found), seed) for seed in range(100)]
    assert 0.5 < sum(seat.success for seat in plays) / 100 < 0.8


def test_the_coder_computes_before_it_answers():
    found = spec("reasoning_gym:chain_sum")
    env = make(found.id, tools=["python"], allow_negation=True)
    policy = load_scripted("coder", 0, env_spec=found, kwargs={"p": 0.0})
    for seed in range(5):
        seat = play_single(env, policy, seed)
        assert seat.success == 1.0
        assert seat.metrics["tools/python/calls"] == 1.0
    env.close()


@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")
@pytest.mark.parametrize("settings", [{}, {"tools": ["python"]}])
@pytest.mark.parametrize("name", ["basic_arithmetic", "list_functions", "n_queens"])
def test_gymnasium_accepts_it(name, settings):
    check_env(make(f"reasoning_gym:{name}", **settings), skip_render_check=True)
