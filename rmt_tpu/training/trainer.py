"""The function `train`, which prepares a run folder, data and state, and runs the loop."""

import contextlib
import gc
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

import sharding
from rmt_tpu import data, memory
from rmt_tpu.checkpoint import Checkpointer, Retention
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.data.datasets import chat_template_of
from rmt_tpu.distributed import processes
from rmt_tpu.errors import UsageError
from rmt_tpu.runs import presence, text_ends, trackers, workdir
from rmt_tpu.runs.side_files import DIVERGED, SideFiles, archive_metrics
from rmt_tpu.runs.warm_start import ContinuedRun, WarmStart
from rmt_tpu.storage import Folder, Location, open_folder
from rmt_tpu.training import depth_rate, freeze, kernel_blocks, kernel_checks, memory_check
from rmt_tpu.training.evaluation import TaskMetrics, notes_without_loss
from rmt_tpu.training.loop import Int16Overflow, Loop, LoopInputs, Outcome
from rmt_tpu.training.progress import TrainingProgress
from rmt_tpu.training.remat_choice import Devices
from rmt_tpu.training.run import PreparedRun, prepare, resolve_auto
from rmt_tpu.training.spikes import GoBack
from rmt_tpu.training.start import (
    SavedRun,
    Start,
    check_step,
    checkpoint_meta,
    go_back,
    kept_values,
    read_text,
    restore_or_init,
    text_of,
    warm_start_of,
)


def train(
    config: RunConfig,
    folder: Location,
    *,
    change_config: bool | None = None,
    from_step: int | None = None,
    profile_steps: int = 0,
    label: str = "train",
    on_saved: Callable[[int], None] = lambda step: None,
    check_kernels: kernel_checks.CheckMode = "auto",
    stop_loss: float = -math.inf,
) -> Outcome:
    """Train `config` in `folder`, starting from its last undamaged checkpoint if there is one.

    If "auto" chose an int16 residual and the residual outgrows int16, training of the RMT continues
    in float32. With `spike_restarts`, a run whose gradient norm spikes goes back to its last
    checkpoint and leaves out the training data since that checkpoint.

    The first SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 stops the run with a checkpoint after the
    current step. In a run with several processes, any process may receive the signal, and all stop
    after the same step.

    In a run with several processes (`processes.initialize`), all of them call this function with
    the same arguments. The first process writes the run folder, which all processes must be able to
    read. Each process writes its own part of a checkpoint.

    Args:
      config: the run's config. If the folder already contains a run, it must be the config of that
        run.
      folder: the run folder, local or gs://.
      change_config: whether the run in the folder may continue with a different config; None also
        means no. See `workdir.open_workdir`.
      from_step: step of a checkpoint to go back to; all later checkpoints, metrics and samples are
        deleted. See `workdir.step_to_go_back_to`.
      profile_steps: number of steps to profile; the trace is written to `<folder>/profile`.
      label: name of the run in the progress display.
      on_saved: a function that is called with the last step of this call once its checkpoint is
        committed. After that only files for people are written, such as metrics and plots.
      check_kernels: "auto" checks kernels that were not checked on this kind of device before;
        "off" checks none.
      stop_loss: loss on held-out text, in nats per token. The run stops with a checkpoint at the
        first evaluation whose loss is at most this.

    Raises:
      UsageError, MeshError: the config, the files that it names, or the folder cannot be used.
      RunError: the loss stays non-finite, no checkpoint can be read, a process is missing, or
        memory runs out.
    """
    folder = open_folder(folder)
    if processes.is_first():
        workdir.check_access(folder)
    trackers.wanted(config.train)
    options = _TrainOptions(label, on_saved, check_kernels, stop_loss)
    while True:
        try:
            return _train(config, folder, change_config, from_step, profile_steps, options)
        except Int16Overflow:
            config = overrides.apply(config, {"model.store.dtype": "float32"})
            options = options._replace(back=None)
        except GoBack as back:
            options = options._replace(back=back.with_traceback(None))
        change_config, from_step, profile_steps = True, None, 0
        gc.collect()  # Free the first loop's arrays before the second loop makes its own.


class _TrainOptions(NamedTuple):
    """Arguments of `train` that stay the same if the run begins again in this process.

    `back` is what made the run go back from a spike; None if it did not.
    """

    label: str
    on_saved: Callable[[int], None]
    check_kernels: kernel_checks.CheckMode
    stop_loss: float
    back: GoBack | None = None


