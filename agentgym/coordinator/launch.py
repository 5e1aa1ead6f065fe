"""The command lines of a run's processes."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from agentgym.config import Config
from agentgym.config_file import load_config
from agentgym.coordinator.supervisor import Supervisor
from agentgym.errors import ConfigError

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


LATEST = "latest"
"""In a folder of checkpoints: the file that names the newest one."""


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


def launch_all(supervisor: Supervisor, config: Config, places: Places, *, resume: Mapping[str, Path]) -> None:
    """Start the trainers, the policy servers and the workers; `resume` are checkpoints to go on from, by policy."""
    parent = ["--parent-pid", str(os.getpid())]
    common = ["--config", str(places.config), "--coordinator", places.coordinator, *parent]

    for policy in config.policies_to_train:
        name = "trainer" if policy == config.learner else f"trainer-{policy}"
        exchange = config.place_of(policy, places.exchange)
        exchange.mkdir(exist_ok=True)

        def trainer(name: str = name, policy: str = policy, exchange: Path = exchange) -> list[str]:
            resumed = ["--resume", str(resume[policy])] if resume else []
            checkpoints = config.place_of(policy, places.checkpoints)
            folders = ["--exchange", str(exchange), "--checkpoints", str(checkpoints)]
            who = ["--policy", policy, "--name", name]
            return ["agentgym_trainers.megatron.main", *common, *who, *folders, *resumed]

        supervisor.start(name, "trainer", trainer, environment(config.trainer.threads))
    for policy in config.served if config.run.steps else ():  # a warm-up alone samples nothing
        for number in range(config.server.count):
            name = f"server-{number}" if policy == config.learner else f"server-{policy}-{number}"
            starts = count()

            def server(name: str = name, policy: str = policy, starts: Iterator[int] = starts) -> list[str]:
                # Each start binds an address of its own: messages for a dead server must not reach its successor.
                address = config.server.bind or f"ipc://{places.sockets}/{name}-{next(starts)}"
                return ["agentgym", "serve", *common, "--policy", policy, "--name", name, "--bind", address]

            # vLLM leaves files behind when it is killed; there they go with the run.
            scratch = {"TMPDIR": str(places.sockets)}
            supervisor.start(name, "server", server, environment(config.server.threads) | scratch)
    for number in range(config.workers.count):
        name = f"worker-{number}"

        def worker(name: str = name) -> list[str]:
            return ["agentgym", "worker", *common, "--name", name]

        supervisor.start(name, "worker", worker, environment(1))


def latest_checkpoints(config: Config) -> dict[str, Path]:
    """Return the newest step's checkpoints that a run has of all its policies; empty where it has none.

    Raises:
        ConfigError: one of them is not there.
    """
    folders = {p: config.place_of(p, config.run_dir / "checkpoints") for p in config.policies_to_train}
    if not all((folder / LATEST).exists() for folder in folders.values()):
        return {}
    # A trainer may have died between the checkpoints of the others and its own.
    step = min((folder / LATEST).read_text().strip() for folder in folders.values())
    found = {policy: folder / step for policy, folder in folders.items()}
    for policy, checkpoint in found.items():
        if not checkpoint.is_dir():
            raise ConfigError(
                f"{folders[policy]} has no {step}, which is the newest step that all policies have; name in its file "
                f"{LATEST!r} a step that is there for all"
            )
    return found


def checkpoint_models(run_dir: Path) -> dict[str, Path]:
    """Return the model folders of a run's newest checkpoints, in the Hugging Face format, by policy; empty: none yet.

    Raises:
        ConfigError: there is no run.
    """
    if not (run_dir / "config.json").exists():
        raise ConfigError(f"{run_dir} is no run directory: it has no config.json")
    config = load_config(run_dir / "config.json")
    # The folder may have been moved since.
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"dir": run_dir.parent, "name": run_dir.name})}
    )
    return {policy: checkpoint / "model" for policy, checkpoint in latest_checkpoints(config).items()}


def read_state(checkpoint: Path) -> dict[str, object]:
    """Return the coordinator's state in a checkpoint."""
    state: dict[str, object] = json.loads((checkpoint / "coordinator.json").read_text())
    return state


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a process of the run that computes on so many threads."""
    number = str(threads)
    return {**OFFLINE, "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number, "OPENBLAS_NUM_THREADS": number}
