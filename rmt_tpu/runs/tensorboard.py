"""TensorBoard event files, made record by record.

The records come from tensorboardX, but its writer is not used. That writer passes events through a
short queue to a thread, and waits forever if the thread has died because the disk is full. In a
bucket it would write the whole file every time.
"""

import importlib.util
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any


def is_installed() -> bool:
    """Return whether tensorboardX is installed, so that records can be made."""
    return importlib.util.find_spec("tensorboardX") is not None


def new_file() -> str:
    """Return the name, within the run folder, of a new file for this process."""
    return f"tensorboard/events.out.tfevents.{int(time.time())}.{socket.gethostname()}"


def header(first_step: int) -> bytes:
    """Return the first records of a file; they make TensorBoard drop earlier files' later steps.

    Values of `first_step` and later in earlier files are dropped.
    """
    from tensorboardX.proto.event_pb2 import SessionLog

    return _record(file_version="brain.Event:2") + _record(
        step=first_step, session_log=SessionLog(status=SessionLog.START)
    )


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """Return the record of a step's values, each of which is a curve under its name."""
    from tensorboardX.proto.summary_pb2 import Summary

    curves = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return _record(step=step, summary=Summary(value=curves))


def _record(**fields: Any) -> bytes:
    """Return an event with its length and checksums, in the TFRecord format."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(data))
    checksum = lambda content: struct.pack("<I", masked_crc32c(content))
    return length + checksum(length) + data + checksum(data)
