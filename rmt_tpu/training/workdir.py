"""The run folder: config, tokenizer, metrics, checkpoints, plots and samples of one run."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.distributed import processes
from rmt_tpu.distributed.roll_call import listed
from rmt_tpu.errors import UsageError, of_flag
from rmt_tpu.storage import Folder, Location, open_folder

CONFIG = "config.json"
CHANGES = "config_changes.jsonl"

# What may differ when a run is resumed: it changes no number of the curve, beyond the order in
# which devices add up.
_FREE = frozenset(
    f"train.{name}"
    for name in (
        *("mesh", "microbatches", "virtual_stages"),
        *("log_every", "eval_every", "eval_batches", "sample_prompt", "sample_tokens"),
        *("checkpoint_every", "checkpoint_seconds", "checkpoint_compression"),
        *("keep_checkpoints", "keep_every", "keep_best", "max_bad_steps"),
    )
)
# What may differ if that is wanted: the state fits, and the curve goes on as another one.
_CHANGEABLE = (
    "train.steps",
    "train.batch_size",
    "train.accumulate",
    "train.z_loss",
    "train.optimizer.",
    "model.compute_dtype",
    "model.remat",
    "model.store.dtype",
    "model.store.key_dim",
)

# A network file system may show a new file late.
_SHARED_SECONDS = 10.0


def open_workdir(workdir: Location, config: RunConfig, *, change_config: bool = False) -> list[str]:
    """Make the folder this run's if it is nobody's, or check that it is the same run's.

    Of several processes the first one does, and all check that they see the same folder.

    Args:
      workdir: of the run.
      config: it is started with.
      change_config: let a run go on with another batch size, optimizer, number of steps, dtype or
        a wider D_k.

    Returns:
      What is so to be changed, on the first process; `write_config` does it.

    Raises:
      UsageError: the folder cannot be written, or holds a run with another config, or one whose
        config is damaged; or it is another folder for another process.
    """
    folder, changes = open_folder(workdir), []
    if processes.is_first():
        check_access(folder, write=True)
        found = folder.read(CONFIG)
        if found is None:
            write_config(folder, config)
        else:
            # Through the config's classes: fields that came later have their defaults.
            old = overrides.to_json(_parsed(folder, found.data))
            changes = _check_same(folder, old, overrides.to_json(config), change_config)
    if processes.num_processes() > 1:
        _check_shared(folder)
    return changes


def write_config(folder: Folder, config: RunConfig, changes: Sequence[str] = ()) -> None:
    """Replaces the run's config, once its state is known to fit; notes what that changes."""
    if changes:
        note = json.dumps({"time": time.time(), "changes": list(changes)})
        folder.append(CHANGES, f"{note}\n".encode())
    folder.write(CONFIG, (json.dumps(overrides.to_json(config), indent=2) + "\n").encode())


def check_access(folder: Folder, *, write: bool = False) -> None:
    """
    Raises:
      UsageError: the run folder cannot be read, or written to.
    """
    with of_flag("workdir"):
        folder.check(write=write)


def _check_shared(folder: Folder) -> None:
    mark = f".seen-{processes.from_first(uuid.uuid4().hex, 'the run folder')}"
    if processes.is_first():
        folder.write(mark, b"")
    processes.exchange("", "the run folder, written")
    until = time.monotonic() + _SHARED_SECONDS
    while not (seen := folder.read(mark) is not None) and time.monotonic() < until:
        time.sleep(0.1)
    answers = processes.exchange("seen" if seen else "", "the run folder, looked into")
    if processes.is_first():
        folder.delete(mark)
    if blind := [process for process, answer in enumerate(answers) if not answer]:
        raise UsageError(
            f"--workdir={folder} is another folder on {listed(blind)} than on process 0; give one "
            "on a file system that all hosts share, or gs://"
        )


def read_config(workdir: Location) -> RunConfig:
    """The config of the run in a folder.

    Raises:
      UsageError: there is no run, or its config is not one of this version.
    """
    with of_flag("workdir"):
        folder = open_folder(workdir)
    check_access(folder)
    found = folder.read(CONFIG)
    if found is None:
        raise UsageError(f"--workdir={folder} holds no run: there is no {folder}/{CONFIG}")
    return _parsed(folder, found.data)


def load(workdir: Location, step: int | None = None):
    """The trained decoder of a run folder, and its tokenizer.

    Args:
      workdir: of `recipes.train`, local or gs://.
      step: of the checkpoint; None is the last good one.

    Returns:
      `(decoder, tokenizer)`.

    Raises:
      UsageError: there is no run in the folder, or no such step.
      RunError: no checkpoint of the run can be read.
    """
    from flax import nnx

    from rmt_tpu.checkpoint import Checkpointer
    from rmt_tpu.data import load_saved
    from rmt_tpu.decoder import Decoder
    from rmt_tpu.training.growth import restore_grown

    config = read_config(workdir)
    folder = open_folder(workdir)
    graphdef, abstract = nnx.split(
        nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0))), nnx.Param
    )
    checkpoints = Checkpointer(folder.child("checkpoints"))
    like = {"params": nnx.to_pure_dict(abstract)}
    _, state, _ = restore_grown(checkpoints, like, config.model, step, partial=True)
    return nnx.merge(graphdef, state["params"]), load_saved(folder)


def _parsed(folder: Folder, content: bytes) -> RunConfig:
    try:
        values = overrides.parse_json(content)
    except ValueError as error:
        raise UsageError(
            f"{folder}/{CONFIG} is damaged: it is not JSON: {error}. Put it back, or delete it and "
            "give the run's own flags again"
        ) from None
    try:
        return overrides.from_json(RunConfig, values)
    except UsageError as error:
        raise UsageError(f"--workdir={folder}: {error}") from None


def _check_same(folder: Folder, old: Any, new: Any, change_config: bool) -> list[str]:
    """What differs in a way that was asked for; raises for any other way."""
    lines = {line: line.split(" ", 1)[0] for line in overrides.differences(old, new)}
    different = [line for line, path in lines.items() if path not in _FREE]
    if not different:
        return []
    fixed = [line for line in different if not lines[line].startswith(_CHANGEABLE)]
    if change_config and not fixed:
        return different
    what = fixed if change_config else different
    shown, more = what[:8], len(what) - 8
    shown += [f"and {more} more"] if more > 0 else []
    ways = "Give the same flags to resume it, " + (
        "" if fixed else "--change_config to go on with these, "
    )
    raise UsageError(
        f"--workdir={folder} holds a run with another config: {'; '.join(shown)}. "
        f"{ways}or another --workdir"
    )
