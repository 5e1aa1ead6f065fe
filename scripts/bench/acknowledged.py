"""Episodes per second of the default run, each on disk before it is acknowledged, against a run that waits for no disk.

    .venv/bin/python scripts/bench/acknowledged.py [--steps 30] [--rounds 3]

Both are `agentgym train` with the default configuration, the same seed and no warm-up, in turn. In the other run the
store says at once that an episode is safe, writes it later, and waits for no disk. The rate is taken
from TensorBoard, as in `overlap.py`.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from overlap import AGENTGYM, CONFIG, episodes_per_second, measure

from agentgym import segments
from agentgym.cli import main as agentgym
from agentgym.config_file import load_config
from agentgym.coordinator import train
from agentgym.coordinator.process import Coordinator
from agentgym.coordinator.store import Done, EpisodeStore, StoredGroup
from agentgym.coordinator.surroundings import Surroundings
from agentgym.errors import RunError
from agentgym.wire import Packet


class Careless(EpisodeStore):
    """A store that says at once that an episode is safe."""

    def __init__(self, run: Path, failed: Callable[[RunError], None]) -> None:
        """Open it; SQLite waits for no disk either."""
        super().__init__(run, failed)
        self._connection.execute("PRAGMA synchronous = OFF")

    def add(self, group: StoredGroup, packet: Packet, done: Done) -> None:
        """Write it some time."""
        super().add(group, packet, lambda: None)
        done()


def main() -> None:
    """Run both in turn and print the rates and their ratio."""
    if sys.argv[1:2] == ["--careless"]:
        segments.sync_file = lambda file: file.flush()
        surroundings = Surroundings(open_store=Careless)
        train.Coordinator = partial(Coordinator, surroundings=surroundings)  # type: ignore[attr-defined,assignment]
        sys.argv[1:2] = []
        agentgym()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, alternating")
    arguments = parser.parse_args()
    commands = {"on disk": AGENTGYM, "not waited for": (sys.executable, __file__, "--careless")}
    rollout = load_config(CONFIG, []).rollout
    episodes = rollout.tasks_per_step * rollout.group_size
    rates: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        subprocess.run([*AGENTGYM, "init-model", str(model)], check=True, stdout=subprocess.DEVNULL)
        settings = [f"run.steps={arguments.steps}", "warmup.steps=0", f"policies.learner.model={model}"]
        for number in range(arguments.rounds):
            for name, command in commands.items():
                run = measure(Path(scratch), f"{name.replace(' ', '-')}-{number}", settings, command)
                rates[name].append(episodes_per_second(run, episodes))
                print(f"{name}: {rates[name][-1]:.1f} episodes/s", flush=True)
    on, off = (statistics.median(values) for values in rates.values())
    print(f"on disk / not waited for: {on / off:.3f} (medians {on:.1f} and {off:.1f} episodes/s)")


if __name__ == "__main__":
    main()
