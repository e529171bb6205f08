"""Estimate kernels and train steps for TPUs that need not be present, or measure them on a device.

    python -m recipes.kernel_report --op=key_vector --targets=v5e --output=reports
    python -m recipes.kernel_report --step --presets=rmt-305m,gpt2-405m --batch_size=16

For ops (--op), the kernel of every call is compared with plain JAX. For steps (--step), the report
has the cycles of each part, the ratio of the first preset to the second, the most expensive
instructions, and a picture. On a machine with a GPU or a TPU, ops and steps are measured, unless
--targets is given. A measured report of steps has the time of each step and of its largest kernels.
The command writes Markdown and JSON to --output. Estimates need the TPU compiler (`pip install
'jax[tpu]'`), but no TPU.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from absl import flags

from recipes import common, local, program
from rmt_tpu.errors import RunError, UsageError, unknown

# The ops of rmt_tpu.estimator.ops, which is not imported here because it imports jax.
_OPS = (
    *("key_vector", "attention", "depth_attention", "depth_sums", "delta_attention"),
    "grouped_matmul",
)
_OP = flags.DEFINE_string("op", "all", f"ops to report on: one of {', '.join(_OPS)}, or all")
_CASES = flags.DEFINE_multi_string(
    "case", None, "report only this case of the ops, like 'H=16 D=64'"
)
_TARGETS = flags.DEFINE_list(
    "targets",
    None,
    "TPUs to estimate for, from v5e, v5p, v6e and tpu7x; the default is the first three on a "
    "machine without a GPU or a TPU",
)
_OUTPUT = flags.DEFINE_string("output", "reports", "folder for tables and pictures")
_STEP = flags.DEFINE_bool("step", False, "report whole train steps instead of ops")
_PRESETS = flags.DEFINE_list(
    "presets", ["rmt-305m", "gpt2-405m"], "presets whose train steps are reported, with --step"
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "sequences per train step, for --step")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 512, "tokens per sequence, for --step")
_SET = flags.DEFINE_multi_string(
    "set",
    [],
    "path=value to set in the configs for --step, or rmt-305m:path=value for that preset only",
)
common.define_list_presets()


def main() -> int:
    """Estimate the cost of ops (with --step: of train steps), write reports, and return 0."""
    from rmt_tpu.estimator import CompilerError

    _check_effects()
    folder = local.folder("output", _OUTPUT.value)
    try:
        return _report_steps(folder) if _STEP.value else _report_ops(folder)
    except CompilerError as error:
        raise RunError(str(error)) from None


def _check_effects() -> None:
    """Raise UsageError if a flag is given that has no effect on ops, or none on steps."""
    without = (_OP, _CASES) if _STEP.value else (_PRESETS, _BATCH_SIZE, _SEQ_LEN, _SET)
    given = [flag.name for flag in without if flag.present]
    if given:
        legal = "without --step" if _STEP.value else "with --step"
        raise UsageError(f"--{given[0]} has no effect here; legal: {legal}, or leave it out")


def _report_ops(folder: Path) -> int:
    from rmt_tpu.estimator import TPUS, report
    from rmt_tpu.estimator.calibration import error_bar
    from rmt_tpu.estimator.measure import ROUNDS
    from rmt_tpu.estimator.ops import OPS, cases

    if _OP.value not in ("all", *OPS):
        raise UsageError(unknown("--op", _OP.value, ["all", *OPS]))
    ops = list(OPS) if _OP.value == "all" else [_OP.value]
    for case in _CASES.value or ():
        legal = [name for op in ops for name in cases(op)]
        if case not in legal:
            raise UsageError(unknown("--case", case, legal))
    targets = _targets()
    device = accelerator()
    clocks = {target.name: target.clock for target in TPUS.values()}
    if _TARGETS.value is None and device is not None:
        rows = report.time_ops(ops, device, _log, _CASES.value)
        method = f"Measured on {device.device_kind}: medians of {ROUNDS} rounds in turn"
        kernels, bar = "", ""
    else:
        rows = [row for t in targets for row in report.estimate(ops, t, _log, only=_CASES.value)]
        method = (
            "Estimated, not measured: an instruction takes the longer of its static schedule and "
            "its bytes over the HBM bandwidth"
        )
        bar = error_bar([target.name for target in targets])
        kernels = f"\n{bar}\n\n## Kernels\n\n{report.kernel_table(rows, clocks)}"
        if traffic := report.traffic_table(rows):
            kernels += (
                "\n## Depth attention: elements moved per sublayer, forward\n\nIn units of d, a "
                "token's elements. Table 1 counts a source as a key and a value, and also the "
                f"sublayer's own addition, which is not part of the ops.\n\n{traffic}"
            )
    failures = report.failure_lines(rows)
    text = (
        f"# Ops and their portable form\n\n{method}. {_versions()}. "
        "8192 tokens, or M rows of experts, in bfloat16.\n"
        '"training" is both passes. Bytes are as if all arrays lay in HBM; "least" counts every '
        "operand and result once.\n\n"
        f"{report.op_table(rows)}{kernels}" + (f"\n## Failed\n\n{failures}" if failures else "")
    )
    values = {"how": method, "error_bar": bar, "rows": [row.json() for row in rows]}
    _write(folder / "kernel_report", text, values)
    return 0


def _report_steps(folder: Path) -> int:
    from rmt_tpu.analysis import step_cost, step_report
    from rmt_tpu.estimator.calibration import error_bar

    names = _PRESETS.value
    if not names or len(set(names)) < len(names):
        raise UsageError(
            f"--presets={','.join(names)} is empty or repeats a name; legal: one "
            "or more different names"
        )
    steps = [
        step_cost.TrainStep(
            n, _BATCH_SIZE.value, _SEQ_LEN.value, common.preset_changes(n, names, _SET.value)
        )
        for n in names
    ]
    changed = f" --set={' --set='.join(_SET.value)}" if _SET.value else ""
    sizes = step_cost.sizes([step.config() for step in steps])
    note = f"{sizes}, bfloat16{changed}. {_versions()}"
    if _TARGETS.value is None and accelerator() is not None:
        return _time_steps(steps, folder, note)
    targets = _targets()
    costs = [c for t in targets for c in step_cost.step_costs(steps, t, _log)]
    bar = error_bar([target.name for target in targets])
    method = (
        "Estimated, not measured: an instruction takes the longer of its static schedule and its "
        "HBM bytes over the bandwidth"
    )
    largest = "".join(
        f"\n## Largest instructions: {cost.preset}, {cost.target}\n\n"
        f"{step_report.largest_table(cost)}"
        for cost in costs
    )
    text = (
        f"# A train step on one chip\n\n{method}. {note}.\n\n{step_report.step_table(costs)}\n"
        f"{bar}\n\nFigures use the best guess where no cost model is named. The cost models:\n\n"
        f"{step_report.model_lines()}{largest}"
    )
    picture, estimated = folder / "step_cost.png", [cost.json() for cost in costs]
    with local.writing("output", folder):
        step_report.draw_steps(estimated, picture, f"Estimated, not measured. {note}")
    values = {
        "how": method,
        "error_bar": bar,
        "steps": estimated,
        "ratios": step_report.ratios(costs),
    }
    _write(folder / "step_cost", text, values)
    print(f"picture: {picture}")
    return 0


def _time_steps(steps: list[Any], folder: Path, note: str) -> int:
    from rmt_tpu.analysis import step_timing

    times = []
    for step in steps:
        times.append(step_timing.time_step(step, _log))
        _log(f"{times[-1].preset}: {1e3 * times[-1].seconds:.2f} ms a step")
    device = accelerator()
    method = f"Measured on {device.device_kind}: medians over rounds of consecutive steps"
    largest = "".join(
        f"\n## Largest kernels: {t.preset}\n\n{step_timing.largest_table(t)}" for t in times
    )
    text = f"# A train step on one chip\n\n{method}. {note}.\n\n{step_timing.table(times)}{largest}"
    values = {"how": method, "device": device.device_kind, "steps": [t._asdict() for t in times]}
    _write(folder / "step_times", text, values)
    return 0


def accelerator() -> Any:
    """Return this machine's first GPU or TPU, or None if there is none."""
    import jax

    device = jax.devices()[0]
    return device if device.platform in ("gpu", "tpu") else None


def _targets() -> list[Any]:
    from rmt_tpu.estimator import TARGETS, TPUS

    names = list(TARGETS) if _TARGETS.value is None else _TARGETS.value
    for name in names:
        if name not in TPUS:
            raise UsageError(unknown("--targets", name, TPUS))
    if not names:
        raise UsageError(f"--targets= is empty; legal: {', '.join(TPUS)}")
    return [TPUS[name] for name in dict.fromkeys(names)]


def _versions() -> str:
    from rmt_tpu.estimator import versions

    return ", ".join(f"{name} {version}" for name, version in versions().items())


def _log(line: str) -> None:
    print(line, flush=True)


def _write(path: Path, text: str, values: dict[str, Any]) -> None:
    from rmt_tpu.estimator import versions
    from rmt_tpu.tables import fitted

    content = json.dumps(values | {"versions": versions()}, indent=1)
    terminal = sys.stdout.isatty()
    print(fitted(text, shutil.get_terminal_size().columns) if terminal else text)
    with local.writing("output", path.parent):
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        path.with_suffix(".json").write_text(content + "\n", encoding="utf-8")
    print(f"table: {path.with_suffix('.md')}")


def run() -> None:
    """Run `main` as a program; `rmt-kernel-report` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
