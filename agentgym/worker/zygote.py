"""The process that the processes of environments are forked from, and what they do.

    python -m agentgym.worker.zygote FD ENV_ID PARENT_PID

It imports what the environment needs, once, and forks a child whenever the worker at the other end of the socket FD
asks for one: a child costs milliseconds, and shares the memory of what was imported. The zygote itself never calls
into an environment, so it is always there to end a child that hangs. When the worker is gone the socket ends, and the
zygote ends all children and itself; when the zygote is gone the kernel ends the children (PR_SET_PDEATHSIG).

Messages, one msgpack array a datagram:

    worker -> zygote   ["fork", number] with a file descriptor: the child's end of its own socket
                       ["signal", number, signal]    to the child's process group
    zygote -> worker   ["ready"]                     forks are fast from now on
                       ["ended", number, status, last words]

A child answers ["method", arguments] with the value of that method of its `Table`, or with the error.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import tempfile
import traceback
from dataclasses import dataclass
from typing import IO, Any

import msgpack

from agentgym.errors import AgentGymError, EnvError
from agentgym.registry import load_attribute, spec
from agentgym.worker.table import Table, attempt
from agentgym.worker.table_codec import decode, encode

LENGTH = struct.Struct("<I")
MAX_MESSAGE = 1 << 16
MAX_OUTPUT = 1 << 20
"""Bytes of what a child printed that are kept until its next call."""
LAST_WORDS = 8000
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Child:
    number: int
    pid: int
    pidfd: int
    output: IO[bytes]


class Zygote:
    """Forks children for one worker."""

    def __init__(self, control: socket.socket) -> None:
        """Serve the worker at the other end of `control`."""
        self._control = control
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> None:
        """Fork and reap until the worker is gone."""
        self._send(["ready"])
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                elif not self._obey():
                    return self._end()

    def _obey(self) -> bool:
        """Do what the next message says; return whether the worker is still there."""
        try:
            message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        match msgpack.unpackb(message):
            case ["fork", int(number)]:
                self._fork(number, fds[0])
            case ["signal", int(number), int(what)] if number in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._children[number].pid, what)
        return True

    def _fork(self, number: int, channel: int) -> None:
        # What a child prints goes to a file without a name, so that nothing waits for a reader and nothing is left.
        output = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115  closed when the child is reaped
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._forget()
            os._exit(_be_child(socket.socket(fileno=channel), output.fileno(), zygote))
        os.close(channel)
        with contextlib.suppress(OSError):  # both sides do it: whoever comes first
            os.setpgid(pid, pid)
        child = _Child(number, pid, os.pidfd_open(pid), output)
        self._children[number] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _forget(self) -> None:
        """In a child: let go of what belongs to the zygote and to its other children."""
        self._selector.close()
        self._control.close()
        for sibling in self._children.values():
            os.close(sibling.pidfd)
            sibling.output.close()

    def _reap(self, child: _Child) -> None:
        _end_group(child.pid)  # before its id is free for others: what it started goes with it
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.number]
        with child.output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - LAST_WORDS))
            words = os.read(output.fileno(), LAST_WORDS).decode(errors="replace")
        self._send(["ended", child.number, os.waitstatus_to_exitcode(status), words])

    def _send(self, message: list[Any]) -> None:
        try:
            self._control.send(msgpack.packb(message))
        except ConnectionError:
            return  # the worker is gone, which the next message says

    def _end(self) -> None:
        for child in self._children.values():
            _end_group(child.pid)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _be_child(channel: socket.socket, output: int, zygote: int) -> int:
    """Serve one environment to its end and return the exit status."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    _die_with(zygote)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A crash, and SIGABRT from a worker that has waited for too long, leave a traceback in the last words.
    faulthandler.enable()
    _, error = attempt(lambda: serve(channel, output))
    if isinstance(error, ConnectionError):
        return 0  # the worker is gone
    if error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    return 0 if error is None else 1


def serve(channel: socket.socket, output: int) -> None:
    """Answer the calls of one environment's table until the other end of `channel` is closed."""
    table: Table | None = None
    while (frame := _read(channel)) is not None:
        method, arguments = decode(frame)
        reply: Any = None
        try:
            if method == "make":
                table = Table.make(*arguments, seed_globals=True)
            else:
                reply = getattr(table, method)(*arguments)
        except AgentGymError as error:
            reply = error
        try:
            packed = encode(reply)
        except (TypeError, ValueError, OverflowError) as error:
            packed = encode(
                EnvError(f"{method} returned what cannot leave the environment's process: {error}")
            )
        if os.fstat(output).st_size > MAX_OUTPUT:
            os.ftruncate(output, 0)
        channel.sendall(LENGTH.pack(len(packed)) + packed)


def _read(channel: socket.socket) -> bytes | None:
    """Return the next frame; None at the end."""
    head = channel.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    frame = channel.recv(length, socket.MSG_WAITALL)
    return frame if len(frame) == length else None


def _die_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _preload(env_id: str) -> None:
    """Import what the environment needs; what fails here fails again in a child, where it is reported."""
    attempt(lambda: load_attribute(spec(env_id).entry_point))
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, what the children share


def main(control: int, env_id: str, worker: int) -> None:
    """Run the zygote."""
    _die_with(worker)  # while it imports, it does not see that the worker is gone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the worker's to deal with
    _preload(env_id)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    Zygote(socket.socket(fileno=control)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
