"""Episodes per second of the default run, each on disk before it is acknowledged, against a run that stores nothing.

    .venv/bin/python scripts/bench/acknowledged.py [--steps 30] [--rounds 3]

Both are `agentgym train` with the default configuration, the same seed and no warm-up, in turn. In the other run the
store says at once that all is safe, and writes nothing. The rate is taken from TensorBoard, as in `overlap.py`.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from overlap import AGENTGYM, CONFIG, episodes_per_second, measure

from agentgym.cli import main as agentgym
from agentgym.config_file import load_config
from agentgym.coordinator.store import EpisodeStore


class Forgetful(EpisodeStore):
    """A store that says at once that all is safe."""

    def add(self, lease_id, group, header, arrays, done):  # type: ignore[no-untyped-def]
        """Keep nothing."""
        done()

    def consume(self, step, group_ids, done):  # type: ignore[no-untyped-def]
        """Note nothing."""
        done()


def main() -> None:
    """Run both in turn and print the rates and their ratio."""
    if sys.argv[1:2] == ["--forgetful"]:
        EpisodeStore.add, EpisodeStore.consume = Forgetful.add, Forgetful.consume  # type: ignore[method-assign]
        sys.argv[1:2] = []
        agentgym()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, alternating")
    arguments = parser.parse_args()
    commands = {"on disk": AGENTGYM, "not stored": (sys.executable, __file__, "--forgetful")}
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
    print(f"on disk / not stored: {on / off:.3f} (medians {on:.1f} and {off:.1f} episodes/s)")


if __name__ == "__main__":
    main()
