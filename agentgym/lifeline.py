"""A process that loses its parent ends by itself.

On Linux the kernel sends SIGKILL when the parent dies; everywhere a thread looks twice a second whether the parent
is still the parent, and ends the process if it is not.
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
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(poll_seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
