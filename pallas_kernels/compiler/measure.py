"""Time ops on the device of this machine."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compiler.ops import Case, Direction
from pallas_kernels.compiler.programs import lower

_WARM_UP = 3


def measure(
    case: Case,
    direction: Direction,
    implementations: Sequence[str | None],
    *,
    repeats: int = 30,
    device: jax.Device | None = None,
) -> list[float]:
    """Seconds of a call by each implementation: medians of calls in turn, waited for one by one.

    Args:
      case: what to call; its arguments are drawn at random, integers are zero.
      direction: "forward", or "training" for both passes.
      implementations: as the op takes them.
      repeats: calls of each that count, after three that do not.
      device: None is the first one.
    """
    device = device or jax.devices()[0]
    calls = [_Call(case, direction, name, device) for name in implementations]
    times: list[list[float]] = [[] for _ in calls]
    # In turn, so that a clock that changes changes all of them.
    for repeat in range(_WARM_UP + repeats):
        for call, taken in zip(calls, times, strict=True):
            arguments = jax.block_until_ready(call.arguments())
            start = time.perf_counter()
            jax.block_until_ready(call.compiled(*arguments))
            if repeat >= _WARM_UP:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


class _Call:
    """A compiled call, and arguments laid out as it wants them."""

    def __init__(self, case: Case, direction: Direction, name: str | None, device: jax.Device):
        function, shapes, self.donated = case.program(direction, name)
        self.compiled = lower(function, shapes, device, donate=self.donated).compile()
        formats = self.compiled.input_formats[0]
        drawn = [_draw(shape, seed) for seed, shape in enumerate(shapes)]
        self.kept = [jax.device_put(x, format) for x, format in zip(drawn, formats, strict=True)]

    def arguments(self) -> list[Any]:
        """The arguments; those that the call uses up are copies."""
        return [jnp.copy(x) if i in self.donated else x for i, x in enumerate(self.kept)]


def _draw(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.zeros(shape.shape, shape.dtype)
    return jax.random.normal(jax.random.key(seed), shape.shape, shape.dtype)
