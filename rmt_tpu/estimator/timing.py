"""Timing of candidate block sizes on this machine's device, after a check of their results."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import tuned
from rmt_tpu.analysis.device_compare import bound
from rmt_tpu.estimator.measure import (
    Compiled,
    draw,
    program_arguments,
    seconds_in_turn,
    words_of,
)
from rmt_tpu.estimator.search import Timing
from rmt_tpu.estimator.spaces import SPACES, Problem, TuningCall, lower_call

# _WORSE: a candidate's error may be at most this many times the error of the default block sizes,
# whose results are tested against float64. The error of the default block sizes may be at most this
# many times the bound on the error of a single result, because plain JAX rounds as well. _ROUNDING:
# an error up to this fraction of the array's largest value counts as rounding, and is always
# allowed to a candidate.
_WORSE, _ROUNDING = 2.0, 1e-5


def time_candidates(
    problem: Problem, candidates: Sequence[tuned.Blocks], device: jax.Device
) -> dict[tuned.Blocks | None, Timing]:
    """Check the results of candidate block sizes, then time the candidates and plain JAX.

    The first candidate is the default block sizes. An error is the difference of a result from the
    result of plain JAX. The default block sizes are timed only if their error is within twice the
    bound of `device_compare`, and another candidate only if its error is not much larger than that
    of the default block sizes. If these fail, no other candidate is checked or timed. Calls of all
    programs are timed in turn; a program that fails there has no time, and if it is the default,
    no other candidate has one. In the returned dict, plain JAX has the key None.
    """
    call = SPACES[problem.platform, problem.kernel].call(dict(problem.key), problem.tokens)
    arguments = jax.jit(call.complete)(*draw(call.arguments, call.counts))
    programs = {None: _compiled(device, problem, call, None)}
    plain = _results(programs[None], call, arguments)
    inputs = {f"argument {n}": x for n, x in enumerate(jax.tree.leaves(arguments))}
    limit = _WORSE * bound(inputs).largest
    allowed = [limit] * len(plain)
    timings: dict[tuned.Blocks | None, Timing] = {}
    for blocks in candidates:
        try:
            program = _compiled(device, problem, call, blocks)
            errors = errors_of(_results(program, call, arguments), plain)
        # The failure of one candidate does not prevent the timing of the other candidates.
        except Exception as error:
            timings[blocks] = Timing(failed=words_of(error))
        else:
            if why := wrong(errors, allowed):
                timings[blocks] = Timing(wrong=why)
            else:
                programs[blocks] = program
        if blocks == candidates[0]:
            if blocks in timings:
                break
            allowed = [min(limit, _WORSE * error + _ROUNDING) for error in errors]
    timings |= seconds_in_turn(programs, arguments, call.donated)
    first = candidates[0]
    return {b: timings[b] for b in (None, first)} if timings[first].failed else timings


def errors_of(results: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> list[float]:
    """Return the maximum error of each array, divided by the maximum of its reference in `plain`.

    The error is NaN if an entry of one of the two arrays is NaN or infinite, and the other array's
    entry differs. It is also NaN if the reference has no finite entry, because then there is
    nothing to compare.
    """
    found = []
    for got, want in zip(results, plain, strict=True):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        finite = np.isfinite(want)
        same = np.array_equal(got[~finite], want[~finite], equal_nan=True)
        if not (same and np.isfinite(got[finite]).all()) or (want.size and not finite.any()):
            found.append(float("nan"))
            continue
        error = np.max(np.abs(got[finite] - want[finite]), initial=0.0)
        found.append(float(error / max(np.max(np.abs(want[finite]), initial=0.0), 1e-30)))
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
