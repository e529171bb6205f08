"""The training loop."""

import contextlib
import gc
import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

import sharding
from rmt_tpu import data, memory
from rmt_tpu.checkpoint import Checkpointer, Retention, Saved
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.data.datasets import Datasets, load_datasets
from rmt_tpu.distributed import processes
from rmt_tpu.errors import DivergedError, RunError, UsageError
from rmt_tpu.residual import fixed_point
from rmt_tpu.runs import lease, text_ends, workdir
from rmt_tpu.runs.side_files import DIVERGED, SideFiles, set_aside, wants_board
from rmt_tpu.storage import Folder, Location, open_folder
from rmt_tpu.training import depth_rate, kernel_blocks, kernel_checks, room, signals
from rmt_tpu.training.evaluation import HeldOutLoss, TaskMetrics, asked_windows, sample_text
from rmt_tpu.training.global_arrays import put_batch
from rmt_tpu.training.progress import TrainingProgress
from rmt_tpu.training.run import Run, prepare, resolved
from rmt_tpu.training.start import Start, go_back, meta_of, origin_of, restore_or_init
from rmt_tpu.training.throughput import Throughput


class _OutgrewInt16(Exception):
    """The residual leaves int16's range for good; a checkpoint is of the last step."""


class Outcome(NamedTuple):
    """Steps done when the run ended, and the signal that ended it before the last, if one did."""

    step: int
    stopped_by: signal.Signals | None


def train(
    config: RunConfig,
    folder: Location,
    *,
    change_config: bool = False,
    from_step: int | None = None,
    profile_steps: int = 0,
    label: str = "train",
    all_is_saved: Callable[[int], None] = lambda step: None,
    check_kernels: kernel_checks.How = "auto",
) -> Outcome:
    """Train `config` in `folder`, from its last good checkpoint if there is one.

    An RMT whose residual outgrows int16, chosen by "auto", goes on from there with one of float32.

    The first SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 ends the run after the step it is in, with
    a checkpoint; of several processes, whichever gets it, after the next step that all are in.

    In a run of several processes (`processes.initialize`) all of them call it with the same
    arguments. The first one writes the run folder, which all see; each writes its own part of a
    checkpoint.

    Args:
      config: of the run; must be that of the run in the folder, if there is one.
      folder: the run folder, local or gs://.
      change_config: let the run in the folder go on with what differs, see `workdir.open_workdir`.
      from_step: go back to this checkpoint of the run, and drop what came later, see
        `workdir.step_to_go_back_to`.
      profile_steps: trace so many steps into `<folder>/profile`.
      label: shown with the progress.
      all_is_saved: given the last step of this call, when its checkpoint is committed; what comes
        after it is for people.
      check_kernels: whether kernels that this device has no record of are checked first.

    Raises:
      UsageError, MeshError: the config, its files or the folder cannot be.
      RunError: the loss stays non-finite, no checkpoint can be read, a process is missing, or
        memory is out.
    """
    folder = open_folder(folder)
    if processes.is_first():
        workdir.check_access(folder)
    wants_board(config.train.tensorboard)
    given = label, all_is_saved, check_kernels
    try:
        return _train(config, folder, change_config, from_step, profile_steps, *given)
    except _OutgrewInt16:
        pass
    gc.collect()  # the arrays of that loop, before there are others
    config = overrides.apply(config, {"model.store.dtype": "float32"})
    return _train(config, folder, True, None, 0, *given)


