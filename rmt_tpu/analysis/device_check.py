"""A check of the results of a device's kernels, and a measurement of their speed.

Every test case of `device_cases` runs as it would inside a model. Its results and gradients are
compared with those of the equations in float32. A residual that is rebuilt by undoing a write must
equal the original bit for bit.
"""

import contextlib
import dataclasses
import functools
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from pallas_kernels.platform import interpreting
from rmt_tpu import memory
from rmt_tpu.analysis.device_case import Arrays, DeviceCase, normal
from rmt_tpu.analysis.device_compare import compare
from rmt_tpu.estimator.measure import program_arguments, seconds_of, wall_seconds
from rmt_tpu.tables import markdown

_ROUNDS = 3
# A wall-clock measurement is repeated with more calls until it lasts _LONG seconds or has at least
# _MOST_CALLS calls.
_LONG, _MOST_CALLS = 0.02, 256
# Errors about on-chip memory, and errors of a device that cannot be reached.
_ON_CHIP = re.compile(r"vmem|smem|shared memory|scoped", re.IGNORECASE)
_AWAY = re.compile(r"(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED):")
# Each key is a string in compiled programs that shows which kernel implementation was used.
_CALLS = {
    "tpu_custom_call": "mosaic_tpu",
    "xla.gpu.triton": "triton",
    "triton_kernel_call": "triton",
    "mosaic_gpu": "mosaic_gpu",
    "__cudnn": "cudnn",
}


def wrong(differences: Mapping[str, float], bounds: Mapping[str, float]) -> list[str]:
    """Return the names of results whose difference is NaN or exceeds its bound."""
    return [name for name, d in differences.items() if not d <= bounds[name]]


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """The outcome of checking one test case.

    Attributes:
      op, size: the op and the size of the case, as text.
      implementation: the name of the implementation that ran.
      differences, bounds: map the name of each result and gradient to its difference from the
        expected value, and to the bound on that difference; see `device_compare.compare`.
      seconds: the time of one call, forward and backward, or None if it was not timed.
      bytes, flops: the minimum number of bytes that the call moves, and its FLOPs.
      error: why the case did not run, in one line.
      note: why plain JAX ran although the device has a kernel, in one line.
      inconclusive: whether the error says nothing about the kernel; see `is_inconclusive`.
    """

    op: str
    size: str
    implementation: str
    differences: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: float | None = None
    bytes: int = 0
    flops: int = 0
    error: str = ""
    note: str = ""
    inconclusive: bool = False

    @property
    def wrong(self) -> list[str]:
        """The names of results whose difference exceeds its bound."""
        return wrong(self.differences, self.bounds)

    @property
    def ok(self) -> bool:
        """Whether the case ran and no difference is greater than its bound."""
        return not self.error and not self.wrong

    @property
    def verdict(self) -> str:
        """The result of the check in one line: "ok", or what failed or differs."""
        if self.error:
            return f"failed: {self.error}"
        verdict = "differs: " + ", ".join(self.wrong) if self.wrong else "ok"
        return f"{verdict}; {self.note}" if self.note else verdict

    @property
    def worst(self) -> str | None:
        """The name of the result with the largest ratio of difference to bound, or None."""
        if not self.differences:
            return None
        return max(self.differences, key=self._share)

    def _share(self, name: str) -> float:
        difference, bound = self.differences[name], self.bounds[name]
        if math.isnan(difference):
            return math.inf
        return difference / bound if bound else (math.inf if difference else 0.0)


@dataclasses.dataclass(frozen=True)
class Rates:
    """The measured speed of this device: FLOP/s of a matrix product, and bytes/s of a copy."""

    flops: float
    bytes: float


def check(
    case: DeviceCase, implementation: str | None, *, interpret: bool = False, timed: bool = True
) -> CheckRow:
    """Run a test case and compare its results with the equations.

    An exception is reported in the returned row.

    Args:
      case: the case to run.
      implementation: the op's `implementation` argument; None means the implementation that
        programs use on this device.
      interpret: whether to run TPU kernels in interpret mode, on a machine without a TPU.
      timed: whether to time the case as well.
    """
    try:
        return _check(case, implementation, interpret, timed)
    except Exception as error:  # The check reports every kind of exception as its result.
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return CheckRow(
            case.op,
            case.size,
            implementation or "auto",
            error=words,
            inconclusive=is_inconclusive(error),
        )


