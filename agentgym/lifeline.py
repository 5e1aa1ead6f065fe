"""A process that loses its parent ends by itself.

On Linux the kernel sends SIGKILL when the parent (to be exact: the thread of it that started the process) dies;
everywhere a thread looks twice a second whether the parent is still the parent, and ends the process if it is not.

Run as a script, this file starts a program of someone else's that way (on Linux; elsewhere it only starts it):

    python -I -S lifeline.py PARENT_PID COMMAND [ARGUMENT ...]
"""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, *, poll_seconds: float = 0.5) -> None:
    """End this process when the process `parent_pid` is no longer its parent."""
    _ask_kernel()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(poll_seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _ask_kernel() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(parent_pid: int, command: list[str]) -> None:
    """Turn this process into another program; what the kernel was asked stays in force."""
    _ask_kernel()
    if os.getppid() != parent_pid:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
