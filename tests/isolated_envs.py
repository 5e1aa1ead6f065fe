"""Environments that need a process of their own, each for another reason, and scripted policies for them."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
from broken_envs import HashesTexts

from agentgym.env import Env
from agentgym.messages import assistant
from agentgym.policy.scripted import SeededPolicy


class GlobalDice(Env):
    """Draws from the generators that all code of a process shares, as TextArena does."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"{random.random()} {np.random.random()}", {}

    def step(self, action: str) -> Any:
        return f"{random.random()} {np.random.random()}", 0.0, False, False, {"not plain": {1, 2}}


class HashesTextsAlone(HashesTexts):
    """In processes that all hash alike."""

    isolation = "process"


class Turn(Env):
    """Does what it is told to do, once, in `reset` or in its first `step`."""

    def __init__(self, deed: str = "nothing", when: str = "step", note: str = "") -> None:
        self.deed, self.when, self.note = deed, when, note
        print(f"built to do {deed}")  # noqa: T201

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.when == "reset":
            self.do()
        return f"pid {os.getpid()}", {}

    def step(self, action: str) -> Any:
        if self.when == "step":
            self.do()
        return "end", 1.0, True, False, {"success": 1.0}

    def close(self) -> None:
        if self.when == "close":
            self.do()

    def do(self) -> None:
        print(f"now it does {self.deed}")  # noqa: T201
        match self.deed:
            case "raise":
                raise KeyError("map")
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(3)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "babble":  # into the socket that answers go through
                for descriptor in range(3, 64):
                    with contextlib.suppress(OSError):
                        socket.socket(fileno=os.dup(descriptor)).sendall(b"\4\0\0\0\xc1\xc1\xc1\xc1")
            case "hang":
                self.start_helper()
                while True:
                    time.sleep(60.0)
            case "hang deaf":
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGABRT})
                while True:
                    time.sleep(60.0)

    def start_helper(self) -> None:
        """Start a process that would outlive this one, and note both."""
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        if self.note:
            with open(self.note, "w") as note:
                note.write(f"{os.getpid()} {helper.pid}\n")


class Unprintable(Env):
    """Says something that is no plain data."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return [{"role": "user", "content": "look", "image": object()}], {}


class Hello(SeededPolicy):
    """Says hello."""

    def act(self, messages: Any, tools: Any, info: Any) -> Any:
        return assistant("hello")


class Bad(SeededPolicy):
    """Ends its process."""

    def act(self, messages: Any, tools: Any, info: Any) -> Any:
        os._exit(9)
