"""The training loop: steps, with reports, evaluations, samples and checkpoints between them."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax

from rmt_tpu import data
from rmt_tpu.checkpoint import Checkpointer, Saved
from rmt_tpu.config import RunConfig
from rmt_tpu.data.datasets import Datasets
from rmt_tpu.distributed import processes
from rmt_tpu.errors import DivergedError, RunError
from rmt_tpu.residual import fixed_point
from rmt_tpu.runs.side_files import Restart, SideFiles
from rmt_tpu.storage import Folder
from rmt_tpu.training import kernel_blocks, signals
from rmt_tpu.training.evaluation import (
    HeldOutLoss,
    MixedHeldOutLoss,
    TaskMetrics,
    num_eval_windows,
    sample_text,
)
from rmt_tpu.training.global_arrays import put_batch
from rmt_tpu.training.progress import TrainingProgress
from rmt_tpu.training.run import PreparedRun
from rmt_tpu.training.spikes import GoBack
from rmt_tpu.training.start import Start, Text, checkpoint_meta
from rmt_tpu.training.throughput import Throughput


class Int16Overflow(Restart):
    """Raised if the residual has outgrown the range of int16, after a checkpoint is saved."""


class Outcome(NamedTuple):
    """The last step of a training run, and the reason why it ended.

    Attributes:
      step: number of steps done.
      stopped_by: the signal that ended the run early, or that arrived in its last steps; or None.
    """

    step: int
    stopped_by: signal.Signals | None


class LoopInputs(NamedTuple):
    """A run that is ready to start: its functions and its data.

    Attributes:
      config: the run's config, with every "auto" resolved.
      model: the run's functions and shardings.
      text: the tokenizer and the checksum of the tokens.
      datasets: training windows and held-out windows.
      tasks: the tasks on which the model is evaluated during training.
    """

    config: RunConfig
    model: PreparedRun
    text: Text
    datasets: Datasets
    tasks: TaskMetrics

    def continuing(self, start: Start) -> "LoopInputs":
        """Return these inputs, with the mixture of texts (if any) replaced by that of `start`."""
        if start.mixture is None:
            return self
        return self._replace(
            text=self.text._replace(mixture=start.mixture),
            datasets=self.datasets._replace(train=start.mixture),
        )


class Loop:
    """The training loop, with the current train state and the metrics of the step in progress."""

    def __init__(
        self,
        inputs: LoopInputs,
        start: Start,
        checkpoints: Checkpointer,
        side_files: SideFiles,
        blocks: kernel_blocks.KernelBlocks,
        progress: TrainingProgress,
        may_overflow: bool,
    ):
        self.config, self.model, self.text, self.datasets, self.tasks = inputs
        self.checkpoints, self.side_files, self.progress = checkpoints, side_files, progress
        self.blocks = blocks
        self.state, self.step, self.windows_read, self.branch, *_ = start
        self.spikes, self.unevaluated = start.spikes, start.unevaluated
        self.throughput = Throughput(self.config, self.model.mesh)
        windows = num_eval_windows(self.config)
        _, held_out, mixed = self.datasets
        self.held_out_loss = (
            MixedHeldOutLoss(self.model, mixed, windows)
            if mixed
            else HeldOutLoss(self.model, held_out, windows)
        )
        # Maps the last evaluated step to the loss on held-out text at that step.
        self.evaluated: dict[int, float] = {}
        # For the step in progress: its metrics, the seconds that it waited for its batch, and the
        # number of training windows read up to its end.
        self.pending: tuple[dict[str, jax.Array], float, int] | None = None
        # The step of the last save that was started, and the time of its start on this process's
        # clock.
        self.save_step, self.save_time = start.step, time.monotonic()
        self.good_step: int | None = start.step or None  # The last committed step.
        self.may_overflow, self.overflowed = may_overflow, False

    def run(
        self,
        profile_steps: int,
        folder: Folder,
        on_saved: Callable[[int], None],
        stop_loss: float,
    ) -> Outcome:
        """Run steps until the last one, until a signal, or until the loss is at most `stop_loss`.

        Then the final files are written.

        Args:
          profile_steps: number of steps to profile.
          folder: the run folder, which is named in a message.
          on_saved: a function that is called with the step of the last checkpoint after this
            checkpoint is committed.
          stop_loss: the loss on held-out text, in nats per token, at which the run stops.

        Raises:
          Int16Overflow: the residual outgrew int16, so the remaining steps were not run. If a
            signal has arrived, the run stops instead.
          GoBack: the run must go back to its last checkpoint because of a spike. If a signal has
            arrived, the run stops instead, and its last step is that of the checkpoint.
        """
        steps, stopped_by = self.config.train.steps, None
        # This step's checkpoint exists, so a signal may end the process at once, as it does here.
        while self.unevaluated and self.step < steps:
            self._evaluate_next()
        if self.step < steps and not self._has_reached(stop_loss):
            train_step = self._compile()
            try:
                with signals.stop_after_step(self.progress.log) as stop:
                    stopped_by = self._steps(train_step, profile_steps, stop, stop_loss)
                    if self.overflowed and stopped_by is None and self.step < steps:
                        raise Int16Overflow
                    on_saved(self.step)
                    # Those who train one run after the other also stop after a signal that arrived
                    # too late to end this run early.
                    stopped_by = stopped_by or signals.STOPS.get(_agreed(stop))
            except Restart:
                # A signal may have arrived after the last agreement, and the run that begins again
                # would not know of it.
                if (stopped_by := signals.STOPS.get(_agreed(stop))) is None:
                    raise
                on_saved(self.good_step)
                return Outcome(self.good_step, stopped_by)
        else:
            on_saved(self.step)
        if self.step < steps:
            self._write_side_files()
            self.side_files.draw(self.step)
            return Outcome(self.step, stopped_by)
        if self.side_files.is_complete(steps):
            self.progress.log(f"{folder} is complete at step {steps}")
        else:
            if self.step not in self.evaluated:
                self._evaluate()
            self._evaluate_tasks()
            self._write_side_files()
            self.side_files.complete(steps)
        return Outcome(self.step, stopped_by)

    def _steps(
        self, train_step, profile_steps: int, stop: signals.Stop, stop_loss: float
    ) -> signal.Signals | None:
        """Run steps until the last one, a signal or `stop_loss`; return the signal or None."""
        steps, first = self.config.train.steps, self.step + 1
        profile_steps = profile_steps if processes.is_first() else 0
        highest = processes.DelayedMax(self.model.mesh)
        stopped_by = None
        self.progress.begin(self.step)
        self.throughput.restart()
        with contextlib.ExitStack() as profile, self._batches() as batches:
            for step in range(first, steps + 1):
                # Start profiling at the third step, or at the last step if the run has fewer than
                # three. The first steps are slower than later ones.
                if profile_steps and step == min(first + 2, steps):
                    profile.enter_context(self.side_files.profile())
                self.take_step(train_step, step, batches)
                if profile_steps and step == min(first + 1 + profile_steps, steps):
                    jax.block_until_ready(self.state)
                    profile.close()
                wanted = highest(stop.wanted or self._checkpoint_seconds_are_over())
                # Evaluate before saving the checkpoint, so that a run that resumes from it does not
                # evaluate this step again. A run that must stop has little time, so it saves first,
                # and evaluates this step when it resumes.
                self.unevaluated = self._evaluations()
                while self.unevaluated and wanted not in signals.STOPS:
                    self._evaluate_next()
                    wanted = max(wanted, _agreed(stop))
                stopped_by = signals.STOPS.get(wanted)
                ends = self.overflowed or self._has_reached(stop_loss)
                if wanted != signals.GO_ON or ends or self._due(self.config.train.checkpoint_every):
                    self._save()
                if stopped_by is not None or ends:
                    break
                if step < steps:
                    self._write_side_files()
        with self._naming_last_checkpoint():
            self._say_saved(self.checkpoints.wait())
        return stopped_by

    def _compile(self):
        """Compile the train step ahead of time, so that no step's time includes the compilation."""
        started = time.monotonic()
        batch = self._batch_at(self.windows_read)
        step = self.model.jitted_step().lower(self.state, batch).compile()
        self.blocks.write()
        self.progress.log(f"compiled the train step in {time.monotonic() - started:.1f} s")
        return step

    def _batches(self) -> data.Prefetcher:
        """Return a prefetcher that loads the next batches onto the devices while steps run."""
        advance = self.config.train.batch_size
        return data.Prefetcher(self._batch_at, start=self.windows_read, advance=advance)

    def _batch_at(self, windows_read: int) -> data.Batch:
        read = lambda rows: self.datasets.train.batch_at(windows_read, rows)
        shape = self.config.train.batch_size, self.config.data.seq_len
        return put_batch(read, shape, self.model.batch_sharding)

    def take_step(self, train_step, step: int, batches: data.Prefetcher) -> None:
        """Dispatch a step, and then report the step before it, so that no device is idle."""
        batch, waited = batches.next()
        self.state, metrics = train_step(self.state, batch)
        self.windows_read += self.config.train.batch_size
        self._report()
        self.step, self.pending = step, (metrics, waited, self.windows_read)

    def _report(self) -> None:
        """Wait for the step in progress, if there is one, and write its metrics.

        Raises:
          DivergedError: the loss or its gradient was not finite in too many consecutive steps.
          RunError: the background save of a checkpoint has failed.
          GoBack: the run must go back to its last checkpoint because of a spike.
        """
        if self.pending is None:
            return
        metrics, waited, windows_read = self.pending
        row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.pending = None
        # If the background save has failed, raise its error now and not at the next save.
        with self._naming_last_checkpoint():
            self._say_saved(self.checkpoints.check())
        in_a_row = int(row.pop("train/skipped_in_a_row"))
        row |= self.throughput.step_ended()
        row["throughput/data_wait_seconds"] = waited
        row |= self.datasets.train.metrics(windows_read)
        row |= self.watch_gradient_norm(row["optim/grad_norm"])
        self.progress.update(self.step, row)
        if self.step % self.config.train.log_every == 0 or self.step == self.config.train.steps:
            self.side_files.write(self.step, row)
        self._go_back_from_spike(row, windows_read)
        limit, skipped = self.config.train.max_bad_steps, int(row["train/skipped_steps"])
        if self.may_overflow and has_overflowed(limit, in_a_row, skipped, self.step):
            if not self.overflowed:
                self.progress.log(
                    f"step {self.step}: {skipped} steps skipped; the residual has outgrown int16 "
                    f"({fixed_point.describe(self.config.model)}) and continues in float32"
                )
            self.overflowed = True
        elif in_a_row >= limit:
            self._go_back("the loss or its gradient is not finite", windows_read)
            raise DivergedError(
                f"the loss or its gradient was not finite in {in_a_row} steps in a row, up to step "
                f"{self.step}; {self._last_checkpoint_text()}. Try a lower "
                "--set=train.optimizer.learning_rate"
                + (", in another --workdir" if self.good_step else "")
                + _range_hint(self.config)
            )

    def watch_gradient_norm(self, norm: float) -> dict[str, float]:
        """Record a step's gradient norm, and return how far it is above the running mean.

        The result is a dict with one metric, in standard deviations; it is empty in the first
        steps.
        """
        deviations = self.spikes.spread.deviations(norm)
        self.spikes = self.spikes._replace(spread=self.spikes.spread.counting(norm))
        return {} if deviations is None else {"optim/grad_norm_deviations": deviations}

    def _go_back_from_spike(self, row: Mapping[str, float], windows_read: int) -> None:
        """Raise GoBack if the gradient norm of a step is a spike, and the run may go back."""
        deviations = row.get("optim/grad_norm_deviations", 0.0)
        if deviations > self.config.train.spike_deviations:
            norm = row["optim/grad_norm"]
            self._go_back(
                f"the gradient norm {norm:.4g} is a spike, {deviations:.1f} standard deviations "
                "above its running mean",
                windows_read,
            )

    def _go_back(self, why: str, windows_read: int) -> None:
        """Print why the run goes back to its last checkpoint, and raise GoBack if it may.

        Args:
          why: what happened in the step.
          windows_read: number of windows read up to this step. The run leaves them out after it
            goes back.
        """
        most, restarts = self.config.train.spike_restarts, self.spikes.restarts
        if restarts >= most:
            again = f"; train.spike_restarts={most} is reached" if most else ""
            self.progress.log(f"step {self.step}: {why}{again}")
            return
        with self._naming_last_checkpoint():
            self._say_saved(self.checkpoints.wait())
        self.progress.log(f"step {self.step}: {why}; {self._last_checkpoint_text()}")
        if self.good_step is not None:
            spike = {"step": self.step, "why": why, "back_to": self.good_step}
            self.side_files.write_spike(spike | {"windows_read": windows_read})
            raise GoBack(windows_read, restarts + 1, self.branch)

    def _due(self, every: int) -> bool:
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def _checkpoint_seconds_are_over(self) -> int:
        """Return SAVE if `checkpoint_seconds` have passed on the clock of process 0, else GO_ON."""
        seconds, now = self.config.train.checkpoint_seconds, time.monotonic()
        if not processes.is_first() or seconds == 0 or now - self.save_time < seconds:
            return signals.GO_ON
        # All processes save after the next step. Do not request another save before then.
        self.save_time = now
        return signals.SAVE

    def _save(self) -> None:
        self._report()
        if self.step != self.save_step:
            own = self.windows_read, self.branch, self.spikes, self.unevaluated
            meta = checkpoint_meta(self.config, self.text, *own)
            with self._naming_last_checkpoint():
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
            self.progress.log(
                f"saved step {saved.step}: {saved.num_bytes / 1e6:,.1f} MB in {saved.seconds:.2f} "
                f"s; training waited {saved.blocked_seconds:.3f} s"
            )

    def _last_checkpoint_text(self) -> str:
        if self.good_step is None:
            return "there is no checkpoint yet"
        return f"the last checkpoint is of step {self.good_step}"

    @contextlib.contextmanager
    def _naming_last_checkpoint(self) -> Iterator[None]:
        """Add the step of the last checkpoint to the message of a RunError from a failed save."""
        try:
            yield
        except RunError as error:
            raise RunError(f"{error}; {self._last_checkpoint_text()}") from None

    def _evaluations(self) -> tuple[str, ...]:
        """Return what is evaluated before this step's checkpoint is saved, in order.

        The last step is evaluated after its checkpoint. But `keep_best` compares the losses at the
        steps of checkpoints, also of the last one.
        """
        train = self.config.train
        if self.step == train.steps:
            return ("loss",) if train.keep_best else ()
        every = {"loss": train.eval_every}
        if train.eval_tasks:
            every["tasks"] = train.eval_tasks_every
        return tuple(name for name, steps in every.items() if self._due(steps))

    def _evaluate_next(self) -> None:
        """Do the first of the evaluations that this step still lacks."""
        name, *rest = self.unevaluated
        {"loss": self._evaluate, "tasks": self._evaluate_tasks}[name]()
        self.unevaluated = tuple(rest)

    def _has_reached(self, stop_loss: float) -> bool:
        return self.evaluated.get(self.step, math.inf) <= stop_loss

    def _evaluate(self) -> None:
        """Compute the loss on held-out text and write it to the metrics."""
        self._report()
        self.progress.doing("evaluating")
        loss, aux, texts = self.held_out_loss(self.state.params)
        self.evaluated = {self.step: loss}
        row = {f"eval/aux/{name}": value for name, value in aux.items()}
        row |= {f"eval/loss/{name}": value for name, value in texts.items()}
        self.side_files.write(self.step, {"eval/loss": loss, **row})
        self.progress.log(f"step {self.step}: loss on held-out text {loss:.4f}")
        self.throughput.restart()

    def _evaluate_tasks(self) -> None:
        """Evaluate the tasks, if there are any, and write their scores to the metrics."""
        if not self.config.train.eval_tasks:
            return
        self._report()
        self.progress.doing("evaluating on tasks")
        found = self.tasks(self.state.params)
        self.side_files.write(self.step, found)
        scores = (f"{name.removeprefix('eval/')} {value:.4g}" for name, value in found.items())
        self.progress.log(f"step {self.step}: {', '.join(scores)}")
        self.throughput.restart()

    def _write_side_files(self) -> None:
        """Draw the plots and append a text sample, if they are due at this step.

        Call this method after the checkpoint of the step, so that a failure here loses no step.
        """
        train = self.config.train
        draws = self.step in self.evaluated
        samples = train.sample_tokens > 0 and self._due(train.sample_every)
        if not (draws or samples):
            return
        self._report()
        if draws:
            self.side_files.draw(self.step)
        if samples:
            self.progress.doing("generating text")
            own = self.model, self.state.params, self.text.tokenizer, self.config
            self.side_files.sample(self.step, lambda: sample_text(*own))
        self.throughput.restart()


def _agreed(stop: signals.Stop) -> int:
    """Return the highest code that any process wants; all processes call this at the same time."""
    return max(map(int, processes.exchange(str(stop.wanted), "whether to stop")))


def has_overflowed(limit: int, in_a_row: int, skipped: int, step: int) -> bool:
    """Return whether so many steps were skipped that the residual must have outgrown int16.

    A step whose residual leaves the range of int16 is skipped. The result is True if the last
    `limit` steps were skipped, or if at least 1% of all steps, and at least `2 * limit` steps, were
    skipped.

    Args:
      limit: the limit `max_bad_steps` of the config.
      in_a_row: number of consecutive skipped steps up to now.
      skipped: number of skipped steps in the whole run.
      step: number of steps done.
    """
    return in_a_row >= limit or skipped >= max(2 * limit, step / 100)


def _range_hint(config: RunConfig) -> str:
    if config.model.store.dtype != "int16":
        return ""
    fixed = fixed_point.describe(config.model)
    return (
        f"; or the residual does not fit int16 ({fixed}); in that case, continue with "
        "--change_config --set=model.store.dtype=float32, or with another "
        "--set=model.store.fraction_bits, fewer if the residual grew too large"
    )
