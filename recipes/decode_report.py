"""Report the time of decode steps, estimated or measured on this machine, with a lower bound.

    python -m recipes.decode_report --presets=gpt2-405m,rmt-305m --target=v5e --batch=1,32,256
    python -m recipes.decode_report --presets=gpt2-tiny,rmt-tiny --target=host --context=128

A decode step generates one new token for each row of a batch. For each preset, batch and context,
the report gives:

- the bytes that every step must move, and the time to move them at full bandwidth;
- the time of the step, and the fraction of the bandwidth that it reaches;
- the ratio of this time to that of the first preset;
- the memory of the step, and the large arrays that it copies.

For v5e, v5p and v6e, the step is estimated from the output of the TPU compiler (`pip install
'jax[tpu]'`). For "host", the default on a machine with a GPU or a TPU, the engine is timed with
random weights. Cases that do not fit in memory are reported without a time.
"""

import json
import shutil
import sys
from typing import Any

from absl import flags

from recipes import common, program
from rmt_tpu.config.presets import presets
from rmt_tpu.errors import RunError, UsageError, flag_errors, unknown

_PRESETS = flags.DEFINE_list("presets", ["gpt2-405m", "rmt-305m"], "names of presets to report on")
_TARGET = flags.DEFINE_list(
    "target",
    None,
    "devices to report on, from v5e, v5p, v6e, tpu7x and host (this machine); the default is host "
    "on a machine with a GPU or a TPU, otherwise the first three",
)
_BATCH = flags.DEFINE_list("batch", ["1", "32", "256"], "numbers of rows in a batch, like 1,32,256")
_CONTEXT = flags.DEFINE_list(
    "context", ["512"], "numbers of tokens per row, including the new token, like 512,2048"
)
_SET = flags.DEFINE_multi_string(
    "set", [], "path=value to set in the config, or rmt-305m:path=value for that preset only"
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "number of timings per step", lower_bound=1)
_LARGEST = flags.DEFINE_integer(
    "largest", 0, "number of instructions to list per step, most expensive first", lower_bound=0
)
_JSON = flags.DEFINE_bool("json", False, "print all numbers as JSON instead of tables")
_OUTPUT = flags.DEFINE_string("output", None, ".md file for the tables, local or gs://")
_PICTURE = flags.DEFINE_string("picture", None, ".png file for the picture, local or gs://")
common.define_list_presets()

_HOST = "host"
# The maximum number of rows in a batch, and the maximum number of tokens per row.
_MOST = 2**20


def main() -> int:
    """Estimate or measure decode steps of models, write the report, and return 0."""
    names = _names()
    batches, contexts = _numbers(_BATCH), _numbers(_CONTEXT)
    changes = {name: common.preset_changes(name, names, _SET.value) for name in names}
    output, picture = _output_file(_OUTPUT, ".md"), _output_file(_PICTURE, ".png")
    targets = _targets()
    from rmt_tpu.analysis import decode
    from rmt_tpu.estimator import CompilerError

    cases = [
        decode.DecodeCase(name, batch, context, changes[name])
        for context in contexts
        for batch in batches
        for name in names
    ]
    _check_positions(cases)
    rows = []
    try:
        for target in targets:
            if target == _HOST:
                rows += decode.measure(cases, _REPEATS.value, _log)
            else:
                rows += decode.estimate(cases, target, _log)
    except CompilerError as error:
        raise RunError(str(error)) from None
    _write(rows, output, picture)
    if all(row.seconds is None for row in rows):
        first, fault = rows[0].case.preset, rows[0].fault
        raise RunError(f"no decode step could be timed or estimated; for example, {first} {fault}")
    return 0


def _names() -> list[str]:
    names = _PRESETS.value
    if not names or len(set(names)) < len(names):
        raise UsageError(
            f"--presets={','.join(names)} is empty or repeats a name; legal: one "
            "or more different names"
        )
    for name in names:
        if name not in presets():
            raise UsageError(unknown("--presets", name, presets()))
    return names


def _numbers(flag: flags.FlagHolder) -> list[int]:
    """Return the distinct numbers in a list flag, in ascending order."""
    for text in flag.value:
        if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= _MOST):
            raise UsageError(
                f"--{flag.name}={text} must be a whole number from 1 to {_MOST:,}, or several, "
                "separated by commas"
            )
    if not flag.value:
        raise UsageError(f"--{flag.name}= is empty; legal: whole numbers, like {flag.default[0]}")
    return sorted({int(text) for text in flag.value})


def _targets() -> list[Any]:
    """Return the chips to estimate for, or "host" to time steps on this machine."""
    import jax

    from rmt_tpu.estimator import TARGETS, TPUS

    if _TARGET.value is None:
        has_accelerator = jax.devices()[0].platform != "cpu"
        return [_HOST] if has_accelerator else list(TARGETS.values())
    legal = TPUS | {_HOST: _HOST}
    for name in _TARGET.value:
        if name not in legal:
            raise UsageError(unknown("--target", name, legal))
    if not _TARGET.value:
        raise UsageError(f"--target= is empty; legal: {', '.join(legal)}")
    return [legal[name] for name in dict.fromkeys(_TARGET.value)]


def _check_positions(cases: list[Any]) -> None:
    """Check that at least one model has positions for each context.

    Raises:
      UsageError: a context is longer than the learned positions of all models.
    """
    for context in dict.fromkeys(case.context for case in cases):
        models = {case.preset: case.model("auto") for case in cases}
        learned = [model.learned_positions for model in models.values()]
        if all(positions and positions.max_length < context for positions in learned):
            raise UsageError(
                f"--context={context} is beyond the learned positions of {', '.join(models)}; "
                f"legal: up to {max(positions.max_length for positions in learned)}, or "
                f"--set=model.attention.positions.max_length={context}"
            )


def _output_file(flag: flags.FlagHolder, ending: str) -> tuple[Any, str] | None:
    """Return the folder and the name of the file to write to, or None if the flag is not set."""
    if flag.value is None:
        return None
    if not flag.value.endswith(ending):
        raise UsageError(f"--{flag.name}={flag.value} must end in {ending}")
    from rmt_tpu.storage import writable_file

    with flag_errors(flag.name):
        return writable_file(flag.value)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(rows: list[Any], output: Any, picture: Any) -> None:
    from rmt_tpu.analysis import decode_report
    from rmt_tpu.estimator import versions
    from rmt_tpu.runs.plots import save_picture
    from rmt_tpu.tables import fitted

    version_text = ", ".join(f"{name} {version}" for name, version in versions().items())
    method = decode_report.how(rows)
    text = decode_report.text(rows, version_text, _LARGEST.value)
    if _JSON.value:
        values = {"how": method, "versions": versions(), "rows": [row.json() for row in rows]}
        print(json.dumps(values | {"ratios": decode_report.ratios(rows)}, indent=1))
    else:
        terminal = sys.stdout.isatty()
        print(fitted(text, shutil.get_terminal_size().columns) if terminal else text)
    if output:
        folder, name = output
        folder.write(name, text.encode())
        _log(f"table: {folder}/{name}")
    if picture:
        folder, name = picture
        path = save_picture(decode_report.figure(rows, version_text), folder, name)
        _log(f"picture: {path}")


def run() -> None:
    """Run `main` as a program; `rmt-decode-report` calls this function."""
    program.start(main, only_printed=True)


if __name__ == "__main__":
    run()
