"""Checkpoints of named arrays, independent of any model, stored locally or on GCS."""

from rmt_tpu.checkpoint.arrays import StoredArray
from rmt_tpu.checkpoint.checkpointer import Checkpointer
from rmt_tpu.checkpoint.retention import Retention
from rmt_tpu.checkpoint.save import Saved

__all__ = ["Checkpointer", "Retention", "Saved", "StoredArray"]
