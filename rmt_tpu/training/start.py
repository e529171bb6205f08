"""The initial state of a run: random, taken from another run, or from its own checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from rmt_tpu import data
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.config import SHARE_UNITS, START_FIELDS, RunConfig, overrides
from rmt_tpu.data.datasets import Datasets, chat_template_of, load_datasets
from rmt_tpu.data.mixture import only_text
from rmt_tpu.distributed import processes
from rmt_tpu.errors import UsageError, flag_errors
from rmt_tpu.runs import text_ends, workdir
from rmt_tpu.runs.growth import restore_grown
from rmt_tpu.runs.warm_start import ContinuedRun, WarmStart
from rmt_tpu.storage import Folder, open_folder
from rmt_tpu.training import start_comparison
from rmt_tpu.training.run import PreparedRun
from rmt_tpu.training.spikes import GoBack, SpikeState
from rmt_tpu.training.step import TrainState

# The fields of `DataConfig` that select the tokens of a run's only text.
_TEXT_FIELDS = ("source", "text_field", "format", "chat_template", "eval_fraction", "tokenizer")


class Start(NamedTuple):
    """The point from which a run starts or resumes.

    Attributes:
      state: the parameters and optimizer state.
      step: number of steps done.
      windows_read: number of windows of training data read so far.
      branch: the step to which the run last went back at the user's request, or None.
      is_saved: whether the state needs no saving, either because a checkpoint of this run has it or
        because it precedes the first step.
      mixture: the mixture of texts, continued from this point; None without a mixture.
      spikes: the spread of gradient norms up to now.
      unevaluated: what of this step has not been evaluated, because the run was stopped: "loss" on
        held-out text, or "tasks".
    """

    state: TrainState
    step: int
    windows_read: int
    branch: int | None = None
    is_saved: bool = True
    mixture: data.Mixture | None = None
    spikes: SpikeState = SpikeState()
    unevaluated: tuple[str, ...] = ()

    def after(self, back: GoBack | None) -> "Start":
        """Return this start after going back because of a spike; None means no going back.

        The windows up to the spike count as read. The step has been evaluated by then.
        """
        if back is None:
            return self
        spikes = self.spikes._replace(restarts=back.restarts)
        windows_read = max(back.windows_read, self.windows_read)
        start = self._replace(windows_read=windows_read, branch=back.branch, spikes=spikes)
        return start._replace(unevaluated=())


class Text(NamedTuple):
    """The text on which a run is trained.

    Attributes:
      tokenizer: the run's tokenizer.
      checksum: checksum of the tokens for training.
      held_out: a dict from the checksum of each text's tokens for training, as a string, to that
        of its held-out tokens. A run that reads a single text has one entry.
      windows: the training windows.
      mixture: the mixture of texts; None if the run reads a single text.
    """

    tokenizer: data.Tokenizer
    checksum: int
    held_out: Mapping[str, int]
    windows: data.Windows | data.Mixture
    mixture: data.Mixture | None = None


def text_of(tokenizer: data.Tokenizer, datasets: Datasets) -> Text:
    """Return the text of a run that reads `datasets`."""
    train, texts = datasets.train, [(datasets.train, datasets.held_out)]
    mixture = train if isinstance(train, data.Mixture) else None
    if mixture is not None:
        windows = (text.windows for text in mixture.texts)
        texts = list(zip(windows, (mixed.windows for mixed in datasets.mixed), strict=True))
    held_out = {str(own.checksum()): held_out.checksum() for own, held_out in texts}
    return Text(tokenizer, train.checksum(), held_out, train, mixture)


class SavedRun(NamedTuple):
    """A run folder with its checkpoints and config; `ContinuedRun` has the same fields."""

    folder: Folder
    checkpoints: Checkpointer
    config: RunConfig


def restore_or_init(
    run: PreparedRun,
    saved: SavedRun,
    text: Text,
    warm_start: WarmStart | ContinuedRun | None,
    back_step: int | None,
    log: Callable[[str], None],
) -> Start:
    """Return the state from which a run starts or resumes.

    A run without checkpoints starts from `warm_start` or from random parameters. If the parameters
    come from another model, the function prints whether the new model starts as the same function
    as that model (see `start_comparison`). Otherwise the run resumes from one of its checkpoints.

    Args:
      run: the run's functions and shardings.
      saved: the run's folder, checkpoints and config.
      text: the text on which the run is trained.
      warm_start: the run or model whose weights or state a new run takes over, or None.
      back_step: step of the checkpoint to go back to; None means the newest undamaged checkpoint.
      log: a function that prints a line.

    Raises:
      UsageError: the checkpoint is from a different run, text or tokenizer, or does not fit the
        model.
      RunError: no checkpoint can be read, or a new model does not start as its config states.
    """
    folder, checkpoints, config = saved
    if not processes.from_first(checkpoints.steps(), "the run's checkpoints"):
        if isinstance(warm_start, ContinuedRun):
            flag = f"--init_from={warm_start.folder}"
            start = _restore_at(config, run, warm_start, flag, text, None)
            log(f"continuing {warm_start.folder} from step {start.step}, with its optimizer")
            return start._replace(branch=None, is_saved=False, unevaluated=())
        state = run.jitted_init()()
        if warm_start is not None:
            params = warm_start.initial_params(state.params, run.state_shardings.params, log)
            state = run.with_copies(state._replace(params=params))
            start_comparison.report(config, run, warm_start, params, text.windows, log)
        return Start(state, 0, 0, mixture=text.mixture)
    if processes.is_first():
        workdir.check_tokenizer(folder, text.tokenizer, config.data.tokenizer)
    start = _restore_at(config, run, saved, f"--workdir={folder}", text, back_step)
    return start if back_step is None else start._replace(branch=back_step)


def check_step(config: RunConfig, folder: Folder, step: int) -> None:
    """Raise UsageError if the run in `folder` has done more steps than its config asks for."""
    if step > config.train.steps:
        raise UsageError(
            f"train.steps={config.train.steps}: {folder} has a checkpoint of step {step}; "
            f"legal: {step} or more, or an older checkpoint (--from_step)"
        )


def kept_values(config: RunConfig, folder: Folder) -> dict[str, Any]:
    """Return the values in place of "auto" that a run has from its folder.

    They are `workdir.resume_overrides` of the run folder. A run that begins with the optimizer of
    another run (`train.with_optimizer`) has them from that run's folder.
    """
    values = workdir.resume_overrides(folder)
    if values or not config.train.with_optimizer:
        return values
    with flag_errors("init_from"):
        values = workdir.resume_overrides(open_folder(config.train.init_from))
    own = {f"train.{name}" for name in START_FIELDS}
    return {path: value for path, value in values.items() if path not in own}


def _restore_at(
    config: RunConfig,
    run: PreparedRun,
    saved: SavedRun | ContinuedRun,
    flag: str,
    text: Text,
    step: int | None,
) -> Start:
    """Return the state in a checkpoint, after checking that the checkpoint fits this run.

    Args:
      config: the config of this run.
      run: the functions and shardings of this run.
      saved: the run that saved the checkpoint.
      flag: the flag and value that name the folder of `saved`, for error messages.
      text: the text on which this run is trained.
      step: step of the checkpoint; None means the newest undamaged one.
    """
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        run.abstract._replace(copies={}),
        run.state_shardings._replace(copies={}),
    )
    name, _, _ = flag.partition("=")
    step, state, meta = restore_grown(saved.checkpoints, like, config.model, step)
    with flag_errors(name.removeprefix("--")):
        workdir.check_config_meta(saved.folder, saved.config, step, meta)
    fingerprint = text.tokenizer.fingerprint()
    if meta.get("tokenizer", fingerprint) != fingerprint:
        raise UsageError(
            f"--tokenizer={config.data.tokenizer} differs from the tokenizer of checkpoint {step} "
            f"in {flag}; legal: the same tokenizer, or another {name}"
        )
    mixture, read = text.mixture, meta["windows_read"]
    if mixture is not None:
        source = meta["config"]["data"]["source"]
        alone = only_text(source, SHARE_UNITS, meta["data_checksum"])
        mixture = mixture.resumed(read, meta.get("mixture", alone))
    elif "mixture" in meta:
        raise UsageError(
            f"--data={config.data.source}: the run in {flag} was trained on a mixture up to step "
            f"{step}; legal: --mixture='{config.data.source}=1' to continue with this text "
            "alone"
        )
    _check_same_text(config, meta, text, step, flag)
    spikes = SpikeState.of_meta(meta.get("spikes"))
    state = run.with_copies(state)
    start = Start(state, step, read, meta.get("branch"), mixture=mixture, spikes=spikes)
    return start._replace(unevaluated=tuple(meta.get("unevaluated", ())))


def _check_same_text(
    config: RunConfig, meta: Mapping[str, Any], text: Text, step: int, flag: str
) -> None:
    """Check that a run's texts have the tokens that its checkpoint states.

    A mixture itself compares the tokens for training.

    Raises:
      UsageError: the tokens for training or the held-out tokens are others.
    """
    given, what = f"--data={config.data.source}", None
    if text.mixture is None and meta["data_checksum"] != text.checksum:
        what = f"the tokens that the run in {flag} was trained on up to step {step}"
    else:
        # Checkpoints from before 2026-11-30 do not have these checksums.
        held_out = meta.get("held_out", {})
        same = [held_out.get(train, own) == own for train, own in text.held_out.items()]
        if not all(same):
            what = f"the held-out tokens on which the run in {flag} was evaluated"
            if text.mixture is not None:
                given = f"--mixture: {text.mixture.names[same.index(False)]}"
    if what is not None:
        raise UsageError(
            f"{given} does not give {what}: {_changed_text(config, meta)}; legal: the same files "
            f"and versions, or another {flag.partition('=')[0]}"
        )


def _changed_text(config: RunConfig, meta: Mapping[str, Any]) -> str:
    """Return why a run's text differs from that of a checkpoint, from the configs of the two."""
    pair = [
        {name: getattr(data, name) for name in _TEXT_FIELDS}
        for data in (overrides.from_json(RunConfig, meta["config"]).data, config.data)
    ]
    return "; ".join(overrides.differences(*pair, "data")) or (
        "a file, the tokenizer or (for stdlib) the version of Python has changed"
    )


