"""One agent's conversation as tokens: what the policy read and wrote, never re-tokenized.

    conversation = Conversation(tokenizer)
    conversation.initial([user("Hi")], tools=())
    completion = await policy.complete(conversation.prompt, ...)
    span = conversation.append_sampled(completion.tokens, completion.logprobs, completion.versions, ...)
    conversation.append_messages([user("And?")])
    for branch in conversation.branches: branch.arrays()

Sampled ids are kept as they are. What follows them is the chat template's own text between the end of an
answer and the next one (`agentgym.policy.suffix`). That is only right while the template leaves earlier answers
alone. Where it does not (Qwen 3 strips the thinking of earlier turns), the conversation goes on in a new branch:
a prompt rendered from the messages, in which nothing is trained a second time. With `keep_thinking` it goes on in place
with the thinking that was sampled, as if the template had not looked at it.

Shapes: K tokens of a branch, L MoE layers, k experts per token. Within a branch every prompt starts with all
earlier tokens; the loss mask is true exactly on sampled ids.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import msgpack
import numpy as np
from numpy.typing import NDArray

from agentgym.episode import NOT_SAMPLED, no_route
from agentgym.errors import IntegrityError
from agentgym.messages import Message, ToolSchema
from agentgym.policy.answers import Thinking
from agentgym.policy.suffix import EMPTY, kind_of, suffix
from agentgym.policy.template import ChatTokenizer

Routes = NDArray[np.unsignedinteger[Any]]
_Sampled = tuple[Sequence[float] | NDArray[np.float32], Sequence[int] | NDArray[np.int32]]
"""The log-probabilities of an answer and its versions."""


class Span(NamedTuple):
    """Where an answer lies: token indices inside a branch."""

    branch: int
    start: int
    end: int


class BranchArrays(TypedDict):
    """The arrays of a branch, with the names and shapes of `agentgym.episode.Trajectory`."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    routes: Routes | None


