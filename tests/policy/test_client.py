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

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: asyncio.Queue[Packet] = asyncio.Queue()
        socket = open_socket(zmq.Context.instance(), zmq.ROUTER)
        socket.bind(address)
        self.channel = Channel(socket, self.requests.put_nowait, lambda _sender, _error: None)

    async def next(self, record: type[Header]) -> Packet:
        packet = await asyncio.wait_for(self.requests.get(), 10.0)
        packet.expect(record)
        return packet

    def answer(self, packet: Packet, tokens: list[int], spans: list[tuple[int, int]]) -> None:
        arrays = {"tokens": np.array(tokens, np.int32), "logprobs": np.zeros(len(tokens), np.float32)}
        header = CompletionHeader(finish_reason="stop", version_spans=spans)
        self.channel.send(header, arrays, to=packet.sender, request_id=packet.request_id)


def play(
    tmp_path: Path,
    script: Callable[[PolicyClient, list[Answerer]], Coroutine[Any, Any, None]],
    servers: int = 1,
) -> None:
    """Run a test's script with a client that is connected to some answerers."""

    async def run() -> None:
        answerers = [Answerer(f"ipc://{tmp_path}/{i}") for i in range(servers)]
        client = PolicyClient([a.address for a in answerers])
        try:
            async with asyncio.timeout(20.0):
                await script(client, answerers)
        finally:
            client.close()
            for answerer in answerers:
                answerer.channel.close()

    asyncio.run(run())


def ask(client: PolicyClient, timeout: float = 10.0, affinity: str | None = None) -> asyncio.Task[Completion]:
    request = client.complete([5, 6], Sampling(max_tokens=4), timeout=timeout, affinity=affinity)
    return asyncio.create_task(request)


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


def test_requests_go_to_the_server_with_the_fewest_outstanding(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        tasks = [ask(client) for _ in range(4)]
        for server in servers:
            for _ in range(2):
                server.answer(await server.next(Generate), [1], [(0, 0)])
        await asyncio.gather(*tasks)

    play(tmp_path, script, servers=2)


def test_requests_of_one_conversation_stay_on_one_server(tmp_path: Path):
    async def script(client: PolicyClient, servers: list[Answerer]) -> None:
        tasks = [ask(client, affinity="talk") for _ in range(4)]
        for _ in tasks:
            servers[0].answer(await servers[0].next(Generate), [1], [(0, 0)])
        await asyncio.gather(*tasks)
        client.set_servers([servers[1].address])
        moved = ask(client, affinity="talk")
        servers[1].answer(await servers[1].next(Generate), [1], [(0, 0)])
        await moved

    play(tmp_path, script, servers=2)


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
        process = subprocess.Popen([sys.executable, "-c", LISTEN, address], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "bound\n"
        client = PolicyClient([address])
        task = ask(client, timeout=60.0)
        assert await asyncio.to_thread(process.stdout.readline) == "asked\n"
        process.kill()
        with pytest.raises(PolicyUnavailableError, match=r"mortal was lost"):
            async with asyncio.timeout(10.0):
                await task
        client.close()
        process.wait()
        process.stdout.close()

    asyncio.run(script())


def test_spans_that_do_not_begin_at_the_first_token_are_refused():
    with pytest.raises(WireError, match="do not begin at token 0"):
        expand_spans([(1, 5)], 3)
    assert expand_spans([], 0).tolist() == []