def is_inconclusive(error: Exception) -> bool:
    """Return whether an error says nothing about a kernel, so that a later check may pass.

    Such errors are a lack of memory of the device or the host, which other programs may use, and a
    device that cannot be reached. A lack of on-chip memory is an error of the kernel.
    """
    words = str(error)
    if _ON_CHIP.search(words):
        return False
    return memory.is_out(error) or (isinstance(error, RuntimeError) and bool(_AWAY.match(words)))


def _check(case: DeviceCase, implementation: str | None, interpret: bool, timed: bool) -> CheckRow:
    case_run = run(case, implementation, interpret=interpret)
    differences, bounds = compare(case, case_run.inputs, case_run.got, case_run.want)
    arguments = case_run.inputs, case_run.cotangents
    return CheckRow(
        case.op,
        case.size,
        case_run.implementation,
        differences,
        bounds,
        _seconds(case_run.program, arguments) if timed else None,
        sum(x.nbytes for x in jax.tree.leaves((arguments, case_run.got))),
        case.flops * (3 if case.gradients else 1),
        note=case_run.note,
    )


class CaseRun(NamedTuple):
    """A test case that ran: its inputs, actual results and expected results, on the host."""

    program: jax.stages.Compiled
    inputs: Arrays
    cotangents: Arrays
    got: Arrays
    want: Arrays
    implementation: str
    note: str


def run(case: DeviceCase, implementation: str | None, *, interpret: bool = False) -> CaseRun:
    """Run a test case and evaluate its equations; see `check` for the arguments."""
    inputs = case.inputs()
    cotangents = _cotangents(case, inputs)
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if interpret:
            stack.enter_context(interpreting())
        traced = jax.jit(results_and_gradients(case, implementation)).trace(inputs, cotangents)
        program = traced.lower().compile()
    if interpret:
        name = "interpreted" if _has_pallas_call(traced.jaxpr) else "xla"
    else:
        name = _implementation_of(program.as_text())
    notes = dict.fromkeys(
        str(w.message) for w in caught if "kernel for this call" in str(w.message)
    )
    got = jax.device_get(program(inputs, cotangents))
    want = jax.device_get(expected_results(case, inputs, cotangents))
    return CaseRun(program, inputs, cotangents, got, want, name, "; ".join(notes))


def time_case(case: DeviceCase, implementation: str) -> float:
    """Return how many seconds one forward and backward call takes, without a check."""
    inputs = case.inputs()
    arguments = inputs, _cotangents(case, inputs)
    program = jax.jit(results_and_gradients(case, implementation)).lower(*arguments).compile()
    return _seconds(program, arguments)


def expected_results(case: DeviceCase, inputs: Arrays, cotangents: Arrays) -> Arrays:
    """Return the expected results and gradients, by evaluating the equations in float32."""
    wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    plain = lambda _, **arrays: case.reference(**arrays)
    exact = case if case.reference is None else dataclasses.replace(case, function=plain)
    with jax.default_matmul_precision("highest"):
        arguments = jax.tree.map(wide, (inputs, cotangents))
        return jax.jit(results_and_gradients(exact, "xla"))(*arguments)


def measure_rates(*, small: bool = False) -> Rates:
    """Measure the speed of a square bfloat16 matrix product and of a float32 copy."""
    n = 512 if small else 8192
    length = 2**22 if small else 2**28
    square = jnp.ones((n, n), "bfloat16")
    product = _seconds(jax.jit(lambda x, y: x @ y).lower(square, square).compile(), (square,) * 2)
    line = jnp.zeros(length, "float32")
    copied = _seconds(jax.jit(lambda x: x + 1).lower(line).compile(), (line,))
    return Rates(2 * n**3 / product, 2 * line.nbytes / copied)


