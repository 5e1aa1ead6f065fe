"""agentgym replay and fork, on episodes that a policy server's stand-in or scripted policies played."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import config_of, episode_of, trajectory_of, within
from chat_families import write_family
from rich.console import Console
from stage import FakePolicy

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.config import Config
from agentgym.coordinator.assemble import assemble
from agentgym.coordinator.groups import Group
from agentgym.episode import NOT_SAMPLED, EndReason, Episode
from agentgym.episode_json import EpisodeWriter, record_of
from agentgym.errors import ConfigError, EnvError
from agentgym.evaluation.plan import Plan, with_policies
from agentgym.evaluation.run import evaluate
from agentgym.policy.template import ChatTokenizer
from agentgym.prefix import replayed
from agentgym.replay.run import continuations, fork, replay
from agentgym.replay.source import read_source, turns_of
from agentgym.worker.seating import Served

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox"]


def written(path: Path, config: Config, *episodes: Episode) -> Path:
    """A file with episodes."""
    writer = EpisodeWriter(path, config=config.model_dump(mode="json"))
    for episode in episodes:
        writer.write(record_of(episode, lambda tokens: ""))
    writer.close()
    return path


def settings(env_id: str, model: Path, **sections: Any) -> Config:
    return config_of(env_id, model=str(model), **sections)


def continued(path: Path, answers: Sequence[str], *, turn: int, count: int = 1) -> list[Episode]:
    """Continuations of the last episode of a file, by a stand-in for a policy server."""
    source = read_source(path, -1)
    tokenizer = ChatTokenizer(source.models["learner"])

    async def scene() -> list[Episode]:
        policy = FakePolicy(tokenizer, *answers)
        return await continuations(source, {"learner": Served(policy, tokenizer, 500)}, turn, count)

    return within(60, scene())


def played(
    folder: Path, model: Path, env_id: str, *agents: str, answers: Sequence[str] = WORDS, **sections: Any
) -> Path:
    """A file with an episode in which the learner plays all agents and gives these answers."""
    config = settings(env_id, model, **sections)
    nobody = episode_of(trajectories=[trajectory_of([0.0], agent=agent) for agent in agents])
    blank = written(folder / "blank.jsonl", config, nobody)
    return written(folder / "played.jsonl", config, *continued(blank, answers, turn=0))


def again(path: Path, number: int = -1) -> tuple[bool, str]:
    """Whether an episode comes out the same, and what is printed."""
    terminal = io.StringIO()
    same = replay(path, number=number, console=Console(file=terminal, width=400))
    return same, terminal.getvalue()


def changed(path: Path, **fields: Any) -> Path:
    """The same file with an episode that has other fields in its first trajectory."""
    source = read_source(path, -1)
    first, *others = source.episode.trajectories
    episode = replace(source.episode, trajectories=(replace(first, **fields), *others))
    return written(path.with_name("changed.jsonl"), Config.model_validate(source.config), episode)


@pytest.mark.parametrize(
    ("env_id", "agents"),
    [
        ("broken_envs:Sound", ["agent"]),
        ("broken_envs:SoundTurns", ["a", "b"]),
        ("broken_envs:SoundTogether", ["a", "b"]),
    ],
)
def test_sampled_answers_lead_to_the_same_tokens_rewards_and_end_again(
    tmp_path: Path, model: Path, env_id: str, agents: list[str]
) -> None:
    path = played(tmp_path, model, env_id, *agents)
    record = read_source(path, -1).episode
    assert {t.agent for t in record.trajectories} == set(agents)
    assert all(t.routes is not None and t.trainable for t in record.trajectories)
    same, text = again(path)
    assert same, text
    answers = sum(len(turns_of(record, agent)) for agent in agents)
    assert f"the same again, {answers} answers to the end by 'terminated'" in text


def test_a_conversation_in_branches_is_the_same_again_and_can_be_forked(tmp_path: Path) -> None:
    qwen3 = write_family(tmp_path / "qwen3", "qwen3")  # leaves earlier thinking out: a branch for each answer
    answers = [f"<think>\n{word}?\n</think>\n\n{word}" for word in WORDS]
    path = played(tmp_path, qwen3, "broken_envs:Sound", "agent", answers=answers, sampling={"max_tokens": 99})
    record = read_source(path, -1).episode
    assert len(record.trajectories) > 1
    same, text = again(path)
    assert same, text
    (forked,) = continued(path, answers[::-1], turn=2)
    said, before = ([turn.message for _, turn in turns_of(e, "agent")] for e in (forked, record))
    assert said[:2] == before[:2]
    assert len(said) == 4


@pytest.mark.parametrize(
    "env_id", ["agentgym/GuessNumber-v0", "agentgym/TicTacToe-v0", "agentgym/SplitCoins-v0"]
)
def test_episodes_of_an_evaluation_with_scripted_policies_are_the_same_again(
    tmp_path: Path, env_id: str
) -> None:
    out = tmp_path / "e.jsonl"
    config = with_policies(config_of(env_id), ["learner=random"], None)
    evaluate(Plan(config, 3, 1), out=out, console=Console(file=io.StringIO()))
    for number in (1, 2, 3):
        same, text = again(out, number)
        assert same, text
    with pytest.raises(ConfigError, match="has 3 episodes; there is no number 4"):
        again(out, 4)


def test_an_environment_that_a_seed_does_not_determine_is_found_out(tmp_path: Path, model: Path) -> None:
    path = played(tmp_path, model, "broken_envs:IgnoresItsSeed", "agent")
    found = [again(path) for _ in range(4)]  # by chance the words may be the same: 1 in 6^4 each time
    text = next(text for same, text in found if not same)
    assert "the first difference is at agent 'agent', answer" in text
    assert "it read" in text
    with pytest.raises(EnvError, match=r"cannot be continued: in . of 8 plays its environment did not do"):
        continued(path, WORDS, turn=3, count=8)


def test_the_first_reward_that_differs_is_named(tmp_path: Path, model: Path) -> None:
    path = played(tmp_path, model, "broken_envs:Sound", "agent")
    turns = list(read_source(path, -1).episode.trajectories[0].turns)
    turns[1] = turns[1]._replace(reward=7.0)
    turns[2] = turns[2]._replace(reward=7.0)
    same, text = again(changed(path, turns=tuple(turns)))
    assert not same
    assert "agent 'agent', answer 2: it earned" in text
    assert "and in the record {'': 7.0" in text


def test_answers_that_are_too_many_or_too_few_are_named(tmp_path: Path, model: Path) -> None:
    path = played(tmp_path, model, "broken_envs:Sound", "agent")
    source = read_source(path, -1)
    (whole,) = source.episode.trajectories
    end = whole.turns[2].start
    parts = {
        name: getattr(whole, name)[:end] for name in ("tokens", "loss_mask", "logprobs", "versions", "routes")
    }
    same, text = again(changed(path, turns=whole.turns[:2], **parts))
    assert not same
    assert "answer 3: asked for; the record ends by 'terminated' before it" in text
    config = Config.model_validate(source.config)
    shorter = config.model_copy(update={"env": config.env.model_copy(update={"max_turns": 3})})
    same, text = again(written(tmp_path / "shorter.jsonl", shorter, source.episode))
    assert not same
    assert "agent 'agent', answer 4: not asked for; the play ended by 'max_turns'" in text


def test_a_record_that_the_clock_cut_short_is_the_same_as_far_as_it_goes(tmp_path: Path, model: Path) -> None:
    path = played(tmp_path, model, "broken_envs:Sound", "agent")
    source = read_source(path, -1)
    (whole,) = source.episode.trajectories
    end = whole.turns[2].start
    parts = {
        name: getattr(whole, name)[:end] for name in ("tokens", "loss_mask", "logprobs", "versions", "routes")
    }
    cut = replace(
        source.episode,
        end_reason=EndReason.TIMEOUT,
        trajectories=(replace(whole, turns=whole.turns[:2], **parts),),
    )
    same, text = again(written(tmp_path / "cut.jsonl", Config.model_validate(source.config), cut))
    assert same, text


def test_a_fork_has_the_first_turns_of_the_record_and_then_its_own(tmp_path: Path, model: Path) -> None:
    path = played(tmp_path, model, "broken_envs:Sound", "agent", answers=["ant"])
    (record,) = read_source(path, -1).episode.trajectories
    forks = continued(path, ["bee", "cat", "dog", "elk"], turn=2, count=3)
    assert [episode.member for episode in forks] == [0, 1, 2]
    assert len({(e.group_id, e.task_index, e.seed) for e in forks}) == 1
    end = record.turns[1].end
    for episode in forks:
        (mine,) = episode.trajectories
        for name in ("tokens", "loss_mask"):
            assert (getattr(mine, name)[:end] == getattr(record, name)[:end]).all()
        assert (mine.versions[:end] == NOT_SAMPLED).all()
        assert mine.routes is not None
        assert (mine.routes[:-1] == 1).all()  # of the continuation's first request, the common turns included
        assert [turn.finish_reason for turn in mine.turns] == ["replayed", "replayed", "stop", "stop"]
        assert [turn.message["content"] for turn in mine.turns[:2]] == ["ant", "ant"]
        assert len(mine.turns) == 4
        assert all(turn.message["content"] != "ant" for turn in mine.turns[2:])
    assert len({episode.checksums for episode in forks}) > 1


def test_a_fork_is_the_same_again_too_with_the_seed_of_its_scripted_players(
    tmp_path: Path, model: Path
) -> None:
    duel = {
        "policies": {"foe": {"scripted": "random"}},
        "policy_mapping": {"player_2": "foe"},
        "sampling": {"max_tokens": 4},
        "env": {"isolation": "shared"},
    }
    mine = trajectory_of([0.0], agent="player_1")
    theirs = trajectory_of([0.0], agent="player_2", policy="foe", trainable=False, finish="scripted")
    config = settings("agentgym/TicTacToe-v0", model, **duel)
    blank = episode_of(trajectories=[mine, theirs], sampling_seed=8)
    path = written(tmp_path / "blank.jsonl", config, blank)
    (first,) = continued(path, ["5", "1", "9", "3", "7"], turn=0)
    path = written(tmp_path / "first.jsonl", config, first)
    (forked,) = continued(path, ["9", "2", "4", "6", "8"], turn=1)
    assert (first.sampling_seed, forked.sampling_seed, replayed(forked)) == (8, 8, 1)
    same, text = again(written(tmp_path / "forked.jsonl", config, forked))
    assert same, text


def test_forks_are_a_group_whose_common_turns_cancel_out(tmp_path: Path, model: Path) -> None:
    path = played(tmp_path, model, "broken_envs:Sound", "agent")
    (record,) = read_source(path, -1).episode.trajectories
    forks = continued(path, WORDS, turn=3, count=6)  # each says another word last, and one is right
    assert sorted(e.reward("agent") - min(f.reward("agent") for f in forks) for e in forks) == [0] * 5 + [1]
    found = assemble(
        [Group(0, 0, len(forks), dict(enumerate(forks)))],
        policies=["learner"],
        algorithm=AlgorithmConfig(normalize_batch=False, entropy_coefficient=0.1),
        max_tokens=32,
        warmup=False,
        version=3,
        max_staleness=0,
    )["learner"]
    end = record.turns[2].end
    for sample in found.samples:
        sample.verify()
    common = np.sum([sample.advantages[:end] * sample.weights[:end] for sample in found.samples], axis=0)
    np.testing.assert_allclose(common, 0, atol=1e-7)
    assert any(sample.advantages[end:].any() for sample in found.samples)


def test_what_cannot_be_forked_is_refused(tmp_path: Path, model: Path) -> None:
    def forked(path: Path, turn: int) -> None:
        fork(path, number=-1, turn=turn, count=2, out=None, console=Console(file=io.StringIO()))

    path = played(tmp_path, model, "broken_envs:Sound", "agent")
    with pytest.raises(ConfigError, match="--turn 4: the episode has 4 answers of an agent; give 0 to 3"):
        forked(path, 4)
    out = tmp_path / "e.jsonl"
    config = with_policies(config_of("broken_envs:Sound"), ["learner=echo"], None)
    evaluate(Plan(config, 1, 1), out=out, console=Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match="no model plays in this episode"):
        forked(out, 1)
    writer = EpisodeWriter(tmp_path / "bare.jsonl")
    writer.write(record_of(episode_of(), lambda tokens: ""))
    writer.close()
    with pytest.raises(ConfigError, match=r"bare\.jsonl does not say with which settings"):
        forked(tmp_path / "bare.jsonl", 0)
