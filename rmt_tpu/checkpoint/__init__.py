"""Checkpoints on tensorstore, local or on GCS, which know arrays by name but no model."""

from rmt_tpu.checkpoint.arrays import StoredArray
from rmt_tpu.checkpoint.checkpointer import Checkpointer
from rmt_tpu.checkpoint.retention import Retention
from rmt_tpu.checkpoint.save import Saved

__all__ = ["Checkpointer", "Retention", "Saved", "StoredArray"]