def _train(
    config: RunConfig,
    folder: Folder,
    change_config: bool | None,
    from_step: int | None,
    profile_steps: int,
    options: _TrainOptions,
) -> Outcome:
    may_overflow = config.model.store.dtype == "auto"
    config = resolve_auto(config, kept_values(config, folder), Devices.here())
    may_overflow = may_overflow and config.model.store.dtype == "int16"
    progress = TrainingProgress(config.train.steps, options.label, show=processes.is_first())
    if processes.is_first():
        workdir.check_workdir(folder, config, change_config=change_config, from_step=from_step)
    with (
        progress,
        memory.report_out_of_memory(memory.train_advice(config.train.parts)),
        contextlib.ExitStack() as stack,
    ):
        inputs, warm_start = _prepare(config, folder, from_step, options.label, progress)
        other = None
        if processes.is_first():
            workdir.check_access(folder, write=True)
            # Announce the run before anything in the folder changes, to protect a run that is
            # still training there.
            other = stack.enter_context(presence.announce_run(folder, progress.log))
        changes = _open(folder, config, change_config, other, progress.log)
        checkpoints = _checkpointer(folder, config, progress)
        back_step = _back_step(folder, from_step, changes)
        progress.doing("checking kernels")
        blocks = stack.enter_context(
            kernel_blocks.pinned_block_sizes(folder, progress.log, restart=changes.restarts)
        )
        how = {"restart": changes.restarts, "how": options.check_kernels}
        stack.enter_context(
            kernel_checks.check_kernels(config, inputs.model, folder, progress.log, **how)
        )
        progress.doing("compiling")
        saved = SavedRun(folder, checkpoints, config)
        start = restore_or_init(
            inputs.model, saved, inputs.text, warm_start, back_step, progress.log
        )
        _check_steps(config, folder, start, changes.lines, warm_start)
        inputs = inputs.continuing(start := start.after(options.back))
        if back_step is not None:
            go_back(folder, checkpoints, back_step, progress.log)
        elif start.step and start.is_saved:
            branched = f", a branch from step {from_step}" if from_step is not None else ""
            progress.log(f"resuming {folder} from step {start.step}{branched}")
        if processes.is_first():
            _write_folder(folder, config, changes, inputs.text.tokenizer)
        # Save the copied state at once, so that this run no longer depends on the folder of the
        # other run.
        if not start.is_saved:
            own = start.windows_read, start.branch, start.spikes
            meta = checkpoint_meta(config, inputs.text, *own)
            checkpoints.save(start.step, start.state._replace(copies={}), meta)
        side_files = stack.enter_context(SideFiles(folder, start.step, config, progress.log))
        loop = Loop(inputs, start, checkpoints, side_files, blocks, progress, may_overflow)
        return loop.run(profile_steps, folder, options.on_saved, options.stop_loss)


def _check_steps(
    config: RunConfig,
    folder: Folder,
    start: Start,
    changes: Sequence[str],
    warm_start: WarmStart | ContinuedRun | None,
) -> None:
    """Check that the steps that the run has done leave those that its config asks for.

    Args:
      config: the run's config.
      folder: the run folder.
      start: the state from which the run goes on.
      changes: a line for each field that differs from the config in the run folder.
      warm_start: the source of a new run's state.

    Raises:
      UsageError: the run has done more steps than that, or a freeze that was changed is over.
    """
    check_step(config, folder, start.step)
    if isinstance(warm_start, ContinuedRun):
        changes = warm_start.changes
    if start.step:
        freeze.check_change(config.train, changes, start.step - int(start.state.skipped))


def _prepare(
    config: RunConfig,
    folder: Folder,
    from_step: int | None,
    label: str,
    progress: TrainingProgress,
) -> tuple[LoopInputs, WarmStart | ContinuedRun | None]:
    """Construct the run's functions and read its text.

    Returns:
      The prepared run, and the source of its initial weights, or None.
    """
    processes.check_runtime()
    run = prepare(config, sharding.make_mesh(config.train.mesh))
    progress.log(f"{label}: {_introduction(config, run)}")
    if frozen := freeze.describe(config.train, run.abstract.params):
        progress.log(frozen)
    memory_check.check(config, run)
    progress.doing("reading data")
    tokenizer = data.load_tokenizer(config.data.tokenizer)
    warm_start = warm_start_of(config, folder)
    datasets = read_text(config, folder, tokenizer, warm_start)
    for note in notes_without_loss(config, datasets):
        progress.log(note)
    text = text_of(tokenizer, datasets)
    tasks = TaskMetrics(run, config, tokenizer)
    checksums = {"train": text.checksum, "held out": text.held_out}
    _check_agreement(config, from_step, checksums, tasks.checksum())
    return LoopInputs(config, run, text, datasets, tasks), warm_start


