"""TensorBoard's event files, written with the `tensorboard` package alone: tensorboardX would load torch."""

import contextlib
import errno
import io
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from agentgym.errors import RunError

_numbers = itertools.count()
"""Of the event files that this process opens: TensorBoard reads those of one second in the order of their names."""


class TensorBoard:
    """Writes the event files of a run; a resumed run goes on in the same curves.

    What is written is in the file at once. Whatever writes raises RunError where the disk is full.
    """

    def __init__(self, directory: Path, *, first_step: int | None = None) -> None:
        """Open a new event file; TensorBoard discards what earlier ones hold from `first_step` on."""
        place = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):06d}"
        self._path = directory / f"events.out.tfevents.{place}"
        with _explained(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb", buffering=0)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=first_step, session_log=start))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers."""
        self._add(step, *(Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()))

    def histogram(self, tag: str, values: NDArray[np.int32], step: int) -> None:
        """Write the distribution of integers that are close to each other; nothing if there is no value."""
        if len(values):
            low = values.min()
            weights = np.bincount(values - low)
            found = low + np.arange(len(weights), dtype=np.float64)
            counts, edges = np.histogram(found, bins=30, weights=weights)
            histo = HistogramProto(
                min=found[0],
                max=found[-1],
                num=len(values),
                sum=found @ weights,
                sum_squares=np.square(found) @ weights,
                bucket_limit=edges[1:],
                bucket=counts,
            )
            self._add(step, Summary.Value(tag=tag, histo=histo))

    def text(self, tag: str, text: str, step: int) -> None:
        """Write Markdown."""
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[text.encode()])
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(step, Summary.Value(tag=tag, metadata=metadata, tensor=tensor))

    def _add(self, step: int, *values: Summary.Value) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        with _explained(self._path):
            if self._file.write(record.getbuffer()) < record.tell():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the event file."""
        self._file.close()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}; go on with --resume when it can") from error
