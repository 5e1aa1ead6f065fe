"""tau2: the customer service tasks, their rewards and their scripted players."""

import functools
import json
import math
import subprocess
import sys

import pytest
from farama import api_test, seed_test
from plays import Says, play_aec
from tau2.evaluator.evaluator_env import EnvironmentEvaluator

from agentgym.errors import ConfigError
from agentgym.messages import assistant, tool_call
from agentgym_envs.tau2.domains import load_tasks, make_world
from agentgym_envs.tau2.env import CustomerService
from agentgym_envs.tau2.policies import Customer, Replay, rounds

TASKS = {"retail": 114, "airline": 50, "telecom": 114, "mock": 7}
"""How many tasks the domains' splits "base" have."""
SAMPLE = {"retail": 60, "airline": 50, "telecom": 3, "mock": 1}
"""Every how many-th task the tests play; `scripts/bench/suites.py` plays all."""


def sample(domain: str) -> list[str]:
    return list(load_tasks(domain, "base"))[:: SAMPLE[domain]]


def replay(env, p=0.0):
    return play_aec(env, {"agent": Replay(seed=1, p=p), "user": Replay(seed=1, p=p)}, 0)


def calls(*names_and_arguments):
    return assistant(
        "", [tool_call(name, arguments, f"id{i}") for i, (name, arguments) in enumerate(names_and_arguments)]
    )


def at_the_agent(**settings):
    """mock's first task with the customer's first words spoken."""
    env = CustomerService("mock", task_id="create_task_1", **settings)
    env.reset(seed=0)
    env.step("I need a task called Important Meeting.")
    return env


CREATE = ("create_task", '{"user_id": "user_1", "title": "Important Meeting"}')


def judged_by_tau2(env) -> float:
    """What tau2's own evaluator says about the state; it plays the conversation again in a new world."""
    return EnvironmentEvaluator.calculate_reward(
        lambda **_: make_world(env._domain), env._task, env._conversation
    ).reward


def judged_by_us(seat) -> float:
    return math.prod(value for name, value in seat.metrics.items() if name in ("db", "env_assertion"))


@pytest.mark.parametrize("domain", TASKS)
def test_replaying_the_gold_actions_succeeds(domain):
    assert len(load_tasks(domain, "base")) == TASKS[domain]
    for task_id in sample(domain):
        env = CustomerService(domain, task_id=task_id)
        seats = replay(env)
        assert (seats["agent"].reward, seats["agent"].success) == (1.0, 1.0), task_id
        assert seats["user"].reward == 0.0
        assert judged_by_us(seats["agent"]) == judged_by_tau2(env)


@pytest.mark.parametrize("domain", ["retail", "telecom"])
def test_doing_nothing_fails_where_something_is_to_be_done(domain):
    for task_id in sample(domain):
        env = CustomerService(domain, task_id=task_id)
        seats = replay(env, p=1.0)
        assert (seats["agent"].reward, seats["agent"].success) == (0.0, 0.0), task_id
        assert judged_by_us(seats["agent"]) == judged_by_tau2(env)


def test_a_part_of_the_gold_actions_is_not_enough():
    failed = 0
    for task_id in sample("telecom"):
        env = CustomerService("telecom", task_id=task_id)
        seats = replay(env, p=0.5)
        assert judged_by_us(seats["agent"]) == judged_by_tau2(env)
        failed += seats["agent"].reward == 0.0
    assert failed > len(sample("telecom")) / 2


def test_the_agent_keeps_the_move_while_it_calls_tools():
    env = at_the_agent()
    assert env.observe("agent")["messages"] == [
        {"role": "user", "content": "I need a task called Important Meeting."}
    ]
    env.step(calls(CREATE))
    assert env.agent_selection == "agent"
    (result,) = env.observe("agent")["messages"]
    assert (result["role"], result["tool_call_id"]) == ("tool", "id0")
    assert "Important Meeting" in result["content"]
    assert env.observe("agent")["messages"] == [result], "observing does not consume"
    assert env.observe("user")["messages"] == [], "the other does not hear of it"
    env.step("It is there.")
    assert env.agent_selection == "user"
    assert env.observe("user")["messages"] == [{"role": "user", "content": "It is there."}]
    env.step("Thanks. ###STOP###")
    assert env.rewards == {"agent": 1.0, "user": 0.0}
    assert all(env.terminations.values())


