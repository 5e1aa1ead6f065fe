"""Learning curves of a configuration over several seeds, from TensorBoard, as a picture.

    .venv/bin/python scripts/bench/seeds.py [--seeds 1 2 3] [--config CONFIG] [--out runs/seeds] [section.key=value ...]

Each seed is an `agentgym train` with a tiny model of that seed, one after another. Printed for each: success in the
first step, its mean over the last five, and the wall time of the warm-up and of reinforcement learning.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import matplotlib as mpl
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
CURVES = (
    "episode/success",
    "train/entropy",
    "train/kl_rollout",
    "policy/age_mean",
    "warmup/loss",
    "system/busy/trainer",
)


def train(seed: int, config: Path, out: Path, settings: list[str]) -> EventAccumulator:
    """Train with one seed and return what TensorBoard holds."""
    model = out / f"model-{seed}"
    cli = [sys.executable, "-m", "agentgym"]
    subprocess.run([*cli, "init-model", str(model), "--seed", str(seed)], check=True)
    run = [f"run.seed={seed}", f"run.dir={out}", f"run.name=seed-{seed}", f"policies.learner.model={model}"]
    started = time.monotonic()
    subprocess.run([*cli, "train", str(config), *run, *settings], check=True)
    print(f"seed {seed}: {time.monotonic() - started:.0f} s from start to end", flush=True)
    events = EventAccumulator(str(out / f"seed-{seed}" / "tensorboard"))
    events.Reload()
    return events


def summary(seed: int, events: EventAccumulator) -> str:
    """Return one line of figures about a run."""
    success = events.Scalars("episode/success")
    learning = success[-1].wall_time - success[0].wall_time
    warmup = events.Scalars("warmup/loss")
    warming = warmup[-1].wall_time - warmup[0].wall_time
    last = [event.value for event in success[-5:]]
    reached = next((event.step for event in success if event.value >= 0.9), None)
    return (
        f"seed {seed}: success {success[0].value:.3f} -> {sum(last) / len(last):.3f} (mean of the last 5 of "
        f"{len(success)} steps; 0.9 first in step {reached}), warm-up {warming:.0f} s, learning {learning:.0f} s"
    )


def draw(runs: dict[int, EventAccumulator], path: Path) -> None:
    """Save the curves of all seeds."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), constrained_layout=True)
    for axis, tag in zip(axes.flat, CURVES, strict=True):
        for seed, events in runs.items():
            scalars = events.Scalars(tag)
            axis.plot(
                [event.step for event in scalars], [event.value for event in scalars], label=f"seed {seed}"
            )
        axis.set_title(tag)
        axis.grid(alpha=0.3)
    axes.flat[0].axhline(0.9, color="grey", linestyle="--")
    axes.flat[0].legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train all seeds, print their figures, draw their curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--config", type=Path, default=ROOT / "scripts/configs/guess_number.toml")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    parser.add_argument("settings", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    runs = {
        seed: train(seed, arguments.config, arguments.out, arguments.settings) for seed in arguments.seeds
    }
    for seed, events in runs.items():
        print(summary(seed, events))
    draw(runs, arguments.out / "curves.png")
    print(f"curves: {arguments.out / 'curves.png'}")


if __name__ == "__main__":
    main()
