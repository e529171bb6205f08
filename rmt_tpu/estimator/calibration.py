"""Comparison of estimates with times that others measured and published.

calibration.json has calls of plain XLA and of kernels by others, timed on TPUs that we do not have.
For each call it has the published time of the whole call, and what the compiler makes of the call
here, without a device, instruction by instruction. Every model of cost can therefore be compared
with all calls without compiling them. `calibrate` compiles them again.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rmt_tpu.estimator.cost import BEST_GUESS, MODELS, Work
from rmt_tpu.estimator.topology import DEVICES

PATH = Path(__file__).with_name("calibration.json")


@dataclasses.dataclass(frozen=True)
class Row:
    """A call whose time was published.

    Attributes:
      target: the chip that it ran on, of `topology.DEVICES`.
      op: what it computes, a function of `published`.
      arguments: the arguments of that function.
      published: measured seconds of the whole call.
      published_bytes: bytes of memory that the program took there.
      bytes: bytes of memory that it takes here. If the two differ by more than a core's VMEM, it
        may be another program.
      work: the work of the program's instructions, and how often each runs.
    """

    target: str
    op: str
    arguments: dict[str, Any]
    published: float
    published_bytes: int
    bytes: int
    work: tuple[tuple[Work, int], ...]

    def estimated(self, model: str = BEST_GUESS) -> float:
        """Return the seconds of the call by one of `cost.MODELS`."""
        cycles = sum(MODELS[model](work) * times for work, times in self.work)
        return cycles / DEVICES[self.target].clock

    def ratio(self, model: str = BEST_GUESS) -> float:
        """Return the estimated seconds over the measured ones."""
        return self.estimated(model) / self.published

    @property
    def is_kernel(self) -> bool:
        """Whether the call has a Pallas kernel; otherwise all of it is XLA's own."""
        return any(work.kind == "kernel" for work, _ in self.work)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The agreement of some calls' estimates with their measured times.

    Attributes:
      calls: how many calls were compared.
      mean: the geometric mean of estimated over measured times.
      spread: e to the standard deviation of the ratios' logarithms; 1 if all calls have one ratio.
      least, most: the range of the ratios.
      rank_correlation: Spearman's; 1 if the estimates order the calls as the measured times do.
    """

    calls: int
    mean: float
    spread: float
    least: float
    most: float
    rank_correlation: float


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return all rows of calibration.json."""
    return parse(json.loads(PATH.read_text(encoding="utf-8")))


def parse(values: dict[str, Any]) -> tuple[Row, ...]:
    """Return the rows of a file's content."""
    work = lambda listed: tuple((Work(*fields), times) for times, *fields in listed)
    return tuple(Row(**value | {"work": work(value["work"])}) for value in values["rows"])


def text(values: dict[str, Any], rows: Iterable[Row]) -> str:
    """Return a file's content with these rows, one per line, and all else unchanged."""

    def line(row: Row) -> str:
        fields = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        listed = [[times, *dataclasses.astuple(work)] for work, times in row.work]
        return json.dumps(fields | {"work": listed})

    head = json.dumps({k: v for k, v in values.items() if k != "rows"}, indent=1)[:-2]
    lines = ",\n".join(map(line, rows))
    return f'{head},\n "rows": [\n{lines}\n]}}\n'


def agreement(rows: Sequence[Row], model: str = BEST_GUESS) -> Agreement | None:
    """Compare estimates of calls with their measured times; return None if there are no calls."""
    if not rows:
        return None
    ratios = [row.ratio(model) for row in rows]
    logs = np.log(ratios)
    return Agreement(
        calls=len(rows),
        mean=math.exp(logs.mean()),
        spread=math.exp(logs.std()),
        least=min(ratios),
        most=max(ratios),
        rank_correlation=spearman(
            [row.estimated(model) for row in rows], [row.published for row in rows]
        ),
    )


def spearman(x: Sequence[int | float], y: Sequence[int | float]) -> float:
    """Return the correlation of ranks; equal values share one rank."""
    return float(np.corrcoef(_ranks(np.asarray(x)), _ranks(np.asarray(y)))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    below, equal = values[:, None] > values, values[:, None] == values
    return below.sum(1) + equal.sum(1) / 2


def error_bar(targets: Sequence[str]) -> str:
    """Return a line about the error of estimates for these targets, to print with them."""
    told, never = [], []
    for target in dict.fromkeys(targets):
        found = agreement([row for row in rows() if row.target == target])
        if found is None:
            never.append(target)
            continue
        told.append(
            f"{found.least:.1f} to {found.most:.1f} (mean {found.mean:.2f}) times the measured "
            f"time of {found.calls} calls on {target}"
        )
    parts = ["estimates"]
    if told:
        parts.append(f"the best guess was {', '.join(told)}")
    if never:
        parts.append(f"never compared with a measured time on {', '.join(never)}")
    return f"{'; '.join(parts)} (docs/benchmarks/estimates.md)"


def table() -> str:
    """Return Markdown tables: a line per call in milliseconds, and a line per target and kind."""
    lines = [
        f"| chip | call | published | {' | '.join(MODELS)} | memory, of published |",
        f"|---|---|---|{'---|' * len(MODELS)}---|",
    ]
    for row in rows():
        ratios = [f"{row.ratio(model):.2f}" for model in MODELS]
        memory = f"{row.bytes / row.published_bytes:.2f}" if row.published_bytes else "-"
        cells = [row.target, described(row), f"{row.published * 1e3:.3f}", *ratios, memory]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| chip | calls | model | geometric mean | spread | least to most | rank correlation |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in dict.fromkeys(row.target for row in rows()):
        here = [row for row in rows() if row.target == target]
        for kind, chosen in (
            ("XLA's own", [row for row in here if not row.is_kernel]),
            ("kernels", [row for row in here if row.is_kernel]),
        ):
            for model in MODELS if chosen else ():
                a = agreement(chosen, model)
                span = f"{a.least:.2f} to {a.most:.2f}"
                cells = [f"{a.calls} {kind}", model, f"{a.mean:.2f}", f"{a.spread:.2f}", span]
                lines.append(f"| {target} | {' | '.join(cells)} | {a.rank_correlation:.2f} |")
    return "\n".join(lines) + "\n"


def described(row: Row) -> str:
    """Return a call in words: its function, its sizes and all other arguments but blocks."""
    arguments = {k: v for k, v in row.arguments.items() if k != "blocks"}
    sizes = "x".join(map(str, arguments.pop("shape")))
    others = "".join(f", {k} {v}" for k, v in arguments.items())
    return f"{row.op.replace('_', ' ')} {sizes}{others}"