def _train(
    config: RunConfig,
    folder: Folder,
    change_config: bool,
    from_step: int | None,
    profile_steps: int,
    label: str,
    all_is_saved: Callable[[int], None],
    check_kernels: kernel_checks.How,
) -> Outcome:
    may_outgrow = config.model.store.dtype == "auto"
    config = resolved(config, workdir.kept(folder))
    progress = TrainingProgress(config.train.steps, label, show=processes.is_first())
    if processes.is_first():
        workdir.check_workdir(folder, config, change_config=change_config, from_step=from_step)
    with progress, memory.told_if_out(memory.TRAIN_ADVICE), contextlib.ExitStack() as stack:
        run = prepare(config, sharding.make_mesh(config.train.mesh))
        progress.say(f"{label}: {_introduction(config, run)}")
        room.check(config, run)
        progress.doing("reading data")
        tokenizer = data.load_tokenizer(config.data.tokenizer)
        datasets = load_datasets(config, tokenizer)
        tasks = TaskMetrics(run, config, tokenizer)
        data_checksum = datasets.train.checksum()
        _check_agreement(config, from_step, data_checksum)
        origin = origin_of(config, folder)
        if origin is not None:
            tokenizer.ends = text_ends.of_origin(open_folder(config.train.init_from), tokenizer)
        elif config.train.init_from:
            tokenizer.ends = text_ends.saved(folder, tokenizer)
        other = None
        if processes.is_first():
            workdir.check_access(folder, write=True)
            # Before anything there is changed: a run that lives keeps its folder.
            other = stack.enter_context(lease.held(folder, progress.say))
        opened = workdir.open_workdir(folder, config, change_config=change_config, other=other)
        if opened.changes:
            how = "starting anew" if opened.anew else "going on"
            progress.say(f"{how} with another config: {'; '.join(opened.changes)}")
        if note := _untrained_positions(config):
            progress.say(note)
        checkpoints = _checkpointer(folder, config, progress)
        back = None
        if processes.is_first():
            back = workdir.step_to_go_back_to(folder, from_step, changes=bool(opened.changes))
        back = processes.from_first(back, "the step to go back to")
        progress.doing("checking kernels")
        blocks = stack.enter_context(kernel_blocks.kept(folder, progress.say, anew=opened.anew))
        given = config, run, folder, progress.say
        stack.enter_context(kernel_checks.decided(*given, anew=opened.anew, how=check_kernels))
        progress.doing("compiling")
        start = restore_or_init(
            config, run, folder, checkpoints, tokenizer, data_checksum, origin, back, progress.say
        )
        if back is not None:
            go_back(folder, checkpoints, back, progress.say)
        elif start.step and start.is_saved:
            branched = f", a branch from step {from_step}" if from_step is not None else ""
            progress.say(f"resuming {folder} from step {start.step}{branched}")
        if processes.is_first():
            if opened.anew:
                set_aside(folder)
            folder.delete(DIVERGED)  # it was an earlier start, maybe of another config
            workdir.write_config(folder, config, [] if opened.anew else opened.changes)
            tokenizer.save(folder)
            text_ends.save(folder, tokenizer)
        if not start.is_saved:  # whatever happens there, this run has what it began with
            meta = meta_of(config, tokenizer, data_checksum, start.windows_read, start.branch)
            checkpoints.save(start.step, start.state._replace(copies={}), meta)
        side_files = stack.enter_context(
            SideFiles(folder, start.step, config.train.tensorboard, progress.say)
        )
        loop = _Loop(
            config,
            run,
            datasets,
            tasks,
            tokenizer,
            checkpoints,
            side_files,
            blocks,
            progress,
            start,
            may_outgrow and config.model.store.dtype == "int16",
        )
        return loop.run(profile_steps, folder, all_is_saved)


def _introduction(config: RunConfig, run: Run) -> str:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params))
    devices = run.mesh.devices.flatten()
    plural = "s" if len(devices) > 1 else ""
    tokens = config.train.batch_size * config.data.seq_len
    told = depth_rate.told(config)
    rates = f"rates over depth: {told}; " if told else ""
    return (
        f"{parameters:,} parameters on {len(devices)} {devices[0].device_kind} device{plural}, "
        f"{tokens:,} tokens a step, {tokens * config.train.steps:,} in {config.train.steps:,} "
        f"steps; {rates}reading data"
    )


