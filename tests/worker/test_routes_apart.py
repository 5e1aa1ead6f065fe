"""A worker on the coordinator's machine leaves large routes on the disk, one elsewhere sends them along."""

import asyncio
import errno
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from builders import within
from live_run import play, small_run
from numpy.typing import NDArray
from strangers import KeyRing, free_address

from agentgym.coordinator.store import FOLDER, stored_episodes
from agentgym.door import Door
from agentgym.origins import with_recorded
from agentgym.policy.template import ChatTokenizer
from agentgym.protocol import Completion, Generate
from agentgym.routes import APART_BYTES
from agentgym.wire import Packet
from agentgym.worker.process import Worker

LAYERS, TOPK = 300, 8


def recorded(tokens: int) -> NDArray[np.uint8]:
    """Routes that say where each token stands."""
    return np.broadcast_to(np.arange(tokens, dtype=np.uint8)[:, None, None] % 7, (tokens, LAYERS, TOPK))


@pytest.mark.parametrize("place", ["here", "elsewhere", "full disk"])
def test_large_routes_reach_the_trainer(
    tmp_path: Path, model: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "full disk":
        error = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr("agentgym.worker.process.write_routes", Mock(side_effect=error))
    ring = KeyRing(tmp_path)
    tokenizer = ChatTokenizer(model)
    answer = [*tokenizer.encode("5"), tokenizer.stop_token_ids[0]]
    address = free_address()
    config = small_run(
        run={"steps": 1},
        policies={"learner": {"model": str(model)}},
        coordinator={"bind": address, "keys": ring.folder},
    )

    door: Door

    def complete(packet: Packet) -> None:
        wanted = packet.expect(Generate)
        rows = len(packet.arrays["tokens"]) + len(answer) - 1
        arrays = {
            "tokens": np.array(answer, np.int32),
            "logprobs": np.full(len(answer), -0.5, np.float32),
            "routes": recorded(rows)[wanted.routes_start :],
        }
        header = Completion(finish_reason="stop", version_spans=[(0, 0)])
        door.send(header, arrays, to=packet.sender, request_id=packet.request_id)

    async def scene() -> None:
        nonlocal door
        door = Door(
            ["tcp://127.0.0.1:*"], complete, lambda _, error: pytest.fail(str(error)), keys=ring.server
        )
        async with play(config, tmp_path, keys=ring.client) as cast:
            server, trainer = cast.server(), cast.trainer()
            cast.start(server.serve(address=door.addresses[0]), trainer.train(cast.run.places.exchange))
            coordinator = address if place == "elsewhere" else cast.run.places.coordinator
            worker = Worker(config, name="far", coordinator=coordinator, keys=ring.client)
            played = asyncio.create_task(worker.run())
            await cast.everyone_is_done()
            assert not await played
        door.close()
        run = cast.run.places.run
        files = list((run / FOLDER).glob("routes-*"))
        episodes = [stored.episode for stored in stored_episodes(run)]
        assert len(episodes) == 4
        assert len(files) == (4 if place == "here" else 0)
        assert all(
            path.stat().st_size > APART_BYTES and path.stat().st_mode & 0o777 == 0o600 for path in files
        )
        (batch,) = trainer.batches
        routes = with_recorded(batch, {})["routes"]
        assert routes.shape == (sum(batch.lengths), LAYERS, TOPK)
        for sample in np.split(routes, np.cumsum(batch.lengths)[:-1]):
            assert np.array_equal(sample[:-1], recorded(len(sample) - 1))
            assert (sample[-1] == 255).all()

    within(60, scene())
