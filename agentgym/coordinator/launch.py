"""The command lines of a run's processes."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from agentgym.config import Config
from agentgym.coordinator.supervisor import Supervisor
from agentgym.errors import ConfigError

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run keeps what its processes share."""

    run: Path
    """The run directory."""
    sockets: Path
    """A private folder with a short path: ZeroMQ's ipc addresses are limited to about 100 characters. Removed at the
    end of the run, or when another one starts."""
    exchange: Path
    """Weights on their way from the trainer to the servers."""

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.run / "config.json"

    @property
    def checkpoints(self) -> Path:
        """The trainer's checkpoints."""
        return self.run / "checkpoints"

    @property
    def snapshots(self) -> Path:
        """The weights of the pools, a folder for each."""
        return self.run / "snapshots"

    @property
    def tensorboard(self) -> Path:
        """The event files."""
        return self.run / "tensorboard"

    @property
    def logs(self) -> Path:
        """A log file per process."""
        return self.run / "logs"

    @property
    def coordinator(self) -> str:
        """The coordinator's address."""
        return f"ipc://{self.sockets}/coordinator"


def launch_all(supervisor: Supervisor, config: Config, places: Places, *, resume: Path | None) -> None:
    """Start the trainer, the policy servers and the workers."""
    parent = ["--parent-pid", str(os.getpid())]
    common = ["--config", str(places.config), "--coordinator", places.coordinator, *parent]

    def trainer() -> list[str]:
        resumed = ["--resume", str(resume)] if resume else []
        folders = ["--exchange", str(places.exchange), "--checkpoints", str(places.checkpoints)]
        return ["agentgym_trainers.megatron.main", *common, *folders, *resumed]

    supervisor.start("trainer", "trainer", trainer, _environment(config.trainer.threads))
    for policy in config.served if config.run.steps else ():  # a warm-up alone samples nothing
        for number in range(config.server.count):
            trained = policy in config.policies_to_train
            name = f"server-{number}" if trained else f"server-{policy}-{number}"
            starts = count()

            def server(name: str = name, policy: str = policy, starts: Iterator[int] = starts) -> list[str]:
                # Each start binds an address of its own: messages for a dead server must not reach its successor.
                address = config.server.bind or f"ipc://{places.sockets}/{name}-{next(starts)}"
                return ["agentgym", "serve", *common, "--policy", policy, "--name", name, "--bind", address]

            # vLLM leaves files behind when it is killed; there they go with the run.
            scratch = {"TMPDIR": str(places.sockets)}
            supervisor.start(name, "server", server, _environment(config.server.threads) | scratch)
    for number in range(config.workers.count):
        name = f"worker-{number}"

        def worker(name: str = name) -> list[str]:
            return ["agentgym", "worker", *common, "--name", name]

        supervisor.start(name, "worker", worker, _environment(1))


def latest_checkpoint(run_dir: Path) -> Path:
    """Return the newest complete checkpoint of a run.

    Raises:
        ConfigError: there is none.
    """
    pointer = run_dir / "checkpoints" / "latest"
    if not pointer.exists():
        raise ConfigError(f"{run_dir} has no checkpoint ({pointer} does not exist)")
    checkpoint = run_dir / "checkpoints" / pointer.read_text().strip()
    if not checkpoint.is_dir():
        raise ConfigError(f"{pointer} names {checkpoint.name}, which is not there; name another one in it")
    return checkpoint


def checkpoint_model(run_dir: Path) -> Path:
    """Return the model folder of a run's newest checkpoint, in the Hugging Face format.

    Raises:
        ConfigError: there is none.
    """
    return latest_checkpoint(run_dir) / "model"


def read_state(checkpoint: Path) -> dict[str, object]:
    """Return the coordinator's state in a checkpoint."""
    state: dict[str, object] = json.loads((checkpoint / "coordinator.json").read_text())
    return state


def _environment(threads: int) -> dict[str, str]:
    number = str(threads)
    return {**OFFLINE, "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number, "OPENBLAS_NUM_THREADS": number}
