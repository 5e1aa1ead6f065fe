"""What crosses the border between a worker and the process of an environment: plain data, no pickle.

A message is a msgpack value. The few records that are exchanged with a `Table` are extension types: a code and the
record's fields. Of an `info` only the keys with a meaning (`agentgym.env`) leave the environment's process.
"""

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from agentgym.episode import Episode
from agentgym.episode_codec import decode_episode, encode_episode
from agentgym.errors import AgentGymError, ConfigError, EnvError, EnvTimeoutError, PolicyError, WireError
from agentgym.policy.scripted import Script
from agentgym.worker.driver import Outcome, Request, State
from agentgym.worker.table import Hop, Move, Opening

ERRORS: dict[str, type[AgentGymError]] = {
    kind.__name__: kind for kind in (AgentGymError, ConfigError, EnvError, EnvTimeoutError, PolicyError)
}
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSU]\d{1,4}")
_WRONG = (
    ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError,
    msgpack.exceptions.UnpackException,
)  # fmt: skip
"""What comes of bytes that are something else."""
_HOP, _SCRIPT, _EPISODE, _ARRAY, _ERROR = range(5)


def encode(value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError, ValueError or OverflowError for what is not plain data."""
    packed: bytes = msgpack.packb(value, default=_plain)
    return packed


def decode(packed: bytes) -> Any:
    """Return the value in some bytes. Raises WireError for bytes that `encode` never wrote."""
    try:
        return msgpack.unpackb(packed, ext_hook=_record, strict_map_key=False)
    except _WRONG as error:
        raise WireError(f"{len(packed)} bytes are no plain data: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    match value:
        case Hop():
            return msgpack.ExtType(_HOP, encode(_hop_fields(value)))
        case Script():
            return msgpack.ExtType(_SCRIPT, encode(astuple(value)))
        case Episode():
            return msgpack.ExtType(_EPISODE, encode(encode_episode(value)))
        case np.ndarray() if _ARRAY_DTYPE.fullmatch(value.dtype.str):
            return msgpack.ExtType(_ARRAY, encode([value.dtype.str, value.shape, value.tobytes()]))
        case AgentGymError():
            return msgpack.ExtType(_ERROR, encode(_error_fields(value)))
        case np.generic():
            return value.item()
        case Mapping():
            return dict(value)
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not plain data")


def _record(code: int, packed: bytes) -> Any:
    if not 0 <= code < len(_MAKERS):
        raise ValueError(f"there is no record {code}")
    return _MAKERS[code](*decode(packed))


def _array(dtype: str, shape: list[int], data: bytes) -> NDArray[Any]:
    if not _ARRAY_DTYPE.fullmatch(dtype):
        raise ValueError(f"there are no arrays of {dtype!r:.20}")
    return np.frombuffer(data, dtype).reshape(shape)


def _hop_fields(hop: Hop) -> list[Any]:
    moves = [
        [
            move.answers,
            [[request.agent, request.messages] for request in move.state.requests],
            [_outcome_fields(outcome) for outcome in move.state.outcomes],
            [_outcome_fields(outcome) for outcome in move.outstanding],
        ]
        for move in hop.moves
    ]
    openings = {agent: [opening.system_prompt, opening.tools] for agent, opening in hop.openings.items()}
    return [moves, openings, hop.scores, hop.failure]


def _hop(moves: list[Any], openings: dict[str, Any], scores: bool, failure: Any) -> Hop:
    return Hop(
        [
            Move(
                answers,
                State(
                    [Request(agent, messages, {}) for agent, messages in requests],
                    [Outcome(*outcome) for outcome in outcomes],
                ),
                [Outcome(*outcome) for outcome in outstanding],
            )
            for answers, requests, outcomes, outstanding in moves
        ],
        {agent: Opening(*opening) for agent, opening in openings.items()},
        scores,
        failure,
    )


def _outcome_fields(outcome: Outcome) -> list[Any]:
    """Return the fields, where the numbers of the info are plain; a driver has checked that they are numbers."""
    info = outcome.info
    meant: dict[str, Any] = {
        name: {part: float(number) for part, number in info[name].items()}
        for name in ("rewards", "metrics")
        if name in info
    }
    if "success" in info:
        meant["success"] = float(info["success"])
    return [outcome.agent, outcome.reward, meant, outcome.truncated]


def _error_fields(error: AgentGymError) -> list[str]:
    """Return the kind, the text and the traceback of the cause."""
    kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in ERRORS)
    cause = error.__cause__
    return [kind, str(error), "" if cause is None else "".join(traceback.format_exception(cause))]


def _error(kind: str, text: str, cause: str) -> AgentGymError:
    error = ERRORS[kind](text)
    if cause:
        error.add_note(cause)
    return error


_MAKERS: tuple[Callable[..., Any], ...] = (_hop, Script, decode_episode, _array, _error)
"""What makes a record of its fields, by code."""
