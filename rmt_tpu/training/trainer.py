"""The training loop, and what it leaves in the run folder."""

import contextlib
import json
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

import sharding
from rmt_tpu import cost as resources
from rmt_tpu import data
from rmt_tpu.checkpoint import Checkpointer, Retention, Saved
from rmt_tpu.config import Learned, RunConfig, overrides
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.storage import Folder, Location, open_folder
from rmt_tpu.training import workdir
from rmt_tpu.training.evaluation import HeldOutLoss, sample_text
from rmt_tpu.training.global_arrays import put_batch
from rmt_tpu.training.growth import restore_grown
from rmt_tpu.training.metrics import MetricsWriter
from rmt_tpu.training.plots import plot_loss
from rmt_tpu.training.progress import TrainingProgress
from rmt_tpu.training.run import Run, load_datasets, prepare, resolve_dtypes
from rmt_tpu.training.step import TrainState


class Outcome(NamedTuple):
    """Steps done when the run ended, and the signal that ended it before the last, if one did."""

    step: int
    stopped_by: signal.Signals | None


# What processes have to agree on after a step, the most urgent last.
_GO_ON, _SAVE = 0, 1
_STOPS = {2: signal.SIGINT, 3: signal.SIGTERM}


def train(
    config: RunConfig,
    folder: Location,
    *,
    change_config: bool = False,
    profile_steps: int = 0,
    label: str = "train",
) -> Outcome:
    """Train `config` in `folder`, from its last good checkpoint if there is one.

    The first SIGINT or SIGTERM ends the run after the step it is in, with a checkpoint; of several
    processes, whichever gets it, after the next step that all are in.

    In a run of several processes (`processes.initialize`) all of them call it with the same
    arguments. The first one writes the run folder, which all see; each writes its own part of a
    checkpoint.

    Args:
      config: of the run; must be that of the run in the folder, if there is one.
      folder: the run folder, local or gs://.
      change_config: let the run in the folder go on with what differs, see `workdir.open_workdir`.
      profile_steps: trace so many steps into `<folder>/profile`.
      label: shown with the progress.

    Raises:
      UsageError, MeshError: the config, its files or the folder cannot be.
      RunError: the loss stays non-finite, no checkpoint can be read, or a process is missing.
    """
    folder = open_folder(folder)
    if processes.is_first():
        workdir.check_access(folder)
    config = resolve_dtypes(config)
    run = prepare(config, sharding.make_mesh(config.train.mesh))
    tokenizer = data.load_tokenizer(config.data.tokenizer)
    datasets = load_datasets(config, tokenizer)
    _check_agreement(config, datasets.train.checksum())
    changes = workdir.open_workdir(folder, config, change_config=change_config)
    with TrainingProgress(config.train.steps, label, show=processes.is_first()) as progress:
        if changes:
            progress.say(f"going on with another config: {'; '.join(changes)}")
        if note := _untrained_positions(config):
            progress.say(note)
        loop = _Loop(config, run, folder, tokenizer, datasets, progress)
        if processes.is_first():
            workdir.write_config(folder, config, changes)
            tokenizer.save(folder)
        return loop.run(profile_steps)


def _check_agreement(config: RunConfig, data_checksum: int) -> None:
    """Processes that do not do the same would wait for each other in different places."""
    own = {"config": overrides.to_json(config), "data": data_checksum}
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
    match config.model.attention.positions:
        case Learned(max_length=max_length) if config.data.seq_len < max_length:
            return (
                f"note: learned positions {config.data.seq_len} to {max_length - 1} are not "
                f"trained at --seq_len={config.data.seq_len}; text beyond them will be poor"
            )
    return None


