"""Metrics of training speed (seconds, tokens, model FLOPs) and of memory in use."""

import time

import jax

from rmt_tpu import cost
from rmt_tpu.config import RunConfig


class Throughput:
    """A stopwatch for steps that excludes work between steps, such as evaluation.

    Args:
      config: the run's config.
      mesh: the mesh on which the run is trained.
    """

    def __init__(self, config: RunConfig, mesh: jax.sharding.Mesh):
        self._tokens = config.train.batch_size * config.data.seq_len
        self._began = time.monotonic()
        self._step_flops, self._peak = 0.0, 0.0
        devices = mesh.devices.flatten()
        if peak := cost.peak_flops(devices[0].device_kind):
            self._peak = peak * len(devices)
            forward = cost.causal_flops_per_token(config.model, config.data.seq_len)
            self._step_flops = cost.train_flops(forward, self._tokens)

    def restart(self) -> None:
        """Restart the stopwatch; call this when the next step starts."""
        self._began = time.monotonic()

    def step_ended(self) -> dict[str, float]:
        """Return the metrics of the step that has just finished, and restart the stopwatch."""
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        row = {
            "throughput/step_seconds": seconds,
            "throughput/tokens_per_second": self._tokens / seconds,
        }
        if self._peak:
            row["throughput/mfu"] = self._step_flops / seconds / self._peak
        return row | _memory()


def _memory() -> dict[str, float]:
    """Return a metric: bytes in use on the fullest local device; {} if no device reports them."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    in_use = [s["bytes_in_use"] for s in stats if "bytes_in_use" in s]
    return {"memory/bytes_in_use": float(max(in_use))} if in_use else {}
