"""Tables in processes of their own: for environments that may keep state anywhere, hang, or crash.

A call that outlives its limit ends the process, whatever it is doing, and says where it was. A process that ends by
itself fails its episode with its exit status and what it printed last. Either way the next play gets a new process.
"""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from agentgym.errors import AgentGymError, EnvError, EnvTimeoutError, WireError
from agentgym.worker.table import SLICE_SECONDS
from agentgym.worker.table_codec import decode, encode
from agentgym.worker.zygote import LENGTH, MAX_MESSAGE

GRACE_SECONDS = 1.0
"""For a process to write where it hangs, before it is killed."""
END_SECONDS = 10.0
"""For a process that was killed, or has nothing more to do, to be gone."""

HASH_SEED = "0"
"""PYTHONHASHSEED of all these processes: the order of a set must not differ from one to another."""

Ending = tuple[int | None, str]
"""Exit status (negative: a signal; None: unknown) and last words."""


class Nursery:
    """The children of one worker's zygote, which is started when the first child is wanted."""

    def __init__(self, env_id: str) -> None:
        """Start nothing yet."""
        self._env_id = env_id
        self._numbers = itertools.count(1)
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = asyncio.Event()
        self._endings: dict[int, asyncio.Future[Ending]] = {}

    def host(self) -> "ProcessHost":
        """Return a place for a table; its process starts when the environment is made."""
        return ProcessHost(self, next(self._numbers))

    async def fork(self, number: int, channel: socket.socket) -> None:
        """Start a child that serves `channel`."""
        if self._control is None:
            self._start()
        self._endings[number] = asyncio.get_running_loop().create_future()
        await self._ready.wait()
        if not await self._send(["fork", number], [channel.fileno()]):
            raise EnvError("the process that environments are forked from has ended; see the worker's log")

    async def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to a child and to what it started."""
        await self._send(["signal", number, int(what)])

    async def ending(self, number: int, timeout: float) -> Ending | None:
        """Wait for the end of a child; None if it does not come in time."""
        ending = self._endings.get(number)
        if ending is None:  # it was never started
            return None, ""
        await asyncio.wait([ending], timeout=timeout)
        return ending.result() if ending.done() else None

    def forget(self, number: int) -> None:
        """Keep the ending of a child no longer."""
        self._endings.pop(number, None)

    async def close(self) -> None:
        """End the zygote, and with it all children."""
        zygote, self._zygote = self._zygote, None
        self._hang_up()
        if zygote is None:
            return
        try:
            await asyncio.to_thread(zygote.wait, END_SECONDS)
        except subprocess.TimeoutExpired:  # it imports what never comes to an end
            zygote.kill()
            await asyncio.to_thread(zygote.wait)

    def _start(self) -> None:
        if self._zygote is not None:
            self._zygote.wait()  # it has hung up
        self._ready.clear()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            number = theirs.fileno()
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "agentgym.worker.zygote", str(number), self._env_id, str(os.getpid())],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "PYTHONHASHSEED": HASH_SEED,
                },
            )
        asyncio.get_running_loop().add_reader(self._control, self._receive)

    async def _send(self, message: list[Any], fds: Sequence[int] = ()) -> bool:
        """Send a message to the zygote; return whether it is there."""
        while self._control is not None:
            try:
                socket.send_fds(self._control, [msgpack.packb(message)], fds)
            except BlockingIOError:  # it is busy with others
                await asyncio.sleep(0.01)
            except ConnectionError:
                break
            else:
                return True
        return False

    def _receive(self) -> None:
        while self._control is not None:
            try:
                message = self._control.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            match msgpack.unpackb(message) if message else None:
                case None:
                    self._hang_up()
                case ["ready"]:
                    self._ready.set()
                case ["ended", int(number), int(status), str(words)] if number in self._endings:
                    self._end(number, (status, words))

    def _end(self, number: int, ending: Ending) -> None:
        if not self._endings[number].done():
            self._endings[number].set_result(ending)

    def _hang_up(self) -> None:
        """Deal with the end of the zygote: its children end with it, and the next one starts another."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        self._ready.set()  # nobody waits for what will not come
        for number in self._endings:
            self._end(number, (None, ""))


