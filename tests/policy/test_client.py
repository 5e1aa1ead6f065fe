"""The client against a ROUTER socket in the same event loop that answers what a test tells it to."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from agentgym.errors import PolicyError, PolicyUnavailableError, WireError
from agentgym.policy.client import Completion, PolicyClient, Sampling, expand_spans
from agentgym.protocol import Abort, Error, Generate, Header
from agentgym.protocol import Completion as CompletionHeader
from agentgym.wire import Channel, Packet, open_socket

LISTEN = """
import sys, zmq
socket = zmq.Context.instance().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
print("bound", flush=True)
while True:
    socket.recv_multipart()
    print("asked", flush=True)
"""


class Answerer:
    """Keeps requests until the test answers them."""

    def __init__(self, address: str, arrivals: "Arrivals | None" = None) -> None:
        self.address = address
        self.requests: asyncio.Queue[Packet] = asyncio.Queue()
        self.arrivals: Arrivals = arrivals or asyncio.Queue()
        """What reached this one and those that share it."""
        socket = open_socket(zmq.Context.instance(), zmq.ROUTER)
        socket.bind(address)
        self.channel = Channel(socket, self._take, lambda _sender, _error: None)

    def _take(self, packet: Packet) -> None:
        self.requests.put_nowait(packet)
        self.arrivals.put_nowait(self)

    async def next(self, record: type[Header]) -> Packet:
        packet = await asyncio.wait_for(self.requests.get(), 10.0)
        packet.expect(record)
        return packet

    def answer(self, packet: Packet, tokens: list[int], spans: list[tuple[int, int]]) -> None:
        arrays = {"tokens": np.array(tokens, np.int32), "logprobs": np.zeros(len(tokens), np.float32)}
        header = CompletionHeader(finish_reason="stop", version_spans=spans)
        self.channel.send(header, arrays, to=packet.sender, request_id=packet.request_id)


Arrivals = asyncio.Queue[Answerer]


def play(
    tmp_path: Path,
    script: Callable[[PolicyClient, list[Answerer]], Coroutine[Any, Any, None]],
    servers: int = 1,
) -> None:
    """Run a test's script with a client that is connected to some answerers."""

    async def run() -> None:
        arrivals: Arrivals = asyncio.Queue()
        answerers = [Answerer(f"ipc://{tmp_path}/{i}", arrivals) for i in range(servers)]
        client = PolicyClient([a.address for a in answerers])
        try:
            async with asyncio.timeout(20.0):
                await script(client, answerers)
        finally:
            client.close()
            for answerer in answerers:
                answerer.channel.close()

    asyncio.run(run())


def ask(
    client: PolicyClient, timeout: float = 10.0, affinity: object = None, prompt: int = 2, most: int = 4
) -> asyncio.Task[Completion]:
    request = client.complete([5] * prompt, Sampling(max_tokens=most), timeout=timeout, affinity=affinity)
    return asyncio.create_task(request)


class Talk:
    """What the requests of one conversation have in common."""