class _Loop:
    """State of one run of the loop: the model's, and the one step that is still being computed."""

    def __init__(self, config, run: Run, folder: Folder, tokenizer, datasets, progress):
        self.config, self.model, self.folder = config, run, folder
        self.tokenizer, self.datasets, self.progress = tokenizer, datasets, progress
        train = config.train
        self.checkpoints = Checkpointer(
            folder.child("checkpoints"),
            retention=Retention(train.keep_checkpoints, train.keep_every, train.keep_best),
            compression=train.checkpoint_compression,
            report=progress.say,
        )
        self.data_checksum = datasets.train.checksum()
        self.state, self.step, self.windows_read = self._restore_or_init()
        self.saved_step, self.saved_at = self.step, time.monotonic()
        self.evaluated: dict[int, float] = {}  # the last held-out loss, by its step
        self.pending: tuple[dict[str, jax.Array], float] | None = None
        self.held_out_loss = HeldOutLoss(run, datasets.held_out, config.train.eval_batches)

    def run(self, profile_steps: int) -> Outcome:
        steps = self.config.train.steps
        with contextlib.ExitStack() as stack:
            self.metrics = None
            if processes.is_first():
                writer = MetricsWriter(self.folder, first_step=self.step + 1)
                self.metrics = stack.enter_context(contextlib.closing(writer))
            if self.step < steps:
                if processes.is_first():  # those of a run that was complete at an earlier step
                    self.folder.delete("samples.txt")
                with _signals(self.progress) as stop:
                    stopped_by = self._loop(profile_steps, stop)
                if stopped_by is not None and self.step < steps:
                    self._draw()
                    return Outcome(self.step, stopped_by)
            finished = self.folder.read("samples.txt") is not None
            if processes.from_first(finished, "the last step"):
                self.progress.say(f"{self.folder} is complete at step {steps}")
            else:
                self._finish()
        return Outcome(self.step, None)

    def _loop(self, profile_steps: int, stop: "_Stop") -> signal.Signals | None:
        """Steps, to the last one or to a signal, which is returned."""
        steps, first = self.config.train.steps, self.step + 1
        train_step = self._compile()
        profile_steps = profile_steps if processes.is_first() else 0
        highest = processes.Highest(self.model.mesh)
        stopped_by = None
        self.clock = time.monotonic()
        with contextlib.ExitStack() as profile, self._batches() as batches:
            for step in range(first, steps + 1):
                # A step or two to warm up, and then those to look at.
                if profile_steps and step == min(first + 2, steps):
                    profile.enter_context(_profile(self.folder))
                self._step(train_step, step, batches)
                if profile_steps and step == min(first + 1 + profile_steps, steps):
                    jax.block_until_ready(self.state)
                    profile.close()
                wanted = highest(stop.wanted or self._checkpoint_seconds_are_over())
                stopped_by = _STOPS.get(wanted)
                # Before the checkpoint: a run that resumes from it does not evaluate its step
                # again.
                if step < steps and self._due(self.config.train.eval_every):
                    self._evaluate()
                if wanted != _GO_ON or self._due(self.config.train.checkpoint_every):
                    self._save()
                if stopped_by is not None:
                    break
        self._say_saved(self.checkpoints.wait())
        return stopped_by

    def _restore_or_init(self) -> tuple[TrainState, int, int]:
        abstract = jax.eval_shape(self.model.init)
        if not processes.from_first(self.checkpoints.steps(), "the run's checkpoints"):
            init = jax.jit(self.model.init, out_shardings=self.model.state_shardings)
            return init(), 0, 0
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract,
            self.model.state_shardings,
        )
        step, state, meta = restore_grown(self.checkpoints, like, self.config.model)
        if meta["data_checksum"] != self.data_checksum:
            raise UsageError(
                f"--data={self.config.data.source} does not give the tokens that the run in "
                f"--workdir={self.folder} was trained on up to step {step}: a file, the tokenizer "
                "or (for stdlib) the Python has changed; give the same ones, or another --workdir"
            )
        self.progress.say(f"resuming {self.folder} from step {step}")
        return state, step, meta["windows_read"]

    def _compile(self):
        """Compiled ahead, so that the first step's time is a step's time."""
        started = time.monotonic()
        batch = self._batch_at(self.windows_read)
        step = jax.jit(self.model.step, donate_argnums=0).lower(self.state, batch).compile()
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
        self._say_saved(self.checkpoints.check())
        now = time.monotonic()
        seconds, self.clock = now - self.clock, now
        in_a_row = int(row.pop("train/skipped_in_a_row"))
        row |= self._throughput(seconds) | _memory()
        row["throughput/data_wait_seconds"] = waited
        self.progress.update(self.step, row)
        if self.step % self.config.train.log_every == 0 or self.step == self.config.train.steps:
            self._write(row)
        if in_a_row >= self.config.train.max_bad_steps:
            raise RunError(
                f"the loss or its gradient was not finite in {in_a_row} steps in a row, to step "
                f"{self.step}; the last checkpoint is of step {self.saved_step}. Try a lower "
                f"--set=train.optimizer.learning_rate, in another --workdir{self._range_hint()}"
            )

    def _write(self, row: dict[str, float]) -> None:
        if self.metrics:
            self.metrics.write(self.step, row)

    def _range_hint(self) -> str:
        if self.config.model.store.dtype != "int16":
            return ""
        return (
            "; or the residual has left the range of int16 fixed point, +-64, in which case "
            "--change_config --set=model.store.dtype=float32 goes on from there"
        )

    def _throughput(self, seconds: float) -> dict[str, float]:
        tokens = self.config.train.batch_size * self.config.data.seq_len
        row = {
            "throughput/step_seconds": seconds,
            "throughput/tokens_per_second": tokens / seconds,
        }
        devices = self.model.mesh.devices.flatten()
        if peak := resources.peak_flops(devices[0].device_kind):
            forward = resources.flops_per_token(self.config.model, self.config.data.seq_len)
            flops = resources.train_flops(forward, tokens)
            row["throughput/mfu"] = flops / seconds / (peak * len(devices))
        return row

    def _due(self, every: int) -> bool:
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def _checkpoint_seconds_are_over(self) -> int:
        """Process 0's clock decides for all."""
        seconds = self.config.train.checkpoint_seconds
        if not processes.is_first() or seconds == 0:
            return _GO_ON
        if time.monotonic() - self.saved_at < seconds:
            return _GO_ON
        self.saved_at = time.monotonic()  # asked for once: the others' answer comes a step later
        return _SAVE

    def _save(self) -> None:
        self._report()
        if self.step != self.saved_step:
            meta = {"windows_read": self.windows_read, "data_checksum": self.data_checksum}
            self.checkpoints.begin_save(
                self.step,
                self.state,
                meta,
                loss=self.evaluated.get(self.step),
                before_commit=self.metrics.flush if self.metrics else None,
            )
            self.saved_step = self.step
        self.clock = self.saved_at = time.monotonic()

    def _say_saved(self, saved: Saved | None) -> None:
        if saved:
            self.progress.say(
                f"saved step {saved.step}: {saved.num_bytes / 1e6:,.1f} MB in {saved.seconds:.2f} "
                f"s, of which training waited {saved.blocked_seconds:.3f} s"
            )

    def _evaluate(self) -> None:
        """Write the loss on held-out text, and draw the curve so far."""
        self._report()
        loss = self.held_out_loss(self.state.params)
        self.evaluated = {self.step: loss}
        self._write({"eval/loss": loss})
        self.progress.say(f"step {self.step}: loss on held-out text {loss:.4f}")
        self._draw()
        self.clock = time.monotonic()

    def _draw(self) -> None:
        if self.metrics:
            self.metrics.flush()
            self.progress.say(f"loss curve: {plot_loss(self.folder)}")

    def _finish(self) -> None:
        """Last evaluation, a sample of text; `samples.txt` is there when a run is complete."""
        self._evaluate()
        text = sample_text(self.model, self.state.params, self.tokenizer, self.config)
        if text is not None:
            self.folder.write("samples.txt", (text + "\n").encode())
            where = f"{self.folder}/samples.txt"
            self.progress.say(f"sample after {self.step} steps ({where}):\n{text}")