def _checkpointer(folder: Folder, config: RunConfig, progress: TrainingProgress) -> Checkpointer:
    train = config.train
    return workdir.open_checkpoints(
        folder,
        retention=Retention(train.keep_checkpoints, train.keep_every, train.keep_best),
        compression=train.checkpoint_compression,
        report=progress.say,
    )


def _check_agreement(config: RunConfig, from_step: int | None, data_checksum: int) -> None:
    """Processes that do not do the same would wait for each other in different places."""
    if processes.num_processes() == 1:
        return
    flags = overrides.to_json(config) | {"--from_step": from_step}
    own = {"config": flags, "data": data_checksum}
    first = processes.from_first(own, "the run's config")
    if different := overrides.differences(first["config"], json.loads(json.dumps(own["config"]))):
        raise UsageError(
            f"process {processes.process_id()} has another config than process 0, "
            f"{'; '.join(different[:8])}; start all processes with the same flags"
        )
    if first["data"] != own["data"]:
        raise UsageError(
            f"--data={config.data.source} gives other tokens on process "
            f"{processes.process_id()} than on process 0; give all the same files"
        )


def _untrained_positions(config: RunConfig) -> str | None:
    learned, seq_len = config.model.learned_positions, config.data.seq_len
    if learned is None or seq_len >= learned.max_length:
        return None
    return (
        f"note: learned positions {seq_len} to {learned.max_length - 1} are not "
        f"trained at --seq_len={seq_len}; text beyond them will be poor"
    )


