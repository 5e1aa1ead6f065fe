"""A real worker, a real coordinator and a scripted policy server, over TCP with keys."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import within
from live_run import numbers_of, play, small_run
from strangers import KeyRing, free_address

from agentgym.door import Door
from agentgym.errors import RunError
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import Completion, Generate
from agentgym.wire import Packet
from agentgym.worker.pool import EnvPool
from agentgym.worker.process import Worker


def test_a_run_plays_through_encrypted_sockets(tmp_path: Path, model: Path) -> None:
    ring = KeyRing(tmp_path)
    stop = ChatTokenizer(model).stop_token_ids[0]

    async def scene() -> None:
        address = free_address()
        config = small_run(
            run={"steps": 2},
            policies={"learner": {"model": str(model)}},
            workers={"slots": 4},
            coordinator={"bind": address, "keys": ring.folder},
        )

        def answer(packet: Packet) -> None:
            assert isinstance(packet.header, Generate)
            arrays = {"tokens": np.array([stop], np.int32), "logprobs": np.array([-0.5], np.float32)}
            header = Completion(finish_reason="stop", version_spans=[(0, server.version)])
            door.send(header, arrays, to=packet.sender, request_id=packet.request_id)

        door = Door(["tcp://127.0.0.1:*"], answer, lambda _, error: pytest.fail(str(error)), keys=ring.server)
        async with play(config, tmp_path, keys=ring.client) as cast:
            server, trainer = cast.server(), cast.trainer()
            cast.start(server.serve(address=door.addresses[0]), trainer.train(cast.run.places.exchange))
            worker = Worker(config, name="far", coordinator=address, keys=ring.client)
            played = asyncio.create_task(worker.run())
            await cast.everyone_is_done()
            assert not await played
            numbers = numbers_of(cast.run)
        assert [len(batch.lengths) for batch in trainer.batches] == [1, 1]  # all plays are alike
        assert numbers["system/wire/connected"] == 3
        assert door.counts["connected"] == 1
        assert numbers["system/wire/handshake_failed"] == door.counts["handshake_failed"] == 0
        door.close()

    within(60, scene())


@pytest.mark.parametrize("busy", [0.0, 0.5])
def test_a_worker_whose_key_nobody_knows_gives_up_and_says_so(
    tmp_path: Path, model: Path, busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was busy for so long that it has been refused before it says hello."""
    ring = KeyRing(tmp_path)

    def slow_pool(*args: Any, **kwargs: Any) -> EnvPool:
        time.sleep(busy)
        return EnvPool(*args, **kwargs)

    monkeypatch.setattr("agentgym.worker.process.EnvPool", slow_pool)

    async def scene() -> None:
        config = small_run(policies={"learner": {"model": str(model)}}, coordinator={"start_timeout": 0.5})
        door = Door(["tcp://127.0.0.1:*"], print, print, keys=ring.server)  # type: ignore[arg-type]
        for keys, hint in (
            (ring.unlisted, r"is the key on its list\?"),
            (None, "if it has keys, give --keys"),
        ):
            worker = Worker(config, name="far", coordinator=door.addresses[0], keys=keys)
            with pytest.raises(RunError, match=rf"(did not answer within 0.5 s|hung up); {hint}"):
                await worker.run()
        assert door.counts["key_refused"] >= 1
        assert door.counts["handshake_failed"] >= 1
        door.close()

    within(30, scene())
