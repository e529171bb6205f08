"""Timing of compiled programs on this machine's device."""

import functools
import math
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.key_vector.interface import FRACTION_BITS
from rmt_tpu.estimator.ops import Direction, OpCase
from rmt_tpu.estimator.programs import lower
from rmt_tpu.estimator.search import Timing

Name = TypeVar("Name", bound=Hashable)
Compiled = jax.stages.Compiled
# A timing has `_WARM_UP` rounds that are discarded and `ROUNDS` rounds that count. One profile
# contains `_CALLS` calls.
_WARM_UP, ROUNDS, _CALLS = 2, 7, 5
# By the wall clock, calls are repeated until the calls that are compared differ by _LONG seconds,
# which noise does not reach, or for _MOST_ROUNDS rounds.
_LONG, _MOST_ROUNDS = 0.02, 16
# Arguments of fewer bytes may be in a device's cache. This is twice the largest second-level cache.
_CACHE = 2 * 128 * 2**20


def measure(
    case: OpCase, direction: Direction, implementations: Sequence[str], device: jax.Device
) -> dict[str, Timing]:
    """Return, for each implementation, the times of `ROUNDS` calls, or why it has none.

    In every round, each implementation is called once. An implementation that cannot be compiled or
    run does not keep the others from being timed.

    Args:
      case: the case to call.
      direction: "forward" for the forward pass, or "training" for forward and backward.
      implementations: values of the op's `implementation` argument.
      device: the device to time on.
    """
    programs, timings = {}, {}
    for name in implementations:
        try:
            function, shapes, donated = case.program(direction, name)
            programs[name] = lower(function, shapes, device, donate=donated).compile()
        except Exception as error:
            timings[name] = Timing(failed=words_of(error))
    if not programs:
        return timings
    try:
        arguments = draw(shapes)
    except Exception as error:  # The arguments alone may be too large for the device.
        return timings | dict.fromkeys(programs, Timing(failed=words_of(error)))
    return timings | seconds_in_turn(programs, arguments, donated)


def words_of(error: Exception) -> str:
    """Return an error's type and message as one line of at most 400 characters.

    Reports keep this text and not the error, whose traceback would keep arrays on the device.
    """
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def seconds_in_turn(
    programs: Mapping[Name, Compiled], arguments: Sequence[Any], donated: Sequence[int]
) -> dict[Name, Timing]:
    """Return, for each program, the times of `ROUNDS` calls in seconds, or why a call failed.

    The programs are called in turn, because the clock rate of a device may change over time. A
    program that fails is not called again.

    Args:
      programs: compiled programs by name; all take the same arguments.
      arguments: the arguments, each a tree of arrays.
      donated: the indices of the arguments that a program may overwrite.
    """
    times: dict[Name, list[float]] = {name: [] for name in programs}
    failed: dict[Name, Timing] = {}
    for turn in range(_WARM_UP + ROUNDS):
        for name, program in programs.items():
            if name in failed:
                continue
            fresh = functools.partial(program_arguments, program, arguments, donated)
            try:
                seconds = seconds_of(program, fresh)
            except Exception as error:
                failed[name] = Timing(failed=words_of(error))
                continue
            if turn >= _WARM_UP:
                times[name].append(seconds)
    return {name: failed.get(name, Timing(tuple(times[name]))) for name in programs}


def seconds_of(program: Compiled, arguments: Callable[[], Sequence[Any]]) -> float:
    """Return the seconds that a call takes on the device, measured with the profiler.

    If the profiler records no device, the time is that by which wall-clock time grows per call. For
    calls that are too short to tell, it is the mean wall-clock time of calls, which is more.
    """
    if jax.default_backend() != "cpu" and (busy := _busy_seconds(program, arguments)):
        return busy / _CALLS
    few = many = rounds = 0
    while many - few < _LONG and rounds < _MOST_ROUNDS:
        few += wall_seconds(program, arguments, _CALLS)
        many += wall_seconds(program, arguments, 3 * _CALLS)
        rounds += 1
    if many - few < _LONG:
        return many / (3 * _CALLS * rounds)
    return (many - few) / (2 * _CALLS * rounds)


def _busy_seconds(program: Compiled, arguments: Callable[[], Sequence[Any]]) -> float:
    argument_lists = jax.block_until_ready([arguments() for _ in range(_CALLS)])
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        try:
            jax.block_until_ready([program(*each) for each in argument_lists])
        finally:
            jax.profiler.stop_trace()
        return covered([(begin, end) for _, begin, end in device_events(Path(folder))])


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the total length of the union of (start, end) spans, excluding gaps."""
    total, end = 0.0, -math.inf
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def wall_seconds(program: Compiled, arguments: Callable[[], Sequence[Any]], calls: int) -> float:
    """Return the wall-clock time of `calls` back-to-back calls, in seconds.

    The clock stops when the last call has finished.
    """
    argument_lists = jax.block_until_ready([arguments() for _ in range(calls)])
    start = time.perf_counter()
    jax.block_until_ready([program(*each) for each in argument_lists])
    return time.perf_counter() - start


def device_events(folder: Path) -> list[tuple[str, float, float]]:
    """Return the (name, start, end) of each event on a TPU or a GPU in a saved profile.

    Times are in seconds. An event is named after a kernel or an instruction of the program.
    """
    events = []
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                tpu = plane.name.startswith("/device:TPU") and line.name == "XLA Ops"
                gpu = plane.name.startswith("/device:GPU") and line.name.startswith("Stream")
                if tpu or gpu:
                    for event in line.events:
                        begin = event.start_ns * 1e-9
                        events.append((event.name, begin, begin + event.duration_ns * 1e-9))
    return events


def draw(shapes: Sequence[Any], counts: Mapping[int, int] | None = None) -> list[Any]:
    """Return random arguments with the given shapes and dtypes.

    Floating-point arrays are normally distributed, and so are int16 arrays, in steps of 1/512, as
    entries of a residual are stored. Boolean arrays are True, and other integer arrays are 0.

    Args:
      shapes: trees of shapes and dtypes.
      counts: maps the index of an integer argument to its value, in place of 0.
    """
    flat, structure = jax.tree.flatten(list(shapes))
    drawn = [_drawn(jax.random.fold_in(jax.random.key(0), n), x) for n, x in enumerate(flat)]
    arguments = jax.tree.unflatten(structure, drawn)
    for index, value in (counts or {}).items():
        arguments[index] = jnp.full_like(arguments[index], value)
    return arguments


def _drawn(key: jax.Array, x: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.random.normal(key, x.shape, x.dtype)
    if x.dtype == jnp.int16:
        steps = 2**FRACTION_BITS * jax.random.normal(key, x.shape)
        return jnp.round(steps).astype(x.dtype)
    return jnp.full(x.shape, x.dtype == jnp.bool_, x.dtype)


def program_arguments(
    program: Compiled, arguments: Sequence[Any], donated: Sequence[int]
) -> list[Any]:
    """Return arguments for one call, in the program's layouts.

    Donated arguments are copied, because a call overwrites them. If the arguments are small, all
    are copied, so that the previous call does not leave them in the device's cache.
    """
    small = sum(x.nbytes for x in jax.tree.leaves(list(arguments))) < _CACHE
    argument_lists = [
        jax.tree.map(jnp.copy, x) if small or i in donated else x for i, x in enumerate(arguments)
    ]
    formats = program.input_formats[0]
    return [jax.device_put(x, form) for x, form in zip(argument_lists, formats, strict=True)]
