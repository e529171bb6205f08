"""Functions that encode the records of TensorBoard event files.

They use the record format of tensorboardX, but not its writer. That writer passes events through a
short queue to a thread, and blocks forever if the thread has died because the disk is full. In a
bucket it would rewrite the whole file for every update.
"""

import importlib.util
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any


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
    """Return the record with a step's values, each of which is a point on the curve of its name."""
    from tensorboardX.proto.summary_pb2 import Summary

    curves = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return _record(step=step, summary=Summary(value=curves))


def _record(**fields: Any) -> bytes:
    """Return an event with these fields in the TFRecord format, with its length and checksums."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(data))
    checksum = lambda content: struct.pack("<I", masked_crc32c(content))
    return length + checksum(length) + data + checksum(data)
