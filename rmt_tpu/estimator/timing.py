"""Timing of candidate block sizes on this machine's device, after a check of their results."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import tuned
from rmt_tpu.estimator.measure import Compiled, draw, program_arguments, seconds_in_turn
from rmt_tpu.estimator.search import Timing
from rmt_tpu.estimator.spaces import SPACES, Problem, TuningCall, lower_call

# _WORSE: a candidate's error may be at most this many times the error of the default block sizes,
# whose results are tested against float64. _ROUNDING: an error up to this fraction of the array's
# largest value counts as rounding, and is always allowed.
_WORSE, _ROUNDING = 2.0, 1e-5


def time_candidates(
    problem: Problem, candidates: Sequence[tuned.Blocks], device: jax.Device
) -> dict[tuned.Blocks | None, Timing]:
    """Check the results of candidate block sizes, then time the candidates and plain JAX.

    The first candidate is the default block sizes. An error is the difference of a result from the
    result of plain JAX. A candidate is not timed if its error is much larger than that of the
    default block sizes. Calls of all programs are timed in turn. In the returned dict, plain JAX
    has the key None.
    """
    call = SPACES[problem.platform, problem.kernel].call(dict(problem.key), problem.tokens)
    arguments = jax.jit(call.complete)(*draw(call.arguments, call.counts))
    programs = {None: _compiled(device, problem, call, None)}
    plain = _results(programs[None], call, arguments)
    timings: dict[tuned.Blocks | None, Timing] = {}
    allowed = None
    for blocks in candidates:
        try:
            program = _compiled(device, problem, call, blocks)
            errors = errors_of(_results(program, call, arguments), plain)
        # The failure of one candidate does not prevent the timing of the other candidates.
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            timings[blocks] = Timing(wrong=words)
            continue
        if allowed is None:
            allowed = [_WORSE * error + _ROUNDING for error in errors]
        if why := wrong(errors, allowed):
            timings[blocks] = Timing(wrong=why)
        else:
            programs[blocks] = program
    times = seconds_in_turn(programs, arguments, call.donated)
    return timings | {blocks: Timing(tuple(seconds)) for blocks, seconds in times.items()}


def errors_of(results: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> list[float]:
    """Return the maximum error of each array, divided by the maximum of its reference in `plain`.

    The error is NaN if an entry is NaN in only one of the two arrays.
    """
    found = []
    for got, want in zip(results, plain, strict=True):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        same = np.isnan(got) == np.isnan(want)
        error = np.max(np.abs(np.nan_to_num(got) - np.nan_to_num(want)), initial=0.0)
        largest = max(np.max(np.abs(np.nan_to_num(want)), initial=0.0), 1e-30)
        found.append(float(error / largest) if same.all() else float("nan"))
    return found


def wrong(errors: Sequence[float], allowed: Sequence[float]) -> str:
    """Return a message about the first error that exceeds its allowed value, or "" if none does."""
    for number, (error, most) in enumerate(zip(errors, allowed, strict=True)):
        if not error <= most:
            return f"result {number} differs by {error:.2g} of its largest value; legal: {most:.2g}"
    return ""


def _compiled(
    device: jax.Device, problem: Problem, call: TuningCall, blocks: tuned.Blocks | None
) -> Compiled:
    return lower_call(device, problem, call, blocks).compile()


def _results(program: Compiled, call: TuningCall, arguments: Sequence[Any]) -> list[np.ndarray]:
    out = program(*program_arguments(program, arguments, call.donated))
    return [np.asarray(jax.device_get(x)) for x in jax.tree.leaves(out)]
