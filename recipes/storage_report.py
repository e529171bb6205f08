"""Measure how long this machine takes to save and restore checkpoints, compared with Orbax.

    python -m recipes.storage_report --folder=/mnt/disk/scratch --gigabytes=1 --output=reports
    python -m recipes.storage_report --store=/mnt/disk/books

The state is a set of random float32 arrays, whose values are distributed like weights.
`Checkpointer` and Orbax's CheckpointManager save and restore it in turn, each with and without
compression. Each measurement saves the state, waits until the save is finished, and restores it
into new arrays, which must equal the saved ones bit for bit. The tables show medians over --rounds.
On gs://, only `Checkpointer` is measured. Restored files may come from the page cache. The command
writes a table, JSON and a picture to --output.

With --store, the command measures how fast random windows of a token store are read. It also
measures how long train steps wait for them, at a million tokens per second.
"""

import contextlib
import json
import os
import shutil
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags, logging

from recipes import program
from rmt_tpu.errors import RunError, UsageError, flag_errors

_FOLDER = flags.DEFINE_string("folder", None, "folder for temporary checkpoints, local or gs://")
_GIGABYTES = flags.DEFINE_float("gigabytes", 1.0, "size of the float32 state, in 10^9 bytes")
_ARRAYS = flags.DEFINE_integer("arrays", 16, "number of arrays in the state")
_ROUNDS = flags.DEFINE_integer(
    "rounds", 3, "number of times to save and restore each kind of checkpoint"
)
_ORBAX = flags.DEFINE_bool("orbax", True, "measure Orbax too; this needs a local folder")
_STORE = flags.DEFINE_string(
    "store", None, "measure reads of this token store, instead of checkpoints"
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 256, "number of windows (token sequences) per batch, with --store"
)
_SEQ_LEN = flags.DEFINE_integer("seq_len", 1024, "number of tokens per window, with --store")
_SECONDS = flags.DEFINE_float(
    "seconds", 10.0, "seconds for which --store is read, first without and then with train steps"
)
_OUTPUT = flags.DEFINE_string("output", "reports", "folder for the table, JSON and picture")


class Times(NamedTuple):
    """The durations of one save and restore in seconds, and the stored bytes.

    Attributes:
      blocked: seconds until the save call returns and the caller may change the arrays.
      save: seconds from the save call until the checkpoint is committed.
      restore: seconds that restoring the arrays takes.
      stored_bytes: the total size of the files in the folder; None if the folder is not local.
    """

    blocked: float
    save: float
    restore: float
    stored_bytes: int | None


class Row(NamedTuple):
    """The median results of one kind of checkpoint."""

    name: str
    times: Times


# A function that saves the state in a folder and restores it. It returns the `blocked`, `save` and
# `restore` seconds (see `Times`) and the restored state.
Kind = Callable[[Any, str], tuple[float, float, float, Any]]


def main() -> int:
    """Time checkpoints in a folder, or reads of a token store, and return 0."""
    if bool(_STORE.value) == bool(_FOLDER.value):
        raise UsageError("--folder (for checkpoints) or --store (a token store to read) is needed")
    if _STORE.value:
        return _read_store()
    for name, value in (("gigabytes", _GIGABYTES), ("arrays", _ARRAYS), ("rounds", _ROUNDS)):
        if not value.value > 0:
            raise UsageError(f"--{name}={value.value} must be positive")
    folder, output = (_writable_folder(flag) for flag in (_FOLDER, _OUTPUT))
    _check_space(folder.local_path)
    kinds: dict[str, Kind] = {
        "Checkpointer": lambda state, root: _ours(state, root, "none"),
        "Checkpointer, zstd": lambda state, root: _ours(state, root, "zstd"),
    }
    if _ORBAX.value and folder.local_path:
        orbax = _import_orbax()
        kinds |= {
            "Orbax, zstd (its default)": lambda state, root: _orbax(orbax, state, root, True),
            "Orbax": lambda state, root: _orbax(orbax, state, root, False),
        }
    _write(output, _measure(kinds, folder))
    return 0