class Conversation:
    """The growing tokens of one agent in one episode."""

    def __init__(self, tokenizer: ChatTokenizer, *, keep_thinking: bool = False) -> None:
        """Start without a prompt; call `initial` first."""
        self.messages: list[Message] = []
        """Everything said so far; the last answer is the last assistant message."""
        self._tokenizer = tokenizer
        self._keep_thinking = keep_thinking
        self._tools: tuple[ToolSchema, ...] = ()
        self._packed_tools = b""
        self._pattern = EMPTY
        self.branches: list[Branch] = []
        """The last one grows. A branch may have no answer: a prompt that nobody came to read."""

    @property
    def branch(self) -> int:
        """The number of the current branch."""
        return len(self.branches) - 1

    @property
    def prompt(self) -> list[int]:
        """The prompt of the next request: all tokens of the current branch. Read it, do not change it."""
        return self.branches[-1].tokens

    @property
    def routes_start(self) -> int:
        """How many of the prompt's first tokens have their route rows already."""
        return self.branches[-1].routed

    def initial(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
        """Begin with these messages; tools are fixed for the whole conversation."""
        if self.branches:
            raise IntegrityError("`initial` was called on a conversation that has begun; make a new one")
        self._tools = tuple(tools)
        self._packed_tools = msgpack.packb(self._tools)
        self.messages = list(messages)
        self._pattern = EMPTY.then(*map(kind_of, messages))
        self._open_branch()

    def append_sampled(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | NDArray[np.float32],
        versions: Sequence[int] | NDArray[np.int32],
        routes: Routes | None = None,
        routes_start: int | None = None,
    ) -> Span:
        """Append an answer exactly as it was sampled; `messages` gets what it means.

        Args:
            tokens: ids [n], the sampled stop token included.
            logprobs: [n].
            versions: [n].
            routes: [rows, L, k] for the positions from `routes_start` on. A row that is here already stays.
            routes_start: a position in the branch; by default what the property of this name says.
        """
        if not len(tokens) == len(logprobs) == len(versions):
            raise IntegrityError(
                f"an answer of {len(tokens)} tokens has {len(logprobs)} log-probabilities and "
                f"{len(versions)} versions"
            )
        branch = self.branches[-1]
        text = self._tokenizer.text(tokens)
        span = self._append_answer(
            self._tokenizer.read(text, self._tools), tokens, text, (logprobs, versions)
        )
        if routes is not None:
            branch.add_routes(routes, branch.routed if routes_start is None else routes_start)
        return span

    def append_said(self, message: Message, tokens: Sequence[int]) -> Span:
        """Append an answer that no policy server sampled, and the ids [n] that stand for it, the end token included."""
        return self._append_answer(message, tokens, self._tokenizer.text(tokens))

    def _append_answer(
        self, message: Message, tokens: Sequence[int], text: str, sampled: _Sampled | None = None
    ) -> Span:
        if not len(tokens):
            raise IntegrityError(
                "an answer has no tokens: there is nothing that its reward could be given to"
            )
        branch = self.branches[-1]
        span = Span(len(self.branches) - 1, *branch.append(tokens, sampled))
        self.messages.append(message)
        kind = kind_of(message, text)
        if self._keep_thinking:
            kind = kind._replace(thinking=Thinking.NONE)
        self._pattern = self._pattern.then(kind)
        return span

    def append_messages(self, new: Sequence[Message]) -> bool:
        """Append what the environment answered, and ask for the next answer.

        Returns:
            True if the current branch goes on, False if a new one was opened.
        """
        ids = suffix(self._tokenizer, self._packed_tools, self._pattern, self.messages[-1], new)
        self.messages += new
        self._pattern = self._pattern.then(*map(kind_of, new))
        if ids is None:
            self._open_branch()
            return False
        branch = self.branches[-1]
        # An answer that was cut off by max_tokens gets its end token from us: read, but never trained.
        ended = branch.tokens[-1] in self._tokenizer.stop_token_ids
        branch.tokens += ids[1:] if ended else ids
        return True

    def _open_branch(self) -> None:
        self.branches.append(Branch(self._tokenizer.encode_chat(self.messages, self._tools)))


class Branch:
    """The arrays of a branch while they grow."""

    def __init__(self, prompt: list[int]) -> None:
        """Begin with a prompt."""
        self.tokens = prompt
        """What the policy read and wrote; what is added to it here was read."""
        self.routed = 0
        """Tokens whose route rows are here: always the first ones."""
        self._answers: list[tuple[int, int, _Sampled | None]] = []
        """Where each answer lies, from and to; None where no policy server sampled it."""
        self._routes: list[Routes] = []

    def append(self, tokens: Sequence[int], sampled: _Sampled | None) -> tuple[int, int]:
        """Append an answer; return where it lies, from and to."""
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        self._answers.append((start, end, sampled))
        self.tokens += tokens
        return start, end

    def add_routes(self, routes: Routes, start: int) -> None:
        """Keep the rows of positions that have none yet."""
        if start > self.routed or start + len(routes) > len(self.tokens):
            raise IntegrityError(
                f"route rows for the positions {start} to {start + len(routes)} do not continue the "
                f"{self.routed} rows of a branch of {len(self.tokens)} tokens"
            )
        rows = routes[self.routed - start :]
        if len(rows):
            self._routes.append(rows)
            self.routed += len(rows)

    def arrays(self) -> BranchArrays:
        """Return the branch up to the last token of an answer: what was read after it is not learned from."""
        K = self._answers[-1][1] if self._answers else 0
        loss_mask = np.zeros(K, np.bool_)
        logprobs = np.zeros(K, np.float32)
        versions = np.full(K, NOT_SAMPLED, np.int32)
        for start, end, sampled in self._answers:
            loss_mask[start:end] = True
            if sampled is not None:
                logprobs[start:end], versions[start:end] = sampled
        routes = None
        if self._routes:
            known = np.concatenate(self._routes)[:K]
            # The last sampled token was never computed, so it has no row.
            routes = np.full((K, *known.shape[1:]), no_route(known.dtype), known.dtype)
            routes[: len(known)] = known
        return {
            "tokens": np.array(self.tokens[:K], np.int32),
            "loss_mask": loss_mask,
            "logprobs": logprobs,
            "versions": versions,
            "routes": routes,
        }
