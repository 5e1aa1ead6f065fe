"""Kills a process of a run at a point in its code, without a word of it in that code.

Python imports this file before anything else where its folder is on PYTHONPATH. CRASH_POINTS is a file of lines

    ROLE MODULE FUNCTION call|return COUNT VICTIM

A process with ROLE in its command line ends VICTIM (itself, or its parent: the coordinator) when the interpreter
calls FUNCTION of MODULE for the COUNTth time, or when that returns. Points are crossed one after another: a process
watches for the first one that was not crossed when it started, and what was crossed is noted beside the file.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any


class Point:
    """A line of the file that concerns this process."""

    def __init__(self, line: str, noted: Path) -> None:
        self.line, self.noted = line, noted
        self.role, module, self.function, self.event, count, self.victim = line.split()
        self.file = module.replace(".", "/") + ".py"
        self.left = int(count)

    def begin(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Watch when all is imported, which takes twice as long for one who is watched: an audit hook."""
        model = event == "open" and str(arguments[0]).endswith("model/config.json")
        if (model or event == "sqlite3.connect") and sys.getprofile() is None:
            threading.setprofile(self.watch)
            sys.setprofile(self.watch)

    def watch(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Look at a call or return, as `sys.setprofile` tells of it."""
        code = frame.f_code
        if event == self.event and code.co_name == self.function and code.co_filename.endswith(self.file):
            self.left -= 1
            if self.left == 0:
                self.crash()

    def crash(self) -> None:
        """End the victim."""
        with self.noted.open("a") as crossed:
            crossed.write(self.line + "\n")
        os.kill(os.getpid() if self.victim == "itself" else os.getppid(), signal.SIGKILL)
        signal.pause()  # the end of the parent is the end of this process


def install() -> None:
    """Watch for the first point that was not crossed yet, if it is in this process."""
    path = Path(os.environ["CRASH_POINTS"])
    noted = path.with_suffix(".crossed")
    crossed = noted.read_text().splitlines() if noted.exists() else []
    points = [line for line in path.read_text().splitlines() if line not in crossed]
    if points and points[0].split()[0] in sys.orig_argv:
        sys.addaudithook(Point(points[0], noted).begin)


if "CRASH_POINTS" in os.environ:
    install()
