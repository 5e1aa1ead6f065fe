"""What must be true of a run directory, whatever was done to its processes."""

import itertools
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from runs import curves, processes_in
from safetensors.numpy import load_file

from agentgym.config import Config
from agentgym.coordinator.launch import checkpoint_models
from agentgym.coordinator.ledger import LEDGER
from agentgym.coordinator.schedule import Schedule
from agentgym.coordinator.store import FOLDER, stored_episodes
from agentgym.model import check_model

if TYPE_CHECKING:
    from chaos import Fire


@dataclass(frozen=True)
class Finding:
    """One promise, and whether it was kept."""

    promise: str
    ok: bool
    detail: str


def audit(fire: "Fire") -> list[Finding]:
    """Look at what a run left that was under fire."""
    return [
        *audit_run(fire.run_dir, fire.acknowledged),
        Finding("it ended only where it had to", not fire.ends, "; ".join(fire.ends) or "yes"),
        _nothing_left(fire),
    ]


def audit_run(run_dir: Path, acknowledged: set[int]) -> list[Finding]:
    """Look at a run directory, in which the episodes of these leases had been acknowledged at some time."""
    config = Config.model_validate_json((run_dir / "config.json").read_text())
    (model,) = checkpoint_models(run_dir).values()
    checkpoint = model.parent
    last = int(json.loads((checkpoint / "trainer.json").read_text())["step"])
    return [
        *_ledger(run_dir, config, last, acknowledged),
        *_curves(run_dir, config, last),
        _model(checkpoint),
    ]


def _ledger(run_dir: Path, config: Config, last: int, acknowledged: set[int]) -> Iterator[Finding]:
    database = sqlite3.connect(f"file:{run_dir / FOLDER / LEDGER}?mode=ro", uri=True)
    groups = database.execute("SELECT group_id, task_index, size, step FROM groups").fetchall()
    leases = database.execute("SELECT lease_id, group_id FROM episodes").fetchall()
    database.close()
    lost = acknowledged - {lease for lease, _ in leases}
    yield Finding("no acknowledged episode is lost", not lost, f"{len(acknowledged)} seen, {len(lost)} lost")
    tasks = [task for _, task, _, _ in groups]
    twice = len(tasks) - len(set(tasks))
    yield Finding("no task is played for two steps", not twice, f"{len(tasks)} tasks, {twice} twice")
    read = [(stored.episode.group_id, stored.episode.member) for stored in stored_episodes(run_dir)]
    whole = len(read) == len(set(read)) == len(leases)
    yield Finding("every episode is there once, and as its worker sent it", whole, f"{len(read)} episodes")
    schedule = Schedule(config)
    of_step = {step: [row for row in groups if row[3] == step] for step in range(1, last + 1)}
    wrong = [step for step, rows in of_step.items() if len(rows) != schedule.step(step).groups]
    beyond = [row for row in groups if row[3] is not None and row[3] > last]
    yield Finding(
        "every step up to the checkpoint consumed its groups, and none did beyond",
        not wrong and not beyond,
        f"{last} steps, wrong {wrong[:5]}, beyond {len(beyond)}",
    )
    members = {group: 0 for group, _, _, _ in groups}
    for _, group in leases:
        members[group] += 1
    short = [group for group, _, size, step in groups if step is not None and members[group] != size]
    yield Finding("consumed groups have all their members", not short, f"{len(short)} have not")


def _curves(run_dir: Path, config: Config, last: int) -> Iterator[Finding]:
    shown = curves(run_dir)
    steps = [step for step, _ in shown["train/loss"]]
    learned = list(range(1, last - config.warmup.steps + 1))
    yield Finding("the curves show every step once", steps == learned, f"{len(steps)} of {len(learned)}")
    versions = [value for _, value in shown["policy/version"]]
    falls = sum(b < a for a, b in itertools.pairwise(versions))
    yield Finding("versions never fall", not falls, f"{len(versions)} steps, up to {versions[-1]:.0f}")
    success = [value for _, value in shown.get("episode/success", [])]
    if len(success) >= 20:
        first, now = success[0], float(np.mean(success[-5:]))
        yield Finding("success went up", now > first, f"{first:.2f} to {now:.2f} in {len(success)} steps")


def _model(checkpoint: Path) -> Finding:
    check_model(checkpoint / "model")
    tensors = [
        *load_file(checkpoint / "model" / "model.safetensors").values(),
        *load_file(checkpoint / "optimizer.safetensors").values(),
    ]
    finite = all(np.isfinite(tensor).all() for tensor in tensors)
    return Finding(
        "the last checkpoint loads and is finite", finite, f"{checkpoint.name}, {len(tensors)} tensors"
    )


def _nothing_left(fire: "Fire") -> Finding:
    left = [*map(str, processes_in(fire.folder)), *fire.orphans.values()]
    left += [str(path) for path in fire.exchanges if path.exists()]
    left += [
        str(path) for path in fire.scratch.iterdir() if not path.name.startswith("torchinductor_")
    ]  # a cache
    return Finding("no process and no temporary file is left", not left, f"{left}")
