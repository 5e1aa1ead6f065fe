"""Two policies that were trained at once, each against the other's first version: what they had after the warm-up.

    .venv/bin/python scripts/bench/first_versions.py RUN [--episodes 512]

RUN is a finished run that kept the checkpoints of its last warm-up step (`trainer.keep_checkpoints`). Printed is the
mean reward of both where each plays its first or its last version: an agent has learned for itself if its last version
earns more than its first one against the same first version of the other.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from agentgym.config_file import load_config
from agentgym.coordinator.launch import checkpoint_models
from agentgym.episode_json import read_episodes

PAIRS = (("first", "first"), ("last", "first"), ("first", "last"), ("last", "last"))


def rewards(run: Path, players: dict[str, Path], episodes: int) -> dict[str, float]:
    """Return the mean reward of each policy in an evaluation with these model folders."""
    policies = [f"--policy={name}={folder}" for name, folder in players.items()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "episodes.jsonl"
        command = ["eval", str(run / "config.json"), *policies, f"--episodes={episodes}", f"--out={out}"]
        subprocess.run([sys.executable, "-m", "agentgym", *command], check=True, stdout=subprocess.DEVNULL)
        played = [record.episode for record in read_episodes(out).records]
    sums = dict.fromkeys(players, 0.0)
    for trajectory in (trajectory for episode in played for trajectory in episode.trajectories):
        sums[trajectory.policy] += sum(turn.reward for turn in trajectory.turns)
    return {name: total / len(played) for name, total in sums.items()}


def main() -> None:
    """Play all four pairs of versions and print what each policy earned."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--episodes", type=int, default=512)
    arguments = parser.parse_args()
    config = load_config(arguments.run / "config.json")
    left, right = config.policies_to_train
    first = f"step-{config.warmup.steps:06d}"
    folders = {
        "first": {
            name: config.place_of(name, arguments.run / "checkpoints") / first / "model"
            for name in (left, right)
        },
        "last": checkpoint_models(arguments.run),
    }
    for ours, theirs in PAIRS:
        earned = rewards(
            arguments.run, {left: folders[ours][left], right: folders[theirs][right]}, arguments.episodes
        )
        print(f"{ours} {left} {earned[left]:.3f}, {theirs} {right} {earned[right]:.3f}", flush=True)


if __name__ == "__main__":
    main()
