"""Estimates held against times that others measured and published: how far they can be trusted.

calibration.json has calls of kernels that are not ours, timed on TPUs that we have not: the time
of the whole call as it was published, and what the compiler makes of that call here, without a
device. `calibrate` compiles them again.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels.compiler.cost import kernel_seconds
from pallas_kernels.compiler.topology import DEVICES

PATH = Path(__file__).with_name("calibration.json")


@dataclasses.dataclass(frozen=True)
class Row:
    """One call.

    Attributes:
      target: what it ran on, of `topology.DEVICES`.
      op: what it computes, in words.
      shape: of its operands.
      blocks: that were the fastest there, by name.
      published: seconds of the whole call, as measured.
      beside: seconds of all but the kernel, which nobody measured: bytes of the call's other
        instructions at the full bandwidth.
      cycles, bundles, mxu_cycles: of the kernel's schedule, as in `cost.KernelCost`.
      bytes: of its operands and results.
    """

    target: str
    op: str
    shape: tuple[int, ...]
    blocks: dict[str, int]
    published: float
    beside: float
    cycles: int
    bundles: int
    mxu_cycles: int
    bytes: int

    @property
    def measured(self) -> float:
        """Seconds of the kernel."""
        return self.published - self.beside

    @property
    def estimated(self) -> float:
        """Seconds of the kernel, as all reports have them."""
        return kernel_seconds(DEVICES[self.target], self.cycles, self.bytes)

    @property
    def ratio(self) -> float:
        """Estimated over measured."""
        return self.estimated / self.measured


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Of estimates with measured times, for one target.

    Attributes:
      calls: how many were compared.
      mean: the geometric mean of estimated over measured.
      least, most: of the ratios.
      rank_correlation: Spearman's, 1 if the estimates put the calls in the order of their times.
    """

    calls: int
    mean: float
    least: float
    most: float
    rank_correlation: float


@functools.cache
def rows() -> tuple[Row, ...]:
    """All that are there."""
    return parse(json.loads(PATH.read_text(encoding="utf-8")))


def parse(values: dict[str, Any]) -> tuple[Row, ...]:
    """The rows of a file's content."""
    return tuple(Row(**value | {"shape": tuple(value["shape"])}) for value in values["rows"])


def text(values: dict[str, Any], rows: Iterable[Row]) -> str:
    """A file's content with these rows, one a line, and all else as it was."""
    head = json.dumps({k: v for k, v in values.items() if k != "rows"}, indent=1)[:-2]
    lines = ",\n".join(json.dumps(dataclasses.asdict(row)) for row in rows)
    return f'{head},\n "rows": [\n{lines}\n]}}\n'


def agreement(rows: Sequence[Row]) -> Agreement | None:
    """Of some calls; None if there are none."""
    if not rows:
        return None
    ratios = [row.ratio for row in rows]
    return Agreement(
        calls=len(rows),
        mean=math.exp(sum(map(math.log, ratios)) / len(rows)),
        least=min(ratios),
        most=max(ratios),
        rank_correlation=spearman([r.estimated for r in rows], [r.measured for r in rows]),
    )


def spearman(x: Sequence[int | float], y: Sequence[int | float]) -> float:
    """The correlation of ranks; equal values share theirs."""
    return float(np.corrcoef(_ranks(np.asarray(x)), _ranks(np.asarray(y)))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    below, equal = values[:, None] > values, values[:, None] == values
    return below.sum(1) + equal.sum(1) / 2


def error_bar(targets: Sequence[str]) -> str:
    """What estimates for these targets are worth, in a line to print beside them."""
    told, never = [], []
    for target in dict.fromkeys(targets):
        of = [row for row in rows() if row.target == target]
        found = agreement(of)
        if found is None:
            never.append(target)
            continue
        ops = " and ".join(dict.fromkeys(row.op for row in of))
        told.append(
            f"{found.least:.1f} to {found.most:.1f} times the measured time of {found.calls} {ops} "
            f"calls on {target}"
        )
    parts = ["estimates"]
    if told:
        parts.append(f"the compiler's model gave {', '.join(told)}")
    if never:
        parts.append(f"never compared with a measured time on {', '.join(never)}")
    return f"{'; '.join(parts)} (docs/benchmarks/estimates.md)"


def table() -> str:
    """Markdown: a line a call, times in milliseconds; then a line a target."""
    lines = [
        "| chip | batch, tokens, heads, size | published | measured | estimated | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows():
        times = (row.published, row.measured, row.estimated)
        cells = [row.target, ", ".join(map(str, row.shape)), *(f"{t * 1e3:.3f}" for t in times)]
        lines.append(f"| {' | '.join(cells)} | {row.ratio:.2f} |")
    lines += [
        "",
        "| chip | calls | geometric mean | least to most | rank correlation |",
        "|---|---|---|---|---|",
    ]
    for target in dict.fromkeys(row.target for row in rows()):
        a = agreement([row for row in rows() if row.target == target])
        span = f"{a.least:.2f} to {a.most:.2f}"
        lines.append(f"| {target} | {a.calls} | {a.mean:.2f} | {span} | {a.rank_correlation:.2f} |")
    return "\n".join(lines) + "\n"
