"""The trainer's connection to the coordinator, on a thread of its own.

A socket belongs to one thread, and heartbeats must go out while a step runs; so this thread owns the socket,
and the training thread exchanges messages with it through queues. A byte through a pipe wakes the thread for
what is to be sent.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

import zmq

from agentgym.busy import BusyShare
from agentgym.errors import WireError
from agentgym.keys import Keys
from agentgym.protocol import BatchHeader, Drain, Error, Header, Heartbeat
from agentgym.wire import Packet, open_context, open_socket, pack, unpack

logger = logging.getLogger(__name__)


class Link:
    """Sends and receives for the training thread; heartbeats by itself."""

    def __init__(
        self,
        address: str,
        *,
        heartbeat_interval: float,
        busy: BusyShare,
        keys: Keys | None = None,
        on_silence: Callable[[str], None],
        silence: float,
    ) -> None:
        """Connect and start the thread.

        `on_silence` is called, once and on that thread, with a sentence when nothing came for `silence`
        seconds.
        """
        self._address = address
        self._interval = heartbeat_interval
        self._busy = busy
        self._on_silence = on_silence
        self._silence = silence
        self._incoming: queue.SimpleQueue[Packet] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[Header | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        # Made here, so that a wrong address fails here; from now on they are the thread's.
        self._context = open_context(keys)
        self._socket = open_socket(self._context, zmq.DEALER)
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def send(self, header: Header) -> None:
        """Send a message; never blocks."""
        self._outgoing.put(header)
        os.write(self._wake_write, b"\0")

    def receive(self) -> Packet:
        """Wait for the next batch, drain or error; `on_silence` ends a wait that nobody would answer."""
        return self._incoming.get()

    def close(self) -> None:
        """Send what is waiting and end the thread."""
        self._outgoing.put(None)
        os.write(self._wake_write, b"\0")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        closed = False
        try:
            with self._context, self._socket:
                self._serve()
            closed = True
        finally:
            if not closed:  # the traceback goes to stderr; nobody would answer `receive` any more
                self._on_silence("the thread that talks to the coordinator failed")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        heard = beaten = time.monotonic()
        while self._flush():
            ready = dict(poller.poll(int(self._interval * 500)))
            now = time.monotonic()
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if self._socket in ready:
                heard = now
                self._take(self._socket.recv_multipart())
            if now - beaten >= self._interval:
                beaten = now
                self._socket.send_multipart(pack(Heartbeat(stats={"busy": self._busy.read()})))
            if now - heard > self._silence:
                self._on_silence(
                    f"the coordinator at {self._address} has been silent for {self._silence:g} s"
                )
                heard = now + 1e9  # said once

    def _flush(self) -> bool:
        """Send what is waiting; False when `close` was called."""
        while not self._outgoing.empty():
            header = self._outgoing.get()
            if header is None:
                return False
            self._socket.send_multipart(pack(header))
        return True

    def _take(self, frames: list[bytes]) -> None:
        try:
            packet = unpack(frames)
        except WireError as error:
            logger.warning("a message from the coordinator was dropped: %s", error)
            return
        if isinstance(packet.header, BatchHeader | Drain | Error):
            self._incoming.put(packet)
        # Welcome and heartbeats only show that it lives.
