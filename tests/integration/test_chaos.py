"""The short version of `scripts/chaos.sh`; the death of the coordinator is in `test_runs.py`."""

import random
import re
from pathlib import Path

import pytest
from chaos import LENIENT, Fire, one_of_each, report
from runs import write_run


@pytest.mark.timeout(900)
def test_a_run_under_fire_loses_nothing_trains_nothing_twice_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    write_run(
        tmp_path, "odd_envs:Letters",
        run={"name": "chaos", "steps": 100_000},
        warmup={"steps": 2, "episodes": 8},
        rollout={"tasks_per_step": 2, "group_size": 2},
        **{"env.kwargs": {"latency": 0.1}},
    )  # fmt: skip
    rng = random.Random(1)
    fire = Fire(tmp_path, ["run.toml", *LENIENT], rng)
    faults = ("kill worker", "kill server", "kill trainer", "nonsense", "full disk")
    findings = fire.rage(one_of_each(rng, *faults))
    broken = [finding.promise for finding in findings if not finding.ok]
    assert not broken, report(fire, findings) + "\n" + "\n".join(fire.terminal)
    assert fire.done == dict.fromkeys(faults, 1)
    assert fire.acknowledged
    said = "\n".join(fire.terminal)
    assert "trainer (pid" in said
    # Of an episode, the ledger or the curves, whichever grew first; SQLite has words of its own.
    full = r"\[Errno 27\] File too large|disk I/O error"
    assert re.search(rf"cannot be (read or )?written: ({full}); go on with --resume when it can", said)
