"""Episodes per second with generation and training overlapping, against the same run with them alternating.

    .venv/bin/python scripts/bench/overlap.py [--steps 20] [--latency 0.2] [--rounds 1]

Both are `agentgym train` with the default configuration, the same seed and no warm-up; each environment step sleeps
`latency` seconds. Off is `rollout.max_staleness = 0`, on is the default. The rate is taken from TensorBoard: episodes
of the steps after the first three, by the wall time between them.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "scripts/configs/guess_number.toml"
FIRST_STEP = 4
AGENTGYM = (sys.executable, "-m", "agentgym")


def episodes_per_second(run: Path, episodes_per_step: int) -> float:
    """Return the rate over the steps of a finished run, its start left out."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    times = [event.wall_time for event in events.Scalars("train/loss") if event.step >= FIRST_STEP]
    seconds: float = times[-1] - times[0]
    return episodes_per_step * (len(times) - 1) / seconds


def measure(folder: Path, name: str, settings: Sequence[str], command: Sequence[str] = AGENTGYM) -> Path:
    """Run a training and return its directory."""
    place = [f"run.dir={folder}", f"run.name={name}"]
    subprocess.run([*command, "train", str(CONFIG), *place, *settings], check=True, stdout=subprocess.DEVNULL)
    return folder / name


def main() -> None:
    """Run both in turn and print the rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument(
        "--latency", type=float, default=0.2, help="seconds that each environment step sleeps"
    )
    parser.add_argument(
        "--tasks", type=int, default=16, help="groups of 4 in a step; with more, two cores are the limit"
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs of each kind, alternating")
    parser.add_argument("--staleness", type=int, default=1, help="rollout.max_staleness with overlap")
    arguments = parser.parse_args()
    rates: dict[int, list[float]] = {0: [], arguments.staleness: []}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        subprocess.run([*AGENTGYM, "init-model", str(model)], check=True, stdout=subprocess.DEVNULL)
        common = [
            f"run.steps={arguments.steps}", "warmup.steps=0", f"policies.learner.model={model}",
            f"env.kwargs={{latency={arguments.latency}}}",
            f"rollout.tasks_per_step={arguments.tasks}", "rollout.group_size=4",
        ]  # fmt: skip
        for number in range(arguments.rounds):
            for staleness in rates:
                settings = [*common, f"rollout.max_staleness={staleness}"]
                run = measure(Path(scratch), f"staleness-{staleness}-{number}", settings)
                rates[staleness].append(episodes_per_second(run, 4 * arguments.tasks))
                print(f"max_staleness {staleness}: {rates[staleness][-1]:.1f} episodes/s", flush=True)
    off, on = (statistics.median(values) for values in rates.values())
    print(f"overlap on / off: {on / off:.2f} (medians {on:.1f} and {off:.1f} episodes/s)")


if __name__ == "__main__":
    main()
