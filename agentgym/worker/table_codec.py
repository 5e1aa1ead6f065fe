"""What crosses the border between a worker and the process of an environment: plain data, no pickle.

A frame is four bytes of length and a msgpack value. The records of `worker.table` travel as extension types, numbered
by their place in `RECORDS`; of an `info` only the keys with a meaning (`agentgym.env`) leave the environment's process.
"""

import traceback
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from agentgym.episode import Episode
from agentgym.episode_codec import decode_episode, encode_episode
from agentgym.errors import AgentGymError, ConfigError, EnvError, EnvTimeoutError, PolicyError
from agentgym.policy.scripted import Script
from agentgym.worker.driver import Outcome, Request, State
from agentgym.worker.table import Hop, Move, Opening

RECORDS: tuple[type[Any], ...] = (Hop, Move, State, Request, Outcome, Opening, Script)
ERRORS: dict[str, type[AgentGymError]] = {
    kind.__name__: kind for kind in (AgentGymError, ConfigError, EnvError, EnvTimeoutError, PolicyError)
}
_CODES = {record: code for code, record in enumerate(RECORDS)}
_FIELDS = {record: tuple(record.__dataclass_fields__) for record in RECORDS}
_ERROR, _EPISODE, _ARRAY = range(len(RECORDS), len(RECORDS) + 3)


def encode(value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError, ValueError or OverflowError for what is not plain data."""
    packed: bytes = msgpack.packb(value, default=_plain)
    return packed


def decode(packed: bytes) -> Any:
    """Return the value in some bytes."""
    return msgpack.unpackb(packed, ext_hook=_record, strict_map_key=False)


def _plain(value: Any) -> Any:
    record = type(value)
    if record is Request:
        fields = [value.agent, value.messages, {}]
    elif record is Outcome:
        fields = [value.agent, value.reward, _meant(value.info), value.truncated]
    elif record in _CODES:
        fields = [getattr(value, name) for name in _FIELDS[record]]
    elif isinstance(value, AgentGymError):
        kind = next(base.__name__ for base in record.__mro__ if base.__name__ in ERRORS)
        return msgpack.ExtType(_ERROR, encode([kind, str(value), _traceback(value)]))
    elif record is Episode:
        return msgpack.ExtType(_EPISODE, encode(encode_episode(value)))
    elif isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, encode([value.dtype.str, value.shape, value.tobytes()]))
    elif isinstance(value, np.generic):
        return value.item()
    elif isinstance(value, Mapping):
        return dict(value)
    else:
        raise TypeError(f"{record.__module__}.{record.__qualname__} is not plain data")
    return msgpack.ExtType(_CODES[record], encode(fields))


def _record(code: int, packed: bytes) -> Any:
    fields = decode(packed)
    if code == _ERROR:
        kind, text, cause = fields
        error = ERRORS[kind](text)
        if cause:
            error.add_note(cause)
        return error
    if code == _EPISODE:
        return decode_episode(*fields)
    if code == _ARRAY:
        dtype, shape, data = fields
        return np.frombuffer(data, dtype).reshape(shape)
    return RECORDS[code](*fields)


def _traceback(error: AgentGymError) -> str:
    """Return the traceback of an error's cause, which travels along as a note."""
    cause = error.__cause__
    return "" if cause is None else "".join(traceback.format_exception(cause))


def _meant(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the three keys with a meaning, as plain numbers; a driver has checked that they are numbers."""
    meant: dict[str, Any] = {
        name: {part: float(number) for part, number in info[name].items()}
        for name in ("rewards", "metrics")
        if name in info
    }
    if "success" in info:
        meant["success"] = float(info["success"])
    return meant
