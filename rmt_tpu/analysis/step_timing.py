"""Measurements of whole train steps on this machine's device, with random tokens."""

import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import sharding
from rmt_tpu.analysis.step_cost import TrainStep
from rmt_tpu.config import RunConfig
from rmt_tpu.data import Batch
from rmt_tpu.estimator.measure import device_events
from rmt_tpu.storage import open_folder
from rmt_tpu.tables import markdown
from rmt_tpu.training import kernel_checks
from rmt_tpu.training.run import PreparedRun, prepare

_WARM_UP, _STEPS, _ROUNDS, _PROFILED = 2, 5, 3, 2
# The table of a step's largest instructions has at most this number of rows.
_LARGEST = 12


class StepTime(NamedTuple):
    """A measured train step.

    Attributes:
      preset: the preset, with the changed config values.
      tokens: the number of tokens in a step.
      seconds: the median time of a step over rounds of consecutive steps.
      rounds: for each round, the mean time of a step in seconds.
      compile_seconds: the time to trace and compile the step.
      temporary_bytes: the memory that the step needs in addition to its arguments.
      busy_seconds: how long the device computes during a step; 0 if the profile does not show it.
      instructions: the kernels and fusions of the compiled step, most expensive first. Each has a
        name, the number of times that a step runs it, and its seconds in a step.
      losses: the loss of the first step and of the last one.
    """

    preset: str
    tokens: int
    seconds: float
    rounds: list[float]
    compile_seconds: float
    temporary_bytes: int
    busy_seconds: float
    instructions: list[tuple[str, float, float]]
    losses: tuple[float, float]


def time_step(step: TrainStep, log: Callable[[str], None] = lambda line: None) -> StepTime:
    """Compile a train step for the first device of this machine, and measure it.

    The step uses the same kernels as a run: they are checked first, and on a GPU timed against
    plain JAX (`rmt_tpu.training.kernel_checks`).

    Args:
      step: the preset, the sizes, and the config values to change.
      log: a function that prints a line of progress.

    Raises:
      UsageError: the preset or a change is not legal.
      MeshError: a size is not divisible by the number of devices that it is sharded over.
    """
    config = step.config(jax.devices()[0].device_kind)
    run = prepare(config, sharding.make_mesh(config.train.mesh, jax.devices()[:1]))
    with _checked(config, run, log):
        state = run.jitted_init()()
        batches = [_batch(config, run, seed) for seed in range(2)]
        started = time.perf_counter()
        compiled = run.jitted_step().lower(state, batches[0]).compile()
        compile_seconds = time.perf_counter() - started
    rounds, losses, taken = [], [], 0

    def take(count: int) -> float:
        nonlocal state, taken
        started = time.perf_counter()
        for _ in range(count):
            state, metrics = compiled(state, batches[taken % 2])
            taken += 1
        losses.append(float(metrics["train/loss"]))
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / count

    take(1)
    take(_WARM_UP)
    for _ in range(_ROUNDS):
        rounds.append(take(_STEPS))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            take(_PROFILED)
        events = device_events(Path(folder))
    seconds, counts = Counter(), Counter()
    for name, begin, end in events:
        seconds[name] += (end - begin) / _PROFILED
        counts[name] += 1 / _PROFILED
    changes = "".join(f" {path}={value}" for path, value in step.changes.items())
    return StepTime(
        preset=step.preset + changes,
        tokens=config.train.batch_size * config.data.seq_len,
        seconds=statistics.median(rounds),
        rounds=rounds,
        compile_seconds=compile_seconds,
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
        busy_seconds=sum(seconds.values()),
        instructions=[(name, counts[name], s) for name, s in seconds.most_common()],
        losses=(losses[0], losses[-1]),
    )


def table(times: Sequence[StepTime]) -> str:
    """Return a Markdown table with one row per step.

    A column has the times relative to that of the last step.
    """
    lines = [
        "train step | ms | times the last row | tokens/s | launches | temporary memory, MiB | "
        "compiled in, s"
    ]
    for t in times:
        launches = sum(count for _, count, _ in t.instructions)
        lines.append(
            f"{t.preset} | {1e3 * t.seconds:.2f} | {t.seconds / times[-1].seconds:.2f} | "
            f"{t.tokens / t.seconds:,.0f} | {f'{launches:,.0f}' if launches else '-'} | "
            f"{t.temporary_bytes / 2**20:,.0f} | {t.compile_seconds:.0f}"
        )
    return markdown(lines) + "\n"


def largest_table(step: StepTime) -> str:
    """Return a Markdown table of the most expensive kernels and fusions in a step."""
    lines = ["kernel or fusion | runs | us each | ms | share"]
    for name, count, seconds in step.instructions[:_LARGEST]:
        lines.append(
            f"`{name[:60]}` | {count:.0f} | {1e6 * seconds / count:.0f} | {1e3 * seconds:.2f} | "
            f"{seconds / step.busy_seconds:.0%}"
        )
    return markdown(lines) + "\n"


@contextlib.contextmanager
def _checked(config: RunConfig, run: PreparedRun, log: Callable[[str], None]) -> Iterator[Any]:
    """Use the kernels of a run with this config in the `with` body."""
    with (
        tempfile.TemporaryDirectory() as folder,
        kernel_checks.check_kernels(config, run, open_folder(folder), log, restart=False) as plain,
    ):
        yield plain


def _batch(config: RunConfig, run: PreparedRun, seed: int) -> Batch:
    """Return a batch of random tokens on the device; each row has two documents."""
    shape = config.train.batch_size, config.data.seq_len
    ids = np.random.default_rng(seed).integers(0, config.model.vocab_size, (2, *shape))
    segments = np.ones(shape, np.int32)
    segments[:, shape[1] // 3 :] = 2
    inputs, targets = ids.astype(np.int32)
    arrays = Batch(inputs, targets, segments, np.ones(shape, np.float32))
    return jax.tree.map(lambda x: jax.device_put(x, run.batch_sharding), arrays)