class _Loop:
    """State of one run of the loop: the model's, and the one step that is still being computed."""

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        datasets: Datasets,
        tasks: TaskMetrics,
        tokenizer: data.Tokenizer,
        checkpoints: Checkpointer,
        side_files: SideFiles,
        blocks: kernel_blocks.KernelBlocks,
        progress: TrainingProgress,
        start: Start,
        may_outgrow: bool,
    ):
        self.config, self.model, self.datasets, self.tokenizer = config, run, datasets, tokenizer
        self.tasks = tasks
        self.checkpoints, self.side_files, self.progress = checkpoints, side_files, progress
        self.blocks = blocks
        self.state, self.step, self.windows_read, self.branch, _ = start
        self.data_checksum = datasets.train.checksum()
        self.throughput = Throughput(config, run.mesh)
        self.held_out_loss = HeldOutLoss(run, datasets.held_out, asked_windows(config))
        self.evaluated: dict[int, float] = {}  # the last held-out loss, by its step
        self.pending: tuple[dict[str, jax.Array], float] | None = None
        # Of the save begun last: its step, and when, on process 0's clock.
        self.save_step, self.save_time = start.step, time.monotonic()
        self.good_step: int | None = start.step or None  # of the last checkpoint that is committed
        self.may_outgrow, self.outgrown = may_outgrow, False

    def run(
        self, profile_steps: int, folder: Folder, all_is_saved: Callable[[int], None]
    ) -> Outcome:
        """All that is left to do: steps to the last one or to a signal, and what comes at the end.

        Args:
          profile_steps: to trace.
          folder: the run folder, for a line about it.
          all_is_saved: see `train`.

        Raises:
          _OutgrewInt16: in place of the steps left.
        """
        steps, stopped_by = self.config.train.steps, None
        if self.step < steps:
            train_step = self._compile()
            with signals.after_the_step(self.progress.say) as stop:
                stopped_by = self._steps(train_step, profile_steps, stop)
                if stopped_by is None and self.step < steps:
                    raise _OutgrewInt16
                all_is_saved(self.step)
        else:
            all_is_saved(self.step)
        if stopped_by is not None and self.step < steps:
            self._leave_side_files()
            self.side_files.draw()
            return Outcome(self.step, stopped_by)
        if self.side_files.is_complete(steps):
            self.progress.say(f"{folder} is complete at step {steps}")
        else:
            self._evaluate()
            self._ask_tasks()
            self._leave_side_files()
            self.side_files.complete(steps)
        return Outcome(self.step, None)

    def _steps(self, train_step, profile_steps: int, stop: signals.Stop) -> signal.Signals | None:
        """Steps, to the last one or to a signal, which is returned."""
        steps, first = self.config.train.steps, self.step + 1
        profile_steps = profile_steps if processes.is_first() else 0
        highest = processes.Highest(self.model.mesh)
        stopped_by = None
        self.progress.begin(self.step)
        self.throughput.restart()
        with contextlib.ExitStack() as profile, self._batches() as batches:
            for step in range(first, steps + 1):
                # A step or two to warm up, and then those to look at.
                if profile_steps and step == min(first + 2, steps):
                    profile.enter_context(self.side_files.profile())
                self._step(train_step, step, batches)
                if profile_steps and step == min(first + 1 + profile_steps, steps):
                    jax.block_until_ready(self.state)
                    profile.close()
                wanted = highest(stop.wanted or self._checkpoint_seconds_are_over())
                stopped_by = signals.STOPS.get(wanted)
                # Before the checkpoint: a run that resumes from it does not evaluate its step
                # again.
                if step < steps and self._due(self.config.train.eval_every):
                    self._evaluate()
                if step < steps and self._due(self.config.train.eval_tasks_every):
                    self._ask_tasks()
                if (
                    wanted != signals.GO_ON
                    or self.outgrown
                    or self._due(self.config.train.checkpoint_every)
                ):
                    self._save()
                if stopped_by is not None or self.outgrown:
                    break
                if step < steps:
                    self._leave_side_files()
        with self._last_good_step_told():
            self._say_saved(self.checkpoints.wait())
        return stopped_by

    def _compile(self):
        """Compiled ahead, so that the first step's time is a step's time."""
        started = time.monotonic()
        batch = self._batch_at(self.windows_read)
        step = self.model.jitted_step().lower(self.state, batch).compile()
        self.blocks.write()
        self.progress.say(f"compiled the train step in {time.monotonic() - started:.1f} s")
        return step

    def _batches(self) -> data.Prefetcher:
        """Batches from here on, read and put on the devices while steps run."""
        advance = self.config.train.batch_size
        return data.Prefetcher(self._batch_at, start=self.windows_read, advance=advance)

    def _batch_at(self, windows_read: int) -> data.Batch:
        read = lambda rows: self.datasets.train.batch_at(windows_read, rows)
        shape = self.config.train.batch_size, self.config.data.seq_len
        return put_batch(read, shape, self.model.batch_sharding)

    def _step(self, train_step, step: int, batches: data.Prefetcher) -> None:
        """Dispatch this step, then report the one before it: the device never waits."""
        batch, waited = batches.next()
        self.state, metrics = train_step(self.state, batch)
        self.windows_read += self.config.train.batch_size
        self._report()
        self.step, self.pending = step, (metrics, waited)

    def _report(self) -> None:
        """Wait for the pending step and write its row."""
        if self.pending is None:
            return
        metrics, waited = self.pending
        row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.pending = None
        # What was in the background must not fail unseen.
        with self._last_good_step_told():
            self._say_saved(self.checkpoints.check())
        in_a_row = int(row.pop("train/skipped_in_a_row"))
        row |= self.throughput.step_ended()
        row["throughput/data_wait_seconds"] = waited
        self.progress.update(self.step, row)
        if self.step % self.config.train.log_every == 0 or self.step == self.config.train.steps:
            self.side_files.write(self.step, row)
        most, skipped = self.config.train.max_bad_steps, int(row["train/skipped_steps"])
        if self.may_outgrow and outgrows(most, in_a_row, skipped, self.step):
            if not self.outgrown:
                self.progress.say(
                    f"step {self.step}: {skipped} steps skipped; the residual has outgrown int16 "
                    f"({fixed_point.described(self.config.model)}) and goes on in float32"
                )
            self.outgrown = True
        elif in_a_row >= most:
            raise DivergedError(
                f"the loss or its gradient was not finite in {in_a_row} steps in a row, to step "
                f"{self.step}; {self._last_good_step()}. Try a lower "
                "--set=train.optimizer.learning_rate"
                + (", in another --workdir" if self.good_step else "")
                + _range_hint(self.config)
            )

    def _due(self, every: int) -> bool:
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def _checkpoint_seconds_are_over(self) -> int:
        """Process 0's clock decides for all."""
        seconds, now = self.config.train.checkpoint_seconds, time.monotonic()
        if not processes.is_first() or seconds == 0 or now - self.save_time < seconds:
            return signals.GO_ON
        self.save_time = now  # asked for once: the others' answer comes a step later
        return signals.SAVE

    def _save(self) -> None:
        self._report()
        if self.step != self.save_step:
            read = self.data_checksum, self.windows_read
            meta = meta_of(self.config, self.tokenizer, *read, self.branch)
            with self._last_good_step_told():
                before = self.checkpoints.begin_save(
                    self.step,
                    self.state._replace(copies={}),
                    meta,
                    loss=self.evaluated.get(self.step),
                    before_commit=self.side_files.flush,
                )
            self._say_saved(before)
            self.save_step = self.step
        self.save_time = time.monotonic()
        self.throughput.restart()

    def _say_saved(self, saved: Saved | None) -> None:
        if saved:
            self.good_step = saved.step
            self.progress.say(
                f"saved step {saved.step}: {saved.num_bytes / 1e6:,.1f} MB in {saved.seconds:.2f} "
                f"s, of which training waited {saved.blocked_seconds:.3f} s"
            )

    def _last_good_step(self) -> str:
        if self.good_step is None:
            return "there is no checkpoint yet"
        return f"the last checkpoint is of step {self.good_step}"

    @contextlib.contextmanager
    def _last_good_step_told(self) -> Iterator[None]:
        """A save that fails is told with what there is."""
        try:
            yield
        except RunError as error:
            raise RunError(f"{error}; {self._last_good_step()}") from None

    def _evaluate(self) -> None:
        """Write the loss on held-out text."""
        self._report()
        self.progress.doing("evaluating")
        loss, aux = self.held_out_loss(self.state.params)
        self.evaluated = {self.step: loss}
        row = {f"eval/aux/{name}": value for name, value in aux.items()}
        self.side_files.write(self.step, {"eval/loss": loss, **row})
        self.progress.say(f"step {self.step}: loss on held-out text {loss:.4f}")
        self.throughput.restart()

    def _ask_tasks(self) -> None:
        """Write what the tasks give, if there are any."""
        if not self.config.train.eval_tasks:
            return
        self._report()
        self.progress.doing("asking tasks")
        found = self.tasks(self.state.params)
        self.side_files.write(self.step, found)
        told = (f"{name.removeprefix('eval/')} {value:.4g}" for name, value in found.items())
        self.progress.say(f"step {self.step}: {', '.join(told)}")
        self.throughput.restart()

    def _leave_side_files(self) -> None:
        """The picture and the sample, where they are due: after the checkpoint."""
        train = self.config.train
        draws = self.step in self.evaluated
        samples = train.sample_tokens > 0 and self._due(train.sample_every)
        if not (draws or samples):
            return
        self._report()
        if draws:
            self.side_files.draw()
        if samples:
            self.progress.doing("generating text")
            make = lambda: sample_text(self.model, self.state.params, self.tokenizer, self.config)
            self.side_files.sample(self.step, make)
        self.throughput.restart()


def outgrows(most: int, in_a_row: int, skipped: int, step: int) -> bool:
    """Whether so many steps were skipped that int16 is not kept: some in a row, or one in 100."""
    return in_a_row >= most or skipped >= max(2 * most, step / 100)


def _range_hint(config: RunConfig) -> str:
    if config.model.store.dtype != "int16":
        return ""
    fixed = fixed_point.described(config.model)
    return (
        f"; or the residual does not fit int16 fixed point, {fixed}, in which case "
        "--change_config --set=model.store.dtype=float32 goes on from there, or another "
        "--set=model.store.fraction_bits, fewer where it grew too large"
    )
