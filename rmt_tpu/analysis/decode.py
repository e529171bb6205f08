"""The cost of a decode step, which generates one token for each row of a batch.

The time of a step has a lower bound, which is the longer of two times. The first is the time to
move the bytes of the step at the device's full bandwidth. The second is the time to compute its
matrix products at peak FLOP/s. The bytes are those of the weights, in the compute dtype, and of the
cache.

The lower bound is compared with an estimate or a measurement. An estimate is for a TPU that need
not be present. Several steps are compiled as one program, and `step_cost` estimates the time of its
instructions. A measurement runs the text generator (`generation.Engine`) on this machine.
"""

import contextlib
import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rmt_tpu import cost, memory
from rmt_tpu.analysis.step_cost import StepCost, step_cost
from rmt_tpu.config import ModelConfig, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.decoder import Cache, Decoder
from rmt_tpu.estimator import DEVICES, Failure, Job, Program, Target, compile_jobs
from rmt_tpu.estimator.hlo import Module
from rmt_tpu.estimator.tuning import target_of
from rmt_tpu.generation import Engine, Request, Sampling, cast_once
from rmt_tpu.generation.engine import bucket
from rmt_tpu.generation.layouts import lay_out, lower_steps
from rmt_tpu.generation.programs import ModelSpec

# One dispatch generates this number of tokens for each row of the batch, as in `generation.Engine`.
STEPS = 8
# One repeat of a measurement generates at most this number of tokens for each row.
_MOST = 64


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """A decode step to estimate or time: a model, a batch size and a context length.

    Attributes:
      preset: the name of the model's preset.
      batch: the number of rows of the batch; a step generates one token for each.
      context: the number of tokens per row, including the new token.
      changes: config values that replace the preset's, keyed by dotted path.
    """

    preset: str
    batch: int
    context: int
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def model(self, dtype: str) -> ModelConfig:
        """Return the model's config; its compute dtype is `dtype` unless `changes` sets it.

        Raises:
          UsageError: the preset does not exist or a change is not valid.
        """
        return overrides.apply(
            run(self.preset), {"model.compute_dtype": dtype} | self.changes
        ).model

    @property
    def capacity(self) -> int:
        """The number of tokens per row that the cache can hold, at least `context`."""
        return bucket(self.context)


@dataclasses.dataclass(frozen=True)
class DecodeLowerBound:
    """The least work of a decode step: its memory traffic, memory and FLOPs.

    Attributes:
      weights: the bytes of weights that a step reads. An embedding counts with one row per token.
        Experts count with the expected number of distinct experts, if all are equally likely.
      cache: the bytes of the cache that a step reads or writes.
      held: the memory for all weights and a cache of `DecodeCase.capacity` tokens, in bytes.
      flops: the FLOPs of a step, as `rmt_tpu.cost` counts them.
    """

    weights: int
    cache: int
    held: int
    flops: int

    def seconds(self, bandwidth: float, peak_flops: int | float) -> float:
        """Return the lower bound on the time: the longer of memory time and compute time.

        `bandwidth` is in bytes/s, and `peak_flops` in FLOP/s.
        """
        return max((self.weights + self.cache) / bandwidth, self.flops / peak_flops)


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """The estimated or measured time of a decode step on one device.

    Attributes:
      case: the decode step.
      device: the name of the device that the step was estimated for or timed on.
      least: the least work of the step.
      least_seconds: the lower bound on the step's time, or None if the device's bandwidth is
        unknown.
      timed: whether the step's time is measured, rather than estimated.
      cost: the estimated cost of a dispatch of STEPS steps, or None if the step is timed or failed.
      copies: the number of large copies from HBM to HBM in a dispatch, and their total bytes. A
        copy is large if it has at least as many bytes as the keys of one layer.
      times: the measured seconds per step, one value per repeat.
      fault: why the step could not be estimated or timed, in one line.
    """

    case: DecodeCase
    device: str
    least: DecodeLowerBound
    least_seconds: float | None
    timed: bool = False
    cost: StepCost | None = None
    copies: tuple[int, int] = (0, 0)
    times: tuple[float, ...] = ()
    fault: str = ""

    @property
    def seconds(self) -> float | None:
        """The time of a step in seconds, or None if there is no result.

        For a timed step, it is the median over repeats. An estimate is at least the lower bound.
        """
        if self.times:
            return statistics.median(self.times)
        return self.cost and self._step_seconds(self.cost.cycles)

    @property
    def span(self) -> tuple[float, float] | None:
        """The minimum and maximum time of a step in seconds, or None if there is no result.

        A measurement has one time per repeat, and an estimate has one per cost model.
        """
        if self.times:
            return min(self.times), max(self.times)
        if self.cost is None:
            return None
        seconds = [self._step_seconds(cycles) for cycles in self.cost.by_model.values()]
        return min(seconds), max(seconds)

    def _step_seconds(self, cycles: float) -> float:
        return max(cycles, self.cost.hbm_cycles) / self.cost.clock / STEPS

    @property
    def of_bandwidth(self) -> float | None:
        """The lower bound divided by the time of the step, or None if either is unknown."""
        if self.seconds is None or self.least_seconds is None:
            return None
        return self.least_seconds / self.seconds

    def json(self) -> dict[str, Any]:
        """Return all results as JSON values, in bytes and seconds."""
        return dataclasses.asdict(dataclasses.replace(self, cost=None)) | {
            "capacity": self.case.capacity,
            "steps": STEPS,
            "cost": self.cost and self.cost.json(),
            "seconds": self.seconds,
            "span": self.span,
            "of_bandwidth": self.of_bandwidth,
        }


