"""Plays with tools: models that call for ever, and tools that never return."""

import threading

import pytest
from stage import FakePolicy, Stage

from agentgym.episode import EndReason
from agentgym.policy.template import ChatTokenizer
from agentgym.tool_schema import Context
from agentgym.tools import ToolEnv, tool

SPEAK = '<tool_call>{"name": "speak", "arguments": {}}</tool_call>'
HANG = '<tool_call>{"name": "hang", "arguments": {}}</tool_call>'


class Endless(ToolEnv):
    """An environment that never ends by itself, with a tool that says much."""

    max_tool_calls = 3
    max_tool_chars = 50

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.spoken = 0
        return "?", {}

    @tool
    def speak(self, context: Context) -> str:
        """Speak."""
        self.spoken += 1
        context.scratch["last"] = self.spoken
        return "word " * 100_000


def test_a_model_that_calls_tools_for_ever_ends_by_its_turns_with_results_that_stay_short(
    tokenizer: ChatTokenizer,
) -> None:
    """trl#4751: a tool loop without a bound on turns took all memory."""
    env = Endless()
    stage = Stage(tokenizer, FakePolicy(tokenizer, SPEAK * 9), max_turns=7, max_tokens=50_000, answer=700)
    episode = stage.play(env).episode
    assert episode.end_reason is EndReason.MAX_TURNS
    assert env.spoken == 7 * 3
    assert episode.agent_metrics["agent"]["tools/speak/calls"] == 21.0
    assert episode.agent_metrics["agent"]["tools/not_run"] == 7 * 6
    assert stage.text(episode.trajectories[0]).count("word ") == 6 * 3 * 10  # nothing follows the last answer


def test_a_model_that_calls_tools_for_ever_ends_where_its_context_is_full(tokenizer: ChatTokenizer) -> None:
    stage = Stage(tokenizer, FakePolicy(tokenizer, SPEAK), max_turns=10_000, max_tokens=1_000, answer=100)
    episode = stage.play(Endless()).episode
    assert episode.end_reason is EndReason.CONTEXT
    assert len(episode.trajectories[0].tokens) <= 1_000


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


def test_a_tool_that_never_returns_fails_its_own_play_in_time(tokenizer: ChatTokenizer, release) -> None:
    """inspect_ai#2605: a time limit that was not applied."""

    class Hanging(Endless):
        @tool
        def hang(self) -> str:
            """Hang."""
            release.wait(60)
            return "late"

    play = Stage(tokenizer, FakePolicy(tokenizer, HANG), answer=100).play(Hanging(), step_timeout=0.2)
    assert (play.episode.end_reason, play.reusable) == (EndReason.ENV_FAILED, False)
    assert "step did not return within 0.2 s" in play.episode.error


def test_a_tool_with_a_time_limit_that_never_returns_does_not_fail_the_play(
    tokenizer: ChatTokenizer, release
) -> None:
    class Hanging(Endless):
        @tool(timeout=0.05)
        def hang(self) -> str:
            """Hang."""
            release.wait(60)
            return "late"

    policy = FakePolicy(tokenizer, HANG, HANG, SPEAK)
    episode = Stage(tokenizer, policy, max_turns=3, max_tokens=5_000, answer=100).play(Hanging()).episode
    assert episode.end_reason is EndReason.MAX_TURNS
    assert episode.agent_metrics["agent"]["tools/errors"] == 2.0
    assert policy.prompts[-1].count("Error: TimeoutError: no result within 0.05 seconds") == 2
