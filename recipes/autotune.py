"""Find fast block sizes for kernels, by timing them on this device or by compiling for another.

    python -m recipes.autotune --from_preset=rmt-305m --target=v5e --dry_run
    python -m recipes.autotune --op=attention --target=v5e,v6e --out=tuned.json
    python -m recipes.autotune --from_preset=rmt-305m --device

Candidate block sizes are compiled one by one, each within a time limit. Without --device, they are
ranked by an estimated time. On a TPU, this is the time of the compiler's instruction schedule or of
the memory transfers, whichever is longer. On a GPU, it follows from the bytes moved, the concurrent
warps and the spilled registers. With --device, the best candidates are checked against plain JAX
and timed.

Block sizes that are clearly faster than the default are written to the table --out. The default is
the table that training reads. Each candidate adds a line to the log <--out>.log.jsonl. An
interrupted search resumes with the same command.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from absl import flags

from recipes import common, program
from rmt_tpu.errors import RunError, UsageError, flag_errors, unknown

# The ops of rmt_tpu.estimator.ops, which is not imported here because it imports jax.
_OPS = ("key_vector", "attention", "depth_attention")
_OP = flags.DEFINE_list(
    "op", None, f"ops to tune, at the sizes in the papers: {', '.join(_OPS)}, or all"
)
_PRESET = flags.DEFINE_string(
    "from_preset", None, "preset whose train and decode steps are tuned; see --list_presets"
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 16, "sequences per step, with --from_preset", lower_bound=1
)
_SEQ_LEN = flags.DEFINE_integer(
    "seq_len", 512, "tokens per sequence, with --from_preset", lower_bound=1
)
_TARGET = flags.DEFINE_list(
    "target",
    None,
    "devices to compile for, which need not be present, like v5e,v5p,v6e,tpu7x,h100,b200",
)
_DEVICE = flags.DEFINE_bool(
    "device", False, "tune for this machine's device, by timing candidates; replaces --target"
)
_TOP = flags.DEFINE_integer(
    "top", 5, "number of candidates to time per kernel, with --device", lower_bound=1
)
_BUDGET = flags.DEFINE_float(
    "budget_minutes",
    30.0,
    "time limit in minutes for all kernels together; the default block sizes are always tried",
    lower_bound=0.0,
)
_LIMIT = flags.DEFINE_float(
    "limit_seconds",
    120.0,
    "seconds after which a candidate that is still compiling is skipped",
    lower_bound=1.0,
)
_OUT = flags.DEFINE_string(
    "out",
    None,
    "file for the table of block sizes, local or gs://; the default is $RMT_TPU_TUNED, or "
    "else tuned.json in the user's cache folder",
)
_RESUME = flags.DEFINE_bool(
    "resume", True, "reuse the outcomes that an earlier search logged; with --noresume, start again"
)
_REFRESH = flags.DEFINE_bool(
    "refresh", False, "also tune kernels that already have an entry in the table"
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "print what would be tuned, and exit")
_JSON = flags.DEFINE_bool("json", False, "print only JSON; progress goes to standard error")
_KERNEL = flags.DEFINE_multi_string(
    "kernel", None, "tune only kernels whose name contains this text"
)
common.define_list_presets()


def main() -> int:
    """Search for fast block sizes of kernels, write the best to a table, and return 0."""
    targets, device = _targets()
    work = _requested_work()
    if not _DRY_RUN.value:
        # Check that the table can be written before the slow work starts.
        from rmt_tpu.analysis import autotune

        out = _out()
        with flag_errors("out"):
            autotune.check_table(out)
    problems = {target: _problems(target, work) for target in targets}
    if _DRY_RUN.value:
        return _dry_run(problems)
    from rmt_tpu.estimator import CompilerError

    log = autotune.TrialLog(out, _RESUME.value)
    results: list[autotune.TuningOutcome] = []
    try:
        for number, (target, target_problems) in enumerate(problems.items()):
            seconds = 60 * _BUDGET.value / (len(problems) - number)
            _tune(target, target_problems, device, out, log, seconds, results)
    except CompilerError as error:
        raise RunError(str(error)) from None
    except KeyboardInterrupt:
        _report(results, out)
        raise KeyboardInterrupt(
            f"stopped; the results so far are in {out} and, next to it, in {log.name}; repeat the "
            "command to resume"
        ) from None
    _report(results, out)
    return 0


def _tune(target, problems, device, out, log, seconds, results: list[Any]) -> None:
    """Tune the kernels of one target; append each outcome to `results` as soon as it is known."""
    from rmt_tpu.analysis.autotune import Tuner
    from rmt_tpu.estimator.tuning import Compiler

    timer = None
    if device is not None:
        from rmt_tpu.estimator.timing import time_candidates

        timer = lambda problem, candidates: time_candidates(problem, candidates, device)
    with contextlib.closing(Compiler(target, _LIMIT.value)) as compiler:
        tuner = Tuner(out, log, compiler.rate, timer, _TOP.value, _REFRESH.value, _log)
        for result in tuner.run(problems, seconds):
            if result.note:
                _log(f"{result.problem.device}: {result.problem.name}: {result.note}")
            results.append(result)


def _targets() -> tuple[list[Any], Any]:
    """Return the targets to compile for, and this machine's device, or None without --device."""
    if _DEVICE.value == (_TARGET.value is not None):
        raise UsageError(
            "give either --target, to compile for devices like v5e, or --device, to time "
            "candidates on this machine's device"
        )
    from rmt_tpu.estimator import DEVICES

    if not _DEVICE.value:
        for name in _TARGET.value:
            if name not in DEVICES:
                raise UsageError(unknown("--target", name, DEVICES))
        if not _TARGET.value:
            raise UsageError(f"--target= is empty; legal: {', '.join(DEVICES)}")
        return [DEVICES[name] for name in dict.fromkeys(_TARGET.value)], None
    import jax

    from rmt_tpu.estimator.tuning import target_of

    device = jax.devices()[0]
    target = target_of(device.device_kind, DEVICES)
    if target is None:
        kinds = ", ".join(t.kind for t in DEVICES.values())
        raise UsageError(
            f"--device: tuning does not support this machine's device, {device.device_kind}; "
            f"legal: {kinds}"
        )
    return [target], device


