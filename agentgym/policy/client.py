"""Ask a policy server for completions: tokens in, tokens out.

    client = PolicyClient(["ipc:///tmp/server"])
    completion = await client.complete(prompt, Sampling(max_tokens=32), routes_start=0, timeout=60.0)

Many requests are in flight over one DEALER socket per server. Every request ends: with a completion, with a
PolicyError that names the server, or by its caller's cancellation, which the server is told.
"""

import abc
import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from agentgym.errors import PolicyError, PolicyUnavailableError, WireError
from agentgym.messages import Message, ToolSchema
from agentgym.protocol import Abort, Error, Generate, Health, Healthy
from agentgym.protocol import Completion as CompletionHeader
from agentgym.wire import Channel, Packet, open_socket


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer is sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the answer; it is the answer's last token."""

    def within(self, room: int) -> "Sampling":
        """Return the same with at most `room` tokens."""
        return self if self.max_tokens <= room else replace(self, max_tokens=room)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer of n tokens."""

    tokens: NDArray[np.int32]
    """[n], the stop token included."""
    logprobs: NDArray[np.float32]
    """[n], of the distribution that was sampled from."""
    versions: NDArray[np.int32]
    """[n], the weight version that sampled each token."""
    routes: NDArray[np.unsignedinteger[Any]] | None
    """[prompt + n - 1 - routes_start, L, k]; None for dense models."""
    finish_reason: Literal["stop", "length", "abort"]
    seconds: float
    """Wall time from the request to the answer."""


class Policy(Protocol):
    """What answers: a policy server's client, or a stand-in for it."""

    async def complete(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        routes_start: int,
        timeout: float,
        affinity: object = None,
    ) -> Completion:
        """Sample an answer to `prompt`; requests with the same `affinity` have a common prefix.

        Raises:
            PolicyError: no answer within `timeout` seconds, or an error.
        """
        ...


class Speaker(abc.ABC):
    """What answers in words: a foreign server, a person. Its answers are logged and never trained."""

    @abc.abstractmethod
    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, timeout: float
    ) -> tuple[Message, str]:
        """Return the answer to a conversation, and why it ended ("stop", "length", "tool_calls").

        Raises:
            PolicyError: no answer within `timeout` seconds, or one that is of no use.
        """


Pending = dict[bytes, asyncio.Future[Packet]]
ZmqContext = zmq.Context[zmq.Socket[bytes]]

LENGTH_MEMORY = 0.98
"""Of the running mean of answer lengths: it is over the last fifty or so."""


class _Server:
    """One server's connection, and the requests that wait for it."""

    def __init__(self, address: str, context: ZmqContext) -> None:
        self.address = address
        self.pending: Pending = {}
        self.tokens = 0.0
        """Of the requests that wait: their prompts, and what is expected of their answers."""
        self.lost = False
        """Whether its connection broke and is not back yet: what it is sent would lie about."""
        socket = open_socket(context, zmq.DEALER)
        # A server that dies takes its requests with it: they fail at once, not at their deadlines.
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._monitor.FD, self._look_at_monitor)
        self._loop.call_soon(self._look_at_monitor)  # its descriptor says nothing before
        socket.connect(address)
        self.channel = Channel(socket, self._answered, self._garbage)

    def fail(self, why: str) -> None:
        """End all waiting requests with a PolicyUnavailableError."""
        for future in self.pending.values():
            if not future.done():
                future.set_exception(PolicyUnavailableError(why))

    def close(self) -> None:
        """Close the connection."""
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close()
        self.channel.close()

    def _answered(self, packet: Packet) -> None:
        future = self.pending.get(packet.request_id)
        if future is not None and not future.done():  # else its caller has given up
            future.set_result(packet)

    def _garbage(self, _sender: bytes, error: WireError) -> None:
        # Whose answer it was cannot be told any more.
        self.fail(f"the policy server at {self.address} sent an unreadable message: {error}")

    def _look_at_monitor(self) -> None:
        while not self._monitor.closed and self._monitor.poll(0):
            self.lost = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
            if self.lost:
                self.fail(f"the connection to the policy server at {self.address} was lost")


