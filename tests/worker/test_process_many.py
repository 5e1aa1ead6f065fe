"""Many plays at once, in threads and in processes, and workers that wear out."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import config_of, lease_of, within
from desk import TAUGHT, desk
from wire_peers import Office, open_context

from agentgym.config_file import save_config
from agentgym.episode import EndReason, Status
from agentgym.protocol import EXIT_REPLACE, Ack, EpisodeDone, Leaving


@pytest.mark.parametrize("isolation", ["shared", "process"])
def test_slow_plays_are_all_in_flight_at_once(tmp_path: Path, model: Path, isolation: str) -> None:
    """Report 18: an environment that blocks in `step` holds up nobody else."""

    async def scene() -> None:
        # Each of the 64 waits in `step` for the 63 others: one after the other, none of them would ever end.
        size = 64
        env = {"kwargs": {"size": size, "folder": str(tmp_path)}, "isolation": isolation, "step_timeout": 120}
        async with desk(tmp_path, model, "toy_envs:Crowd", env=env, workers={"slots": size}) as d:
            await d.open()
            d.send(*(lease_of(n, teacher=TAUGHT) for n in range(size)))
            episodes = await d.episodes(size)
            assert {e.end_reason for e in episodes.values()} == {EndReason.TERMINATED}
            assert {e.agent_metrics["agent"]["together"] for e in episodes.values()} == {float(size)}
            await d.drain()

    within(150, scene())


@pytest.mark.parametrize("isolation", ["inline", "shared", "process"])
def test_one_of_64_plays_that_fails_fails_alone(tmp_path: Path, model: Path, isolation: str) -> None:
    """Report 16: the others come back as if nothing had happened."""

    async def scene() -> None:
        async with desk(tmp_path, model, env={"isolation": isolation}, workers={"slots": 8}) as d:
            await d.open()
            d.send(*(lease_of(n, seed=n, teacher=TAUGHT) for n in range(64)))
            episodes = await d.episodes(64)
            assert {n for n, e in episodes.items() if e.status is Status.FAILED} == {13}
            assert {e.status for n, e in episodes.items() if n != 13} == {Status.OK}
            await d.drain()

    within(120, scene())


def test_the_same_lease_is_the_same_episode_wherever_it_is_played(tmp_path: Path, model: Path) -> None:
    sums: dict[str, list[Any]] = {"inline": [], "shared": [], "process": []}

    async def scene(isolation: str, env_id: str) -> None:
        folder = tmp_path / f"{isolation}{len(sums[isolation])}"
        folder.mkdir()
        async with desk(folder, model, env_id, env={"isolation": isolation}) as d:
            await d.open()
            d.send(*(lease_of(n, sampling_seed=n, teacher="random") for n in range(4)))
            sums[isolation] += [e.checksums for _, e in sorted((await d.episodes(4)).items())]
            await d.drain()

    for isolation in sums:
        for env_id in ("agentgym/GuessNumber-v0", "agentgym/TicTacToe-v0", "agentgym/SplitCoins-v0"):
            within(60, scene(isolation, env_id))
    assert sums["inline"] == sums["shared"] == sums["process"]


@pytest.mark.parametrize("limit", [{"max_episodes": 3}, {"max_memory_gib": 0.001}])
def test_a_worn_out_worker_finishes_what_it_has_and_asks_to_be_replaced(
    tmp_path: Path, model: Path, limit: dict[str, float]
) -> None:
    async def scene() -> None:
        quick = {"heartbeat_interval": 0.02}
        async with desk(tmp_path, model, workers={"slots": 4, **limit}, coordinator=quick) as d:
            await d.open()
            d.send(*(lease_of(n, teacher=TAUGHT) for n in range(3)))
            episodes, left = set(), False
            while len(episodes) < 3 or not left:
                header = (await d.office.packet()).header
                left |= isinstance(header, Leaving)
                episodes |= {header.lease_id} if isinstance(header, EpisodeDone) else set()
            d.send(lease_of(3, teacher=TAUGHT), Leaving())  # it was on its way already
            while not isinstance((await d.office.packet()).header, EpisodeDone):
                pass
            assert not d.task.done(), "what it has sent is not acknowledged"
            d.send(*(Ack(lease_id=n) for n in range(4)))
            assert await d.task is True

    within(30, scene())


def test_a_worker_that_is_to_be_replaced_says_so_by_its_exit_status(tmp_path: Path, model: Path) -> None:
    async def scene() -> None:
        config = config_of("toy_envs:Counted", model=str(model), workers={"slots": 1, "max_episodes": 1})
        save_config(config, tmp_path / "config.json")
        with open_context() as context:
            office = Office(context, f"ipc://{tmp_path}/coordinator")
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agentgym", "worker", "--config", str(tmp_path / "config.json"),
                "--coordinator", office.address, "--parent-pid", str(os.getpid()),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
            identity = await office.welcome(lease_of(1, teacher=TAUGHT))
            while not isinstance((await office.packet()).header, EpisodeDone):
                pass
            for header in (Ack(lease_id=1), Leaving()):
                office.channel.send(header, to=identity)
            assert await worker.wait() == EXIT_REPLACE
            office.channel.close()

    within(120, scene())
