"""Keys of a run that spans several machines: who may connect to its sockets, and what encrypts them (CURVE).

    DIR/server.key, server.pub    the pair of the sockets that are bound: the coordinator's and the policy servers'
    DIR/client.key                the secret key of what connects to them from this machine
    DIR/allowed/NAME.pub          whoever has a key of this list may connect; "local" is DIR/client.key
    DIR/clients/NAME/             for another machine, to be copied there: its client.key, and server.pub

A key is 40 characters of text (Z85). Secrets, and the folders they lie in, are readable by nobody else.
"""

import contextlib
import os
import re
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from agentgym.errors import ConfigError

LOCAL = "local"
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """What a folder of keys holds."""

    folder: Path
    server_public: bytes
    client_secret: bytes = field(repr=False)
    server_secret: bytes | None = field(repr=False)
    """None in the folder of a machine that only connects."""

    def server_options(self) -> dict[int, bytes | int]:
        """Return the options of a socket that is bound.

        Raises:
            ConfigError: the folder has no server.key.
        """
        if self.server_secret is None:
            raise ConfigError(
                f"{self.folder} has no server.key, which a process that binds an address needs; "
                "give it the folder that `agentgym keys` made, not a client's"
            )
        return {
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: self.server_secret,
            zmq.CURVE_PUBLICKEY: self.server_public,
        }

    def client_options(self) -> dict[int, bytes]:
        """Return the options of a socket that connects."""
        return {
            zmq.CURVE_SECRETKEY: self.client_secret,
            zmq.CURVE_PUBLICKEY: zmq.curve_public(self.client_secret),
            zmq.CURVE_SERVERKEY: self.server_public,
        }

    def name_of(self, public: bytes) -> str | None:
        """Return who has this public key, or None where it is not on the list as it is now."""
        with contextlib.suppress(OSError):  # a list that cannot be read names nobody
            for path in (self.folder / "allowed").glob("*.pub"):
                if path.read_bytes().strip() == public:
                    return path.stem
        return None


def load_keys(folder: Path | None) -> Keys | None:
    """Read a folder of keys; None: there is none, and nothing is encrypted.

    Raises:
        ConfigError: a file is missing or is no key, or others may read it.
    """
    if folder is None:
        return None
    if not folder.is_dir():
        raise ConfigError(f"there is no folder of keys {folder}; `agentgym keys {folder}` makes one")
    _check_private(folder)
    return Keys(
        folder,
        server_public=_read(folder / "server.pub"),
        client_secret=_read(folder / "client.key"),
        server_secret=_read(folder / "server.key") if (folder / "server.key").exists() else None,
    )


def make_keys(folder: Path, clients: Sequence[str] = ()) -> list[Path]:
    """Make a folder of keys, or add `clients` to one; return the folders that are to be copied to their machines.

    Raises:
        ConfigError: the folder is there already and no client is named, a client is there already, or it cannot be
            written.
    """
    try:
        if not folder.exists():
            public, secret = zmq.curve_keypair()
            for made in (folder, folder / "allowed", folder / "clients"):
                made.mkdir(mode=0o700, parents=True)
            _write(folder / "server.key", secret)
            _write(folder / "server.pub", public)
            _add_client(folder, LOCAL, folder)
        elif not clients:
            raise ConfigError(f"{folder} exists already; name a client to add one, or choose another folder")
        load_keys(folder)
        return [_add_client(folder, name, folder / "clients" / name) for name in clients]
    except OSError as error:
        raise ConfigError(f"cannot write keys into {folder}: {error}") from error


def _add_client(folder: Path, name: str, place: Path) -> Path:
    """Put a client on the list, and its secret key into `place`."""
    listed = folder / "allowed" / f"{name}.pub"
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"client {name!r}: a name has letters, digits, '-' and '_'")
    if listed.exists() or (place != folder and place.exists()):
        raise ConfigError(
            f"{folder} has a client {name!r} already; remove {listed} and {place}, or name another"
        )
    public, secret = zmq.curve_keypair()
    if place != folder:
        place.mkdir(mode=0o700)
        _write(place / "server.pub", (folder / "server.pub").read_bytes())
    _write(place / "client.key", secret)
    _write(listed, public)
    return place


def _write(path: Path, text: bytes) -> None:
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(text.strip() + b"\n")


def _read(path: Path) -> bytes:
    try:
        if path.suffix == ".key":
            _check_private(path)
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from error
    try:
        if len(z85.decode(text)) == KEY_BYTES:
            return text
    except (KeyError, ValueError, struct.error):
        pass
    raise ConfigError(
        f"{path} does not hold a key: {KEY_BYTES * 5 // 4} characters that `agentgym keys` wrote"
    )


def _check_private(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        private = "700" if path.is_dir() else "600"
        raise ConfigError(f"{path} is open to others (mode {mode:04o}); run chmod {private} {path}")