def _read_store() -> int:
    from rmt_tpu.analysis.reading import reading_report

    sizes = {"batch_size": _BATCH_SIZE.value, "seq_len": _SEQ_LEN.value}
    try:
        r = reading_report(_STORE.value, **sizes, seconds=_SECONDS.value)
    except UsageError as error:
        message = str(error).replace("--data=", "--store=")
        raise UsageError(message) from None
    print(
        f"{_STORE.value}, batches of {_BATCH_SIZE.value} x {_SEQ_LEN.value} tokens: "
        f"{r.tokens_per_second:,.0f} tokens/s without steps; steps of a million tokens/s waited "
        f"{r.waited:.3%} of {r.seconds:.1f} s"
    )
    return 0


def _writable_folder(flag: flags.FlagHolder) -> Any:
    from rmt_tpu import storage

    with flag_errors(flag.name):
        folder = storage.open_folder(flag.value)
        folder.check(write=True)
    return folder


def _check_space(path: Path | None) -> None:
    # The disk needs space for two checkpoints while the previous one is being deleted.
    needed = 2.2e9 * _GIGABYTES.value
    if path and (free := shutil.disk_usage(path).free) < needed:
        raise UsageError(
            f"--folder={_FOLDER.value} has {free / 1e9:.1f} GB free, but --gigabytes="
            f"{_GIGABYTES.value:g} needs {needed / 1e9:.1f} GB"
        )


def _import_orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError:
        raise UsageError(
            "Orbax is not installed; pip install orbax-checkpoint, or give --noorbax"
        ) from None
    # Orbax logs many messages, and its import raises the verbosity of absl's logging.
    logging.set_verbosity(logging.WARNING)
    return orbax.checkpoint


def _measure(kinds: dict[str, Kind], folder: Any) -> list[Row]:
    import jax
    import numpy as np

    state = _state()
    measured: dict[str, list[Times]] = {name: [] for name in kinds}
    # The kinds of checkpoint take turns, so that other load on the machine affects all of them.
    for number in range(_ROUNDS.value):
        for name, kind in kinds.items():
            scratch = f"storage-report-{uuid.uuid4().hex[:8]}"
            try:
                blocked, saved, restored, restored_state = kind(state, str(folder.child(scratch)))
                times = Times(blocked, saved, restored, _stored_bytes(folder, scratch))
            finally:
                folder.delete_folder(scratch)
            if not jax.tree.all(jax.tree.map(np.array_equal, state, restored_state)):
                raise RunError(f"{name}: the restored arrays differ from the saved arrays")
            measured[name].append(times)
            print(f"round {number + 1}, {name}: {saved:.2f} s, {restored:.2f} s", file=sys.stderr)
    return [Row(name, _median(times)) for name, times in measured.items()]


def _median(times: list[Times]) -> Times:
    *seconds, stored = zip(*times, strict=True)
    return Times(*map(statistics.median, seconds), stored[0])


def _state() -> dict[str, Any]:
    import jax
    import numpy as np

    rows = max(1, round(_GIGABYTES.value * 1e9 / 4 / 1024 / _ARRAYS.value))
    rng = np.random.default_rng(0)
    draw = lambda: jax.device_put(rng.standard_normal((rows, 1024), np.float32))
    return jax.block_until_ready({f"layer_{i:03d}": draw() for i in range(_ARRAYS.value)})


def _abstract(state: Any) -> Any:
    import jax

    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.tree.map(shape, state)


def _ours(state: Any, root: str, compression: str) -> tuple[float, float, float, Any]:
    import jax

    from rmt_tpu.checkpoint import Checkpointer

    checkpoints = Checkpointer(root, compression=compression)
    started = time.monotonic()
    checkpoints.begin_save(1, state, {})
    blocked = time.monotonic()
    checkpoints.wait()
    saved = time.monotonic()
    restored = jax.block_until_ready(checkpoints.restore(_abstract(state))[1])
    return blocked - started, saved - started, time.monotonic() - saved, restored


