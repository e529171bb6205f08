"""The tracker for TensorBoard, and the records of its event files.

It uses the record format of tensorboardX, but not its writer. That writer passes events through a
short queue to a thread, and blocks forever if the thread has died because the disk is full. In a
bucket it would rewrite the whole file for every update.
"""

import importlib.util
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

from rmt_tpu.runs.appended import AppendedFile
from rmt_tpu.storage import Folder


class TensorBoard:
    """A TensorBoard event file in the run folder; see `trackers.Tracker`.

    Each start of a run writes a separate file. Together the files are one run in TensorBoard.

    Args:
      folder: the run folder.
      first_step: the first step that will be recorded; later steps in older files are dropped.
      report: a callback that receives a one-line message if the file cannot be written.
    """

    def __init__(self, folder: Folder, first_step: int, report: Callable[[str], None]):
        self._file = AppendedFile(folder, new_file(), report)
        self._file.add(header(first_step))

    def config(self, config: Mapping[str, Any]) -> None:
        """Record the run's config as JSON, which is indented so that Markdown shows it as code."""
        lines = json.dumps(config, indent=2).splitlines()
        self.text(0, "config", "\n".join(f"    {line}" for line in lines))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step, given as a mapping from name to value."""
        self._file.add(scalars(step, values))

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Record a picture in PNG format that shows the run after a step."""
        self._file.add(picture(step, name, png))

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text of a step."""
        from tensorboardX import summary

        self._file.add(_record(step=step, summary=summary.text(name, text)))

    def flush(self) -> None:
        """Write all pending records; any thread may call this method."""
        self._file.flush()

    def close(self, failed: bool) -> None:
        """Write the remaining records."""
        self._file.close()


def is_installed() -> bool:
    """Return whether tensorboardX is installed, which is needed to encode records."""
    return importlib.util.find_spec("tensorboardX") is not None


def new_file() -> str:
    """Return the name of a new event file, relative to the run folder."""
    return f"tensorboard/events.out.tfevents.{int(time.time())}.{socket.gethostname()}"


def header(first_step: int) -> bytes:
    """Return the first records of an event file, for a run that starts or resumes at `first_step`.

    They make TensorBoard discard values for `first_step` and later steps in older files.
    """
    from tensorboardX.proto.event_pb2 import SessionLog

    return _record(file_version="brain.Event:2") + _record(
        step=first_step, session_log=SessionLog(status=SessionLog.START)
    )


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """Return a record with the values of a step; each value is a point on the curve of its name."""
    from tensorboardX.proto.summary_pb2 import Summary

    curves = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return _record(step=step, summary=Summary(value=curves))


def picture(step: int, name: str, png: bytes) -> bytes:
    """Return a record with a PNG picture, whose bytes 16 to 23 are its width and height."""
    from tensorboardX.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", png[16:24])
    image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
    return _record(step=step, summary=Summary(value=[Summary.Value(tag=name, image=image)]))


def _record(**fields: Any) -> bytes:
    """Return an event with the given fields as a TFRecord, including its length and checksums."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(data))
    checksum = lambda content: struct.pack("<I", masked_crc32c(content))
    return length + checksum(length) + data + checksum(data)
