"""agentgym check: each planted fault fails its rule, with a sentence that says what was found."""

from inspect import signature
from pathlib import Path

import pytest

from agentgym import cli
from agentgym.check.rule import RULES
from agentgym.check.run import Result, check, try_rule
from agentgym.check.subject import Options, Subject
from agentgym.config import EnvConfig
from agentgym.model import read_chat_template
from agentgym.tiny_model import init_model

SLOW = {"processes"}
"""Starts a process; tested on its own."""
SOUND = ["Sound", "SoundTools", "SoundTurns", "SoundTogether"]
SHIPPED = ["GuessNumber", "Calculator", "TicTacToe", "SplitCoins", "PrisonersDilemma"]

# Fault: the rule that must fail, what it must say, and the other rules that may fail with it.
FAULTS: dict[str, tuple[str, str, set[str]]] = {
    "CannotBeBuilt": ("builds", "OSError: the words are gone", set(RULES)),
    "Raises": ("contract", "step raised KeyError", {"farama", "scripted"}),
    "RewardIsNotANumber": ("contract", "the reward is nan", {"farama"}),
    "PartsDoNotSum": ("contract", "does not sum to the reward", set()),
    "ObservationIsANumber": ("contract", "an observation is int", {"farama", "opening"}),
    "IgnoresItsSeed": ("deterministic", "the first time and", {"farama"}),
    "DrawsGlobally": ("global-random", "process-global generators", {"instances", "farama"}),
    "SharesItsState": ("instances", "the first time and", {"close"}),
    "RemembersItsPast": ("reusable", "seed 0", set()),
    "ClosesOnce": ("close", "the second time raised RuntimeError: closed already", set()),
    "ClosesForAll": ("close", "after another instance was closed", {"instances"}),
    "RepeatsTheHistory": ("only-new", "agent reads its history again", set()),
    "SaysNothing": ("opening", "agent must answer and has read nothing", {"scripted"}),
    "ChangesItsPrompt": ("fixed-prompt", "the system prompt of agent changed in step 1", set()),
    "SucceedsTwice": ("success", "agent has success 2", set()),
    "TalksTooMuch": ("budget", "reads 30000 characters at once, and 20000 are allowed", set()),
    "HasALostPolicy": ("scripted", "lost: raised KeyError: 'map'", set()),
    "TooLongForItsSpace": ("farama", "the checker raised", set()),
    "ToolWithoutWords": ("tool-schemas", "half: the tool has no description", set()),
    "SchemaIsWrong": ("tool-schemas", "add.a: 'int' is no type of JSON", {"tool-calls"}),
    "SchemaAllowsMore": ("tool-calls", "the schema allows the call add(", set()),
    "AnswersOneCall": ("tool-calls", "answered were ['call_0']", set()),
    "TrustsItsCalls": ("wrong-calls", "no_such_tool", set()),
    "ObserveCounts": ("observe", "observe('a') gave", {"farama"}),
    "ForgetsAnAgent": ("contract", "no observation for ['b']", {"farama"}),
}


def results(name: str) -> dict[str, Result]:
    """What the quick rules say of an environment, in this process."""
    subject = Subject(f"broken_envs:{name}")
    return {rule: try_rule(rule, subject) for rule in RULES if rule not in SLOW}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_rule_and_only_those_that_depend_on_it(name: str) -> None:
    rule, text, others = FAULTS[name]
    found = results(name)
    failed = {rule for rule, result in found.items() if result.status == "FAIL"}
    assert rule in failed
    assert text in " ".join(found[rule].findings)
    assert failed - {rule} <= others


@pytest.mark.parametrize("name", SOUND)
def test_an_environment_without_a_fault_passes(name: str) -> None:
    assert [result for result in results(name).values() if result.status == "FAIL"] == []


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_environments_pass(name: str) -> None:
    found = {r.rule: r for r in check(f"agentgym/{name}-v0", Options())}
    assert found.keys() == RULES.keys()
    assert [r for r in found.values() if r.status == "FAIL"] == []


