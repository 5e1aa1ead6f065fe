import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import within
from plays import Says
from stage import LAYERS, TOPK, FakePolicy, Stage, of, rewards
from toy_envs import Adder, Relay, Scripted, Stuck, Together, raising, says, stuck

from agentgym.episode import NOT_SAMPLED, EndReason
from agentgym.errors import IntegrityError, PolicyError, PolicyUnavailableError
from agentgym.messages import assistant, tool_call, user
from agentgym.policy.client import Completion
from agentgym.policy.template import ChatTokenizer


def test_one_agent_plays_to_the_end_and_every_token_is_recorded(tokenizer: ChatTokenizer) -> None:
    policy = FakePolicy(tokenizer, "first", "second")
    stage = Stage(tokenizer, policy)
    env = Scripted(
        says("more", 0.5, rewards={"a": 0.5}), says("bye", 1.0, over=True, rewards={"b": 1.0}, success=1)
    )
    play = stage.play(env)
    episode, trajectory = play.episode, play.episode.trajectories[0]
    assert (episode.end_reason, episode.error, play.reusable) == (EndReason.TERMINATED, "", True)
    assert (episode.env_id, episode.task_index, episode.seed) == ("toy", 9, 5)
    assert (episode.group_id, episode.member, env.seeds) == (2, 1, [5])
    assert episode.metrics == {"seconds": 2.0}
    assert episode.agent_metrics == {"agent": {"success": 1.0}}
    assert (trajectory.agent, trajectory.policy, trajectory.trainable) == ("agent", "learner", True)
    assert stage.said(trajectory) == ["first<|end|>", "second<|end|>"]
    assert [(turn.reward, turn.rewards) for turn in trajectory.turns] == [
        (0.5, {"a": 0.5}),
        (1.0, {"b": 1.0}),
    ]
    # What follows the last answer is not learned from, and what was sent as a prompt is what is recorded.
    assert stage.text(trajectory).startswith(policy.prompts[1])
    assert stage.text(trajectory).endswith("second<|end|>")
    assert policy.prompts[1].startswith(policy.prompts[0] + "first<|end|>")
    assert (trajectory.versions[trajectory.loss_mask] == 3).all()
    assert (trajectory.versions[~trajectory.loss_mask] == NOT_SAMPLED).all()
    assert trajectory.routes is not None
    assert trajectory.routes.shape == (len(trajectory.tokens), LAYERS, TOPK)
    assert (trajectory.routes[-1] == 255).all()
    assert (trajectory.routes[:-1] == 1).all()
    assert env.heard == ["first", "second"]


def test_an_agent_with_tools_sees_them_and_their_results(tokenizer: ChatTokenizer) -> None:
    policy = FakePolicy(
        tokenizer,
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>',
        '<tool_call>{"name": "submit", "arguments": {"answer": 2}}</tool_call>',
    )
    stage = Stage(tokenizer, policy, max_tokens=2000, answer=80)
    episode = stage.play(Adder()).episode
    assert episode.end_reason is EndReason.TERMINATED
    assert "submit(answer)" in policy.prompts[0]
    assert "<|tool|>2<|end|>" in policy.prompts[1]
    assert rewards(episode.trajectories[0]) == [0.0, 1.0]
    assert episode.trajectories[0].turns[0].message["tool_calls"][0]["function"]["name"] == "add"
    metrics = episode.agent_metrics["agent"]
    assert (metrics["success"], metrics["tools/add/calls"]) == (1.0, 1.0)


def test_agents_by_turns_have_a_trajectory_each_and_late_rewards_reach_the_right_turn(
    tokenizer: ChatTokenizer,
) -> None:
    stage = Stage(tokenizer, FakePolicy(tokenizer, "a1", "b1", "a2", "b2"))
    episode = stage.play(Relay(rounds=2, prompt="You are"), "aec").episode
    assert episode.agents == ["a", "b"]
    assert stage.said(of(episode, "a")) == ["a1<|end|>", "a2<|end|>"]
    assert stage.said(of(episode, "b")) == ["b1<|end|>", "b2<|end|>"]
    # Each of b's answers rewards a's answer before it; a's first answer rewarded b, who had not acted yet.
    assert rewards(of(episode, "a")) == [1.0, 1.0]
    assert rewards(of(episode, "b")) == [1.0, 0.0]
    assert of(episode, "a").turns[0].rewards == {"heard": 1.0}
    assert episode.agent_metrics["b"]["unattributed_reward"] == 1.0
    assert stage.text(of(episode, "b")).startswith("<|system|>You are b<|end|><|user|>a1<|end|>")