def _back_step(folder: Folder, from_step: int | None, changes: workdir.ConfigChanges) -> int | None:
    """Compute `workdir.step_to_go_back_to` on process 0, and return it on every process."""
    step = None
    if processes.is_first():
        step = workdir.step_to_go_back_to(folder, from_step, changes=bool(changes.lines))
    return processes.from_first(step, "the step to go back to")


def _open(
    folder: Folder,
    config: RunConfig,
    change_config: bool | None,
    other: str | None,
    log: Callable[[str], None],
) -> workdir.ConfigChanges:
    """Register the run in its folder, and print how its config differs from the config there."""
    changes = workdir.open_workdir(folder, config, change_config=change_config, other=other)
    if changes.lines:
        verb = "starting again" if changes.restarts else "continuing"
        log(f"{verb} with a different config: {'; '.join(changes.lines)}")
    if note := _untrained_positions(config):
        log(note)
    return changes


def _write_folder(
    folder: Folder, config: RunConfig, changes: workdir.ConfigChanges, tokenizer: data.Tokenizer
) -> None:
    """Write config, tokenizer and chat template into the folder, on the first process."""
    if changes.restarts:
        archive_metrics(folder)
    folder.delete(DIVERGED)  # An earlier start of the run may have diverged and left this file.
    workdir.write_config(folder, config, [] if changes.restarts else changes.lines)
    tokenizer.save(folder)
    if (template := chat_template_of(config, tokenizer)) is not None:
        template.save(folder)  # The server formats chats with this template.
    text_ends.save(folder, tokenizer)


def _introduction(config: RunConfig, run: PreparedRun) -> str:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params))
    devices = run.mesh.devices.flatten()
    plural = "s" if len(devices) > 1 else ""
    tokens = config.train.batch_size * config.data.seq_len
    rate_factors = depth_rate.describe(config)
    rates = f"rates over depth: {rate_factors}; " if rate_factors else ""
    return (
        f"{parameters:,} parameters on {len(devices)} {devices[0].device_kind} device{plural}, "
        f"{tokens:,} tokens per step, {tokens * config.train.steps:,} in {config.train.steps:,} "
        f"steps; {rates}reading data"
    )


def _checkpointer(folder: Folder, config: RunConfig, progress: TrainingProgress) -> Checkpointer:
    train = config.train
    return workdir.open_checkpoints(
        folder,
        retention=Retention(train.keep_checkpoints, train.keep_every, train.keep_best),
        compression=train.checkpoint_compression,
        report=progress.log,
    )


def _check_agreement(
    config: RunConfig, from_step: int | None, data_checksums: dict[str, Any], tasks_checksum: int
) -> None:
    """Check that all processes have the same config and data; otherwise they could deadlock.

    Raises:
      UsageError: the config, the data or the tasks differ between this process and process 0.
    """
    if processes.num_processes() == 1:
        return
    flags = overrides.to_json(config) | {"--from_step": from_step}
    own = {"config": flags, "data": data_checksums, "tasks": tasks_checksum}
    first = processes.from_first(own, "the run's config")
    if different := overrides.differences(first["config"], json.loads(json.dumps(own["config"]))):
        raise UsageError(
            f"the config of process {processes.process_id()} differs from that of process 0: "
            f"{'; '.join(different[:8])}; start all processes with the same flags"
        )
    if first["data"] != own["data"]:
        flag = "--mixture" if config.data.mixture else f"--data={config.data.source}"
        raise UsageError(
            f"{flag} does not give the same tokens on process {processes.process_id()} as on "
            "process 0; give all processes the same files"
        )
    if first["tasks"] != own["tasks"]:
        raise UsageError(
            f"--eval_data_dir={config.train.eval_data_dir} does not give the same documents on "
            f"process {processes.process_id()} as on process 0; give all processes the same files"
        )


def _untrained_positions(config: RunConfig) -> str | None:
    learned, seq_len = config.model.learned_positions, config.data.seq_len
    if learned is None or seq_len >= learned.max_length:
        return None
    return (
        f"note: learned positions {seq_len} to {learned.max_length - 1} are not trained at "
        f"--seq_len={seq_len}; text that extends beyond position {seq_len - 1} will be poor"
    )
