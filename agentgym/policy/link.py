"""A policy server's connection to the coordinator."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import zmq

from agentgym.errors import WireError
from agentgym.policy.client import ZmqContext
from agentgym.protocol import Drain, Error, Heartbeat, Hello, Loaded, LoadWeights, Welcome
from agentgym.wire import Channel, Packet, open_socket

logger = logging.getLogger(__name__)


class CoordinatorLink:
    """The DEALER socket to the coordinator, and what came over it."""

    def __init__(
        self, address: str, context: ZmqContext, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Connect."""
        self._clock = clock
        self._heard: float | None = None
        self.welcomed = False
        """The coordinator has answered the hello."""
        self.refusal = ""
        """Why the coordinator does not want this server; empty if it does."""
        self.orders: asyncio.Queue[LoadWeights | Drain] = asyncio.Queue()
        """What it wants, in order."""
        socket = open_socket(context, zmq.DEALER)
        socket.connect(address)
        self._channel = Channel(socket, self._on_packet, self._on_garbage)

    @property
    def silence(self) -> float:
        """Seconds since the coordinator was heard, or should first have answered."""
        return 0.0 if self._heard is None else self._clock() - self._heard

    def tell(self, header: Hello | Heartbeat | Loaded | Error) -> None:
        """Send a message; a coordinator that does not read is silent, which `silence` shows."""
        self._heard = self._clock() if self._heard is None else self._heard
        with contextlib.suppress(WireError):
            self._channel.send(header)

    def close(self) -> None:
        """Close the connection, after what was sent is on its way."""
        self._channel.close()

    def _on_packet(self, packet: Packet) -> None:
        self._heard = self._clock()
        match packet.header:
            case Welcome():
                self.welcomed = True
            case LoadWeights() | Drain() as order:
                self.orders.put_nowait(order)
            case Heartbeat():
                pass
            case Error(fatal=True) as error:
                self.refusal = error.text
            case Error() as error:
                logger.error("the coordinator says: %s", error.text)
            case other:
                logger.warning("the coordinator sent a %r message, which is not for servers", other.kind)

    def _on_garbage(self, _sender: bytes, error: WireError) -> None:
        logger.warning("unreadable message from the coordinator: %s", error)
