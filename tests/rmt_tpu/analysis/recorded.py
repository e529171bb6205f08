"""Keep programs that a compiler made once, and all that is reported of them.

    python -m tests.rmt_tpu.analysis.recorded [--compile]

The program writes what tests expect into recorded/*.txt, from the files of the compiler in
recorded.tar.xz, from traced steps (`recorded_kernels`) and from lists (`recorded_lists`): look at
the difference before you commit it. With --compile it compiles anew.
"""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest import mock

from rmt_tpu.analysis import (
    decode,
    decode_report,
    preflight,
    preflight_report,
    step_cost,
    step_report,
)
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run
from rmt_tpu.estimator import TARGETS, parse_topology, programs
from rmt_tpu.estimator import report as op_report
from rmt_tpu.estimator.hlo import Bytes
from tests.rmt_tpu.analysis import recorded_kernels, recorded_lists

FOLDER = Path(__file__).with_name("recorded")
ARCHIVE = FOLDER.with_suffix(".tar.xz")
SMALL = {"model.vocab_size": 512, "model.num_layers": 2}
CHIP = TARGETS["v5e"]
DECODED = [decode.DecodeCase(preset, 2, 40, SMALL) for preset in ("gpt2-tiny", "rmt-tiny")]
OP = "depth_attention"
MODULES = (decode, preflight, op_report, step_cost)  # each compiles by its `compile_jobs`


def step() -> str:
    (cost,) = step_cost.step_costs([step_cost.TrainStep("rmt-tiny", 2, 256, SMALL)], CHIP)
    rows = [[*row.by_model.values(), row.bytes.hbm, row.bytes.vmem] for row in cost.rows]
    large = dataclasses.replace(cost, rows=tuple(map(_thousand_times, cost.rows)))
    tables = step_report.step_table([large, cost]), step_report.largest_table(large, 60)
    return "\n".join([*tables, _lines([cost.json(), rows])])


def mesh() -> str:
    changes = {"train.batch_size": 8, "data.seq_len": 256, "train.mesh": "fsdp=4"}
    config = overrides.apply(run("gpt2-tiny"), SMALL | changes)
    found = preflight.preflight(config, parse_topology("v5e:2x2"))
    values = {key: x for key, x in found.json().items() if key != "config"}
    return f"{preflight_report.report_text(found, 'gpt2-tiny', 30)}\n{_lines(values)}"


def decoded() -> str:
    rows = decode.estimate(DECODED, CHIP)
    values = [[row.json() for row in rows], decode_report.ratios(rows)]
    return f"{decode_report.text(rows, 'versions', 9)}\n{_lines(values)}"


def op() -> str:
    rows = op_report.estimate([OP], CHIP, only=["S=1 N=9 D=2048"])
    clocks = {CHIP.name: CHIP.clock}
    tables = op_report.op_table(rows), op_report.kernel_table(rows, clocks)
    more = op_report.traffic_table(rows), _lines([row.json() for row in rows])
    return "\n".join([*tables, *more])


REPORTS = {report.__name__: report for report in (step, mesh, decoded, op)}


def _thousand_times(row: step_cost.InstructionCost) -> step_cost.InstructionCost:
    """Return a row as large as in a step of a large model, because tables round."""
    return dataclasses.replace(
        row,
        by_model={name: 1000 * cycles for name, cycles in row.by_model.items()},
        bytes=Bytes(1000 * row.bytes.hbm, 1000 * row.bytes.vmem),
    )


def _lines(values) -> str:
    """Return values as JSON, with six digits and without the seconds that compiling took."""
    text = json.dumps(values, indent=1)
    text = re.sub(r'"compile_seconds": [\d.]+', '"compile_seconds": null', text)
    text = re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.6g}", text)
    return re.sub(r"\[[^\[\]{}]*\]", lambda group: " ".join(group[0].split()), text) + "\n"


def unpack(folder: Path) -> None:
    """Write the compiler's files, a folder for each program."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def read_again(name: str, folder: Path) -> str:
    """Return the report of programs whose files `unpack` wrote into a folder."""

    def read(target, jobs, progress=None, *, buffers=False):
        for number, _ in enumerate(jobs):
            yield programs.read_outcome(target, folder / f"{name}.{number}")

    with contextlib.ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "compile_jobs", read))
        return REPORTS[name]()


def _compile() -> None:
    """Replace the archive by what the compiler makes now."""
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(ARCHIVE, "w:xz") as archive:
        for name in REPORTS:
            numbers, read = itertools.count(), programs.read_outcome

            def keep(target, folder, name=name, numbers=numbers, read=read):
                shutil.copytree(folder, Path(scratch) / f"{name}.{next(numbers)}")
                return read(target, folder)

            with mock.patch.object(programs, "read_outcome", keep):
                REPORTS[name]()
        for file in sorted(Path(scratch).glob("*/[!<T]*")):  # no program's beginning and end
            _add(archive, f"{file.parent.name}/{file.name}", file.read_text("utf-8"))


# An instruction of a schedule that computes with vectors and not in a matrix unit. Which units it
# uses is in another file.
_VECTORS = re.compile(r"(?<=[{;]) *%\w+ = (?!vmat)v[^;{}]*(?=;;|\})")


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    """Add a file, without the paths of this machine and what no report depends on."""
    text = re.sub(r'"/[^"\n]*/', '"', text)
    text = re.sub(r'(?<="body":")[^"]+', lambda code: _digest(code[0]), text)
    if name.endswith(".bundles.txt"):
        text = _VECTORS.sub("", text)
    content = text.encode()
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()[:12]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    if "--compile" in sys.argv:
        _compile()
    with tempfile.TemporaryDirectory() as scratch:
        unpack(Path(scratch))
        for name in REPORTS:
            (FOLDER / f"{name}.txt").write_text(read_again(name, Path(scratch)), encoding="utf-8")
    assert recorded_kernels.HAS_BODIES, "use the version of jax for Python 3.11"
    for name in recorded_kernels.STEPS:
        (FOLDER / f"{name}.txt").write_text(recorded_kernels.report(name), encoding="utf-8")
    for name, made in recorded_lists.LISTS.items():
        (FOLDER / f"{name}.txt").write_text(made(), encoding="utf-8")