def checkpoint_meta(
    config: RunConfig,
    text: Text,
    windows_read: int,
    branch: int | None,
    spikes: SpikeState,
    unevaluated: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the metadata of a checkpoint: the run's config and its position in the text.

    The other arguments are the fields of `Start` with the same names.
    """
    meta = {"windows_read": windows_read, "data_checksum": text.checksum}
    meta["held_out"] = dict(text.held_out)
    meta["spikes"] = spikes.meta()
    meta |= workdir.config_meta(config, text.tokenizer)
    if text.mixture is not None:
        meta["mixture"] = text.mixture.meta()
    if unevaluated:
        meta["unevaluated"] = unevaluated
    return meta if branch is None else meta | {"branch": branch}


def go_back(
    folder: Folder, checkpoints: Checkpointer, step: int, log: Callable[[str], None]
) -> None:
    """Delete the checkpoints after `step`, so that the run in `folder` resumes from `step`."""
    later = [str(other) for other in checkpoints.steps() if other > step]
    checkpoints.go_back(step)
    dropped = "there is no later checkpoint"
    if later:
        dropped = f"checkpoints {', '.join(later)} and later metrics and samples are deleted"
        log(f"going back: {folder} resumes from step {step}; {dropped}")


def warm_start_of(config: RunConfig, folder: Folder) -> WarmStart | ContinuedRun | None:
    """Return the run or model from which a new run starts, as given by `train.init_from`.

    The result is None if the field is empty, or if the run already has checkpoints.

    Raises:
      UsageError: that run or model cannot be read or does not fit; see `WarmStart` and
        `ContinuedRun`.
    """
    if not config.train.init_from or workdir.open_checkpoints(folder).steps():
        return None
    if config.train.with_optimizer:
        return ContinuedRun(config)
    return WarmStart(config.train.init_from, config.model)


def read_text(
    config: RunConfig,
    folder: Folder,
    tokenizer: data.Tokenizer,
    warm_start: WarmStart | ContinuedRun | None,
) -> Datasets:
    """Return the run's text, and set how texts start and end in the tokenizer.

    A run that begins with a model has the boundaries of that model's texts. In a run that trains on
    conversations, the tokens that end an answer in its chat template also end a text. They come
    last, because `ends[0]` is the end token of templates that name none.

    Args:
      config: the run's config.
      folder: the run folder.
      tokenizer: the run's tokenizer, whose `starts` and `ends` are changed.
      warm_start: the source of the run's initial weights, or None.

    Raises:
      UsageError: see `load_datasets`.
      RunError: the manifest of a store is damaged.
    """
    # Set the boundaries first, because a template may write `ends[0]` after each answer.
    if warm_start is not None:
        source = open_folder(config.train.init_from)
        tokenizer.starts, tokenizer.ends = text_ends.after_warm_start(source, tokenizer)
    elif config.train.init_from:
        tokenizer.starts, tokenizer.ends = text_ends.load(
            folder, tokenizer, config.model.vocab_size
        )
    datasets = load_datasets(config, tokenizer)
    if (template := chat_template_of(config, tokenizer)) is not None:
        tokenizer.ends = tuple(dict.fromkeys((*tokenizer.ends, *template.answer_ends())))
    return datasets
