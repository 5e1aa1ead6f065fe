"""Processes that are started as ranks; here they are not trainers."""

import logging
import sys
from pathlib import Path

import pytest

from agentgym_trainers.megatron.launch import run_ranks

SAY = "import os; print(*map(os.environ.get, ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'AGENTGYM_MEETING']), flush=True)"


def test_each_rank_knows_its_number_and_where_all_of_them_meet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert run_ranks(3, [sys.executable, "-c", SAY], tmp_path) == 0
    numbers = [line.split() for line in sorted(capfd.readouterr().out.splitlines())]
    assert [line[:3] for line in numbers] == [[rank, rank, "3"] for rank in "012"]
    (meeting,) = {Path(line[3]) for line in numbers}
    assert meeting.parent.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_they_meet_where_nobody_else_can_enter(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    look = (
        "import os, pathlib; print(oct(pathlib.Path(os.environ['AGENTGYM_MEETING']).parent.stat().st_mode))"
    )
    assert run_ranks(1, [sys.executable, "-c", look], tmp_path) == 0
    assert capfd.readouterr().out.strip() == oct(0o40700)


@pytest.mark.parametrize(
    ("end", "said"), [("sys.exit(3)", "status 3"), ("os.kill(os.getpid(), 9)", "SIGKILL")]
)
def test_when_one_fails_the_others_are_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str, said: str
):
    script = f"import os, sys, time\nif os.environ['RANK'] == '2': {end}\ntime.sleep(1000)"
    with caplog.at_level(logging.ERROR, logger="agentgym_trainers"):
        assert run_ranks(3, [sys.executable, "-c", script], tmp_path) == 1
    assert f"rank 2 of the trainer ended with {said}; the others were ended" in caplog.messages


def test_nothing_listens_to_other_machines(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """By itself torchrun does, and unpickles what it hears."""
    look = (
        "import os, psutil; both = [psutil.Process(pid) for pid in (os.getpid(), os.getppid())]; "
        "ends = [c for process in both for c in process.net_connections()]; "
        "print([c.laddr for c in ends if c.status == psutil.CONN_LISTEN and c.laddr.ip not in ('127.0.0.1', '::1')])"
    )
    assert run_ranks(1, [sys.executable, "-c", look], tmp_path) == 0
    assert capfd.readouterr().out.strip() == "[]"