def test_agents_at_once_are_asked_at_once(tokenizer: ChatTokenizer) -> None:
    class Meeting(FakePolicy):
        """Answers when both have asked."""

        both = asyncio.Barrier(2)

        async def complete(self, *args: Any, **kwargs: Any) -> Completion:
            await self.both.wait()
            return await super().complete(*args, **kwargs)

    stage = Stage(tokenizer, Meeting(tokenizer, "hi"))
    episode = stage.play(Together(rounds=2), "parallel").episode
    assert episode.end_reason is EndReason.TERMINATED
    assert (rewards(of(episode, "a")), rewards(of(episode, "b"))) == ([0.0, 0.0], [1.0, 1.0])
    assert episode.agent_metrics == {"a": {"success": 1.0}, "b": {"success": 1.0}}


def test_a_scripted_opponent_is_recorded_and_not_trained(tokenizer: ChatTokenizer) -> None:
    stage = Stage(tokenizer, FakePolicy(tokenizer, "a1", "a2"), {"b": Says("b1", "b2")})
    episode = stage.play(Relay(rounds=2), "aec").episode
    foe = of(episode, "b")
    assert (foe.policy, foe.trainable, of(episode, "a").trainable) == ("other", False, True)
    assert stage.said(foe) == ["b1<|end|>", "b2<|end|>"]
    assert (foe.versions == NOT_SAMPLED).all()
    assert (foe.routes, foe.turns[0].finish_reason) == (None, "scripted")


def test_a_teacher_may_call_tools(tokenizer: ChatTokenizer) -> None:
    class Teacher(Says):
        def act(self, messages: Any, tools: Any, info: Any) -> Any:
            assert [schema["function"]["name"] for schema in tools] == ["add", "submit"]
            return assistant("", [tool_call("submit", '{"answer": 2}', "c0")])

    stage = Stage(tokenizer, Teacher())
    episode = stage.play(Adder()).episode
    assert rewards(episode.trajectories[0]) == [1.0]
    assert stage.said(episode.trajectories[0])[0].startswith('<tool_call>{"name": "submit"')


def test_the_turns_of_an_agent_are_limited(tokenizer: ChatTokenizer) -> None:
    env = Scripted(says("more", 1.0))
    play = Stage(tokenizer, FakePolicy(tokenizer, "x"), max_turns=3).play(env)
    assert (play.episode.end_reason, play.reusable) == (EndReason.MAX_TURNS, True)
    assert rewards(play.episode.trajectories[0]) == [1.0, 1.0, 1.0]
    assert len(env.heard) == 3


@pytest.mark.parametrize(("context", "reason"), [(True, EndReason.CONTEXT), (False, EndReason.MAX_TOKENS)])
def test_a_prompt_that_does_not_fit_is_never_sent(
    tokenizer: ChatTokenizer, context: bool, reason: EndReason
) -> None:
    opening = len("Obey.begin") + 4  # system, user, assistant, and two ends of turns: characters are tokens
    policy = FakePolicy(tokenizer, "x")
    stage = Stage(tokenizer, policy, max_tokens=opening + 20, context=context)
    play = stage.play(Scripted(says("y" * 30, 0.5)))
    assert (play.episode.end_reason, len(policy.prompts), play.reusable) == (reason, 1, True)
    assert rewards(play.episode.trajectories[0]) == [0.5]


def test_an_opening_that_does_not_fit_leaves_no_trajectory(tokenizer: ChatTokenizer) -> None:
    policy = FakePolicy(tokenizer, "x")
    episode = Stage(tokenizer, policy, max_tokens=10).play(Scripted(says())).episode
    assert (episode.end_reason, episode.trajectories, policy.prompts) == (EndReason.CONTEXT, (), [])


