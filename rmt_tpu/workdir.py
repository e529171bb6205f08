"""The run folder: config, tokenizer, metrics, checkpoints, plots and samples of one run."""

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from rmt_tpu import distributed, overrides
from rmt_tpu.config import RunConfig
from rmt_tpu.errors import UsageError
from rmt_tpu.roll_call import listed

# What may differ when a run is resumed: it changes no number of the curve.
_FREE = (
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.eval_every",
    "train.eval_batches",
    "train.sample_prompt",
    "train.sample_tokens",
)

# A network file system may show a new file late.
_SHARED_SECONDS = 10.0


def open_workdir(workdir: str | Path, config: RunConfig) -> None:
    """Make the folder this run's: write its config, or check that it is the same run's.

    Of several processes the first one does, and all check that they see the same folder.

    Raises:
      UsageError: the folder cannot be written, or holds a run with another config, or one whose
        config is damaged; or it is another folder for another process.
    """
    path = Path(workdir, "config.json")
    if distributed.is_first():
        _write_config(workdir, path, overrides.to_json(config))
    if distributed.num_processes() > 1:
        _check_shared(workdir, path.parent)


def _write_config(workdir: str | Path, path: Path, new: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _check_same(workdir, _read(path), new)
        write_atomically(path, json.dumps(new, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"--workdir={workdir} cannot be written: {error.strerror}") from None


def _check_shared(workdir: str | Path, folder: Path) -> None:
    mark = folder / f".seen-{distributed.from_first(uuid.uuid4().hex, 'the run folder')}"
    if distributed.is_first():
        mark.touch()
    distributed.exchange("", "the run folder, written")
    until = time.monotonic() + _SHARED_SECONDS
    while not (seen := mark.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    answers = distributed.exchange("seen" if seen else "", "the run folder, looked into")
    if distributed.is_first():
        mark.unlink()
    if blind := [process for process, answer in enumerate(answers) if not answer]:
        raise UsageError(
            f"--workdir={workdir} is another folder on {listed(blind)} than on process 0; give one "
            "on a file system that all hosts share"
        )


def read_config(workdir: str | Path) -> RunConfig:
    """The config of the run in a folder.

    Raises:
      UsageError: there is no run, or its config is not one of this version.
    """
    path = Path(workdir, "config.json")
    if not path.exists():
        raise UsageError(f"--workdir={workdir} holds no run: there is no {path}")
    try:
        return overrides.from_json(RunConfig, _read(path))
    except UsageError as error:
        raise UsageError(f"--workdir={workdir}: {error}") from None


def load(workdir: str | Path, step: int | None = None):
    """The trained decoder of a run folder, and its tokenizer.

    Args:
      workdir: of `recipes.train`.
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

    config = read_config(workdir)
    graphdef, abstract = nnx.split(
        nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0))), nnx.Param
    )
    checkpoints = Checkpointer(str(Path(workdir, "checkpoints")))
    like = {"params": nnx.to_pure_dict(abstract)}
    _, state, _ = checkpoints.restore(like, step, partial=True)
    return nnx.merge(graphdef, state["params"]), load_saved(workdir)


def write_atomically(path: Path, text: str) -> None:
    """The whole of `text`, or what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(
            f"{path} is damaged: it is not JSON: {error}. Put it back, or delete it and give the "
            "run's own flags again"
        ) from None


def _check_same(workdir: str | Path, old: Any, new: Any) -> None:
    different = [
        line for line in overrides.differences(old, new) if line.split(" ", 1)[0] not in _FREE
    ]
    if different:
        listed, more = different[:8], len(different) - 8
        listed += [f"and {more} more"] if more > 0 else []
        raise UsageError(
            f"--workdir={workdir} holds a run with another config: {'; '.join(listed)}. "
            "Give the same flags to resume it, or another --workdir"
        )
