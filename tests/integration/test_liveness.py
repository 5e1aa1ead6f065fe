"""Processes of a whole run that are stopped or killed: each is noticed and replaced, and nothing stays behind.

Runs here are warm-ups alone, which need no policy server; `test_chaos.py` stops and kills those, too.
"""

import os
import signal
import time
from pathlib import Path

from processes import ends
from runs import processes_in, running, wait_until_gone, write_run

ENDLESS = {"steps": 100_000, "episodes": 8}
"""A warm-up that somebody has to stop."""
SLOW = {"env.kwargs": {"latency": 0.05}}


def test_a_run_goes_on_by_itself_from_its_last_checkpoint_when_the_trainer_is_killed_or_stopped(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, "odd_envs:Letters", warmup=ENDLESS, coordinator={"heartbeat_timeout": 8.0}, **SLOW)
    with running(tmp_path, "run.toml") as run:
        run.wait_for(r"\d+/100000 ")
        killed = run.pid("trainer")
        run.kill(killed)
        run.wait_for(
            rf"trainer \(pid {killed}\) was killed by SIGKILL; everything is stopped, to go on from the last checkpoint"
        )
        run.wait_for("resumed after step 0 from model")  # there is no checkpoint yet
        run.wait_for(r"\d+/100000 ", after=len(run.lines))
        stopped = run.pid("trainer")
        assert stopped != killed
        os.kill(stopped, signal.SIGSTOP)
        run.wait_for(rf"trainer \(pid {stopped}\) was silent for \d+ s; everything is stopped")
        run.wait_for(r"\d+/100000 ", after=len(run.lines))
        assert stopped not in processes_in(tmp_path)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.report()
        assert wait_until_gone(tmp_path, 10.0) == {}


def test_a_worker_is_replaced_a_coordinator_that_was_stopped_blames_nobody_and_when_it_is_killed_all_end(
    tmp_path: Path,
) -> None:
    limits = {"heartbeat_timeout": 8.0, "notice_after": 2.0}
    write_run(tmp_path, "odd_envs:Letters", warmup=ENDLESS, coordinator=limits, **SLOW)
    with running(tmp_path, "run.toml") as run:
        run.wait_for(r"\d+/100000 ")
        stopped = run.pid("worker-0")
        os.kill(stopped, signal.SIGSTOP)
        run.wait_for(r"waiting for \d+ s: .*worker-0 was heard \d+ s ago")
        run.wait_for(rf"worker-0 \(pid {stopped}\) was silent for \d+ s; restarted as pid \d+")
        assert stopped not in processes_in(tmp_path)
        before = len(run.lines)
        os.kill(run.process.pid, signal.SIGSTOP)
        time.sleep(10.0)  # longer than heartbeat_timeout
        os.kill(run.process.pid, signal.SIGCONT)
        run.wait_for(r"this process stood still for 1\d s", log="coordinator")
        run.wait_for(r"\d+/100000 ", after=before)
        assert not [line for line in run.lines[before:] if "silent" in line or "killed" in line]
        worker = run.pid("worker-0")
        family = {pid for pid, command in processes_in(tmp_path).items() if "zygote" in command}
        assert len(family) >= 2  # the zygote and environments that it forked
        run.kill(worker)
        run.wait_for(r"worker-0 .* was killed by SIGKILL; restarted")
        assert all(ends(pid, 10.0) for pid in family)
        os.kill(run.pid("trainer"), signal.SIGSTOP)  # one that could not end by itself
        run.kill(run.process.pid)
        assert wait_until_gone(tmp_path, 10.0) == {}