def test_an_answer_is_cut_to_the_room_that_is_left(tokenizer: ChatTokenizer) -> None:
    policy = FakePolicy(tokenizer, "a long answer")
    opening = len(tokenizer.encode_chat([{"role": "system", "content": "Obey."}, user("begin")]))
    stage = Stage(tokenizer, policy, max_tokens=opening + 4)
    episode = stage.play(Scripted(says("more"))).episode
    assert policy.asked[0].max_tokens == 4
    assert stage.said(episode.trajectories[0]) == ["a lo"]
    assert episode.trajectories[0].turns[0].finish_reason == "length"
    assert episode.end_reason is EndReason.CONTEXT


def test_an_environment_may_cut_the_episode(tokenizer: ChatTokenizer) -> None:
    for env, kind in ((Scripted(says(cut=True)), "single"), (Relay(rounds=1, end="truncation"), "aec")):
        play = Stage(tokenizer, FakePolicy(tokenizer, "x")).play(env, kind)
        assert (play.episode.end_reason, play.reusable) == (EndReason.ENV_TRUNCATED, True)


@pytest.mark.parametrize(
    ("env", "message", "turns"),
    [
        (Scripted(first=raising(KeyError("map"))), "toy: reset raised KeyError: 'map'", 0),
        (Scripted(first=raising(StopIteration())), "toy: reset raised StopIteration: ", 0),
        (Scripted(says("x", 1.0), raising(SystemExit(2))), "toy: step raised SystemExit: 2", 2),
        (Scripted(says("x", 1.0), None), "toy: step: step returned None; expected", 2),
        (Scripted(says(success="well")), "toy: step: info['success'] is 'well'", 1),
        (Scripted(first=("\udce4", {})), "toy: reset: an observation is not valid Unicode", 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failing_environment_fails_its_episode_and_is_not_used_again(
    tokenizer: ChatTokenizer, env: Scripted, message: str, turns: int
) -> None:
    play = Stage(tokenizer, FakePolicy(tokenizer, "x")).play(env)
    assert (play.episode.end_reason, play.reusable) == (EndReason.ENV_FAILED, False)
    assert play.episode.error.startswith(message)
    assert sum(len(t.turns) for t in play.episode.trajectories) == turns


def test_a_step_that_takes_too_long_fails_the_episode(tokenizer: ChatTokenizer) -> None:
    env = Stuck()
    play = Stage(tokenizer, FakePolicy(tokenizer, "x")).play(env, step_timeout=0.05)
    stuck.remove(env)
    env.close()
    assert (play.episode.end_reason, play.reusable) == (EndReason.ENV_FAILED, False)
    assert play.episode.error.startswith("toy: step did not return within 0.05 s\n  at ")
    assert re.search(r"toy_envs\.py, line \d+, in step", play.episode.error), "where it hangs is named"


def test_an_episode_that_takes_too_long_is_truncated_and_keeps_its_turns(tokenizer: ChatTokenizer) -> None:
    released = threading.Event()
    env = Scripted(says("x", 1.0), lambda: released.wait(20) and says())
    play = Stage(tokenizer, FakePolicy(tokenizer, "x")).play(env, episode_timeout=0.3)
    released.set()
    assert (play.episode.end_reason, play.reusable) == (EndReason.TIMEOUT, False)
    assert rewards(play.episode.trajectories[0]) == [1.0, 0.0]


def test_the_turns_of_an_agent_have_an_affinity_of_their_own(tokenizer: ChatTokenizer) -> None:
    policy = FakePolicy(tokenizer, "one", "two", "three", "four")
    Stage(tokenizer, policy).play(Relay(rounds=2), "aec")
    first, second, third, fourth = policy.affinities
    assert first is third
    assert second is fourth
    assert first is not second


def test_a_server_that_is_not_there_is_asked_again(tokenizer: ChatTokenizer) -> None:
    gone = PolicyUnavailableError("no policy server is known")
    policy = FakePolicy(tokenizer, gone, "x")
    times = iter([100.0, 100.0, 103.0, 110.0])
    stage = Stage(tokenizer, policy, clock=lambda: next(times))
    assert stage.play(Scripted(says(over=True))).episode.end_reason is EndReason.TERMINATED
    # The retries share the time that one answer may take.
    assert policy.timeouts == [10.0, 7.0]


def test_a_server_that_never_comes_back_fails_the_episode(tokenizer: ChatTokenizer) -> None:
    policy = FakePolicy(tokenizer, PolicyUnavailableError("no policy server is known"))
    times = iter([100.0, 109.9])
    play = Stage(tokenizer, policy, clock=lambda: next(times)).play(Scripted(says()))
    assert (play.episode.end_reason, play.reusable) == (EndReason.POLICY_FAILED, False)
    assert play.episode.error == "no policy server is known"


@pytest.mark.parametrize(
    "error",
    [PolicyError("the server refused"), IntegrityError("route rows do not continue")],
    ids=["policy", "routes"],
)
def test_a_policy_that_fails_fails_the_episode(tokenizer: ChatTokenizer, error: Exception) -> None:
    play = Stage(tokenizer, FakePolicy(tokenizer, "x", error)).play(Scripted(says("y", 1.0)))
    assert (play.episode.end_reason, play.episode.error) == (EndReason.POLICY_FAILED, str(error))
    assert rewards(play.episode.trajectories[0]) == [1.0]


@pytest.mark.parametrize("finish", ["abort", "stop"])
def test_an_answer_that_was_broken_off_is_no_answer(tokenizer: ChatTokenizer, finish: Any) -> None:
    class Broken(FakePolicy):
        async def complete(self, *args: Any, **kwargs: Any) -> Completion:
            none = np.zeros(0, np.int32)
            return Completion(none, none.astype(np.float32), none, None, finish, 0.0)

    play = Stage(tokenizer, Broken(tokenizer, "x")).play(Scripted(says()))
    assert play.episode.end_reason is EndReason.POLICY_FAILED
    assert "the server broke the answer off" in play.episode.error
    assert play.episode.trajectories == ()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raising(KeyError("board")), "policy 'learner' raised KeyError: 'board'"),
        (
            lambda: "hello",
            "policy 'learner' answered 'hello'; expected {'role': 'assistant', 'content': text}",
        ),
        (lambda: None, "policy 'learner' answered None"),
        (lambda: {"role": "assistant", "content": None}, "policy 'learner' answered {'role'"),
    ],
)
def test_a_scripted_policy_that_is_wrong_fails_the_episode(
    tokenizer: ChatTokenizer, answer: Callable[[], Any], message: str
) -> None:
    class Wrong(Says):
        def act(self, *_: Any) -> Any:
            return answer()

    play = Stage(tokenizer, Wrong("x")).play(Scripted(says()))
    assert play.episode.end_reason is EndReason.POLICY_FAILED
    assert play.episode.error.startswith(message)