def _requested_work() -> Any:
    """Return what to tune: the train step of --from_preset, or the names of the ops in --op."""
    if (_OP.value is None) == (_PRESET.value is None):
        raise UsageError(f"give either --op={','.join(_OPS)} or --from_preset=rmt-305m")
    if _PRESET.value is not None:
        from rmt_tpu.analysis.step_cost import TrainStep

        step = TrainStep(_PRESET.value, _BATCH_SIZE.value, _SEQ_LEN.value)
        step.config()
        return step
    for name in _OP.value or [""]:
        if name not in (*_OPS, "all"):
            raise UsageError(unknown("--op", name, (*_OPS, "all")))
    return _OPS if "all" in _OP.value else tuple(dict.fromkeys(_OP.value))


def _problems(target, work: Any) -> list[Any]:
    from rmt_tpu.analysis import kernel_problems

    make_problems = (
        kernel_problems.problems_of_preset if _OP.value is None else kernel_problems.problems_of_ops
    )
    problems = make_problems(work, target)
    if not problems:
        raise UsageError(
            f"--target={target.name} has no tunable kernel for the given ops or preset"
        )
    found = [p for p in problems if any(part in p.kernel for part in _KERNEL.value or [""])]
    if not found:
        legal = sorted({p.kernel for p in problems})
        raise UsageError(unknown("--kernel", ", ".join(_KERNEL.value), legal))
    return found


def _out() -> str:
    from pallas_kernels import tuned

    out = _OUT.value if _OUT.value is not None else tuned.user_path()
    if not out:
        raise UsageError(f"--out, the file for the table, is needed when {tuned.VARIABLE} is off")
    return out


def _dry_run(problems: dict[Any, list[Any]]) -> int:
    from pallas_kernels import tuned

    if _JSON.value:
        values = [
            {"target": target.name, "kernel": p.kernel, "key": dict(p.key), "tokens": p.tokens,
             "default": tuned.fields(p.default()), "candidates": len(p.candidates())}
            for target, target_problems in problems.items() for p in target_problems
        ]  # fmt: skip
        print(json.dumps(values, indent=1))
        return 0
    for target, target_problems in problems.items():
        print(f"{target.name} ({target.kind}): {len(target_problems)} kernels")
        for p in target_problems:
            default = " ".join(f"{k}={v}" for k, v in tuned.fields(p.default()).items())
            print(f"  {p.name}: {len(p.candidates())} candidates; default {default}")
    return 0


def _report(results: list[Any], out: str) -> None:
    if not results:
        return
    from rmt_tpu.analysis import autotune_report as report
    from rmt_tpu.tables import fitted

    if _JSON.value:
        print(json.dumps(report.values(results), indent=1))
    else:
        print(f"\n{fitted(report.table(results), 10**6)}\n{report.summary(results, out)}")
    picture = Path(f"{Path(out).name if '://' in out else Path(out).expanduser()}.png")
    try:
        if report.draw(results, picture):
            _log(f"picture: {picture}")
    except OSError as error:
        _log(f"note: {picture} cannot be written: {error.strerror}")


def _log(line: str) -> None:
    print(line, file=sys.stderr if _JSON.value else sys.stdout, flush=True)


def run() -> None:
    """Run `main` as a program; `rmt-autotune` calls this function."""
    program.start(main, only_printed=True)


if __name__ == "__main__":
    run()