class ProcessHost:
    """A table in a process; see `worker.pool.Host`."""

    stuck = False
    """A process can always be ended."""

    def __init__(self, nursery: Nursery, number: int) -> None:
        """Start nothing yet."""
        self._nursery = nursery
        self._number = number
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def make(self, env_id: str, kwargs: Mapping[str, Any], timeout: float) -> None:
        """Start the process and build the environment in it."""
        what = f"making {env_id}"
        ours, theirs = socket.socketpair()
        self._streams = await asyncio.open_unix_connection(sock=ours)
        with theirs:
            try:
                async with asyncio.timeout(timeout):
                    await self._nursery.fork(self._number, theirs)
            except TimeoutError:
                raise EnvTimeoutError(f"{what}: importing it took more than {timeout:g} s") from None
        await self.run(what, timeout, "make", env_id, dict(kwargs))

    async def run(self, what: str, timeout: float, method: str, *args: Any) -> Any:
        """Call a method of the table."""
        if self._streams is None:
            raise EnvError(f"{what}: the environment's process was ended before")
        reader, writer = self._streams
        request = encode([method, args])
        writer.write(LENGTH.pack(len(request)) + request)
        try:
            async with asyncio.timeout(timeout + SLICE_SECONDS):
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                reply = decode(await reader.readexactly(length))
        except TimeoutError:
            words = await self._kill()
            raise EnvTimeoutError(f"{what} did not return within {timeout:g} s{words}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EnvError(f"{what}: its process {await self._epitaph()}") from None
        except WireError as error:
            self._hang_up()  # what comes after it cannot be told
            raise EnvError(f"{what}: its process sent what cannot be read: {error}") from error
        except asyncio.CancelledError:
            self._hang_up()  # the table is in the middle of something; `close` sees to the process
            raise
        if isinstance(reply, AgentGymError):
            raise reply
        return reply

    async def close(self, timeout: float) -> None:
        """Close the environment, and end the process in any case."""
        try:
            if self._streams is not None:
                await self.run("close", timeout, "close")
        finally:
            self._hang_up()
            if await self._nursery.ending(self._number, GRACE_SECONDS) is None:
                await self._nursery.signal(self._number, signal.SIGKILL)
                await self._nursery.ending(self._number, END_SECONDS)
            self._nursery.forget(self._number)

    async def _kill(self) -> str:
        """End the process, and return where it was."""
        await self._nursery.signal(self._number, signal.SIGABRT)  # faulthandler writes a traceback
        ending = await self._nursery.ending(self._number, GRACE_SECONDS)
        if ending is None:
            await self._nursery.signal(self._number, signal.SIGKILL)
            ending = await self._nursery.ending(self._number, END_SECONDS)
        self._hang_up()
        return _quote(ending[1]) if ending is not None else ""

    async def _epitaph(self) -> str:
        """Say how the process ended."""
        self._hang_up()
        ending = await self._nursery.ending(self._number, END_SECONDS)
        status, words = ending or (None, "")
        if status is None:
            return "is gone"
        if status >= 0:
            return f"ended with status {status}{_quote(words)}"
        memory = " (was there enough memory?)" if -status == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-status).name}{memory}{_quote(words)}"

    def _hang_up(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _quote(words: str, lines: int = 8) -> str:
    """Return what is worth reading of a process's last words: the end, or the top of the traceback of a crash."""
    text = words.strip().splitlines()
    crash = next((n for n, line in enumerate(text) if line.endswith("(most recent call first):")), None)
    told = text[-lines:] if crash is None else text[max(0, crash - lines) : crash + 1 + lines]
    return "; the last it wrote:" + "".join(f"\n  | {line}" for line in told if line) if told else ""