@pytest.mark.parametrize("token", ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"])
def test_the_user_ends_the_conversation_and_the_agent_cannot(token):
    env = at_the_agent()
    env.step(f"I stop: {token}")
    assert not any(env.terminations.values())
    env.step(f"I stop: {token}")
    assert all(env.terminations.values())
    assert env.infos["agent"]["success"] == 0.0


def test_what_the_model_gets_wrong_is_answered_and_counted():
    env = at_the_agent()
    env.step(calls(("nonsense", "{}"), ("create_task", "{"), ("create_task", '{"title": "x"}'), CREATE))
    answers = [m["content"] for m in env.observe("agent")["messages"]]
    assert len(answers) == 4
    assert all(text.startswith("Error: ") for text in answers[:3])
    assert "Important Meeting" in answers[3]
    metrics = env.infos["agent"]["metrics"]
    assert (metrics["tools/invalid"], metrics["tools/errors"]) == (2.0, 1.0)
    env.step("Done.")
    env.step("###STOP###")
    assert env.rewards["agent"] == 1.0


def test_too_many_errors_end_the_conversation_without_a_reward():
    env = at_the_agent(max_errors=2)
    env.step(calls(CREATE))
    env.step(calls(("nonsense", "{}")))
    env.step("  ")
    assert all(env.terminations.values())
    assert env.rewards["agent"] == 0.0
    assert env.infos["agent"]["metrics"]["too_many_errors"] == 1.0


def test_saying_nothing_hands_the_move_over():
    env = at_the_agent()
    env.step("")
    assert env.agent_selection == "user"
    assert env.observe("user")["messages"] == [{"role": "user", "content": "(silence)"}]
    assert env.infos["agent"]["metrics"] == {"empty": 1.0}


def test_text_beside_a_tool_call_reaches_nobody():
    task_id = next(
        key
        for key, text in load_tasks("retail", "base").items()
        if json.loads(text)["evaluation_criteria"]["communicate_info"]
    )
    env = CustomerService("retail", task_id=task_id)
    facts = " ".join(
        json.loads(load_tasks("retail", "base")[task_id])["evaluation_criteria"]["communicate_info"]
    )

    class Mutters(Replay):
        def act(self, messages, tools, info):
            answer = super().act(messages, tools, info)
            beside = bool(answer.get("tool_calls"))
            return {**answer, "content": facts if beside else "That is all."}

    seats = play_aec(env, {"agent": Mutters(seed=0), "user": Replay(seed=0)}, 0)
    assert seats["agent"].metrics["communicate"] == 0.0
    assert seats["agent"].reward == 0.0
    assert replay(env)["agent"].metrics["communicate"] == 1.0


def test_powers_are_not_worked_out():
    env = CustomerService("retail")
    env.reset(seed=0)
    env.step("Hello")
    env.step(calls(("calculate", '{"expression": "9**9**9**9"}'), ("calculate", '{"expression": "2*3"}')))
    refused, done = (m["content"] for m in env.observe("agent")["messages"])
    assert refused.startswith("Error: ")
    assert done == "6.0"


def test_the_seed_chooses_the_task_and_task_id_names_it():
    def tasks(env, seeds):
        found = []
        for seed in seeds:
            env.reset(seed=seed)
            found.append(env._task.id)
        return found

    first, second = CustomerService("telecom"), CustomerService("telecom")
    assert tasks(first, range(20)) == tasks(second, range(20))
    assert len(set(tasks(first, range(20)))) > 10
    one, *few = sample("telecom")[:4]
    assert set(tasks(CustomerService("telecom", task_id=one), range(5))) == {one}
    assert set(tasks(CustomerService("telecom", task_id=few), range(20))) == set(few)


@pytest.mark.parametrize("domain", ["retail", "airline", "telecom"])
def test_train_and_test_are_two_halves_of_the_tasks(domain):
    train, test = (set(load_tasks(domain, split)) for split in ("train", "test"))
    assert not train & test
    assert train | test == set(load_tasks(domain, "base"))


def test_only_telecoms_user_has_tools():
    assert {domain for domain in TASKS if CustomerService(domain).tools("user")} == {"telecom"}
    assert len(CustomerService("telecom").tools("user")) == 30


def test_prompts_are_the_policy_and_the_scenario_or_what_is_given():
    env = CustomerService("mock", task_id="create_task_1")
    env.reset(seed=0)
    assert make_world("mock").get_policy().strip() in env.system_prompt("agent")
    assert str(env._task.user_scenario) in env.system_prompt("user")
    short = CustomerService("retail", policy="Be brief.", tools=["calculate"])
    assert "Be brief." in short.system_prompt("agent")
    assert len(short.system_prompt("agent")) < 300
    assert [tool["function"]["name"] for tool in short.tools("agent")] == ["calculate"]


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="no split 'dev'; it has base, test, train"):
        CustomerService("retail", split="dev")
    with pytest.raises(ConfigError, match="no task x in its split 'base'"):
        CustomerService("retail", task_id="x")
    with pytest.raises(ConfigError, match="no tool hammer; it has"):
        CustomerService("retail", tools=["hammer"])


def test_a_customer_is_more_patient_than_a_replayed_user():
    env = CustomerService("mock", task_id="create_task_1")
    seats = play_aec(env, {"agent": Says("One moment."), "user": Customer(seed=0)}, 0)
    assert seats["user"].answers[1:] == ["Yes, please.", "###STOP###"]
    assert "Important Meeting" in seats["user"].answers[0]


def test_gold_actions_are_cut_into_rounds_of_agent_and_user():
    order = ["user", "agent", "agent", "user", "agent"]
    actions = [{"agent": agent, "name": str(i), "arguments": {}} for i, agent in enumerate(order)]
    assert [{k: [a["name"] for a in v] for k, v in one.items()} for one in rounds(actions)] == [
        {"agent": [], "user": ["0"]},
        {"agent": ["1", "2"], "user": ["3"]},
        {"agent": ["4"], "user": []},
    ]
    assert rounds([]) == [{"agent": [], "user": []}]


@pytest.mark.filterwarnings("ignore:Observation is not a NumPy array:UserWarning")
@pytest.mark.filterwarnings("ignore:We recommend agents to be named:UserWarning")
@pytest.mark.filterwarnings("ignore:Observation space for each agent probably should be:UserWarning")
@pytest.mark.filterwarnings("ignore:Action space for each agent probably should be:UserWarning")
@pytest.mark.parametrize("domain", ["mock", "telecom"])
def test_pettingzoo_accepts_it(domain):
    api_test(CustomerService(domain), num_cycles=60)
    seed_test(functools.partial(CustomerService, domain), num_cycles=20)


def test_no_model_client_is_imported():
    code = "import sys, agentgym_envs.tau2.env; print([m for m in ('litellm', 'openai', 'torch') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert printed.stdout.strip() == "[]", printed.stderr
    assert printed.stderr == ""
