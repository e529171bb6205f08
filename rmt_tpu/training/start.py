"""Where a run begins: at random, with another's weights, or at a checkpoint of its own."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from rmt_tpu import data
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.config import RunConfig
from rmt_tpu.distributed import processes
from rmt_tpu.errors import UsageError, of_flag
from rmt_tpu.storage import Folder
from rmt_tpu.training import workdir
from rmt_tpu.training.growth import restore_grown
from rmt_tpu.training.origin import Origin
from rmt_tpu.training.run import Run
from rmt_tpu.training.step import TrainState


class Start(NamedTuple):
    """Where a run goes on: its state, steps done, windows of data read, and its branch.

    Attributes:
      branch: the step that the run has last gone back to, if it has.
    """

    state: TrainState
    step: int
    windows_read: int
    branch: int | None = None


def restore_or_init(
    config: RunConfig,
    run: Run,
    folder: Folder,
    checkpoints: Checkpointer,
    tokenizer: data.Tokenizer,
    data_checksum: int,
    origin: Origin | None,
    back: int | None,
    say: Callable[[str], None],
) -> Start:
    """The start of a run that has no checkpoint, or its state at one.

    Args:
      config: of the run.
      run: it, before its first step.
      folder: the run folder.
      checkpoints: of the run.
      tokenizer: of the run.
      data_checksum: of its tokens.
      origin: whose weights a run that begins takes, if any.
      back: the checkpoint to go back to; None is the newest undamaged one.
      say: is told in one line what is taken.

    Raises:
      UsageError: the checkpoint is of another run, text or tokenizer, or does not fit the model.
      RunError: no checkpoint can be read.
    """
    if not processes.from_first(checkpoints.steps(), "the run's checkpoints"):
        state = jax.jit(run.init, out_shardings=run.state_shardings)()
        if origin is not None:
            params = origin.taken(run, state.params, say)
            state = run.with_copies(state._replace(params=params))
        return Start(state, 0, 0)
    if processes.is_first():
        workdir.check_tokenizer(folder, tokenizer, config.data.tokenizer)
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        run.abstract._replace(copies={}),
        run.state_shardings._replace(copies={}),
    )
    step, state, meta = restore_grown(checkpoints, like, config.model, back)
    with of_flag("workdir"):
        workdir.check_saved_with(folder, config, step, meta)
    if meta.get("tokenizer", tokenizer.fingerprint()) != tokenizer.fingerprint():
        raise UsageError(
            f"--tokenizer={config.data.tokenizer} is another one than that of checkpoint {step} in "
            f"--workdir={folder}; give the same one, or another --workdir"
        )
    if meta["data_checksum"] != data_checksum:
        raise UsageError(
            f"--data={config.data.source} does not give the tokens that the run in "
            f"--workdir={folder} was trained on up to step {step}: a file, the tokenizer "
            "or (for stdlib) the Python has changed; give the same ones, or another --workdir"
        )
    branch = meta.get("branch") if back is None else back
    return Start(run.with_copies(state), step, meta["windows_read"], branch)


def go_back(
    folder: Folder, checkpoints: Checkpointer, step: int, say: Callable[[str], None]
) -> None:
    """Drops the checkpoints after `step`, from which the run in `folder` begins again."""
    later = [str(other) for other in checkpoints.steps() if other > step]
    checkpoints.go_back(step)
    dropped = "there is no later checkpoint"
    if later:
        dropped = f"checkpoints {', '.join(later)} are dropped, and metrics and samples after it"
    say(f"going back: {folder} begins again from step {step}; {dropped}")


def origin_of(config: RunConfig, folder: Folder) -> Origin | None:
    """What a run that begins is to take; one that goes on does not look for it any more."""
    if not config.train.init_from or workdir.open_checkpoints(folder).steps():
        return None
    return Origin(config.train.init_from, config.model)
