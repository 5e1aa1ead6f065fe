"""Forks in the worker: an environment is brought to a turn of a record, then its agents answer by themselves."""

from typing import Any

import numpy as np
import pytest
from builders import lease_of, within
from stage import FakePolicy, Stage, of, rewards
from toy_envs import Adder, Relay, Scripted, Together, says

from agentgym.config import EnvConfig, SamplingConfig
from agentgym.episode import NOT_SAMPLED, EndReason, Episode
from agentgym.policy.template import ChatTokenizer
from agentgym.policy_config import PolicyConfig
from agentgym.prefix import prefix_of, replayed
from agentgym.registry import spec
from agentgym.worker.pool import EnvPool
from agentgym.worker.rollout import Play, Rollout
from agentgym.worker.seating import Seating, Served

ROUND = (says("more", 0.5), says("and more", 0.25), says("bye", 1.0, over=True))
TICTACTOE = "agentgym/TicTacToe-v0"
ROOM: dict[str, Any] = {"max_tokens": 2000, "answer": 200}


def played(tokenizer: ChatTokenizer, env: Any, *answers: str, kind: str = "single") -> Episode:
    return Stage(tokenizer, FakePolicy(tokenizer, *answers), **ROOM).play(env, kind).episode


def forked(
    tokenizer: ChatTokenizer, env: Any, record: Episode, turn: int, *answers: str, kind: str = "single"
) -> tuple[Play, FakePolicy]:
    policy = FakePolicy(tokenizer, *answers)
    return Stage(tokenizer, policy, prefix=prefix_of(record, turn), **ROOM).play(env, kind), policy


def test_recorded_answers_come_first_and_only_what_follows_is_asked_for(tokenizer: ChatTokenizer) -> None:
    record = played(tokenizer, Scripted(*ROUND), "one", "two", "three")
    env = Scripted(*ROUND)
    play, policy = forked(tokenizer, env, record, 1, "second", "third")
    assert (env.heard, play.diverged, play.reusable) == (["one", "second", "third"], False, True)
    assert len(policy.prompts) == 2
    (before,), (mine,) = record.trajectories, play.episode.trajectories
    first = before.turns[0]
    assert policy.prompts[0] == tokenizer.decode(before.tokens[: before.turns[1].start].tolist())
    np.testing.assert_array_equal(mine.tokens[: first.end], before.tokens[: first.end])
    assert [turn.finish_reason for turn in mine.turns] == ["replayed", "stop", "stop"]
    assert rewards(mine) == [0.5, 0.25, 1.0]
    assert (mine.versions[: first.end] == NOT_SAMPLED).all()
    assert (mine.versions[mine.turns[1].start : mine.turns[1].end] == policy.version).all()
    assert mine.routes is not None
    assert (mine.routes[:-1] == 1).all()  # those of the first request of its own cover what it had read
    assert mine.turns[0].message == before.turns[0].message
    assert replayed(play.episode) == 1


def test_tools_that_were_called_before_the_turn_run_again(tokenizer: ChatTokenizer) -> None:
    def call(name: str, **arguments: int) -> str:
        fields = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
        return f'<tool_call>{{"name": "{name}", "arguments": {{{fields}}}}}</tool_call>'

    record = played(tokenizer, Adder(), call("add", a=1, b=1), call("submit", answer=3))
    play, policy = forked(tokenizer, Adder(), record, 1, call("submit", answer=2))
    assert record.reward("agent") == 0.0
    assert play.episode.reward("agent") == 1.0
    assert len(policy.prompts) == 1
    assert policy.prompts[0] == tokenizer.decode(
        record.trajectories[0].tokens[: record.trajectories[0].turns[1].start].tolist()
    )


@pytest.mark.parametrize(
    ("kind", "env", "heard"),
    [
        ("aec", Relay, [("a", "1"), ("b", "2"), ("a", "x"), ("b", "y")]),
        ("parallel", Together, [{"a": "1", "b": "2"}, {"a": "x", "b": "y"}]),
    ],
)
def test_each_of_several_agents_repeats_its_answers(
    tokenizer: ChatTokenizer, kind: str, env: Any, heard: list[Any]
) -> None:
    record = played(tokenizer, env(), "1", "2", "3", "4", kind=kind)
    again = env()
    play, _ = forked(tokenizer, again, record, 1, "x", "y", kind=kind)
    assert again.heard == heard
    for agent in "ab":
        assert [turn.finish_reason for turn in of(play.episode, agent).turns] == ["replayed", "stop"]


