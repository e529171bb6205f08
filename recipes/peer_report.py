"""Compare our train step with MaxText's, as compiled for TPUs that need not be present.

    python -m recipes.peer_report --presets=llama-374m,llama-1.2b --seq_lens=2048,8192 \\
        --topologies=v5e,v5p,v6e,v5e:2x2 --workdir=runs/peers

For each model, length and topology, the command compiles MaxText's own train step and ours for the
same batch. Several choices of rematerialization, compiler options, weights and attention kernels
are tried on each side, and the fastest step counts. The report shows memory, HBM traffic, matrix
products, attention, collectives, launches and the time of the step. Times are estimates from the
compiler's output (see docs/benchmarks/peers.md), not measurements.

The command needs Python 3.12, the TPU compiler (`pip install 'jax[tpu]'`) and MaxText
(`pip install 'rmt_tpu[peers]'`). A step takes one to four minutes to compile, and MaxText's for v6e
about forty. Each finished step is kept in --workdir, so that the same command continues after an
interruption.
"""

import importlib.metadata
import importlib.util
import json
import math
import shutil
import sys
from typing import Any

from absl import flags

from recipes import common, program
from rmt_tpu.config.presets import presets
from rmt_tpu.errors import RunError, UsageError, flag_errors, unknown

_PRESETS = flags.DEFINE_list(
    "presets", ["llama-374m", "llama-1.2b"], "names of the presets of Llamas"
)
_SEQ_LENS = flags.DEFINE_list("seq_lens", ["2048", "8192"], "numbers of tokens per sequence")
_TOPOLOGIES = flags.DEFINE_list(
    "topologies",
    ["v5e", "v5p", "v6e", "v5e:2x2"],
    "TPUs to compile for; a name without a layout, like v5e, means one chip",
)
_TOKENS = flags.DEFINE_integer(
    "tokens", 8192, "number of tokens per step and chip", lower_bound=1, upper_bound=2**24
)
_COMPILES = flags.DEFINE_integer(
    "compiles", 6, "maximum number of choices per side and row", lower_bound=1, upper_bound=6
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/peers", "folder for the report and the finished steps, local or gs://"
)
common.define_list_presets()


def main() -> int:
    """Compile the steps of both sides, write the report, and return 0."""
    rows = _rows()
    _check_installed()
    from rmt_tpu.analysis import peers
    from rmt_tpu.estimator import CompilerError, versions
    from rmt_tpu.storage import open_folder
    from rmt_tpu.tables import fitted

    with flag_errors("workdir"):
        folder = open_folder(_WORKDIR.value)
        folder.check(write=True)
    found: list[dict[str, Any]] = []
    try:
        for i, (row, target) in enumerate(rows):
            _log(f"row {i + 1} of {len(rows)}: {row.topology} {row.preset} {row.seq_len} tokens")
            steps = {
                side: peers.sweep(row, side, target, folder, _COMPILES.value, _log)
                for side in peers.SIDES
            }
            found.append(peers.row_json(row, target, steps))
    except CompilerError as error:
        raise RunError(str(error)) from None
    used = versions() | {"maxtext": importlib.metadata.version("maxtext")}
    how = ", ".join(f"{name} {version}" for name, version in used.items())
    text = f"{peers.table(found)}\n\nEstimated, not measured: {how}.\n"
    values = {"versions": used, "rows": found}
    folder.write("peers.json", (json.dumps(values, indent=1) + "\n").encode())
    folder.write("peers.md", text.encode())
    print(fitted(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)
    _log(f"report: {folder}/peers.md")
    return 0


def _rows() -> list[tuple[Any, Any]]:
    """Return the rows of the report, each with its target.

    Raises:
      UsageError: a flag has an illegal value.
    """
    from rmt_tpu.analysis import maxtext, peers

    for name in _PRESETS.value:
        if name not in presets():
            raise UsageError(unknown("--presets", name, presets()))
    lengths = [_number(text) for text in _SEQ_LENS.value]
    targets = [_target(text) for text in _TOPOLOGIES.value]
    rows = []
    for target in targets:
        devices = math.prod(target.shape)
        for name in _PRESETS.value:
            for length in lengths:
                batch = devices * max(1, _TOKENS.value // length)
                row = peers.Row(name, length, batch, target.topology)
                try:
                    maxtext.overrides_of(row.config(devices), devices, "default", "full")
                except UsageError as error:
                    raise UsageError(f"--presets={name}: {error}") from None
                rows.append((row, target))
    return rows


def _number(text: str) -> int:
    """Return a sequence length, which the blocks of MaxText's attention have to divide."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 128 <= number <= 2**20 or number & (number - 1):
        raise UsageError(f"--seq_lens={text} must be a power of two from 128 to 1,048,576")
    return number


def _target(text: str) -> Any:
    """Return the target for a topology, or for one chip if the text is the name of a TPU."""
    from rmt_tpu.estimator import TARGETS, parse_topology

    name, colon, _ = text.partition(":")
    if name not in TARGETS:
        raise UsageError(unknown("--topologies", name, TARGETS))
    if not colon:
        text = f"{name}:{'x'.join('1' for _ in TARGETS[name].shape)}"
    try:
        return parse_topology(text)
    except ValueError as value_and_reason:
        raise UsageError(f"--topologies={value_and_reason}") from None


def _check_installed() -> None:
    """Check that MaxText is installed.

    Raises:
      RunError: it is not, or it is another version than the one whose interfaces are used.
    """
    from rmt_tpu.analysis.maxtext import VERSION

    if sys.version_info < (3, 12):
        version = ".".join(map(str, sys.version_info[:2]))
        raise RunError(f"MaxText needs Python 3.12 or later, and this is Python {version}")
    if importlib.util.find_spec("maxtext") is None:
        raise RunError("MaxText is not installed; pip install 'rmt_tpu[peers]' installs it")
    if (installed := importlib.metadata.version("maxtext")) != VERSION:
        raise RunError(
            f"maxtext {installed} is installed, and this command uses the interfaces of "
            f"{VERSION}; pip install maxtext=={VERSION} installs it"
        )


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run() -> None:
    """Run `main` as a program; `rmt-peer-report` calls this function."""
    program.start(main, only_printed=True)


if __name__ == "__main__":
    run()
