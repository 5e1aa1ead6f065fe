"""Fuzz the decoders with atheris: what comes from a socket or an environment's process is right, or a WireError.

    python scripts/fuzz_wire.py [SECONDS] [libFuzzer options]

It starts from one message of every kind, an episode and a table's records, ends with the first other exception, and
writes the input that caused it as crash-*. Needs the extra `fuzz`.
"""

import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("scripts/fuzz_wire.py needs atheris: pip install 'agentgym-rl[fuzz]'")

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

with atheris.instrument_imports(include=["agentgym"]):
    import msgpack
    import numpy as np
    import zmq
    from builders import episode_of
    from every_kind import ONE_OF_EACH

    from agentgym.episode_codec import decode_episode, encode_episode
    from agentgym.errors import IntegrityError, WireError
    from agentgym.metrics import episode_metrics
    from agentgym.protocol import EpisodeDone, Header
    from agentgym.wire import Arrays, pack, unpack
    from agentgym.worker.table_codec import decode, encode

SECONDS = "120"
WIRE, TABLE = b"W", b"T"


def joined(frames: list[bytes]) -> bytes:
    """Return frames as one input: each behind its length."""
    return b"".join(len(frame).to_bytes(2, "big") + frame for frame in frames)


def parted(data: bytes) -> list[bytes]:
    """Return the frames in an input."""
    frames = []
    while len(data) > 1 and len(frames) < 20:
        length = int.from_bytes(data[:2], "big")
        frames.append(data[2 : 2 + length])
        data = data[2 + length :]
    return frames


def try_one(data: bytes) -> None:
    """Decode an input as a message, or as what an environment's process says."""
    try:
        if data[:1] == TABLE:
            decode(data[1:])
            return
        packet = unpack(parted(data[1:]))
        again = unpack(as_bytes(packet.header, packet.arrays))
        assert repr(again.header) == repr(packet.header), "a header does not survive"
        if isinstance(packet.header, EpisodeDone):
            episode = decode_episode(packet.header.episode, packet.arrays)
            episode.verify()
            episode_metrics([episode])
            decode_episode(*encode_episode(episode))  # type: ignore[arg-type]
    except (WireError, IntegrityError):
        return


def as_bytes(header: Header, arrays: Arrays | None = None) -> list[bytes]:
    """Return the frames of a message as ZeroMQ would send them."""
    return [zmq.Frame(frame).bytes for frame in pack(header, arrays, request_id=b"7")]


def seeds() -> list[bytes]:
    """Return inputs to start from."""
    tokens = {"tokens": np.arange(5, dtype=np.int32)}
    episode = episode_of({"one": [1.0], "two": [0.5]})
    fields, arrays = encode_episode(episode)
    messages = [as_bytes(header, tokens) for header in ONE_OF_EACH.values()]
    messages.append(as_bytes(EpisodeDone(lease_id=1, episode=fields), arrays))
    values = [episode, np.arange(3.0), ["step", {"one": {"role": "assistant", "content": "x"}}]]
    return [
        *(WIRE + joined(frames) for frames in messages),
        *(TABLE + encode(value) for value in values),
        *(TABLE + msgpack.packb(msgpack.ExtType(code, b"\x91\x90")) for code in range(5)),
    ]


def main(arguments: list[str]) -> None:
    """Fuzz for some time."""
    seconds = arguments.pop(0) if arguments and arguments[0].isdecimal() else SECONDS
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        options = [f"-max_total_time={seconds}", "-max_len=8192", "-timeout=20", *arguments, corpus]
        atheris.Setup([sys.argv[0], *options], try_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
