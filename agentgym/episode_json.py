"""Episodes in a file: what `agentgym eval` writes and `agentgym show` reads.

A file is JSON Lines. The first line says who played, each further one is an episode:

    {"kind": "header", "format": 1, "config": {...}, ...}
    {"kind": "episode", "episode": {...}, "texts": [[[read, said], ...], ...], "arrays": {...}, ...}

`episode` and `arrays` hold the record as `agentgym.episode_codec` splits it, arrays as base64 of their bytes, so that
nothing is lost. `texts` is what each agent read before each of its answers, and the answer, decoded from the tokens:
for readers that have no tokenizer, and of no consequence otherwise.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.episode import Episode, Trajectory
from agentgym.episode_codec import decode_episode, encode_episode
from agentgym.errors import ConfigError, WireError

FORMAT = 1
Decode = Callable[[Sequence[int]], str]
Dialogue = tuple[tuple[str, str], ...]
"""What one trajectory read and said, a pair for each turn; what was read after the last turn stands with ""."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One episode of a file."""

    episode: Episode
    texts: tuple[Dialogue, ...]
    """One dialogue for each trajectory."""
    fields: dict[str, Any] = field(default_factory=dict)
    """What else its writer noted, for example the training step."""


@dataclass(frozen=True, slots=True)
class EpisodeFile:
    """A file that was read."""

    header: dict[str, Any]
    """The fields of the first line."""
    records: tuple[EpisodeRecord, ...]


def record_of(episode: Episode, decode: Decode, **fields: Any) -> EpisodeRecord:
    """Return an episode with its texts."""
    return EpisodeRecord(episode, tuple(dialogue(t, decode) for t in episode.trajectories), fields)


def dialogue(trajectory: Trajectory, decode: Decode) -> Dialogue:
    """Return what an agent read and said, token for token."""
    pairs, read = [], 0
    tokens = trajectory.tokens.tolist()
    for turn in trajectory.turns:
        pairs.append((decode(tokens[read : turn.start]), decode(tokens[turn.start : turn.end])))
        read = turn.end
    if read < len(tokens):
        pairs.append((decode(tokens[read:]), ""))
    return tuple(pairs)


class EpisodeWriter:
    """Appends episodes to a file, each one whole and on the disk's way before `write` returns."""

    def __init__(self, path: Path, **header: Any) -> None:
        """Open the file; a new one gets the header, one that is there loses an unfinished last line.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            data = path.read_bytes() if path.exists() else b""
            self._file = path.open("ab")
            self._file.truncate(_whole_lines(data))
        except OSError as error:
            raise ConfigError(f"cannot write episodes into {path}: {error.strerror or error}") from error
        if not _whole_lines(data):
            self._append({"kind": "header", "format": FORMAT, **header})

    def write(self, record: EpisodeRecord) -> None:
        """Append an episode."""
        header, arrays = encode_episode(record.episode)
        for trajectory in header["trajectories"]:  # names for those who read the file with other programs
            trajectory["turns"] = [turn._asdict() for turn in trajectory["turns"]]
        self._append(
            {
                "kind": "episode",
                **record.fields,
                "episode": header,
                "texts": record.texts,
                "arrays": {name: _pack(array) for name, array in arrays.items() if array is not None},
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, default=_as_plain, ensure_ascii=False).encode() + b"\n")
        self._file.flush()


def read_episodes(path: Path) -> EpisodeFile:
    """Read a file; an unfinished last line is left out.

    Raises:
        ConfigError: there is no such file, or a line is not what this module writes.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the episodes in {path}: {error.strerror or error}") from error
    header: dict[str, Any] = {}
    records = []
    for number, line in enumerate(data[: _whole_lines(data)].split(b"\n")[:-1], start=1):
        try:
            values = json.loads(line)
            kind = values.pop("kind")
            if (kind == "header") != (number == 1):
                raise ValueError(f"found a line of kind {kind!r}")
            if kind == "header":
                header = _checked_header(values)
            else:
                records.append(_record(values))
        except (ValueError, TypeError, KeyError, AttributeError, WireError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a line of an episode file ({error}); give a file that "
                "`agentgym eval` or a run wrote"
            ) from error
    if not header:
        raise ConfigError(f"{path} holds no episodes; give a file that `agentgym eval` or a run wrote")
    return EpisodeFile(header, tuple(records))


def _whole_lines(data: bytes) -> int:
    """Return the bytes up to the end of the last whole line; what follows is of a writer that was interrupted."""
    return data.rfind(b"\n") + 1


def _checked_header(values: dict[str, Any]) -> dict[str, Any]:
    if values.get("format") != FORMAT:
        raise ValueError(f"it has format {values.get('format')!r}, and this version reads {FORMAT}")
    return values


def _record(values: dict[str, Any]) -> EpisodeRecord:
    arrays = {name: _unpack(packed) for name, packed in values.pop("arrays").items()}
    episode = decode_episode(values.pop("episode"), arrays)
    texts = tuple(tuple((read, said) for read, said in pairs) for pairs in values.pop("texts"))
    if len(texts) != len(episode.trajectories):
        raise ValueError(f"{len(episode.trajectories)} trajectories have {len(texts)} texts")
    return EpisodeRecord(episode, texts, values)


def _pack(array: NDArray[Any]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": data}


def _unpack(packed: Mapping[str, Any]) -> NDArray[Any]:
    data = base64.b64decode(packed["base64"], validate=True)
    return np.frombuffer(data, dtype=np.dtype(packed["dtype"])).reshape(packed["shape"])


def _as_plain(value: Any) -> Any:
    """Return numpy's numbers, which environments give as rewards and metrics, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")