def lower_bound(case: DecodeCase, dtype: str) -> DecodeLowerBound:
    """Return the least work of a decode step, computed from the shapes of arrays.

    Raises:
      UsageError: see `DecodeCase.model`.
    """
    decoder = _abstract(case.model(dtype))
    read = held = 0
    for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        size = _bytes(variable)
        held += size
        axes = variable.get_metadata("axes")
        tied = path[-1] == "tokens" and decoder.config.tied_embeddings
        if variable.get_metadata("role") == "embedding" and not tied:
            size = case.batch * size // variable.shape[0]
        elif "expert" in axes:
            _, stack, sublayer, *_ = path
            experts = decoder.config.stacks[stack].cores[sublayer]
            # This is the probability that a row of the batch does not select a given expert.
            idle = 1 - experts.top_k / experts.num_experts
            size = round(size * (1 - idle**case.batch))
        read += size
    flops = case.batch * cost.flops_per_token(decoder.config, case.context)
    held += _bytes(_cache(decoder, case.batch, case.capacity).cores)
    return DecodeLowerBound(read, _read_of_cache(decoder, case), held, flops)


def _read_of_cache(decoder: Decoder, case: DecodeCase) -> int:
    """Return how many bytes of the cache a decode step reads or writes."""
    total = 0
    for s, stack in enumerate(decoder.config.stacks):
        for k, core in enumerate(stack.cores):
            window = core.softmax and core.softmax.window
            tokens = case.context if window is None else min(case.context, window)
            total += _bytes(_cache(decoder, case.batch, tokens).cores[s][k])
    return total


def estimate(
    cases: Sequence[DecodeCase], target: Target, progress: Callable[[str], None] | None = None
) -> list[DecodeRow]:
    """Estimate the decode steps of all cases on a TPU that need not be present.

    After each case is compiled, `progress` is called with a line of text.

    Raises:
      UsageError: a preset or a change is not legal.
      CompilerError: there is no compiler.
    """
    rows = []
    for case in cases:
        bound = lower_bound(case, "bfloat16")
        seconds = bound.seconds(target.bandwidth, target.peak_flops)
        fault = _fault(case, bound, target.hbm)
        rows.append(DecodeRow(case, target.name, bound, seconds, fault=fault))
    jobs = [Job(f"{__name__}:lower", dataclasses.asdict(row.case)) for row in rows if not row.fault]
    with contextlib.closing(compile_jobs(target, jobs, progress, buffers=True)) as outcomes:
        return [row if row.fault else _compiled(row, next(outcomes)) for row in rows]


def _compiled(row: DecodeRow, outcome: Program | Failure) -> DecodeRow:
    if isinstance(outcome, Failure):
        return dataclasses.replace(row, fault=outcome.message)
    decoder = _abstract(row.case.model("bfloat16"))
    return dataclasses.replace(
        row,
        cost=step_cost(row.case.preset, row.case.batch, outcome),
        copies=copies(
            outcome.module, _layer_bytes(_cache(decoder, row.case.batch, row.case.capacity))
        ),
    )


def lower(device: jax.Device, **case: Any) -> jax.stages.Lowered:
    """Lower a dispatch of STEPS decode steps, so that it can be compiled.

    See `layouts.lower_steps`. The device need not be present. Each step chooses the likeliest
    token. Other ways of sampling are branches, and an estimate cannot know how often a branch runs.

    Args:
      device: a device of a topology description.
      **case: the fields of a `DecodeCase`.
    """
    case = DecodeCase(**case)
    graphdef, params = nnx.split(_abstract(case.model("bfloat16")), nnx.Param)
    here = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    on_device = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    decoder = nnx.merge(graphdef, jax.tree.map(on_device, params))
    # Set the mesh, because kernels look up their block sizes by the device kind of the mesh.
    with jax.sharding.use_abstract_mesh(here.mesh.abstract_mesh), warnings.catch_warnings():
        # Ignore the warning that no kernel supports a call, because some kernels need more tokens
        # than a decode step has.
        warnings.filterwarnings("ignore", "no tpu kernel for this call")
        lay_out(decoder, case.batch)
        return lower_steps(*ModelSpec.of(decoder), case.batch, case.capacity, STEPS)


