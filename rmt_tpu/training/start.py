"""Where a run begins: at random, with another's weights or state, or at its own checkpoint."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from rmt_tpu import data
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.config import RunConfig
from rmt_tpu.distributed import processes
from rmt_tpu.errors import UsageError, of_flag
from rmt_tpu.runs import workdir
from rmt_tpu.runs.growth import restore_grown
from rmt_tpu.runs.origin import Copied, Origin
from rmt_tpu.storage import Folder
from rmt_tpu.training.run import Run
from rmt_tpu.training.step import TrainState


class Start(NamedTuple):
    """Where a run goes on: its state, steps done, windows of data read, and its branch.

    Attributes:
      branch: the step that the run has last gone back to, if it has.
      is_saved: whether a checkpoint of the run has this state, or it is that before the first step.
    """

    state: TrainState
    step: int
    windows_read: int
    branch: int | None = None
    is_saved: bool = True


def restore_or_init(
    config: RunConfig,
    run: Run,
    folder: Folder,
    checkpoints: Checkpointer,
    tokenizer: data.Tokenizer,
    data_checksum: int,
    origin: Origin | Copied | None,
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
      origin: whose weights or state a run that begins takes, if any.
      back: the checkpoint to go back to; None is the newest undamaged one.
      say: is told in one line what is taken.

    Raises:
      UsageError: the checkpoint is of another run, text or tokenizer, or does not fit the model.
      RunError: no checkpoint can be read.
    """
    own = tokenizer, data_checksum
    if not processes.from_first(checkpoints.steps(), "the run's checkpoints"):
        if isinstance(origin, Copied):
            from_there = f"--init_from={origin.folder}"
            start = _at(config, run, origin, from_there, *own, None)
            say(f"going on as {origin.folder} from step {start.step}, with its optimizer")
            return start._replace(branch=None, is_saved=False)
        state = run.jitted_init()()
        if origin is not None:
            params = origin.taken(state.params, run.state_shardings.params, say)
            state = run.with_copies(state._replace(params=params))
        return Start(state, 0, 0)
    if processes.is_first():
        workdir.check_tokenizer(folder, tokenizer, config.data.tokenizer)
    saved = _Saved(folder, checkpoints, config)
    start = _at(config, run, saved, f"--workdir={folder}", *own, back)
    return start if back is None else start._replace(branch=back)


class _Saved(NamedTuple):
    """A run's checkpoints, and the config that is beside them; `Copied` is one too."""

    folder: Folder
    checkpoints: Checkpointer
    config: RunConfig


def _at(
    config: RunConfig,
    run: Run,
    saved: _Saved | Copied,
    flag: str,
    tokenizer: data.Tokenizer,
    data_checksum: int,
    step: int | None,
) -> Start:
    """The state at a checkpoint, of a run that `flag` names: of this text, tokenizer and config."""
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        run.abstract._replace(copies={}),
        run.state_shardings._replace(copies={}),
    )
    name, _, _ = flag.partition("=")
    step, state, meta = restore_grown(saved.checkpoints, like, config.model, step)
    with of_flag(name.removeprefix("--")):
        workdir.check_saved_with(saved.folder, saved.config, step, meta)
    if meta.get("tokenizer", tokenizer.fingerprint()) != tokenizer.fingerprint():
        raise UsageError(
            f"--tokenizer={config.data.tokenizer} is another one than that of checkpoint {step} in "
            f"{flag}; give the same one, or another {name}"
        )
    if meta["data_checksum"] != data_checksum:
        raise UsageError(
            f"--data={config.data.source} does not give the tokens that the run in {flag} was "
            f"trained on up to step {step}: a file, the tokenizer or (for stdlib) the Python has "
            f"changed; give the same ones, or another {name}"
        )
    return Start(run.with_copies(state), step, meta["windows_read"], meta.get("branch"))


def meta_of(
    config: RunConfig,
    tokenizer: data.Tokenizer,
    data_checksum: int,
    windows_read: int,
    branch: int | None,
) -> dict[str, Any]:
    """What a checkpoint says beside its arrays: of which run it is, and where in the text."""
    meta = {"windows_read": windows_read, "data_checksum": data_checksum}
    meta |= workdir.saved_with(config, tokenizer)
    return meta if branch is None else meta | {"branch": branch}


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


def origin_of(config: RunConfig, folder: Folder) -> Origin | Copied | None:
    """What a run that begins is to take; one that goes on does not look for it any more.

    Raises:
      UsageError: it cannot be taken, see `Origin` and `Copied`.
    """
    if not config.train.init_from or workdir.open_checkpoints(folder).steps():
        return None
    if config.train.with_optimizer:
        return Copied(config)
    return Origin(config.train.init_from, config.model)