def table(rows: Sequence[CheckRow], rates: Rates | None) -> str:
    """Return a Markdown table with one row per test case."""
    lines = [
        "op | size | implementation | largest difference | bound | time, ms | share of device "
        "| result"
    ]
    for row in rows:
        worst = row.worst
        worst_values = ("", "") if worst is None else (row.differences[worst], row.bounds[worst])
        numbers = "|".join(f" {x:.2g} " if x != "" else " " for x in worst_values)
        numbers = numbers.replace("|", f"({worst}) |" if worst else "|", 1)
        time = "" if row.seconds is None else f"{1e3 * row.seconds:.3g}"
        lines.append(
            f"{row.op} | {row.size} | {row.implementation} |{numbers}| {time} | "
            f"{share(row, rates)} | {row.verdict.replace('|', '/')}"
        )
    return markdown(lines)


def share(row: CheckRow, rates: Rates | None) -> str:
    """Return, as text, what share of the device's speed a call reaches.

    The share is the larger of two fractions. One is the bytes/s of the call divided by those of a
    copy. The other is the FLOP/s of the call divided by those of a matrix product.
    """
    if rates is None or not row.seconds:
        return ""
    bandwidth = row.bytes / row.seconds / rates.bytes
    peak = row.flops / row.seconds / rates.flops
    return f"{bandwidth:.0%} of a copy" if bandwidth >= peak else f"{peak:.0%} of a matmul"


def record(rows: Sequence[CheckRow], rates: Rates | None, device: jax.Device) -> dict[str, Any]:
    """Return all results as JSON values; NaN and infinity become null."""
    number = lambda x: x if x is None or math.isfinite(x) else None
    names = lambda values: {name: number(x) for name, x in values.items()}
    row_values = lambda row: (
        dataclasses.asdict(row)
        | {
            "differences": names(row.differences),
            "bounds": names(row.bounds),
            "wrong": row.wrong,
            "ok": row.ok,
        }
    )
    return {
        "device_kind": device.device_kind,
        "platform": device.platform,
        "compiler": device.client.platform_version,
        "jax": jax.__version__,
        "rates": None if rates is None else dataclasses.asdict(rates),
        "rows": [row_values(row) for row in rows],
    }


def results_and_gradients(
    case: DeviceCase, implementation: str | None
) -> Callable[[Arrays, Arrays], Arrays]:
    """Return a function that runs a test case forward and backward.

    The function maps inputs and cotangents to results and gradients, all by name. A gradient's name
    is "d_" followed by the name of the input.
    """

    def both(inputs: Arrays, cotangents: Arrays) -> Arrays:
        function = functools.partial(case.function, implementation)
        if not case.gradients:
            return function(**inputs)
        floats = {k: x for k, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        out, pullback = jax.vjp(lambda floats: function(**(inputs | floats)), floats)
        (gradients,) = pullback(cotangents)
        return out | {f"d_{name}": x for name, x in gradients.items()}

    return both


def _cotangents(case: DeviceCase, inputs: Arrays) -> Arrays:
    out = abstract_cotangents(case, inputs)
    drawn = (normal(100 + i, x.dtype, *x.shape) for i, x in enumerate(out.values()))
    return dict(zip(out, drawn, strict=True))


def abstract_cotangents(case: DeviceCase, inputs: Arrays) -> Arrays:
    """Return the shapes and dtypes of a case's cotangents, or {} if it has no gradients."""
    if not case.gradients:
        return {}
    return jax.eval_shape(functools.partial(case.function, "xla"), **inputs)


def _seconds(program: jax.stages.Compiled, arguments: Sequence[Any]) -> float:
    fresh = functools.partial(program_arguments, program, arguments, ())
    once = _wall_seconds if jax.default_backend() == "cpu" else seconds_of
    return statistics.median(once(program, fresh) for _ in range(_ROUNDS))


def _wall_seconds(program: jax.stages.Compiled, arguments: Callable[[], Sequence[Any]]) -> float:
    """Return the wall-clock seconds per call, averaged over enough calls for a reliable time."""
    calls = 1
    while (seconds := wall_seconds(program, arguments, calls)) < _LONG and calls < _MOST_CALLS:
        calls *= 4
    return seconds / calls


def _implementation_of(text: str) -> str:
    found = dict.fromkeys(name for call, name in _CALLS.items() if call in text)
    return "+".join(found) or "xla"


def _has_pallas_call(jaxpr: Any) -> bool:
    return any(name == "pallas_call" for name in _primitives(jaxpr.jaxpr))


def _primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _primitives(inner)
