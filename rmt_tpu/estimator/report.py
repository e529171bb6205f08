"""Reports that compare the cost of each op's kernel with the cost of the op in plain JAX."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.target import chip_of
from rmt_tpu.estimator.cost import MODELS, KernelCost, ProgramCost, program_cost
from rmt_tpu.estimator.measure import measure
from rmt_tpu.estimator.ops import (
    DIRECTIONS,
    OPS,
    PORTABLE,
    Direction,
    MinimumWork,
    cases,
    elements_per_sublayer,
)
from rmt_tpu.estimator.programs import Failure, Job, compile_jobs
from rmt_tpu.estimator.topology import Target
from rmt_tpu.tables import markdown, scaled

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class OpRow:
    """The costs of one call of an op on one chip: with its kernel, and in plain JAX (portable).

    Attributes:
      op, case, direction: the op, its case and "forward" or "training", which identify the call.
      device: the name of the chip.
      bandwidth: the chip's HBM bandwidth in bytes/s, or None if unknown.
      kernel: the name of the kernel implementation, or None if the device has none.
      work: the minimum bytes and the FLOPs of the call.
      seconds, portable_seconds: the time of a call with the kernel and in plain JAX, in seconds;
        None if the call failed or if there is no kernel.
      cost, portable_cost: the estimated costs of the two compiled programs; None if the call was
        timed on a device or failed.
      failures: maps an implementation that could not be compiled or run to the reason.
    """

    op: str
    case: str
    direction: Direction
    device: str
    bandwidth: float | None
    kernel: str | None
    work: MinimumWork
    seconds: float | None
    portable_seconds: float | None
    cost: ProgramCost | None = None
    portable_cost: ProgramCost | None = None
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def speedup(self) -> float | None:
        """The time of plain JAX divided by the time of the kernel, or None if either is missing."""
        if self.seconds is None or self.portable_seconds is None:
            return None
        return self.portable_seconds / self.seconds

    @property
    def speedups(self) -> list[float]:
        """The `speedup` in each cost model, in ascending order; empty without estimates."""
        if self.cost is None or self.portable_cost is None:
            return []
        portable, kernel = self.portable_cost.by_model, self.cost.by_model
        return sorted(portable[model] / kernel[model] for model in MODELS)

    def bandwidth_use(self, seconds: float | None) -> float | None:
        """Return the fraction of HBM bandwidth that is used if the minimum bytes take `seconds`."""
        if seconds is None or self.bandwidth is None:
            return None
        return self.work.bytes / seconds / self.bandwidth

    def json(self) -> dict[str, Any]:
        """Return all fields, the speedup and the used fractions of bandwidth, as JSON values."""
        return dataclasses.asdict(self) | {
            "speedup": self.speedup,
            "bandwidth_use": self.bandwidth_use(self.seconds),
            "portable_bandwidth_use": self.bandwidth_use(self.portable_seconds),
        }


def estimate(
    ops: Sequence[str],
    target: Target,
    progress: Progress | None = None,
    only: Sequence[str] | None = None,
) -> list[OpRow]:
    """Estimate how long calls of ops take on a TPU. The TPU need not be present.

    Args:
      ops: the names of the ops.
      target: the TPU.
      progress: a function that is called with a line of text per compiled program.
      only: the names of the cases to estimate, or None for all.

    Returns:
      One row per case and direction.

    Raises:
      CompilerError: the compiler is missing.
    """
    calls = _calls(ops, only)
    jobs = [
        Job(
            "rmt_tpu.estimator.ops:lower_case",
            {"op": op, "case": case, "direction": direction, "implementation": implementation},
        )
        for op, case, direction in calls
        for implementation in (OPS[op].kernels["tpu"], PORTABLE)
    ]
    outcomes = iter(list(compile_jobs(target, jobs, progress)))
    rows = []
    for op, case, direction in calls:
        kernel, failures, costs = OPS[op].kernels["tpu"], {}, []
        for implementation in (kernel, PORTABLE):
            outcome = next(outcomes)
            if isinstance(outcome, Failure):
                failures[implementation] = outcome.message
            costs.append(None if isinstance(outcome, Failure) else program_cost(outcome))
        row = OpRow(
            op=op,
            case=case,
            direction=direction,
            device=target.name,
            bandwidth=target.bandwidth,
            kernel=kernel,
            work=cases(op)[case].work(direction),
            seconds=costs[0] and costs[0].seconds,
            portable_seconds=costs[1] and costs[1].seconds,
            cost=costs[0],
            portable_cost=costs[1],
            failures=failures,
        )
        rows.append(row)
    return rows


def time_ops(
    ops: Sequence[str],
    device: jax.Device,
    progress: Progress | None = None,
    only: Sequence[str] | None = None,
) -> list[OpRow]:
    """Time calls of ops on a device of this machine.

    The timed calls are the cases named in `only`, or all cases if `only` is None. An op without a
    kernel for the device is timed only in plain JAX. An implementation that fails has no time, and
    its row says why.
    """
    known = chip_of(device.device_kind)
    bandwidth = (known.bandwidth or None) if known else None
    rows = []
    for op, case, direction in _calls(ops, only):
        kernel = OPS[op].kernels.get(device.platform)
        timed = (PORTABLE,) if kernel is None else (kernel, PORTABLE)
        timings = measure(cases(op)[case], direction, timed, device)
        failures = {name: timing.failed for name, timing in timings.items() if timing.failed}
        seconds = {name: statistics.median(t.seconds) for name, t in timings.items() if t.seconds}
        work = cases(op)[case].work(direction)
        rows.append(
            OpRow(op, case, direction, device.device_kind, bandwidth, kernel, work,
                  kernel and seconds.get(kernel), seconds.get(PORTABLE), failures=failures)
        )  # fmt: skip
        if progress is not None:
            progress(f"{device.device_kind}: {op} {case} {direction}")
    return rows


def op_table(rows: Sequence[OpRow]) -> str:
    """Return a Markdown table with one line per call. Times are in microseconds, sizes in MB.

    The most important columns come first, so that a narrow terminal shows them.
    """
    lines = [
        "op | case | pass | chip | us, kernel | us, xla | xla / kernel "
        "| share of bandwidth, kernel | share of bandwidth, xla | GFLOP | least MB | MB, kernel "
        "| MB, xla | range of xla / kernel"
    ]
    for row in rows:
        cost, portable = row.cost, row.portable_cost
        cells = [
            row.op,
            row.case,
            row.direction,
            row.device,
            scaled(row.seconds, 1e6),
            scaled(row.portable_seconds, 1e6),
            scaled(row.speedup, 1, ".2f"),
            scaled(row.bandwidth_use(row.seconds), 1, ".0%"),
            scaled(row.bandwidth_use(row.portable_seconds), 1, ".0%"),
            f"{row.work.flops / 1e9:.1f}",
            f"{row.work.bytes / 1e6:.1f}",
            scaled(cost and cost.bytes, 1e-6),
            scaled(portable and portable.bytes, 1e-6),
            _span(row.speedups),
        ]
        lines.append(cells)
    return markdown(lines) + "\n"


def kernel_table(rows: Sequence[OpRow], clocks: dict[str, float]) -> str:
    """Return a Markdown table with one line per kernel; cycles are in thousands per call."""
    lines = [
        "chip | case | pass | kernel | kcycles | kbundles | least MXU kcycles | compute / HBM "
        "| VMEM MiB | trips | busiest units"
    ]
    for row in rows:
        for kernel in row.cost.kernels if row.cost else ():
            cells = [
                row.device,
                f"{row.op} {row.case}",
                row.direction,
                kernel.name,
                scaled(kernel.cycles, 1e-3),
                scaled(kernel.bundles, 1e-3),
                scaled(kernel.mxu_cycles, 1e-3),
                scaled(_compute_over_hbm(kernel, row, clocks[row.device]), 1, ".2f"),
                f"{kernel.vmem_bytes / 2**20:.1f}",
                " ".join("?" if trips is None else str(trips) for trips in kernel.trips),
                _busiest(kernel),
            ]
            lines.append(cells)
    return markdown(lines) + "\n"


def traffic_table(rows: Sequence[OpRow]) -> str:
    """Return a Markdown table of the memory traffic of depth attention, per token and sublayer.

    The schedules are those in Table 1 of the Attention Residuals paper. A chip is left out if
    `rows` lacks a case that the table needs. Without any chip, the result is "".
    """
    paper = {"Block, two-phase": 5.5, "Full, two-phase": 24}
    lines = []
    for device in dict.fromkeys(row.device for row in rows):
        forward = [
            row
            for row in rows
            if (row.device, row.op, row.direction) == (device, "depth_attention", "forward")
        ]
        columns = []
        for of in (lambda r: r.work, lambda r: r.cost, lambda r: r.portable_cost):
            try:
                columns.append(elements_per_sublayer({r.case: of(r).bytes for r in forward}))
            except (AttributeError, KeyError):
                break
        else:
            for schedule, booked in paper.items():
                cells = [device, schedule, *(f"{column[schedule]:.2f}" for column in columns)]
                lines.append([*cells, f"{booked:g}"])
    if not lines:
        return ""
    head = "chip | schedule | least d | d, kernels | d, xla | d, paper's Table 1"
    return markdown([head, *lines]) + "\n"


def failure_lines(rows: Sequence[OpRow]) -> str:
    """Return one line of text per implementation that could not be compiled or run."""
    return "".join(
        f"- {row.device}, {row.op} {row.case}, {row.direction}, {implementation}: {why}\n"
        for row in rows
        for implementation, why in row.failures.items()
    )


def _calls(ops: Sequence[str], only: Sequence[str] | None) -> list[tuple[str, str, Direction]]:
    return [
        (op, case, direction)
        for op in ops
        for case in cases(op)
        if only is None or case in only
        for direction in DIRECTIONS
    ]


def _compute_over_hbm(kernel: KernelCost, row: OpRow, clock: float) -> float | None:
    if kernel.cycles is None or row.bandwidth is None or not kernel.bytes.total:
        return None
    return kernel.cycles / clock / (kernel.bytes.total / row.bandwidth)


def _busiest(kernel: KernelCost, units: int = 3) -> str:
    use = sorted(kernel.unit_use.items(), key=lambda item: -item[1])[:units]
    return ", ".join(f"{unit} {fraction:.0%}" for unit, fraction in use)


def _span(values: Sequence[float]) -> str:
    return f"{values[0]:.2f} to {values[-1]:.2f}" if values else "-"