def copies(module: Module, least_bytes: int) -> tuple[int, int]:
    """Return how many HBM copies have at least `least_bytes`, and their total bytes."""
    calls = moved = 0
    for ran in module.run():
        instruction = ran.instruction
        starts = instruction.opcode.endswith("-start") and not instruction.is_prefetch
        if not (starts or module.moves_only(instruction)):
            continue
        written = sum(array.bytes for array in instruction.arrays if array.space == 0)
        # The result of an in-place update is a whole array, but only a part of it moves. The
        # traffic includes this part twice, because it is read and written.
        size = min(written, module.traffic(ran.computation, instruction).hbm // 2)
        if size >= least_bytes:
            calls, moved = calls + ran.times, moved + ran.times * size
    return calls, moved


def measure(
    cases: Iterable[DecodeCase], repeats: int, progress: Callable[[str], None] | None = None
) -> Iterator[DecodeRow]:
    """Time the decode steps of the text generator on this machine's first device.

    Weights and tokens are random. Rows grow until they reach the context of the case. A repeat runs
    rounds of STEPS steps, and its result is the time per step in the median round. Reading the
    prompts is not timed. The first repeat is discarded, because it includes compilation.

    Raises:
      UsageError: a preset or a change is not legal.
    """
    device = jax.devices()[0]
    target, peak = target_of(device.device_kind, DEVICES), cost.peak_flops(device.device_kind)
    stats = device.memory_stats() or {}
    limit = (
        memory.machine_bytes() if device.platform == "cpu" else stats.get("bytes_limit", math.inf)
    )
    for case in cases:
        bound = lower_bound(case, "auto")
        fault, seconds = _fault(case, bound, limit), None
        if target and peak:
            seconds = bound.seconds(target.bandwidth, peak)
        row = DecodeRow(case, device.device_kind, bound, seconds, timed=True, fault=fault)
        if not row.fault:
            try:
                row = dataclasses.replace(row, times=tuple(_times(case, repeats)))
            except Exception as error:
                if not memory.is_out(error):
                    raise
                row = dataclasses.replace(row, fault=" ".join(str(error).split())[:200])
        if progress is not None:
            result = row.fault or f"{row.seconds * 1e3:.3f} ms per step"
            progress(f"{row.device}: {case.preset} {case.batch} {case.context}: {result}")
        yield row


def _times(case: DecodeCase, repeats: int) -> Iterator[float]:
    config = case.model("auto")
    engine = Engine(random_decoder(config), -1, slots=case.batch, steps=STEPS)
    rounds = max(2, min(_MOST, case.context // 2) // STEPS)
    new = rounds * STEPS
    prompts = np.random.default_rng(0).integers(
        config.vocab_size, size=(case.batch, max(1, case.context - new))
    )
    # Reading the prompt generates a token too, so `max_tokens` is one more than the timed steps.
    requests = [Request(p, Sampling(max_tokens=new + 1, seed=n)) for n, p in enumerate(prompts)]
    for repeat in range(1 + repeats):
        ends = []
        for number, _ in enumerate(engine.run(requests)):
            if number % case.batch == case.batch - 1:
                ends.append(time.perf_counter())
        # At the time ends[0], all prompts have been read. The next round may still enlarge the
        # cache, so the differences start at ends[1].
        if repeat:
            yield float(np.median(np.diff(ends[1:]))) / STEPS


def random_decoder(config: ModelConfig) -> Decoder:
    """Return a decoder with random weights, cast once to the dtype in which decode steps run."""
    draw = lambda: nnx.state(cast_once(Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    graphdef, _ = nnx.split(_abstract(config), nnx.Param)
    # Drawing all weights in one program is much faster than one program per array.
    return nnx.merge(graphdef, jax.jit(draw)())


def _fault(case: DecodeCase, bound: DecodeLowerBound, limit: int | float) -> str:
    """Return in one line why a decode step cannot run, or "" if no reason is known."""
    learned = case.model("auto").learned_positions
    if learned and learned.max_length < case.context:
        return f"has only {learned.max_length} learned positions"
    if bound.held > limit:
        held, there = memory.format_bytes(bound.held), memory.format_bytes(int(limit))
        return f"does not fit: weights and cache take {held}, but the device has {there}"
    return ""


def _abstract(config: ModelConfig) -> Decoder:
    """Return a decoder of abstract arrays, whose matrices have the compute dtype."""
    return nnx.eval_shape(lambda: cast_once(Decoder(config, rngs=nnx.Rngs(0))))


def _cache(decoder: Decoder, batch: int, capacity: int) -> Cache:
    """Return the cache of a decoder as abstract arrays (shapes only)."""
    return jax.eval_shape(lambda: decoder.empty_cache(batch, capacity))


def _layer_bytes(cache: Cache) -> int:
    """Return the bytes per layer of the largest array in a cache, such as the array of keys."""
    return max(_bytes(leaf) // leaf.shape[0] for leaf in jax.tree.leaves(cache.cores))


def _bytes(arrays: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