def test_answers_find_their_requests_in_any_order(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        tasks = [ask(client) for _ in range(3)]
        packets = [await servers[0].next(Generate) for _ in tasks]
        assert client.outstanding == 3
        for number in (2, 0, 1):
            servers[0].answer(packets[number], [10 + number, 1], [(0, 3), (1, 4)])
        answers = await asyncio.gather(*tasks)
        assert [int(a.tokens[0]) for a in answers] == [10, 11, 12]
        assert answers[0].versions.tolist() == [3, 4]
        assert client.outstanding == 0

    play(tmp_path, script)


def test_a_deadline_names_the_server_and_aborts_the_request(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        with pytest.raises(PolicyError, match=rf"{servers[0].address} did not answer .* within 0.05 s"):
            await ask(client, timeout=0.05)
        asked = await servers[0].next(Generate)
        assert (await servers[0].next(Abort)).request_id == asked.request_id

    play(tmp_path, script)


def test_cancelling_a_request_aborts_it(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        task = ask(client)
        asked = await servers[0].next(Generate)
        task.cancel()
        assert (await servers[0].next(Abort)).request_id == asked.request_id
        servers[0].answer(asked, [5], [(0, 0)])  # too late, and harmless
        again = ask(client)
        servers[0].answer(await servers[0].next(Generate), [6], [(0, 0)])
        assert (await again).tokens.tolist() == [6]

    play(tmp_path, script)


def test_an_error_of_the_server_is_a_policy_error(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        task = ask(client)
        asked = await servers[0].next(Generate)
        servers[0].channel.send(Error(text="too long"), to=asked.sender, request_id=asked.request_id)
        with pytest.raises(PolicyError, match="refused: too long"):
            await task

    play(tmp_path, script)


def test_an_answer_without_its_arrays_is_a_policy_error(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        task = ask(client)
        asked = await servers[0].next(Generate)
        header = CompletionHeader(finish_reason="stop", version_spans=[(0, 0)])
        servers[0].channel.send(header, to=asked.sender, request_id=asked.request_id)
        with pytest.raises(PolicyError, match="nonsense"):
            await task

    play(tmp_path, script)


def test_requests_go_to_the_server_with_the_fewest_tokens_outstanding(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        long = ask(client, prompt=100)
        busy, packet = await first_of(servers)
        (idle,) = (server for server in servers if server is not busy)
        tasks = [ask(client) for _ in range(10)]  # 10 times 6 tokens weigh less than the long prompt
        for _ in tasks:
            idle.answer(await idle.next(Generate), [1], [(0, 0)])
        await asyncio.gather(*tasks)
        busy.answer(packet, [1], [(0, 0)])
        await long

    play(tmp_path, script, servers=2)


async def first_of(servers: list[Answerer]) -> tuple[Answerer, Packet]:
    """The first request that waits at one of some servers."""
    while True:
        server = await asyncio.wait_for(servers[0].arrivals.get(), 10.0)
        if not server.requests.empty():  # else the test has taken it from there
            return server, server.requests.get_nowait()


def test_an_answer_counts_as_long_as_answers_are_and_not_as_long_as_it_may_be(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        first = ask(client, most=1000)
        server, packet = await first_of(servers)
        server.answer(packet, [1], [(0, 0)])
        await first
        # A prompt of 20 tokens is now more than an answer of up to 1,000, which will have one.
        tasks = [ask(client, prompt=20)]
        busy, packet = await first_of(servers)
        (idle,) = (server for server in servers if server is not busy)
        tasks += [ask(client, prompt=1, most=1000) for _ in range(4)]
        for _ in range(4):
            idle.answer(await idle.next(Generate), [1], [(0, 0)])
        busy.answer(packet, [1], [(0, 0)])
        await asyncio.gather(*tasks)

    play(tmp_path, script, servers=2)


def test_many_clients_with_a_request_each_use_all_servers(tmp_path: Path):
    async def run() -> None:
        arrivals: Arrivals = asyncio.Queue()
        answerers = [Answerer(f"ipc://{tmp_path}/{i}", arrivals) for i in range(2)]
        clients = [PolicyClient([a.address for a in answerers]) for _ in range(40)]
        tasks = [ask(client) for client in clients]
        asked = {answerer.address: 0 for answerer in answerers}
        for _ in range(40):
            server, packet = await first_of(answerers)
            server.answer(packet, [1], [(0, 0)])
            asked[server.address] += 1
        await asyncio.gather(*tasks)
        assert min(asked.values()) >= 5
        for closed in (*clients, *(a.channel for a in answerers)):
            closed.close()

    asyncio.run(asyncio.wait_for(run(), 20.0))


def test_requests_of_one_conversation_stay_on_one_server(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        talk = Talk()
        tasks = [ask(client, affinity=talk)]
        mine, packet = await first_of(servers)
        (other,) = (server for server in servers if server is not mine)
        tasks += [ask(client, affinity=talk) for _ in range(3)]
        for asked in (packet, *[await mine.next(Generate) for _ in range(3)]):
            mine.answer(asked, [1], [(0, 0)])
        await asyncio.gather(*tasks)
        client.set_servers([other.address])
        moved = ask(client, affinity=talk)
        other.answer(await other.next(Generate), [1], [(0, 0)])
        await moved

    play(tmp_path, script, servers=2)


def test_a_conversation_moves_on_when_its_server_dies_and_new_ones_use_it_when_it_is_back(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        mortal, other = f"ipc://{tmp_path}/mortal", servers[0]
        process = await listening(mortal)
        client.set_servers([mortal])
        talk = Talk()
        task = ask(client, affinity=talk)
        await heard(process)
        client.set_servers([mortal, other.address])
        process.kill()
        with pytest.raises(PolicyUnavailableError, match="mortal was lost"):
            await task
        close(process)
        again = ask(client, affinity=talk)  # the coordinator has not yet noticed
        other.answer(await other.next(Generate), [7], [(0, 0)])
        assert (await again).tokens.tolist() == [7]
        client.set_servers([mortal])
        with pytest.raises(PolicyUnavailableError, match=r"every policy server is lost: .*mortal"):
            await ask(client)
        process = await listening(mortal)
        asked = asyncio.create_task(heard(process))
        while not asked.done():  # the connection comes back by itself
            task = ask(client)
            await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
            assert asked.done() or isinstance(task.exception(), PolicyUnavailableError)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        process.kill()
        close(process)

    play(tmp_path, script)


def test_requests_on_a_server_that_leaves_fail_at_once(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        task = ask(client)
        await servers[0].next(Generate)
        client.set_servers([])
        with pytest.raises(PolicyUnavailableError, match="no longer part of the run"):
            await task
        with pytest.raises(PolicyUnavailableError, match="no policy server is known"):
            await ask(client)

    play(tmp_path, script)


def test_requests_on_a_server_that_dies_fail_at_once(tmp_path: Path):
    async def script() -> None:
        address = f"ipc://{tmp_path}/mortal"
        process = await listening(address)
        client = PolicyClient([address])
        task = ask(client, timeout=60.0)
        await heard(process)
        process.kill()
        with pytest.raises(PolicyUnavailableError, match=r"mortal was lost"):
            async with asyncio.timeout(10.0):
                await task
        client.close()
        close(process)

    asyncio.run(script())


Listener = subprocess.Popen[str]


async def listening(address: str) -> Listener:
    """A process with a server's socket, which never answers."""
    process = subprocess.Popen([sys.executable, "-c", LISTEN, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "bound\n"
    return process


async def heard(process: Listener) -> None:
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "asked\n"


def close(process: Listener) -> None:
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_spans_that_do_not_begin_at_the_first_token_are_refused():
    with pytest.raises(WireError, match="do not begin at token 0"):
        expand_spans([(1, 5)], 3)
    assert expand_spans([], 0).tolist() == []