def _memory() -> dict[str, float]:
    """Bytes in use on the busiest local device, where the platform tells."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    in_use = [s["bytes_in_use"] for s in stats if "bytes_in_use" in s]
    return {"memory/bytes_in_use": float(max(in_use))} if in_use else {}


@contextlib.contextmanager
def _profile(folder: Folder) -> Iterator[None]:
    """Traces into `profile/`; the profiler itself writes to a local disk only."""
    with tempfile.TemporaryDirectory() as scratch:
        jax.profiler.start_trace(scratch)
        try:
            yield
        finally:
            jax.profiler.stop_trace()
        for path in sorted(p for p in Path(scratch).rglob("*") if p.is_file()):
            folder.write(f"profile/{path.relative_to(scratch).as_posix()}", path.read_bytes())


class _Stop:
    """Whether a signal asks for the end; `wanted` is a key of `_STOPS`, or `_GO_ON`."""

    def __init__(self):
        self.wanted = _GO_ON


@contextlib.contextmanager
def _signals(progress: TrainingProgress) -> Iterator[_Stop]:
    """What the first SIGINT or SIGTERM asks for; the second ends the process as usual."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    usual = {number: signal.getsignal(number) for number in _STOPS.values()}

    def on_signal(number: int, frame) -> None:
        stop.wanted = next(key for key, value in _STOPS.items() if value == number)
        for number, handler in usual.items():
            signal.signal(number, handler)
        # Refused in the midst of another write to the same stream.
        with contextlib.suppress(RuntimeError):
            progress.say("stopping after this step; once more to stop at once, without checkpoint")

    for number in usual:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
