"""Peers that a socket had better not trust: raw TCP that speaks as much ZMTP as it likes, and wrong keys."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import zmq

from agentgym.keys import Keys, load_keys, make_keys
from agentgym.wire import open_context, open_socket

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
"""Of ZMTP 3.0, without a mechanism."""


def ready(identity: bytes = b"") -> bytes:
    """Return the second half of a handshake, of a DEALER that may call itself something."""
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    )
    return b"\x04" + bytes([len(body)]) + body


READY = ready()


def frame(data: bytes, *, more: bool = False, claims: int | None = None) -> bytes:
    """Return a frame on the wire, which may claim another length than it has."""
    return bytes([2 | more]) + (len(data) if claims is None else claims).to_bytes(8, "big") + data


def free_address() -> str:
    """A TCP address of this machine that nobody has bound."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


class Stranger:
    """A TCP connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10.0)
        self.socket.setblocking(False)

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def hung_up(self) -> None:
        """Wait until the other side has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await asyncio.get_running_loop().sock_recv(self.socket, 4096):
                pass

    async def heard(self, part: bytes) -> None:
        """Wait until the other side has said something that holds `part`."""
        said = b""
        while part not in said:
            received = await asyncio.get_running_loop().sock_recv(self.socket, 4096)
            assert received, f"it hung up after {said!r}"
            said += received

    def close(self) -> None:
        self.socket.close()


class KeyRing:
    """Keys that fit to each other, and some that do not."""

    def __init__(self, folder: Path) -> None:
        (copied,) = make_keys(folder / "keys", ["other-host"])
        make_keys(folder / "foreign-keys")
        self.folder = folder / "keys"
        self.server, self.client = _load(self.folder), _load(copied)
        foreign = _load(folder / "foreign-keys")
        self.unlisted = replace(self.client, client_secret=foreign.client_secret)
        """A client that knows the server, and that nobody has put on the list."""
        self.of_another_server = replace(self.client, server_public=foreign.server_public)


def _load(folder: Path) -> Keys:
    keys = load_keys(folder)
    assert keys is not None
    return keys


@contextlib.contextmanager
def dealer(address: str, keys: Keys | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER socket that is gone after the block, whatever still waits in it."""
    context = open_context(keys)
    try:
        made = open_socket(context, zmq.DEALER)
        made.connect(address)
        yield made
    finally:
        context.destroy(linger=0)
