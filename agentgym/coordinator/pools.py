"""Pools: frozen snapshots of a trained policy, as opponents.

A snapshot is a safetensors file in the run directory, taken of the first weights that reinforcement learning plays with
and then whenever `every` versions have passed; the newest `keep` are kept. Version 0 is the model folder itself.

A pool's servers hold one snapshot at a time. So its groups are played in rounds: all groups of a round meet the same
snapshot; when a round is full the next one's snapshot is drawn, and if it is another one it is loaded as soon as the
last group of the round is closed. Until it is loaded no group against the pool is opened.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from agentgym.config import Config
from agentgym.errors import RunError
from agentgym.policy_config import PolicyConfig
from agentgym.ratings import Ratings

_logger = logging.getLogger(__name__)


class Pool:
    """The snapshots of one pool, and which of them is played now."""

    def __init__(
        self,
        name: str,
        config: PolicyConfig,
        *,
        folder: Path,
        model: Path,
        seed: int,
        round_groups: int,
        ratings: Ratings,
        state: dict[str, Any],
        step: int,
    ) -> None:
        """Begin empty, or with the snapshots in `folder` that an earlier run had taken until `step`.

        Args:
            name: the policy's name.
            config: its settings.
            folder: where its snapshots are.
            model: the model folder, which is version 0.
            seed: the run's.
            round_groups: groups that play the same snapshot.
            ratings: how the trained policy fares against each snapshot.
            state: of a checkpoint, empty for a new run.
            step: of the checkpoint.
        """
        self.name = name
        self.of = config.pool
        """The policy whose snapshots it holds."""
        self.version: int | None = None
        """The snapshot of this round; None before the first round."""
        self.loaded: int | None = None
        """The snapshot that all of the pool's servers hold; whoever hears of it sets it."""
        self._config = config
        self._folder = folder
        self._model = model
        self._seed = seed
        self._round_groups = round_groups
        self._ratings = ratings
        self._next: int | None = None
        self._room = 0
        self._groups: set[int] = set()
        self._rounds = int(state.get("rounds", 0))
        # Files may be newer than the checkpoint's list, or gone since; only the list knows of version 0.
        files = {int(path.stem.removeprefix("version-")) for path in self._files()}
        first = {version for version in state.get("snapshots", []) if version == 0}
        self._snapshots = sorted({v for v in files if v <= step} | first)[-config.keep :]
        self._taking: set[int] = set()
        self._sweep()

    @property
    def snapshots(self) -> list[int]:
        """The versions to draw from, ascending."""
        return list(self._snapshots)

    def path(self, version: int) -> Path:
        """Return where the weights of a snapshot are."""
        return self._folder / f"version-{version}.safetensors" if version else self._model

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"rounds": self._rounds, "snapshots": self.snapshots}

    # ---------------------------------------------------------------- snapshots

    def due(self, version: int) -> bool:
        """Whether a snapshot is to be taken of weights that are played with from now on; if so, `take` it."""
        newest = max((*self._snapshots, *self._taking), default=None)
        if newest is not None and version - newest < self._config.every:
            return False
        self._taking.add(version)
        return True

    async def take(self, version: int, source: int | None) -> None:
        """Copy a snapshot from the weights' open file, given as a descriptor; None for version 0.

        Raises:
            OSError: it cannot be written.
        """
        if source is not None:
            await asyncio.to_thread(_copy, source, self.path(version))
        self._taking.discard(version)
        self._snapshots = sorted({*self._snapshots, version})[-self._config.keep :]
        self._ratings.enter(f"{self.name}@{version}", like=self._config.pool or "")
        self._sweep()
        _logger.info("pool %s has the snapshots %s", self.name, self._snapshots)

    def _sweep(self) -> None:
        """Remove the files that no round needs any more."""
        needed = {
            self.path(v) for v in (*self._snapshots, *self._taking, self.version, self._next) if v is not None
        }
        for path in self._files():
            if path not in needed:
                path.unlink()

    def _files(self) -> list[Path]:
        return list(self._folder.glob("version-*.safetensors"))

    # ---------------------------------------------------------------- rounds

    def ready(self, is_open: Callable[[int], bool]) -> bool:
        """Whether a group may be opened against the pool now; begins the next round where the last one is over."""
        if not self._snapshots:
            return False
        if self._room == 0:
            if self._next is None:
                self._next = self._draw()
            if self._next != self.version and any(map(is_open, self._groups)):
                return False
            self._rounds += 1
            self.version, self._next, self._room = self._next, None, self._round_groups
            self._groups = {group for group in self._groups if is_open(group)}
            self._sweep()
        return self.loaded == self.version

    def join(self, group_id: int) -> str:
        """Open a group against the pool, which is `ready`; return the name of the snapshot that it meets."""
        self._room -= 1
        self._groups.add(group_id)
        return f"{self.name}@{self.version}"

    def _draw(self) -> int:
        if self._config.sample == "latest":
            return self._snapshots[-1]
        weights = np.ones(len(self._snapshots))
        if self._config.sample == "win_rate":
            weights = np.array([self._losing_rate(version) ** 2 for version in self._snapshots])
        rng = np.random.default_rng([self._seed, crc32(self.name.encode()), self._rounds])
        return int(rng.choice(self._snapshots, p=weights / weights.sum()))

    def _losing_rate(self, version: int) -> float:
        """Return the share of points that the trained policy loses, with Laplace's rule for how little is known.

        Squared it is the weight of prioritized fictitious self-play, f_hard(x) = (1 - x)^2 with x the chance to win
        (Vinyals et al., Grandmaster level in StarCraft II using multi-agent reinforcement learning, 2019).
        """
        learner, snapshot = self._config.pool or "", f"{self.name}@{version}"
        games = self._ratings.games(learner, snapshot)
        points = games * (self._ratings.win_rate(learner, snapshot) or 0.0)
        return 1.0 - (points + 1.0) / (games + 2.0)


