"""A run that is killed at every phase of a step, one after another, and goes on each time: a table of them.

    python tests/crash_phases.py [--folder DIR] [NUMBER ...]

The run is deterministic: a warm-up whose teacher plays one episode at a time. So a run that was killed and went on must
end with the ledger, the weights and the optimizer of one that was left alone, to the last bit. Where it does not, its
NUMBER in the table kills a run at one phase alone.
"""

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from runs import DEADLINE, running, wait_until_gone, write_run

from agentgym.coordinator.launch import checkpoint_models
from agentgym.coordinator.store import stored_episodes

STEPS, EPISODES = 6, 4
"""Steps of the run, a checkpoint after every second one; episodes of each."""
HOOK = Path(__file__).with_name("crash")
COORDINATOR, TRAINER = "train", "agentgym_trainers.megatron.main"


@dataclass(frozen=True)
class Phase:
    """A moment of a step."""

    name: str
    point: str
    """As in `crash/sitecustomize.py`, without the victim."""
    victim: str
    """itself or parent."""

    @property
    def victim_name(self) -> str:
        """Who is killed."""
        return "trainer" if self.point.startswith(TRAINER) and self.victim == "itself" else "coordinator"


def _of_the_coordinator(name: str, point: str) -> Phase:
    return Phase(name, f"{COORDINATOR} agentgym.{point} 1", "itself")


def _of_the_trainer(name: str, point: str, victim: str) -> Phase:
    return Phase(name, f"{TRAINER} agentgym_trainers.megatron.{point} 1", victim)


_IN_THE_TRAINER = (
    ("batch received, before the optimizer step", "trainer _update call"),
    ("after the optimizer step", "step train_step return"),
    ("checkpoint: weights written, optimizer not", "checkpoint _write_model return"),
    ("checkpoint: written, without its name", "checkpoint _sync_tree return"),
    ("checkpoint: named, latest is still the older", "checkpoint _point_latest call"),
    ("checkpoint: done, nobody knows", "checkpoint save_checkpoint return"),
)
PHASES = (
    _of_the_coordinator("a lease is out", "coordinator.leases issue return"),
    _of_the_coordinator("episode received, not written", "segments append call"),
    _of_the_coordinator("episode written, not in the ledger", "segments sync return"),
    _of_the_coordinator("in the ledger, not acknowledged", "coordinator.store _write return"),
    _of_the_coordinator("acknowledged", "coordinator.store _call_all return"),
    _of_the_coordinator("batch made, not marked as taken", "coordinator.store consume call"),
    *(_of_the_trainer(name, point, "parent") for name, point in _IN_THE_TRAINER),
    _of_the_coordinator("step and checkpoint are done, not noted", "coordinator.training finished call"),
    _of_the_trainer("before the weights are published", "trainer publish call", "parent"),
    _of_the_trainer("weights published, nobody knows", "trainer publish return", "parent"),
    *(_of_the_trainer(name, point, "itself") for name, point in _IN_THE_TRAINER),
    _of_the_trainer("weights published, nobody knows", "trainer publish return", "itself"),
)


SOME = (PHASES[2], PHASES[10], PHASES[16])
"""For a short version: the coordinator is killed, it is killed by its trainer, and the trainer is killed."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    crossed: int
    """Points at which it was killed."""
    resumed: tuple[int, ...]
    """Steps after which it went on."""
    trained: tuple[tuple[int, int, int], ...]
    """(step, task, member) of every episode that was trained."""
    digest: str
    """Of the final weights and the optimizer."""
    lost: int
    """Episodes that were in the ledger after a crash, and are not at the end."""


def run_through(folder: Path, phases: Sequence[Phase]) -> Outcome:
    """Make the run in an empty folder, and kill it at these phases, one after another."""
    write_run(
        folder, "odd_envs:Letters",
        run={"name": "phases", "steps": 0},
        warmup={"steps": STEPS, "episodes": EPISODES},
        workers={"slots": 1},
        trainer={"checkpoint_every": 2},
        coordinator={"max_restarts": len(PHASES)},
    )  # fmt: skip
    points = folder / "points"
    points.write_text("".join(f"{phase.point} {phase.victim}\n" for phase in phases))
    hook = {"CRASH_POINTS": str(points), "PYTHONPATH": f"{HOOK}:{os.environ.get('PYTHONPATH', '')}"}
    run_dir = folder / "runs" / "phases"
    seen: set[int] = set()
    resumed: list[int] = []
    for attempt in range(len(phases) + 1):
        with running(folder, "run.toml", *(["--resume"] if attempt else []), environment=hook) as run:
            status = run.wait(DEADLINE * (1 + len(phases)))
            resumed += [
                int(line.split()[3]) for line in run.lines if line.startswith("  resumed after step ")
            ]
            report = run.report()
            assert not wait_until_gone(folder, 15.0), report
        seen |= {stored.lease_id for stored in stored_episodes(run_dir)}
        if status == 0:
            break
        assert status == -9, report
    stored = list(stored_episodes(run_dir))
    trained = sorted((s.step or 0, s.episode.task_index, s.episode.member) for s in stored)
    (model,) = checkpoint_models(run_dir).values()
    checkpoint = model.parent
    assert checkpoint.name == f"step-{STEPS:06d}", report
    digest = hashlib.sha256((checkpoint / "model" / "model.safetensors").read_bytes())
    digest.update((checkpoint / "optimizer.safetensors").read_bytes())
    crossed = points.with_suffix(".crossed")
    return Outcome(
        crossed=len(crossed.read_text().splitlines()) if crossed.exists() else 0,
        resumed=tuple(resumed),
        trained=tuple(trained),
        digest=digest.hexdigest(),
        lost=len(seen - {s.lease_id for s in stored}),
    )


def main() -> int:
    """Kill a run at each phase, and print what became of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="for the runs; by default a temporary one, which stays")
    parser.add_argument(
        "numbers", nargs="*", type=int, metavar="NUMBER", help="rows of the table; by default all"
    )
    settings = parser.parse_args()
    base = settings.folder or Path(tempfile.mkdtemp(prefix="phases-"))
    base.mkdir(parents=True, exist_ok=True)
    phases = [PHASES[number - 1] for number in settings.numbers] or PHASES
    whole, killed = run_through(_folder(base, "whole"), []), run_through(_folder(base, "killed"), phases)
    lines = [f"{'killed when':<47}{'who':<13}on from step"]
    for phase, step in zip_longest(phases, killed.resumed, fillvalue="not killed"):
        lines.append(f"{phase.name:<47}{phase.victim_name:<13}{step}")
    same = {
        "episodes": killed.trained == whole.trained and not killed.lost,
        "weights and optimizer": killed.digest == whole.digest,
    }
    lines += [
        f"{what}: {'the same as in' if good else 'OTHER than in'} a run that was left alone"
        for what, good in same.items()
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if all(same.values()) and killed.crossed == len(phases) else 1


def _folder(base: Path, name: str) -> Path:
    (base / name).mkdir()
    return base / name


if __name__ == "__main__":
    sys.exit(main())
