"""Messages in files that only grow, for the ledger that knows where each lies (`agentgym.coordinator.store`).

    segment-000001   [number of frames][their lengths][frame][frame]... and again, one message behind the other

In SQLite itself a message would be written twice, in small pages: five times the CPU time. A process begins a
segment of its own, so that what another one left unfinished at its death is never written behind, and never read:
no row of the ledger names it. A segment goes as a whole, when nobody needs any of its messages.
"""

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from agentgym.errors import WireError

SEGMENT_BYTES = 64 << 20
"""Size at which another segment is begun."""
BUFFER_BYTES = 1 << 18
"""Episodes that are synced together are written together; routes that were sent along go past it."""


class Place(NamedTuple):
    """Where a message lies."""

    segment: int
    offset: int
    length: int
    crc: int
    """CRC-32 of the frames before the arrays, whose own checksums are in the episode."""


class Segments:
    """The segments of a folder, and the one that is written now."""

    def __init__(self, folder: Path) -> None:
        """Look at what is there; nothing is written yet."""
        self._folder = folder
        self._sizes = {_number(path): path.stat().st_size for path in folder.glob("segment-*")}
        self._current = max(self._sizes, default=0)
        self._file: BinaryIO | None = None

    @property
    def bytes_used(self) -> int:
        """The size of all segments."""
        return sum(self._sizes.values())

    def append(self, frames: Sequence[bytes | memoryview]) -> Place:
        """Write a message behind the others; it is on the disk after `sync`."""
        if self._file is None or self._sizes[self._current] >= SEGMENT_BYTES:
            self.close()
            self._file = self._begin()
        offset = self._sizes[self._current]
        lengths = [memoryview(frame).nbytes for frame in frames]
        head = struct.pack(f"<{1 + len(lengths)}Q", len(lengths), *lengths)
        for part in (head, *frames):
            self._file.write(part)
        length = len(head) + sum(lengths)
        self._sizes[self._current] += length
        return Place(self._current, offset, length, _crc(frames))

    def sync(self) -> None:
        """Wait until what was appended is on the disk."""
        if self._file is not None:
            sync_file(self._file)

    def close(self) -> None:
        """Finish the segment that is written."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def remove_others(self, needed: set[int]) -> None:
        """Remove the segments that are not needed, but for the one that is written."""
        for number in self._sizes.keys() - needed - {self._current}:
            _path(self._folder, number).unlink(missing_ok=True)
            del self._sizes[number]

    def _begin(self) -> BinaryIO:
        self._current += 1
        self._sizes[self._current] = 0
        path = _path(self._folder, self._current)
        file = begin_file(path, BUFFER_BYTES)
        sync_path(self._folder)
        return file


def begin_file(path: Path | str, buffer_bytes: int = -1) -> BinaryIO:
    """Open a new file that only this user may read; -1: with Python's own buffer. Raises OSError where there is one."""
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb", buffer_bytes)


def sync_file(file: BinaryIO) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fdatasync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file is on the disk, or the names in a folder, which must survive like what its files hold."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_message(folder: Path, place: Place) -> list[bytes]:
    """Return the frames of a message.

    Raises:
        OSError: the segment is not there, or cannot be read.
        WireError: it does not hold what was written.
    """
    with _path(folder, place.segment).open("rb") as file:
        file.seek(place.offset)
        data = file.read(place.length)
    frames: list[bytes] = []
    try:
        (count,) = struct.unpack_from("<Q", data)
        lengths = struct.unpack_from(f"<{min(count, len(data))}Q", data, 8)
    except struct.error:
        lengths = ()
    position = 8 * (1 + len(lengths))
    for length in lengths:
        frames.append(data[position : position + length])
        position += length
    if not lengths or position != place.length or len(data) != place.length or _crc(frames) != place.crc:
        raise WireError(f"segment {place.segment} does not hold a whole message at {place.offset}")
    return frames


def _crc(frames: Sequence[bytes | memoryview]) -> int:
    crc = 0
    for frame in frames[:3]:  # kind, request id and header, see agentgym.wire
        crc = zlib.crc32(frame, crc)
    return crc


def _path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:06d}"


def _number(path: Path) -> int:
    return int(path.name.removeprefix("segment-"))
