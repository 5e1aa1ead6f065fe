"""One agent of an episode in play: its conversation, its turns and what they earned."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from agentgym.episode import REPLAYED, SCRIPTED, EndReason, Trajectory, Turn
from agentgym.errors import PolicyError, PolicyUnavailableError
from agentgym.messages import AgentId, Message, ToolSchema, shortened, system
from agentgym.policy.client import Completion, Policy, Sampling, Speaker
from agentgym.policy.scripted import Script
from agentgym.policy.template import ChatTokenizer
from agentgym.policy.tokens import Conversation, Span
from agentgym.protocol import Recorded

RETRY_SECONDS = 0.5
"""Between two questions to policy servers that are not there."""


@dataclass(slots=True)
class _Draft:
    """A turn whose reward may still come."""

    span: Span
    message: Message
    finish_reason: str
    seconds: float = 0.0
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends an agent's part in an episode."""

    max_turns: int
    max_tokens: int
    """Tokens of one conversation, prompts included: the smaller of the model's context and `env.max_tokens`."""
    context: bool
    """Whether `max_tokens` is the model's context."""
    request_timeout: float
    """Seconds that an answer may take, all retries included."""
    max_observation_chars: int | None = None
    """See `env.max_observation_chars`."""


Player = Policy | Script | Speaker


class Seat:
    """An agent and the policy that plays it."""

    def __init__(
        self,
        agent: AgentId,
        policy: str,
        player: Player,
        *,
        trainable: bool,
        tokenizer: ChatTokenizer,
        sampling: Sampling,
        limits: Limits,
        system_prompt: str | None,
        tools: list[ToolSchema],
        keep_thinking: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin a conversation for the agent; a script answers elsewhere, and `say` records it.

        `keep_thinking` is `policies.NAME.history = "keep"`.
        """
        self.agent = agent
        self.metrics: dict[str, float] = {}
        self._policy = policy
        self.script = player if isinstance(player, Script) else None
        """Who plays where the environment is; its answers come in by `say`."""
        self._player = player
        self._trainable = trainable
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._limits = limits
        # What a teacher says is read by the model that is trained; the words of an opponent never are.
        self._reads = trainable or not isinstance(player, Script | Speaker)
        self._tools = tools
        self._keep_thinking = keep_thinking
        self._opening: list[Message] = [system(system_prompt)] if system_prompt else []
        self._clock = clock
        self._conversation: Conversation | None = None
        self._turns: list[_Draft] = []

    def hear(self, new: list[Message]) -> EndReason | None:
        """Take in the messages that the agent must answer; return why it cannot, if so."""
        if len(self._turns) >= self._limits.max_turns:
            return EndReason.MAX_TURNS
        limit = self._limits.max_observation_chars
        if limit is not None:
            new = shortened(new, limit)
        if self._conversation is None:
            self._conversation = Conversation(self._tokenizer, keep_thinking=self._keep_thinking)
            self._conversation.initial([*self._opening, *new], self._tools)
        else:
            self._conversation.append_messages(new)
        if self._reads and self._room() < 1:
            return EndReason.CONTEXT if self._limits.context else EndReason.MAX_TOKENS
        return None

    @property
    def prompt(self) -> list[int]:
        """What the agent has read and said, which its next answer follows."""
        return self._conversation.prompt if self._conversation else []

    def repeat(self, recorded: Recorded) -> Message:
        """Give a recorded answer to what was heard last; nothing of it is trained."""
        message = cast(Message, recorded["message"])
        self.say(message, REPLAYED, tokens=recorded["tokens"])
        return message

    def say(
        self,
        message: Message,
        finish: str = SCRIPTED,
        seconds: float = 0.0,
        *,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Record an answer that no server sampled to what was heard last; words are put as our model would say them."""
        assert self._conversation is not None
        if tokens is None:
            tokens = self._tokenizer.encode_answer(message)
        span = self._conversation.append_said(message, tokens)
        self._turns.append(_Draft(span, message, finish, seconds))

    async def answer(self) -> Message:
        """Ask the policy for the answer to what was heard last.

        Raises:
            PolicyError: it gave none.
        """
        assert self._conversation is not None
        assert not isinstance(self._player, Script)
        if isinstance(self._player, Speaker):
            start, timeout = self._clock(), self._limits.request_timeout
            message, finish = await self._player.chat(
                self._conversation.messages, self._tools, timeout=timeout
            )
            self.say(message, finish, self._clock() - start)
            return message
        return await self._sampled(self._player, self._conversation)

    def earn(self, reward: float, info: Mapping[str, Any]) -> None:
        """Credit the agent's latest turn, and take over the numbers in the environment's info."""
        if self._turns:
            turn = self._turns[-1]
            turn.reward += reward
            for name, value in info.get("rewards", {}).items():
                turn.rewards[name] = turn.rewards.get(name, 0.0) + float(value)
        elif reward:
            # Given before the agent ever acted: no token can be credited with it.
            self.metrics["unattributed_reward"] = self.metrics.get("unattributed_reward", 0.0) + reward
        if "success" in info:
            self.metrics["success"] = float(info["success"])
        for name, value in info.get("metrics", {}).items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)

    def trajectories(self) -> list[Trajectory]:
        """Return the record of each branch that has a turn."""
        if self._conversation is None:
            return []
        records = []
        for number, branch in enumerate(self._conversation.branches):
            turns = tuple(
                Turn(d.span.start, d.span.end, d.message, d.finish_reason, d.reward, d.rewards, d.seconds)
                for d in self._turns
                if d.span.branch == number
            )
            if turns:
                records.append(
                    Trajectory(
                        agent=self.agent,
                        policy=self._policy,
                        trainable=self._trainable,
                        turns=turns,
                        branch=number,
                        **branch.arrays(),
                    )
                )
        return records

    async def _sampled(self, player: Policy, conversation: Conversation) -> Message:
        routes_start = conversation.routes_start
        sampling = self._sampling.within(self._room())
        completion = await self._complete(player, conversation, sampling, routes_start)
        if completion.finish_reason == "abort" or not len(completion.tokens):
            raise PolicyError(
                f"policy {self._policy!r}: the server broke the answer off; the episode is lost"
            )
        span = conversation.append_sampled(
            completion.tokens.tolist(),
            completion.logprobs,
            completion.versions,
            completion.routes,
            routes_start,
        )
        message = conversation.messages[-1]
        self._turns.append(_Draft(span, message, completion.finish_reason, completion.seconds))
        return message

    def _room(self) -> int:
        """Return how many tokens the next answer may have."""
        return self._limits.max_tokens - len(self.prompt) if self._conversation else 0

    async def _complete(
        self, player: Policy, conversation: Conversation, sampling: Sampling, routes_start: int
    ) -> Completion:
        """Ask until a server answers: one that died comes back, and nothing of the episode is lost with it."""
        prompt = conversation.prompt
        deadline = self._clock() + self._limits.request_timeout
        while True:
            left = max(0.001, deadline - self._clock())
            try:
                return await player.complete(
                    prompt, sampling, routes_start=routes_start, timeout=left, affinity=conversation
                )
            except PolicyUnavailableError:
                if left <= RETRY_SECONDS:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
