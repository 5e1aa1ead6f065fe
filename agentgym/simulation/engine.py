"""A policy server's engine as a fluid: requests share its speed, and none of its steps is simulated.

A step of the engine gives a token to each of its n requests and takes a + b n seconds. So each request gets
1 / (a + b n) tokens a second, whichever it is: with the tokens that any request got since the beginning as a clock,
a request ends when that clock has moved on by its length, and the next one to end is the top of a heap.
"""

import asyncio
import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from agentgym.errors import PolicyUnavailableError

ROUNDED = 1e-6
"""Of a token: less is none."""
Spans = list[tuple[int, int]]
"""[(first token index, version)], ascending, as in a completion."""


@dataclass(slots=True)
class _Request:
    work: float
    """In sampled tokens: the prompt's share, then the answer."""
    answer: int
    future: asyncio.Future[Spans]
    begun: float = 0.0
    """The engine's token clock when it was taken up."""
    spans: list[tuple[float, int]] = field(default_factory=list)
    """(token clock, version) since then."""


class Engine:
    """One policy server's engine; belongs to a running event loop."""

    def __init__(self, alone: float, full: float, slots: int) -> None:
        """Begin idle, with version 0.

        Args:
            alone: tokens a second for one request.
            full: tokens a second for `slots` requests together.
            slots: requests at once; others wait for their turn.
        """
        self._per_request = max(0.0, (slots / full - 1 / alone) / (slots - 1)) if slots > 1 else 0.0
        self._fixed = 1 / alone - self._per_request
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self._running: list[tuple[float, int, _Request]] = []
        """A heap by the token clock at which a request ends."""
        self._waiting: deque[_Request] = deque()
        self._order = count()
        self._tokens = 0.0
        """The token clock: what any request got since the beginning."""
        self._looked = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._paused = self._closed = False
        self.version = 0
        self.work = 0.0
        """Tokens that were sampled until `look`, those of prompts with what they cost."""

    @property
    def outstanding(self) -> int:
        """Requests that are not answered."""
        return len(self._running) + len(self._waiting)

    def ask(self, prompt: float, answer: int) -> asyncio.Future[Spans]:
        """Sample `answer` tokens, after a prompt that costs as much as `prompt` of them.

        The future gives the versions that sampled them; PolicyUnavailableError where the server dies first.
        """
        request = _Request(prompt + answer, answer, self._loop.create_future())
        if self._closed:
            request.future.set_exception(PolicyUnavailableError("the policy server is gone"))
            return request.future
        self.look()
        self._waiting.append(request)
        self._take_up()
        return request.future

    def abort(self, future: asyncio.Future[Spans]) -> None:
        """Stop sampling for a request whose caller wants no answer any more."""
        self.look()
        self._running = [entry for entry in self._running if entry[2].future is not future]
        heapq.heapify(self._running)
        self._take_up()

    def pause(self) -> None:
        """Sample nothing from now on."""
        self.look()
        self._paused = True
        self._set_timer()

    def go_on(self, version: int) -> None:
        """Sample with the weights of a version from now on; requests that are running go on under them."""
        self.look()
        self._paused, self.version = False, version
        for _, _, request in self._running:
            request.spans.append((self._tokens, version))
        self._set_timer()

    def close(self) -> None:
        """Die: nobody is answered any more."""
        self.look()
        self._closed = True
        for request in [*(request for _, _, request in self._running), *self._waiting]:
            if not request.future.done():
                request.future.set_exception(PolicyUnavailableError("the policy server died"))
                request.future.exception()  # its caller may be gone
        self._running, self._waiting = [], deque()
        self._set_timer()

    def look(self) -> None:
        """Bring the numbers up to now."""
        now = self._loop.time()
        seconds, self._looked = now - self._looked, now
        if self._running and not self._paused:
            tokens = seconds * self._speed()
            self._tokens += tokens
            self.work += tokens * len(self._running)

    def _speed(self) -> float:
        return 1 / (self._fixed + self._per_request * len(self._running))

    def _take_up(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.popleft()
            if not request.future.done():  # else its caller has given up
                request.begun = self._tokens
                request.spans.append((self._tokens, self.version))
                heapq.heappush(self._running, (self._tokens + request.work, next(self._order), request))
        self._set_timer()

    def _set_timer(self) -> None:
        if not self._running or self._paused:
            due = math.inf
        else:
            due = self._looked + (self._running[0][0] - self._tokens) / self._speed()
        if self._timer is not None:
            if self._timer.when() <= due < math.inf:
                return  # it looks again then; a timer is dearer than a look
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._finish) if due < math.inf else None

    def _finish(self) -> None:
        self._timer = None
        self.look()
        while self._running and self._running[0][0] <= self._tokens + ROUNDED:
            _, _, request = heapq.heappop(self._running)
            if not request.future.done():
                request.future.set_result(_spans(request))
        self._take_up()


def _spans(request: _Request) -> Spans:
    prompt = request.work - request.answer
    spans: Spans = []
    for at, version in request.spans:
        first = max(0, round(at - request.begun - prompt))
        if spans and spans[-1][0] == first:
            spans.pop()
        if first < request.answer:
            spans.append((first, version))
    return spans