def _orbax(orbax: Any, state: Any, root: str, compress: bool) -> tuple[float, float, float, Any]:
    import jax

    options = orbax.CheckpointManagerOptions(enable_async_checkpointing=True)
    handler = orbax.PyTreeCheckpointHandler(use_compression=compress)
    absolute = Path(root).absolute()
    with orbax.CheckpointManager(absolute, options=options, item_handlers=handler) as manager:
        started = time.monotonic()
        manager.save(1, args=orbax.args.PyTreeSave(state))
        blocked = time.monotonic()
        manager.wait_until_finished()
        saved = time.monotonic()
        abstract = _abstract(state)
        restore_args = orbax.checkpoint_utils.construct_restore_args(abstract)
        arguments = orbax.args.PyTreeRestore(abstract, restore_args=restore_args)
        restored = jax.block_until_ready(manager.restore(1, args=arguments))
        return blocked - started, saved - started, time.monotonic() - saved, restored


def _stored_bytes(folder: Any, name: str) -> int | None:
    if folder.local_path is None:
        return None
    return sum(p.stat().st_size for p in (folder.local_path / name).rglob("*") if p.is_file())


def _write(output: Any, rows: list[Row]) -> None:
    import jax

    gigabytes = _GIGABYTES.value
    where = (
        f"{gigabytes:g} GB of float32 in {_ARRAYS.value} arrays, {_FOLDER.value}, "
        f"{os.cpu_count()} CPU cores, {jax.default_backend()} devices, medians of {_ROUNDS.value}"
    )
    text = f"# Checkpoints\n\n{where}. {_versions()}.\n\n{_table(rows, gigabytes)}"
    values = {
        "gigabytes": gigabytes,
        "arrays": _ARRAYS.value,
        "rounds": _ROUNDS.value,
        "cpu_cores": os.cpu_count(),
        "versions": _versions(),
        "rows": [{"name": row.name, **row.times._asdict()} for row in rows],
    }
    print(text)
    output.write("storage_report.md", text.encode())
    output.write("storage_report.json", (json.dumps(values, indent=1) + "\n").encode())
    print(f"picture: {_draw(output, rows, where)}")


def _table(rows: list[Row], gigabytes: float) -> str:
    lines = [
        "| | save, s | GB/s | blocked, s | of the save | restore, s | GB/s | GB stored |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, t in rows:
        stored = "" if t.stored_bytes is None else f"{t.stored_bytes / 1e9:.3f}"
        lines.append(
            f"| {name} | {t.save:.2f} | {gigabytes / t.save:.2f} | {t.blocked:.4f} | "
            f"{t.blocked / t.save:.2%} | {t.restore:.2f} | {gigabytes / t.restore:.2f} | {stored} |"
        )
    return "\n".join(lines) + "\n"


def _draw(output: Any, rows: list[Row], where: str) -> str:
    from matplotlib.figure import Figure

    from rmt_tpu.runs.plots import save_picture

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, part in zip(figure.subplots(1, 2, sharey=True), ("save", "restore"), strict=True):
        seconds = [getattr(row.times, part) for row in rows]
        bars = axes.barh([row.name for row in rows], seconds, color="tab:blue")
        axes.bar_label(bars, fmt="%.2f s", padding=3)
        axes.set(title=part, xlabel="seconds", xlim=(0, 1.25 * max(seconds)))
    axes.invert_yaxis()  # The two plots share their y axis, so one call is enough.
    figure.suptitle(where, fontsize="small")
    return save_picture(figure, output, "storage_report.png")


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    versions = []
    for package in ("jax", "tensorstore", "orbax-checkpoint"):
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return ", ".join(versions)


def run() -> None:
    """Run `main` as a program; `rmt-storage-report` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
