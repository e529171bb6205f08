"""The cost of a decode step, which reads and makes a new token for each row of a batch.

The lower bound is the time of a step's bytes at the full bandwidth of a device, or of its products
at the peak if that is longer: weights in the compute dtype and the cache are read once, and nothing
else is moved. It is compared with a dispatch of steps, compiled for a TPU that need not be there
and estimated as train steps are (see `step_cost`), or with the engine's steps, timed here.
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
from rmt_tpu.generation.programs import Model

STEPS = 8  # tokens per row in a dispatch, as in the engine
_MOST = 64  # tokens per row in one repeat of a measurement


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode step of a model, with its sizes.

    Attributes:
      preset: the preset of the model.
      batch: the number of rows.
      context: tokens of each row, including the new one.
      changes: values at dotted paths of the preset's config.
    """

    preset: str
    batch: int
    context: int
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def model(self, dtype: str) -> ModelConfig:
        """Return the model, with a compute dtype that a change may replace.

        Raises:
          UsageError: the preset or a change is not legal.
        """
        return overrides.apply(
            run(self.preset), {"model.compute_dtype": dtype} | self.changes
        ).model

    @property
    def capacity(self) -> int:
        """The number of tokens that the program's cache has room for."""
        return bucket(self.context)


@dataclasses.dataclass(frozen=True)
class Least:
    """The lower bounds of a step.

    Attributes:
      weights: bytes of weights that are read: one row of an embedding for each token; of experts
        the expected share that the rows choose if all experts are equally likely; all other
        weights.
      cache: bytes of the cache that are read for earlier tokens or written for the new ones.
      held: bytes in memory of all weights and of a cache of the program's capacity.
      flops: FLOPs by `rmt_tpu.cost`.
      flops: as `rmt_tpu.cost` counts them.
    """

    weights: int
    cache: int
    held: int
    flops: int

    def seconds(self, bandwidth: float, peak_flops: int | float) -> float:
        """Return the longer of the bytes' time at the bandwidth (bytes/s) and the products'."""
        return max((self.weights + self.cache) / bandwidth, self.flops / peak_flops)


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of a case on a device.

    Attributes:
      case: the case.
      device: the device that it was estimated for or timed on.
      least: its lower bounds.
      least_seconds: the lower bound of its time; None where the device's bandwidth is not known.
      timed: whether the step is timed and not estimated.
      cost: the cost of a dispatch of STEPS steps; None if the step is timed, or failed.
      copies: in the dispatch, the number and the bytes of moves from HBM to HBM that are at least
        as large as a layer's keys.
      times: measured seconds per step, one for each repeat.
      fault: why there is no step, in a line.
    """

    case: Case
    device: str
    least: Least
    least_seconds: float | None
    timed: bool = False
    cost: StepCost | None = None
    copies: tuple[int, int] = (0, 0)
    times: tuple[float, ...] = ()
    fault: str = ""

    @property
    def seconds(self) -> float | None:
        """The seconds of a step, or None.

        They are the median if the step was timed; an estimate is never less than the time of its
        bytes.
        """
        if self.times:
            return statistics.median(self.times)
        return self.cost and self._of_cycles(self.cost.cycles)

    @property
    def span(self) -> tuple[float, float] | None:
        """The least and most seconds, over repeats or over the models of cost."""
        if self.times:
            return min(self.times), max(self.times)
        if self.cost is None:
            return None
        seconds = [self._of_cycles(cycles) for cycles in self.cost.by_model.values()]
        return min(seconds), max(seconds)

    def _of_cycles(self, cycles: float) -> float:
        return max(cycles, self.cost.hbm_cycles) / self.cost.clock / STEPS

    @property
    def of_bandwidth(self) -> float | None:
        """The fraction of the full bandwidth: the least time divided by that of the step."""
        if self.seconds is None or self.least_seconds is None:
            return None
        return self.least_seconds / self.seconds

    def json(self) -> dict[str, Any]:
        """Return all figures, in bytes and seconds."""
        return dataclasses.asdict(dataclasses.replace(self, cost=None)) | {
            "capacity": self.case.capacity,
            "steps": STEPS,
            "cost": self.cost and self.cost.json(),
            "seconds": self.seconds,
            "span": self.span,
            "of_bandwidth": self.of_bandwidth,
        }


def least(case: Case, dtype: str) -> Least:
    """Return the lower bounds of a case, from shapes alone.

    Raises:
      UsageError: see `Case.model`.
    """
    decoder = _abstract(case.model(dtype))
    read = held = 0
    for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        size = _bytes(variable)
        held += size
        axes = variable.get_metadata("axes")
        if variable.get_metadata("role") == "embedding":
            size = case.batch * size // variable.shape[0]
        elif "expert" in axes:
            _, stack, sublayer, *_ = path
            experts = decoder.config.stacks[stack].cores[sublayer]
            # Share of the experts that one row does not choose.
            idle = 1 - experts.top_k / experts.num_experts
            size = round(size * (1 - idle**case.batch))
        read += size
    cache = lambda capacity: _bytes(_cache(decoder, case.batch, capacity).cores)
    flops = case.batch * cost.flops_per_token(decoder.config, case.context)
    return Least(read, cache(case.context), held + cache(case.capacity), flops)


def estimate(
    cases: Sequence[Case], target: Target, progress: Callable[[str], None] | None = None
) -> list[Row]:
    """Estimate each case on a chip that need not be there; report each compiled one to `progress`.

    Raises:
      UsageError: a preset or a change is not legal.
      CompilerError: there is no compiler.
    """
    rows = []
    for case in cases:
        needs = least(case, "bfloat16")
        seconds = needs.seconds(target.bandwidth, target.peak_flops)
        fault = _fault(case, needs, target.hbm)
        rows.append(Row(case, target.name, needs, seconds, fault=fault))
    jobs = [Job(f"{__name__}:lower", dataclasses.asdict(row.case)) for row in rows if not row.fault]
    with contextlib.closing(compile_jobs(target, jobs, progress, buffers=True)) as outcomes:
        return [row if row.fault else _compiled(row, next(outcomes)) for row in rows]


def _compiled(row: Row, outcome: Program | Failure) -> Row:
    if isinstance(outcome, Failure):
        return dataclasses.replace(row, fault=outcome.message)
    decoder = _abstract(row.case.model("bfloat16"))
    return dataclasses.replace(
        row,
        cost=step_cost(row.case.preset, row.case.batch, outcome),
        copies=copies(
            outcome.module, _of_layer(_cache(decoder, row.case.batch, row.case.capacity))
        ),
    )


def lower(device: jax.Device, **case: Any) -> jax.stages.Lowered:
    """Lower a dispatch like the engine's for a device that need not exist.

    See `layouts.lower_steps`. Steps take the likeliest token: other choices are branches, and the
    estimate does not know how often they are taken.

    Args:
      device: a device of a topology.
      **case: the fields of a Case.
    """
    case = Case(**case)
    graphdef, params = nnx.split(_abstract(case.model("bfloat16")), nnx.Param)
    here = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    decoder = nnx.merge(graphdef, jax.tree.map(placed, params))
    # Block sizes are looked up by the device of the mesh that is active.
    with jax.sharding.use_abstract_mesh(here.mesh.abstract_mesh), warnings.catch_warnings():
        # Some kernels serve only calls with many tokens.
        warnings.filterwarnings("ignore", "no tpu kernel for this call")
        lay_out(decoder, case.batch)
        return lower_steps(*Model.of(decoder), case.batch, case.capacity, STEPS)


def copies(module: Module, least_bytes: int) -> tuple[int, int]:
    """Return the number and bytes of HBM-to-HBM moves of at least `least_bytes` in a run."""
    calls = moved = 0
    for ran in module.run():
        instruction = ran.instruction
        starts = instruction.opcode.endswith("-start") and not instruction.is_prefetch
        if not (starts or module.moves_only(instruction)):
            continue
        written = sum(array.bytes for array in instruction.arrays if array.space == 0)
        # An update in place reads and writes only a part of the array.
        size = min(written, module.traffic(ran.computation, instruction).hbm // 2)
        if size >= least_bytes:
            calls, moved = calls + ran.times, moved + ran.times * size
    return calls, moved


def measure(
    cases: Iterable[Case], repeats: int, progress: Callable[[str], None] | None = None
) -> Iterator[Row]:
    """Time each case on this machine's first device with the engine.

    Weights, prompts and choices of tokens are random. Rows grow to the case's context. A repeat's
    time is that of its median round of steps. It includes neither prompts nor compilation, because
    a first repeat is left out.

    Raises:
      UsageError: a preset or a change is not legal.
    """
    device = jax.devices()[0]
    target, peak = target_of(device.device_kind, DEVICES), cost.peak_flops(device.device_kind)
    stats = device.memory_stats() or {}
    limit = memory.of_machine() if device.platform == "cpu" else stats.get("bytes_limit", math.inf)
    for case in cases:
        needs = least(case, "auto")
        fault, seconds = _fault(case, needs, limit), None
        if target and peak:
            seconds = needs.seconds(target.bandwidth, peak)
        row = Row(case, device.device_kind, needs, seconds, timed=True, fault=fault)
        if not row.fault:
            try:
                row = dataclasses.replace(row, times=tuple(_times(case, repeats)))
            except Exception as error:
                if not memory.is_out(error):
                    raise
                row = dataclasses.replace(row, fault=" ".join(str(error).split())[:200])
        if progress is not None:
            told = row.fault or f"{row.seconds * 1e3:.3f} ms a step"
            progress(f"{row.device}: {case.preset} {case.batch} {case.context}: {told}")
        yield row


def _times(case: Case, repeats: int) -> Iterator[float]:
    config = case.model("auto")
    engine = Engine(_random(config), -1, slots=case.batch, steps=STEPS)
    rounds = max(2, min(_MOST, case.context // 2) // STEPS)
    new = rounds * STEPS
    prompts = np.random.default_rng(0).integers(
        config.vocab_size, size=(case.batch, max(1, case.context - new))
    )
    # One more token comes from reading the prompt.
    requests = [Request(p, Sampling(max_tokens=new + 1, seed=n)) for n, p in enumerate(prompts)]
    for repeat in range(1 + repeats):
        ends = []
        for number, _ in enumerate(engine.run(requests)):
            if number % case.batch == case.batch - 1:
                ends.append(time.perf_counter())
        if repeat:  # ends[0] is the prompts', and the first round may still enlarge the cache
            yield float(np.median(np.diff(ends[1:]))) / STEPS


def _random(config: ModelConfig) -> Decoder:
    draw = lambda: nnx.state(cast_once(Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    graphdef, _ = nnx.split(_abstract(config), nnx.Param)
    # One program is much faster than one for each array.
    return nnx.merge(graphdef, jax.jit(draw)())


def _fault(case: Case, needs: Least, limit: int | float) -> str:
    """Return why there can be no step, in a line; "" if there may be one."""
    learned = case.model("auto").learned_positions
    if learned and learned.max_length < case.context:
        return f"has {learned.max_length} learned positions"
    if needs.held > limit:
        there = memory.told(int(limit))
        return f"does not fit: weights and cache are {memory.told(needs.held)}, of {there}"
    return ""


def _abstract(config: ModelConfig) -> Decoder:
    """Return a decoder of shapes, with its matrices in the compute dtype."""
    return nnx.eval_shape(lambda: cast_once(Decoder(config, rngs=nnx.Rngs(0))))


def _cache(decoder: Decoder, batch: int, capacity: int) -> Cache:
    """Return a cache of shapes."""
    return jax.eval_shape(lambda: decoder.empty_cache(batch, capacity))


def _of_layer(cache: Cache) -> int:
    """Return the bytes of the cache's largest array for one layer, such as its keys."""
    return max(_bytes(leaf) // leaf.shape[0] for leaf in jax.tree.leaves(cache.cores))


def _bytes(arrays: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