def test_a_conversation_that_the_chat_template_refuses_fails_the_episode(model: Path, tmp_path: Path) -> None:
    strict = Path(shutil.copytree(model, tmp_path / "strict"))
    settings = json.loads((strict / "tokenizer_config.json").read_text())
    settings["chat_template"] = '{{ raise_exception("roles must alternate") }}'
    (strict / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = ChatTokenizer(strict)
    play = Stage(tokenizer, FakePolicy(tokenizer, "x")).play(Scripted(says()))
    assert play.episode.end_reason is EndReason.ENV_FAILED
    assert "roles must alternate" in play.episode.error


def test_when_one_of_several_agents_fails_the_others_are_waited_for(tokenizer: ChatTokenizer) -> None:
    policy = FakePolicy(tokenizer, PolicyError("no"), "fine")
    play = Stage(tokenizer, policy).play(Together(), "parallel")
    assert (play.episode.end_reason, play.episode.error) == (EndReason.POLICY_FAILED, "no")
    assert len(policy.prompts) == 2
    assert play.episode.agents == ["b"]


def test_a_cancelled_play_gives_no_episode(tokenizer: ChatTokenizer) -> None:
    class Slow(FakePolicy):
        async def complete(self, *args: Any, **kwargs: Any) -> Completion:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    async def scene() -> None:
        task = asyncio.create_task(Stage(tokenizer, Slow(tokenizer, "x")).rollout(Scripted(says())).play())
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asked = asyncio.Event()
    within(10, scene())


def test_metrics_of_the_steps_are_summed(tokenizer: ChatTokenizer) -> None:
    env = Scripted(says(metrics={"n": 1, "m": 2.5}), says(metrics={"n": 3}, over=True, success=0.5))
    metrics = Stage(tokenizer, FakePolicy(tokenizer, "x")).play(env).episode.agent_metrics["agent"]
    assert metrics == {"n": 4.0, "m": 2.5, "success": 0.5}