def test_what_instances_do_to_each_other_is_excused_in_processes_of_their_own() -> None:
    found = results("DrawsGloballyAlone")
    assert [result for result in found.values() if result.status == "FAIL"] == []
    assert found["global-random"].status == "skip"
    assert "it plays in a process of its own; in a shared one: a call" in found["global-random"].findings[0]


def test_an_inline_environment_that_takes_its_time_fails() -> None:
    result = try_rule("quick", Subject("toy_envs:Naps"))
    assert result.status == "FAIL"
    assert "step 1 took 3" in result.findings[0]
    assert try_rule("quick", Subject("agentgym/GuessNumber-v0")).status == "ok"
    assert try_rule("quick", Subject("broken_envs:Sound")).status == "skip"


def test_a_template_that_refuses_the_roles_of_an_environment_fails(tmp_path: Path) -> None:
    model = tmp_path / "model"
    init_model(model)
    subject = Subject("broken_envs:Sound", Options(tokenizer=str(model)))
    assert try_rule("template", subject).status == "ok"
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    (model / "chat_template.jinja").write_text(refusal + read_chat_template(model))
    result = try_rule("template", subject)
    assert result.status == "FAIL"
    assert "no system here" in result.findings[0]


def test_a_conversation_that_outgrows_the_model_fails(tmp_path: Path) -> None:
    init_model(tmp_path / "model")
    options = Options(tokenizer=str(tmp_path / "model"), max_chars=10**6)
    result = try_rule("budget", Subject("broken_envs:TalksTooMuch", options))
    assert result.status == "FAIL"
    assert "the model takes" in result.findings[0]


def test_an_order_that_depends_on_hashes_shows_in_another_process() -> None:
    result = try_rule("processes", Subject("broken_envs:HashesTexts"))
    assert result.status == "FAIL"
    assert "the first time and" in result.findings[0]


def test_processes_that_workers_keep_for_one_environment_hash_alike() -> None:
    found = {r.rule: r for r in check("isolated_envs:HashesTextsAlone", Options())}
    assert found["processes"].status == "ok"


def test_a_call_that_never_returns_fails_its_rule_and_not_the_command() -> None:
    found = {r.rule: r for r in check("broken_envs:Hangs", Options(timeout=1.0))}
    assert found["builds"].status == "ok"
    assert found["contract"] == Result("contract", "FAIL", ("step did not return within 1 s",))
    assert found["farama"] == Result("farama", "FAIL", ("the checker's step did not return within 1 s",))
    assert found["close"] == Result("close", "skip", ("2 processes were lost already",))
    assert found.keys() == RULES.keys()


def test_an_environment_that_ends_its_process_fails_its_rule() -> None:
    found = {r.rule: r for r in check("broken_envs:Dies", Options())}
    assert found["contract"] == Result("contract", "FAIL", ("the process ended by itself: step",))


def test_an_environment_that_cannot_be_built_is_said_once() -> None:
    found = list(check("broken_envs:CannotBeBuilt", Options()))
    assert found[0].status == "FAIL"
    assert "OSError: the words are gone" in found[0].findings[0]
    assert {(r.status, r.findings) for r in found[1:]} == {("skip", ("it could not be built",))}


def test_a_call_may_take_as_long_as_in_a_run() -> None:
    limits = EnvConfig(id="agentgym/GuessNumber-v0")
    asked = signature(cli.check).parameters["timeout"].default
    assert asked == Options().timeout == limits.reset_timeout == limits.step_timeout


@pytest.mark.parametrize("name", ["Sound", "SoundTurns", "SoundTogether"])
def test_each_call_of_the_public_checkers_has_its_own_time(name: str) -> None:
    calls: list[str] = []
    assert try_rule("farama", Subject(f"broken_envs:{name}", on_call=calls.append)).status == "ok"
    for call in ("reset", "step"):
        assert calls.count(f"the checker's {call}") > 1
    assert calls[-1] == "the checker"
