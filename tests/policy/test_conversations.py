"""Whatever is said in whatever template: what the policy read and wrote is what is recorded and trained, once."""

from dataclasses import dataclass

import numpy as np
import pytest
from builders import group_of
from chat_families import FAMILIES, family
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.algorithm_config import AlgorithmConfig
from agentgym.batch import concatenate, split
from agentgym.coordinator.assemble import assemble
from agentgym.episode import NOT_SAMPLED, EndReason, Episode, Trajectory, Turn
from agentgym.episode_codec import decode_episode, encode_episode
from agentgym.errors import ModelError
from agentgym.messages import Message, ToolSchema, system, tool_result, user
from agentgym.policy.answers import read_bare, read_functions
from agentgym.policy.template import ChatTokenizer
from agentgym.policy.tokens import Conversation, Span
from agentgym.protocol import EpisodeDone
from agentgym.wire import pack, unpack

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
WORDS = st.text('the ynug\nA{é"<', max_size=8)


@dataclass(frozen=True)
class Round:
    """What is sampled, and what the environment answers."""

    thinking: str
    words: str
    calls: int
    ended: bool
    spelled: bool
    """The answer is sampled byte for byte, not as the tokenizer would encode it."""
    replies: tuple[str, ...]


ROUNDS = st.builds(
    Round,
    thinking=st.sampled_from(["", "<think>\n\n</think>\n\n", "<think>\nhm\n</think>\n\n", "<think>\nh"]),
    words=WORDS,
    calls=st.integers(0, 2),
    ended=st.booleans(),
    spelled=st.booleans(),
    replies=st.lists(WORDS, min_size=1, max_size=2).map(tuple),
)


def call_text(tokenizer: ChatTokenizer) -> str:
    if tokenizer.reader is read_functions:
        return "<tool_call>\n<function=add>\n</function>\n</tool_call>"
    if tokenizer.reader is read_bare:
        return '{"name": "add", "parameters": {}}'
    return '<tool_call>\n{"name":"add", "arguments":{ }}\n</tool_call>'


def sampled_ids(tokenizer: ChatTokenizer, said: Round) -> list[int]:
    text = said.thinking + said.words + call_text(tokenizer) * said.calls
    pieces = list(text) if said.spelled else [text]
    ids = [i for piece in pieces for i in tokenizer.encode(piece)]
    return ids + [tokenizer.stop_token_ids[0]] * said.ended or [tokenizer.stop_token_ids[0]]


def replies(message: Message, said: Round) -> list[Message]:
    calls = message.get("tool_calls", [])
    results = [tool_result(said.replies[0], call) for call in calls]
    return results + [user(text) for text in said.replies[1:]] if calls else [user(t) for t in said.replies]


class Recorded:
    """A conversation, and what must be found in it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.conversation = Conversation(tokenizer)
        self.tools: list[ToolSchema] = []
        self.spans: list[tuple[Span, list[int], int]] = []

    def begin(self, opening: list[Message], tools: list[ToolSchema]) -> None:
        self.tools = tools
        self.conversation.initial(opening, tools)
        assert self.conversation.prompt == self.tokenizer.encode_chat(opening, tools)

    def play(self, said: Round, version: int) -> None:
        conversation = self.conversation
        prompt, branch = list(conversation.prompt), conversation.branch
        ids = sampled_ids(self.tokenizer, said)
        logprobs = [-float(i % 7) for i in range(len(ids))]
        span = conversation.append_sampled(ids, logprobs, [version] * len(ids))
        assert span == (branch, len(prompt), len(prompt) + len(ids))
        self.spans.append((span, ids, version))
        new = replies(conversation.messages[-1], said)
        if conversation.append_messages(new):
            assert conversation.prompt[: len(prompt) + len(ids)] == prompt + ids
        else:
            assert conversation.branch == branch + 1
            assert conversation.prompt == self.tokenizer.encode_chat(conversation.messages, self.tools)
        self.check_text()

    def check_text(self) -> None:
        """The branch is what the template writes, but for the answers themselves."""
        conversation = self.conversation
        written = self.tokenizer.render(conversation.messages, self.tools)
        at, end = 0, 0
        for span, _, _ in self.spans:
            if span.branch == conversation.branch:
                between = self.tokenizer.decode(conversation.prompt[end : span.start])
                found = written.find(between, at)
                assert found == 0 if at == 0 else found >= at
                at, end = found + len(between), span.end
        assert written.endswith(self.tokenizer.decode(conversation.prompt[end:]))

    def episode(self, reward: float) -> Episode:
        conversation = self.conversation
        made = []
        for number, branch in enumerate(conversation.branches):
            turns = tuple(
                Turn(span.start, span.end, {"role": "assistant", "content": ""}, "stop", reward, {}, 0.0)
                for span, _, _ in self.spans
                if span.branch == number
            )
            if turns:
                made.append(
                    Trajectory("agent", "learner", True, **branch.arrays(), turns=turns, branch=number)
                )
        return Episode(
            *("test", 0, 0, 0, 0, EndReason.TERMINATED), tuple(made), tuple(t.checksum() for t in made)
        )


def arrived(episode: Episode) -> Episode:
    """The episode as the coordinator receives it."""
    header, arrays = encode_episode(episode)
    frames = pack(EpisodeDone(lease_id=1, episode=header), arrays)
    packet = unpack([bytes(frame) for frame in frames])
    return decode_episode(packet.header.episode, packet.arrays)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25)
@given(
    opening=WORDS, prompt=st.booleans(), tools=st.booleans(), rounds=st.lists(ROUNDS, min_size=1, max_size=4)
)
def test_what_was_sampled_is_trained_exactly_once_behind_what_was_read(
    name: str, opening: str, prompt: bool, tools: bool, rounds: list[Round]
) -> None:
    tokenizer = family(name)
    recorded = Recorded(tokenizer)
    try:
        recorded.begin([system("S")] * prompt + [user(opening)], [TOOL] * tools)
        for version, said in enumerate(rounds):
            recorded.play(said, version)
    except ModelError:  # such an episode ends here
        assert name in ("gemma", "llama3_2")
    if not recorded.spans:
        return
    episode = arrived(recorded.episode(1.0))
    for trajectory in episode.trajectories:
        trajectory.check()
        mask = trajectory.loss_mask
        assert len(trajectory.tokens) == len(mask) == len(trajectory.logprobs) == len(trajectory.versions)
        assert (trajectory.versions[~mask] == NOT_SAMPLED).all()
        assert not trajectory.logprobs[~mask].any()
    group = group_of(episode, arrived(recorded.episode(0.0)))
    found = assemble(
        [group],
        policies=["learner"],
        algorithm=AlgorithmConfig(advantage="group_mean", normalize_batch=False),
        max_tokens=32,
        warmup=False,
        version=len(rounds),
        max_staleness=len(rounds),
    )["learner"]
    arrays = {k: v for k, v in concatenate(found.samples).items() if v is not None}
    lengths = [len(sample.tokens) for sample in found.samples]
    samples = split(arrays, lengths, [sample.checksum for sample in found.samples])
    for sample in samples:
        sample.verify()
    trained = np.concatenate([sample.tokens[sample.loss_mask] for sample in samples])
    everything = [i for _, ids, _ in recorded.spans for i in ids]
    assert trained.tolist() == everything * 2
    weights = np.concatenate([sample.weights for sample in samples])
    assert weights.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-5)
    assert (weights[np.concatenate([sample.loss_mask for sample in samples])] > 0).all()
