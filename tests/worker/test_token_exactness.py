"""Whole plays in the chat templates of known families: what the server read and wrote is what is trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import episode_of, group_of
from chat_families import family
from hypothesis import given
from hypothesis import strategies as st
from stage import FakePolicy, Stage
from toy_envs import Adder, Scripted, says

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import Sample
from agentgym.coordinator.assemble import assemble
from agentgym.episode import EndReason, Episode
from agentgym.errors import IntegrityError
from agentgym.messages import assistant, shortened_text, system, user
from agentgym.policy.client import Completion, Sampling
from agentgym.policy.template import ChatTokenizer


class Spelling(FakePolicy):
    """Samples its answers byte for byte, as no tokenizer would, and remembers prompts and answers as ids."""

    def __init__(self, tokenizer: ChatTokenizer, *answers: str, versions: Sequence[int] = (3,)) -> None:
        super().__init__(tokenizer, *answers)
        self.versions = versions
        self.ids: list[tuple[list[int], list[int]]] = []

    async def complete(self, prompt: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        assert isinstance(answer, str)
        tokens = [i for letter in answer for i in self.tokenizer.encode(letter)]
        tokens.append(self.tokenizer.stop_token_ids[0])
        self.ids.append((list(prompt), tokens))
        n = len(tokens)
        # The weights change in the middle of the answer if there are two versions.
        versions = np.repeat(np.array(self.versions, np.int32), -(-n // len(self.versions)))[:n]
        ids, logprobs = np.array(tokens, np.int32), np.full(n, -0.5, np.float32)
        return Completion(ids, logprobs, versions, None, "stop", 0.01)


def samples_of(*episodes: Episode, version: int = 3, max_staleness: int = 1) -> list[Sample]:
    """The samples of a step on one group."""
    found = assemble(
        [group_of(*episodes)],
        policies=["learner"],
        algorithm=AlgorithmConfig(advantage="group_mean", normalize_batch=False),
        max_tokens=32,
        warmup=False,
        version=version,
        max_staleness=max_staleness,
    )["learner"]
    for sample in found.samples:
        sample.verify()
    return found.samples


def assert_trained_as_sampled(policy: Spelling, episode: Episode) -> None:
    """Every answer is trained once, behind the very prompt that the server read."""
    samples = samples_of(episode, episode_of([-9.0], versions=3))[:-1]
    asked = iter(policy.ids)
    for sample, trajectory in zip(samples, episode.trajectories, strict=True):
        assert sample.loss_mask.sum() == sum(turn.end - turn.start for turn in trajectory.turns)
        for turn in trajectory.turns:
            prompt, answer = next(asked)
            assert sample.tokens[: turn.start].tolist() == prompt
            assert sample.tokens[turn.start : turn.end].tolist() == answer
            assert sample.loss_mask[turn.start : turn.end].all()
            assert sample.advantages[turn.start : turn.end].all()
    assert next(asked, None) is None


def test_in_a_tool_loop_the_ids_that_are_trained_are_those_that_were_sampled() -> None:
    tokenizer = family("qwen2_5")
    # Neither the tokens nor the spaces are those that the template would write.
    policy = Spelling(
        tokenizer,
        'So. <tool_call>{"arguments":{"a":1,"b":1},"name":"add"}</tool_call>',
        "<tool_call>{nonsense</tool_call>",
        '<tool_call>\n{"name": "submit", "arguments": {"answer":2}}</tool_call>',
    )
    stage = Stage(tokenizer, policy, max_tokens=9000)
    episode = stage.play(Adder()).episode
    assert (episode.end_reason, episode.reward("agent")) == (EndReason.TERMINATED, 1.0)
    [trajectory] = episode.trajectories
    assert "Error" in stage.text(trajectory)  # the malformed call was answered
    assert [len(turn.message.get("tool_calls", [])) for turn in trajectory.turns] == [1, 1, 1]
    assert tokenizer.encode(stage.text(trajectory)) != trajectory.tokens.tolist()
    assert_trained_as_sampled(policy, episode)


def test_a_thinking_model_has_the_templates_prefix_in_every_turn_of_a_game() -> None:
    tokenizer = family("qwen3")
    answers = [f"<think>\nhm {i}\n</think>\n\nA{i}" for i in range(3)]
    policy = Spelling(tokenizer, *answers)
    stage = Stage(tokenizer, policy, max_turns=3, max_tokens=9000)
    episode = stage.play(Scripted(says("more", 1.0))).episode
    assert [t.branch for t in episode.trajectories] == [0, 1, 2]
    assert_trained_as_sampled(policy, episode)
    said = [system("Obey."), user("begin")]
    for i, (prompt, _) in enumerate(policy.ids):
        assert prompt == tokenizer.encode_chat(said)
        said += [assistant(answers[i]), user("more")]


def test_a_turn_too_long_ends_the_play_before_the_server_is_asked() -> None:
    tokenizer = family("qwen2_5")
    policy = Spelling(tokenizer, "A")
    stage = Stage(tokenizer, policy, max_tokens=300)
    episode = stage.play(Scripted(says("so " * 400, 1.0))).episode
    assert (episode.end_reason, len(policy.ids)) == (EndReason.CONTEXT, 1)
    [trajectory] = episode.trajectories
    assert stage.text(trajectory).startswith("<|im_start|>system\nObey.<|im_end|>\n<|im_start|>user\nbegin")
    assert stage.said(trajectory) == ["A<|im_end|>"]  # and what was said before it is still trained
    assert_trained_as_sampled(policy, episode)


def test_the_sampled_stop_token_is_trained() -> None:
    tokenizer = family("llama3_2")
    stage = Stage(tokenizer, FakePolicy(tokenizer, "A", ""), max_tokens=9000)
    won, lost = (stage.play(Scripted(says("x"), says("y", r, over=True))).episode for r in (1.0, 0.0))
    for sample in samples_of(won, lost):
        stops = sample.tokens == tokenizer.stop_token_ids[0]
        # Of system, user and the answers: only the last two were sampled; the last answer is nothing else.
        assert sample.loss_mask[stops].tolist() == [False, False, True, False, True]
        assert sample.advantages[stops].astype(bool).tolist() == sample.loss_mask[stops].tolist()


def test_every_token_has_the_version_that_sampled_it_and_old_ones_are_masked() -> None:
    tokenizer = family("qwen2_5")
    stage = Stage(tokenizer, Spelling(tokenizer, "abcdefg", versions=(3, 4)), max_tokens=9000)
    won, lost = (stage.play(Scripted(says("bye", r, over=True))).episode for r in (1.0, 0.0))
    [trajectory] = won.trajectories
    assert trajectory.versions[trajectory.loss_mask].tolist() == [3] * 4 + [4] * 4
    sample = samples_of(won, lost, version=5, max_staleness=1)[0]
    trained = sample.tokens[sample.loss_mask].tolist()
    assert tokenizer.decode(trained) == "efg<|im_end|>"


def test_a_turn_without_tokens_is_refused_where_it_would_move_the_advantages() -> None:
    tokenizer = family("qwen2_5")
    episode = (
        Stage(tokenizer, FakePolicy(tokenizer, "A"), max_tokens=900).play(Scripted(says(over=True))).episode
    )
    [trajectory] = episode.trajectories
    [turn] = trajectory.turns
    empty = replace(trajectory, turns=(turn, turn._replace(start=turn.end, end=turn.end, reward=1.0)))
    with pytest.raises(IntegrityError, match="is empty"):
        empty.check()


def test_long_observations_lose_their_middle_and_say_so() -> None:
    tokenizer = family("qwen2_5")
    stage = Stage(tokenizer, FakePolicy(tokenizer, "A"), max_tokens=9000, max_turns=2, chars=5)
    episode = stage.play(Scripted(says("0123456789"), first=("12345", {}))).episode
    text = stage.text(episode.trajectories[0])
    assert "user\n12345<|im_end|>" in text
    assert "user\n012\n[... 5 characters left out ...]\n89<|im_end|>" in text


@given(st.text(max_size=30), st.integers(1, 20))
def test_a_shortened_text_keeps_its_ends(text: str, limit: int) -> None:
    short = shortened_text(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        head, tail = short.split(f"\n[... {len(text) - limit} characters left out ...]\n")
        assert len(head) + len(tail) == limit
        assert text.startswith(head)
        assert text.endswith(tail)
