"""Learning curves of a configuration over several seeds, from TensorBoard, as a picture.

    .venv/bin/python scripts/bench/seeds.py [--seeds 1 2 3] [--config CONFIG] [--curve episode/success]
        [--out runs/seeds] [section.key=value ...]

Each seed is an `agentgym train` with a tiny model of that seed, one after another. Printed for each: the curve in the
first step, its mean over the last five, and the wall time of the warm-up and of reinforcement learning.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import matplotlib as mpl
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentgym.config_file import load_config

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
CURVES = ("train/entropy", "train/kl_rollout", "policy/age_mean", "warmup/loss", "system/busy/trainer")
"""Beside the one that is asked for; where several policies learn, each has its own."""


def train(seed: int, config: Path, out: Path, settings: list[str]) -> EventAccumulator:
    """Train with one seed and return what TensorBoard holds."""
    model = out / f"model-{seed}"
    cli = [sys.executable, "-m", "agentgym"]
    subprocess.run([*cli, "init-model", str(model), "--seed", str(seed)], check=True)
    models = [f"policies.{name}.model={model}" for name in load_config(config, settings).policies_to_train]
    run = [f"run.seed={seed}", f"run.dir={out}", f"run.name=seed-{seed}", *models]
    started = time.monotonic()
    subprocess.run([*cli, "train", str(config), *run, *settings], check=True)
    print(f"seed {seed}: {time.monotonic() - started:.0f} s from start to end", flush=True)
    events = EventAccumulator(str(out / f"seed-{seed}" / "tensorboard"))
    events.Reload()
    return events


def tags_of(events: EventAccumulator, curve: str) -> list[str]:
    """Return the tags of a curve: itself, or that of each policy ("train/left/entropy")."""
    start, _, end = curve.rpartition("/")
    pattern = re.compile(f"{re.escape(start)}(/[^/]+)?/{re.escape(end)}")
    tags = sorted(events.Tags()["scalars"])
    return [curve] if curve in tags else [tag for tag in tags if pattern.fullmatch(tag)]


def summary(seed: int, events: EventAccumulator, curve: str) -> str:
    """Return one line of figures about a run."""
    found = events.Scalars(curve)
    learning = found[-1].wall_time - found[0].wall_time
    warmup = events.Scalars(tags_of(events, "warmup/loss")[0])
    warming = warmup[-1].wall_time - warmup[0].wall_time
    last = [event.value for event in found[-5:]]
    reached = next((event.step for event in found if event.value >= 0.9), None)
    return (
        f"seed {seed}: {curve} {found[0].value:.3f} -> {sum(last) / len(last):.3f} (mean of the last 5 of "
        f"{len(found)} steps; 0.9 first in step {reached}), warm-up {warming:.0f} s, learning {learning:.0f} s"
    )


def draw(runs: dict[int, EventAccumulator], curves: tuple[str, ...], path: Path) -> None:
    """Save the curves of all seeds."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), constrained_layout=True)
    for axis, curve in zip(axes.flat, curves, strict=True):
        for seed, events in runs.items():
            for tag in tags_of(events, curve):
                scalars = events.Scalars(tag)
                label = f"seed {seed}" if tag == curve else f"seed {seed}, {tag}"
                axis.plot([event.step for event in scalars], [event.value for event in scalars], label=label)
        axis.set_title(curve)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train all seeds, print their figures, draw their curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--config", type=Path, default=ROOT / "scripts/configs/guess_number.toml")
    parser.add_argument("--curve", default="episode/success")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    parser.add_argument("settings", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    runs = {
        seed: train(seed, arguments.config, arguments.out, arguments.settings) for seed in arguments.seeds
    }
    for seed, events in runs.items():
        print(summary(seed, events, arguments.curve))
    draw(runs, (arguments.curve, *CURVES), arguments.out / "curves.png")
    print(f"curves: {arguments.out / 'curves.png'}")


if __name__ == "__main__":
    main()
