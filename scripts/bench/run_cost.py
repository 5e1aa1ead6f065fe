"""What a training run costs: seconds a step, tokens, and the memory of all its processes.

    python scripts/bench/run_cost.py CONFIG [section.key=value ...]

It is `agentgym train`; the memory is the largest sum of PSS (pages that processes share count once) that was seen in
looks every two seconds. The seconds are those between the ends of two steps, from TensorBoard.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentgym.memory import memory_gib

LOOK_EVERY = 2.0
TAGS = (
    "train/seconds",
    "train/tokens",
    "train/tokens_trained",
    "episode/success",
    "train/mismatch_max",
    "train/grad_norm",
)


def train(config: Path, folder: Path, settings: list[str]) -> float:
    """Train, and return the most memory in GiB."""
    place = [f"run.dir={folder}", "run.name=run", *settings]
    process = subprocess.Popen([sys.executable, "-m", "agentgym", "train", str(config), *place])
    most = 0.0
    try:
        while process.poll() is None:
            most = max(most, memory_gib(process.pid))
            time.sleep(LOOK_EVERY)
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}")
    return most


def report(run: Path, started: float, memory: float) -> None:
    """Print what a finished run says of itself."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    ends = [event.wall_time for event in events.Scalars("train/loss")]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    print(
        f"{len(ends)} steps; the first ended {ends[0] - started:.0f} s after the start, the others took "
        f"{statistics.median(seconds):.1f} s each (median; {min(seconds):.1f} to {max(seconds):.1f}); {memory:.1f} GiB"
    )
    for tag in TAGS:
        values = [event.value for event in events.Scalars(tag)]
        print(f"  {tag:22} median {statistics.median(values):.4g}, last {values[-1]:.4g}")


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the run; by default it is thrown away")
    parser.add_argument("settings", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, started = arguments.keep or Path(scratch), time.time()
        memory = train(arguments.config, folder, arguments.settings)
        report(folder / "run", started, memory)


if __name__ == "__main__":
    main()