class PolicyClient:
    """A client of one or several policy servers that serve the same policy.

    A request goes to the server with the fewest tokens outstanding: prompts, and the answers as long as they are on
    average. Requests with the same `affinity` stay on one server while it is there, since the keys and values of
    their common prefix are cached there; it is any object, held weakly. A server whose connection is lost is not
    asked until it is back.
    """

    def __init__(self, addresses: Sequence[str] = (), *, context: ZmqContext | None = None) -> None:
        """Connect; must be called inside a running event loop."""
        self._context = context or zmq.Context.instance()
        self._servers: dict[str, _Server] = {}
        self._affinity: WeakKeyDictionary[object, _Server] = WeakKeyDictionary()
        self._answer_tokens: float | None = None
        """The mean length of the answers."""
        # Many clients that all prefer the first of equals would send it everything.
        self._random = random.Random()
        self._ids = itertools.count()
        self.set_servers(addresses)

    def set_servers(self, addresses: Sequence[str]) -> None:
        """Use exactly these servers from now on; requests on others fail with PolicyError."""
        for address in [a for a in self._servers if a not in addresses]:
            self._drop(address, f"the policy server at {address} is no longer part of the run")
        for address in addresses:
            if address not in self._servers:
                self._servers[address] = _Server(address, self._context)

    @property
    def outstanding(self) -> int:
        """Requests that wait for their answer."""
        return sum(len(server.pending) for server in self._servers.values())

    async def complete(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        routes_start: int = 0,
        timeout: float,
        affinity: object = None,
    ) -> Completion:
        """Sample an answer to `prompt`; see `Policy.complete`. Cancelling the call stops the generation."""
        header = Generate(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            routes_start=routes_start,
        )
        start = time.monotonic()
        server = self._choose(affinity)
        expected = sampling.max_tokens if self._answer_tokens is None else self._answer_tokens
        tokens = len(prompt) + min(expected, sampling.max_tokens)
        server.tokens += tokens
        try:
            packet = await self._ask(server, header, {"tokens": np.asarray(prompt, np.int32)}, timeout)
            completion = _completion(packet, time.monotonic() - start)
        except WireError as error:
            raise PolicyError(f"the policy server at {server.address} sent nonsense: {error}") from error
        finally:
            server.tokens -= tokens
        length = len(completion.tokens)
        mean = length if self._answer_tokens is None else self._answer_tokens
        self._answer_tokens = LENGTH_MEMORY * mean + (1 - LENGTH_MEMORY) * length
        return completion

    async def health(self, address: str, *, timeout: float) -> Healthy:
        """Return what the server at `address` says of itself.

        Raises:
            PolicyError: it is not known, or does not answer in time.
        """
        if address not in self._servers:
            raise PolicyError(f"no policy server is known at {address}; known: {list(self._servers)}")
        packet = await self._ask(self._servers[address], Health(), {}, timeout)
        try:
            return packet.expect(Healthy)
        except WireError as error:
            raise PolicyError(f"the policy server at {address} sent nonsense: {error}") from error

    def close(self) -> None:
        """Close all connections; requests that wait fail with PolicyError."""
        for address in list(self._servers):
            self._drop(address, f"the connection to the policy server at {address} was closed")

    def _drop(self, address: str, why: str) -> None:
        server = self._servers.pop(address)
        server.lost = True
        server.fail(why)
        server.close()

    def _choose(self, affinity: object) -> _Server:
        there = [server for server in self._servers.values() if not server.lost]
        if not there:
            known = ", ".join(self._servers)
            raise PolicyUnavailableError(
                f"the connection to every policy server is lost: {known}"
                if known
                else "no policy server is known; the coordinator has not named one yet"
            )
        chosen = None if affinity is None else self._affinity.get(affinity)
        if chosen is None or chosen.lost:
            chosen = min(there, key=lambda server: (server.tokens, self._random.random()))
            if affinity is not None:
                self._affinity[affinity] = chosen
        return chosen

    async def _ask(
        self, server: _Server, header: Generate | Health, arrays: dict[str, Any], timeout: float
    ) -> Packet:
        request_id = next(self._ids).to_bytes(8, "big")
        future: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        server.pending[request_id] = future
        try:
            server.channel.send(header, arrays, request_id=request_id)
            async with asyncio.timeout(timeout):
                packet = await future
        except TimeoutError as error:
            self._abort(server, request_id)
            raise PolicyError(
                f"the policy server at {server.address} did not answer a {header.kind!r} request within "
                f"{timeout:g} s ({len(server.pending)} requests outstanding there)"
            ) from error
        except asyncio.CancelledError:
            self._abort(server, request_id)
            raise
        except WireError as error:
            raise PolicyError(f"cannot ask the policy server at {server.address}: {error}") from error
        finally:
            server.pending.pop(request_id, None)
        if isinstance(packet.header, Error):
            raise PolicyError(f"the policy server at {server.address} refused: {packet.header.text}")
        return packet

    def _abort(self, server: _Server, request_id: bytes) -> None:
        if self._servers.get(server.address) is server:
            # A server that does not even read is told nothing; its connection fails soon enough.
            with contextlib.suppress(WireError):
                server.channel.send(Abort(), request_id=request_id)


def _completion(packet: Packet, seconds: float) -> Completion:
    header = packet.expect(CompletionHeader)
    arrays = packet.arrays
    missing = {"tokens", "logprobs"} - arrays.keys()
    if missing or len(arrays["tokens"]) != len(arrays["logprobs"]):
        raise WireError(f"a completion has the arrays {sorted(arrays)}, of lengths that do not fit")
    return Completion(
        tokens=arrays["tokens"],
        logprobs=arrays["logprobs"],
        versions=expand_spans(header.version_spans, len(arrays["tokens"])),
        routes=arrays.get("routes"),
        finish_reason=header.finish_reason,
        seconds=seconds,
    )


def expand_spans(spans: Sequence[tuple[int, int]], n: int) -> NDArray[np.int32]:
    """Return the version of each of n tokens from [(first token index, version)], ascending.

    Raises:
        WireError: the spans do not cover the tokens.
    """
    if n and (not spans or spans[0][0] != 0):
        raise WireError(f"version spans {list(spans)!r:.80} do not begin at token 0 of {n}")
    versions = np.empty(n, np.int32)
    for start, version in spans:
        versions[start:] = version
    return versions
