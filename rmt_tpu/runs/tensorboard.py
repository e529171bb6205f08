"""An event file of TensorBoard, record by record.

The records are tensorboardX's, its writer is not: that one hands events through a short queue to a
thread, and waits for ever once the thread has died of a full disk; and to a bucket it would write
the whole file every time.
"""

import importlib.util
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any


def is_installed() -> bool:
    """Whether records can be made."""
    return importlib.util.find_spec("tensorboardX") is not None


def new_file() -> str:
    """The name, in the run folder, of a file that this process writes from now on."""
    return f"tensorboard/events.out.tfevents.{int(time.time())}.{socket.gethostname()}"


def header(first_step: int) -> bytes:
    """How a file begins; TensorBoard forgets what earlier files have of `first_step` and later."""
    from tensorboardX.proto.event_pb2 import SessionLog

    return _record(file_version="brain.Event:2") + _record(
        step=first_step, session_log=SessionLog(status=SessionLog.START)
    )


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """A step's values, each a curve by its name."""
    from tensorboardX.proto.summary_pb2 import Summary

    curves = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return _record(step=step, summary=Summary(value=curves))


def _record(**fields: Any) -> bytes:
    """An event between its length and checksums: the format of TFRecord."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(data))
    checksum = lambda content: struct.pack("<I", masked_crc32c(content))
    return length + checksum(length) + data + checksum(data)