class Pools:
    """The pools of a run."""

    def __init__(self, config: Config, folder: Path, ratings: Ratings, state: dict[str, Any]) -> None:
        """Make the pools that agents may play; each has its own folder in `folder`, `state` is the coordinator's."""
        self.by_name = {
            name: Pool(
                name,
                config.policies[name],
                folder=folder / name,
                model=model.absolute(),
                seed=config.run.seed,
                round_groups=config.rollout.tasks_per_step,
                ratings=ratings,
                state=state.get("pools", {}).get(name, {}),
                step=int(state.get("step", 0)),
            )
            for name, model in config.served.items()
            if config.policies[name].kind == "pool"
        }
        self._writing: set[asyncio.Task[None]] = set()
        self._failure: RunError | None = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {name: pool.state() for name, pool in self.by_name.items()}

    def enter(
        self, group_id: int, policies: Collection[str], is_open: Callable[[int], bool]
    ) -> dict[str, str] | None:
        """Open a group against the pools among its policies; None if one of them is not ready.

        Returns:
            By pool, the name of the snapshot that the group meets.
        """
        met = [pool for name, pool in self.by_name.items() if name in policies]
        if not all([pool.ready(is_open) for pool in met]):  # a list: all of them begin to load
            return None
        return {pool.name: pool.join(group_id) for pool in met}

    def take_due(self, policy: str, version: int, path: str) -> None:
        """Begin to take the snapshots that are due of a policy's weights in a file; the path of version 0 is empty."""
        for pool in self.by_name.values():
            if pool.of == policy and pool.due(version):
                # Opened now: the file may lose its name before it is copied.
                source = os.open(path, os.O_RDONLY) if path else None
                task = asyncio.create_task(pool.take(version, source))
                self._writing.add(task)
                task.add_done_callback(self._written)

    async def written(self) -> None:
        """Wait until all snapshots are written."""
        await asyncio.gather(*self._writing)

    def check(self) -> None:
        """Raise RunError if a snapshot could not be written."""
        if self._failure is not None:
            raise self._failure

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = RunError(f"a snapshot could not be written: {error}")


def _copy(source: int, target: Path) -> None:
    """Copy an open file; the copy has its name only when it is complete."""
    unfinished = target.with_suffix(".unfinished")
    with os.fdopen(source, "rb") as original:
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as copy:
            shutil.copyfileobj(original, copy, 1 << 24)
            copy.flush()
            os.fsync(copy.fileno())
    unfinished.rename(target)
