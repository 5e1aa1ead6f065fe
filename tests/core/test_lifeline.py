import os
import signal
import subprocess
import sys

# The parent starts a child that would wait for an hour, tells its pid, and waits to be killed.
CHILD = """
import os, sys, threading
{prepare}
from agentgym.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]), poll_seconds=0.05)
print(os.getpid(), flush=True)
threading.Event().wait(3600)
"""
PARENT = """
import os, subprocess, sys, threading
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
threading.Event().wait(3600)
"""
NO_KERNEL_HELP = "sys.platform = 'elsewhere'"
"""As on a system without PR_SET_PDEATHSIG: only the thread looks."""


def ends_with_its_parent(prepare: str) -> bool:
    """Whether the end of the child's output, which is its end, comes soon after its parent is killed."""
    child = CHILD.format(prepare=prepare)
    with subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        try:
            # The pipe closes when the last process that holds it, the child, is gone.
            rest, _ = parent.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.kill(pid, signal.SIGKILL)
            return False
        return rest == b""


def test_a_process_ends_when_its_parent_is_killed() -> None:
    assert ends_with_its_parent(prepare="")


def test_a_process_ends_when_its_parent_is_killed_where_the_kernel_does_not_help() -> None:
    assert ends_with_its_parent(prepare=NO_KERNEL_HELP)


def test_a_process_whose_parent_was_gone_before_it_looked_ends_too() -> None:
    never_the_parent = 0
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(prepare=NO_KERNEL_HELP), str(never_the_parent)],
        timeout=20,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    assert done.returncode == -signal.SIGKILL
