"""Time programs on the device of this machine."""

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from rmt_tpu.estimator.ops import Case, Direction
from rmt_tpu.estimator.programs import lower

Name = TypeVar("Name", bound=Hashable)
Compiled = jax.stages.Compiled
_WARM_UP, ROUNDS, _CALLS = 2, 7, 5
_CACHE = 2 * 128 * 2**20  # bytes, twice the largest second-level cache


def measure(
    case: Case, direction: Direction, implementations: Sequence[str | None], device: jax.Device
) -> list[float]:
    """Seconds of a call by each implementation: medians of `ROUNDS` in turn.

    Args:
      case: what to call.
      direction: "forward", or "training" for both passes.
      implementations: as the op takes them.
      device: to run on.
    """
    programs = {}
    for name in implementations:
        function, shapes, donated = case.program(direction, name)
        programs[name] = lower(function, shapes, device, donate=donated).compile()
    taken = seconds_in_turn(programs, draw(shapes), donated)
    return [statistics.median(taken[name]) for name in implementations]


def seconds_in_turn(
    programs: Mapping[Name, Compiled], arguments: Sequence[Any], donated: Sequence[int]
) -> dict[Name, list[float]]:
    """Seconds of a call of each program, `ROUNDS` times: in turn, for a clock that changes.

    Args:
      programs: which take the same arguments.
      arguments: trees of arrays.
      donated: which of them a program may overwrite.
    """
    taken: dict[Name, list[float]] = {name: [] for name in programs}
    for turn in range(_WARM_UP + ROUNDS):
        for name, program in programs.items():
            fresh = functools.partial(placed, program, arguments, donated)
            seconds = seconds_of(program, fresh)
            if turn >= _WARM_UP:
                taken[name].append(seconds)
    return taken


def seconds_of(program: Compiled, arguments: Callable[[], Sequence[Any]]) -> float:
    """Of a call on the device, by the profiler; where it sees none, by the slope of wall clock."""
    if jax.default_backend() != "cpu" and (busy := _busy_seconds(program, arguments)):
        return busy / _CALLS
    few, many = (wall_seconds(program, arguments, n) for n in (_CALLS, 3 * _CALLS))
    return max((many - few) / (2 * _CALLS), 1e-9)


def _busy_seconds(program: Compiled, arguments: Callable[[], Sequence[Any]]) -> float:
    given = jax.block_until_ready([arguments() for _ in range(_CALLS)])
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        try:
            jax.block_until_ready([program(*each) for each in given])
        finally:
            jax.profiler.stop_trace()
        return covered(device_spans(Path(folder)))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """What is in at least one of the spans, without the gaps between them."""
    total, end = 0.0, -math.inf
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def wall_seconds(program: Compiled, arguments: Callable[[], Sequence[Any]], calls: int) -> float:
    """Of so many calls, dispatched one after the other and waited for at the end."""
    given = jax.block_until_ready([arguments() for _ in range(calls)])
    start = time.perf_counter()
    jax.block_until_ready([program(*each) for each in given])
    return time.perf_counter() - start


def device_spans(folder: Path) -> list[tuple[float, float]]:
    """Begin and end in seconds of what ran on devices: a TPU's instructions, a GPU's streams."""
    spans = []
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                tpu = plane.name.startswith("/device:TPU") and line.name == "XLA Ops"
                gpu = plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
                if tpu or gpu:
                    for event in line.events:
                        begin = event.start_ns * 1e-9
                        spans.append((begin, begin + event.duration_ns * 1e-9))
    return spans


def draw(shapes: Sequence[Any], counts: Mapping[int, int] | None = None) -> list[Any]:
    """Arguments of these shapes, in trees: at random; truths are True, and whole numbers 0.

    Args:
      shapes: and dtypes.
      counts: what those whole numbers are that are something else.
    """
    flat, structure = jax.tree.flatten(list(shapes))
    key = jax.random.key(0)
    drawn = [
        jax.random.normal(jax.random.fold_in(key, n), x.shape, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.full(x.shape, x.dtype == jnp.bool_, x.dtype)
        for n, x in enumerate(flat)
    ]
    arguments = jax.tree.unflatten(structure, drawn)
    for index, value in (counts or {}).items():
        arguments[index] = jnp.full_like(arguments[index], value)
    return arguments


def placed(program: Compiled, arguments: Sequence[Any], donated: Sequence[int]) -> list[Any]:
    """Laid out as the program wants them: copies of those that it may overwrite.

    All are copies where they are small, for else a cache would have them from the call before.
    """
    small = sum(x.nbytes for x in jax.tree.leaves(list(arguments))) < _CACHE
    given = [
        jax.tree.map(jnp.copy, x) if small or i in donated else x for i, x in enumerate(arguments)
    ]
    formats = program.input_formats[0]
    return [jax.device_put(x, form) for x, form in zip(given, formats, strict=True)]