@pytest.mark.parametrize("turn", [1, 2])
def test_an_environment_that_is_not_the_same_again_is_played_from_the_start(
    tokenizer: ChatTokenizer, turn: int
) -> None:
    record = played(tokenizer, Scripted(*ROUND), "one", "two", "three")
    other = Scripted(says("something else", 0.5), *ROUND[1:])
    play, policy = forked(tokenizer, other, record, turn, "x", "y", "z")
    assert (play.diverged, play.reusable) == (True, True)
    assert other.heard == ["one", "x", "y", "z"]
    assert other.seeds == [5, 5]
    (mine,) = play.episode.trajectories
    assert [turn.finish_reason for turn in mine.turns] == ["stop"] * 3
    assert (mine.versions[mine.loss_mask] == policy.version).all()
    assert (rewards(mine), play.episode.end_reason) == ([0.5, 0.25, 1.0], EndReason.TERMINATED)
    assert replayed(play.episode) == 0


def test_an_environment_that_ends_before_the_turn_is_played_from_the_start(tokenizer: ChatTokenizer) -> None:
    record = played(tokenizer, Scripted(*ROUND), "one", "two", "three")
    short = Scripted(says("more", 0.5, over=True))
    play, _ = forked(tokenizer, short, record, 2, "mine")
    assert (play.diverged, short.heard) == (True, ["one", "mine"])
    assert rewards(play.episode.trajectories[0]) == [0.5]


def test_an_environment_that_fails_before_the_turn_is_a_failed_play(tokenizer: ChatTokenizer) -> None:
    record = played(tokenizer, Scripted(*ROUND), "one", "two", "three")
    broken = Scripted(("more", "no number", False, False, {}))
    play, policy = forked(tokenizer, broken, record, 2, "mine")
    assert (play.episode.end_reason, policy.prompts) == (EndReason.ENV_FAILED, [])


def test_scripted_opponents_say_the_same_again_up_to_the_turn(tokenizer: ChatTokenizer) -> None:
    def seating(policy: FakePolicy) -> Seating:
        return Seating(
            EnvConfig(id=TICTACTOE),
            spec(TICTACTOE),
            {"learner": PolicyConfig(model="m"), "random": PolicyConfig(scripted="random")},
            sampling=SamplingConfig(max_tokens=4),
            tokenizer=tokenizer,
            served={"learner": Served(policy, tokenizer, 500)},
            trained=["learner"],
        )

    async def scene(answers: list[str], **lease: Any) -> Play:
        pool = EnvPool(EnvConfig(id=TICTACTOE, isolation="shared"), slots=1)
        host = await pool.take()
        seats = seating(FakePolicy(tokenizer, *answers))
        try:
            whole = lease_of(policies={"player_1": "learner", "player_2": "random"}, sampling_seed=3, **lease)
            return await Rollout(whole, host, config=EnvConfig(id=TICTACTOE), make_seat=seats.seat).play()
        finally:
            pool.give_back(host, reusable=True)
            await pool.close()

    first = within(20, scene(["5"])).episode  # forfeits with its second answer, for the cell is taken
    assert len(of(first, "player_1").turns) == 2
    record, theirs = of(first, "player_1"), of(first, "player_2")
    taken = theirs.turns[0].message["content"]
    free = next(cell for cell in "123456789" if cell not in ("5", taken))
    fork = within(20, scene([free, "5"], prefix=prefix_of(first, 1)))
    assert not fork.diverged
    assert fork.episode.sampling_seed == first.sampling_seed == 3
    assert of(fork.episode, "player_2").turns[0].message["content"] == taken
    mine = of(fork.episode, "player_1")
    assert [turn.finish_reason for turn in mine.turns[:2]] == ["replayed", "stop"]
    assert mine.tokens[: record.turns[1].start].tolist() == record.tokens[: record.turns[1].start].tolist()
