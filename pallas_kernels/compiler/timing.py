"""Time a kernel's candidates on the device of this machine, once their results are right."""

import functools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuned
from pallas_kernels.compiler.search import Timing
from pallas_kernels.compiler.spaces import SPACES, Call, Problem, lower_call

_WARM_UP, _ROUNDS, _CALLS = 2, 7, 5
_CACHE = 2 * 128 * 2**20  # bytes, twice the largest second-level cache
# Of a candidate's error over that of the rule's blocks, which tests hold to float64; and of an
# error that is only rounding, over the largest value.
_WORSE, _ROUNDING = 2.0, 1e-5


def time_candidates(
    problem: Problem, candidates: Sequence[tuned.Blocks], device: jax.Device
) -> dict[tuned.Blocks | None, Timing]:
    """Times of calls, in turn so that a clock that changes changes all; the rule's blocks first.

    That of None is of plain JAX. What gives other results than it, as far as the rule's blocks do
    not too, is not timed.
    """
    call = SPACES[problem.platform, problem.kernel].call(dict(problem.key), problem.tokens)
    arguments = draw(call)
    programs = {None: _compiled(device, problem, call, None)}
    plain = _results(programs[None], call, arguments)
    timings: dict[tuned.Blocks | None, Timing] = {}
    allowed = None
    for blocks in candidates:
        try:
            program = _compiled(device, problem, call, blocks)
            errors = errors_of(_results(program, call, arguments), plain)
        except Exception as error:  # one candidate's failure is its own
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            timings[blocks] = Timing(wrong=words)
            continue
        if allowed is None:
            allowed = [_WORSE * error + _ROUNDING for error in errors]
        if why := wrong(errors, allowed):
            timings[blocks] = Timing(wrong=why)
        else:
            programs[blocks] = program
    taken: dict[tuned.Blocks | None, list[float]] = {blocks: [] for blocks in programs}
    for turn in range(_WARM_UP + _ROUNDS):
        for blocks, program in programs.items():
            fresh = functools.partial(_placed, program, call, arguments)
            seconds = seconds_of(program, fresh)
            if turn >= _WARM_UP:
                taken[blocks].append(seconds)
    return timings | {blocks: Timing(tuple(seconds)) for blocks, seconds in taken.items()}


def errors_of(results: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> list[float]:
    """The largest of each array, over its largest value; NaN where one is not finite."""
    found = []
    for got, want in zip(results, plain, strict=True):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        same = np.isnan(got) == np.isnan(want)
        error = np.max(np.abs(np.nan_to_num(got) - np.nan_to_num(want)), initial=0.0)
        largest = max(np.max(np.abs(np.nan_to_num(want)), initial=0.0), 1e-30)
        found.append(float(error / largest) if same.all() else float("nan"))
    return found


def wrong(errors: Sequence[float], allowed: Sequence[float]) -> str:
    """Which result is not right, in words; "" if all are."""
    for number, (error, most) in enumerate(zip(errors, allowed, strict=True)):
        if not error <= most:
            return f"result {number} is off by {error:.2g} of its largest value, legal {most:.2g}"
    return ""


def draw(call: Call) -> list[Any]:
    """Its arguments: at random, whole numbers as it says."""
    flat, structure = jax.tree.flatten(call.arguments)
    key = jax.random.key(0)
    drawn = [
        jax.random.normal(jax.random.fold_in(key, n), x.shape, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.ones(x.shape, x.dtype)
        if x.dtype == jnp.bool_
        else jnp.zeros(x.shape, x.dtype)
        for n, x in enumerate(flat)
    ]
    arguments = list(jax.tree.unflatten(structure, drawn))
    for index, value in call.counts.items():
        arguments[index] = jnp.full_like(arguments[index], value)
    return arguments


def seconds_of(program: Callable[..., Any], arguments: Callable[[], Sequence[Any]]) -> float:
    """Of a call on the device, by the profiler; else by the slope of the wall clock."""
    given = jax.block_until_ready([arguments() for _ in range(_CALLS)])
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        try:
            jax.block_until_ready([program(*each) for each in given])
        finally:
            jax.profiler.stop_trace()
        busy = covered(device_spans(Path(folder)))
    if busy:
        return busy / _CALLS
    few, many = (wall_seconds(program, arguments, n) for n in (_CALLS, 3 * _CALLS))
    return max((many - few) / (2 * _CALLS), 1e-9)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """What is in at least one of the spans, without the gaps between them."""
    total, end = 0.0, -math.inf
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def wall_seconds(program, arguments, calls: int) -> float:
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


def _compiled(device, problem: Problem, call: Call, blocks: tuned.Blocks | None):
    return lower_call(device, problem, call, blocks).compile()


def _placed(program, call: Call, arguments: Sequence[Any]) -> list[Any]:
    """Laid out as the program wants them: copies of those that it may overwrite.

    All are copies where they are small, for else a cache would have them from the call before.
    """
    small = sum(x.nbytes for x in jax.tree.leaves(list(arguments))) < _CACHE
    given = [
        jax.tree.map(jnp.copy, x) if small or i in call.donated else x
        for i, x in enumerate(arguments)
    ]
    formats = program.input_formats[0]
    return [jax.device_put(x, form) for x, form in zip(given, formats, strict=True)]


def _results(program, call: Call, arguments) -> list[np.ndarray]:
    out = program(*_placed(program, call, arguments))
    return [np.asarray(jax.device_get(x)) for x in jax.tree.leaves(out)]
