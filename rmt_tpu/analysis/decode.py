"""What a decode step costs: a new token of each row of a batch, read with those in its cache.

The least is what its bytes take at the full bandwidth of a device, or its products at the peak if
that is longer: weights as they multiply and the cache are read once, and nothing else is moved.
Beside it stand a dispatch of steps, compiled for a TPU that need not be there and estimated as
train steps are (see `step_cost`), or the engine's, timed here.
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

STEPS = 8  # tokens a row in a dispatch, as the engine has them
_MOST = 64  # tokens a row in one repeat of a measurement


@dataclasses.dataclass(frozen=True)
class Case:
    """Which step.

    Attributes:
      preset: of the model.
      batch: rows.
      context: tokens of each row, the new one among them.
      changes: values at dotted paths of the preset's config.
    """

    preset: str
    batch: int
    context: int
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def model(self, dtype: str) -> ModelConfig:
        """Computing in a dtype, if no change says otherwise.

        Raises:
          UsageError: the preset or a change is not legal.
        """
        return overrides.apply(
            run(self.preset), {"model.compute_dtype": dtype} | self.changes
        ).model

    @property
    def capacity(self) -> int:
        """Tokens that a program's cache has room for."""
        return bucket(self.context)


@dataclasses.dataclass(frozen=True)
class Least:
    """What no step can do without.

    Attributes:
      weights: bytes of them that are read: of an embedding a row for each token, of experts as many
        as the rows choose on average if all are as likely, else all.
      cache: bytes of it that are read, of earlier tokens, or written, of the new ones.
      held: bytes in memory: of all weights, and of a cache of a program's capacity.
      flops: as `rmt_tpu.cost` counts them.
    """

    weights: int
    cache: int
    held: int
    flops: int

    def seconds(self, bandwidth: float, peak_flops: int | float) -> float:
        """The longer of bytes at the bandwidth (bytes/s) and products at the peak."""
        return max((self.weights + self.cache) / bandwidth, self.flops / peak_flops)


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of a case on a device.

    Attributes:
      device: what it was estimated for or timed on.
      least_seconds: None where the device's bandwidth is not known.
      timed: whether it was to be timed.
      cost: of a dispatch of STEPS steps; None if it was timed, or there is none.
      copies: moves in it from HBM to HBM of as much as a layer's keys: how many, and bytes.
      times: measured seconds a step, of each repeat.
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
        """Of a step: the median if it was timed; estimated, never less than its bytes take."""
        if self.times:
            return statistics.median(self.times)
        return self.cost and self._of_cycles(self.cost.cycles)

    @property
    def span(self) -> tuple[float, float] | None:
        """Least and most seconds: of repeats, or by the models of cost."""
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
        """Fraction of the full bandwidth: the least time over that of the step."""
        if self.seconds is None or self.least_seconds is None:
            return None
        return self.least_seconds / self.seconds

    def json(self) -> dict[str, Any]:
        """All figures, in bytes and seconds."""
        return dataclasses.asdict(dataclasses.replace(self, cost=None)) | {
            "capacity": self.case.capacity,
            "steps": STEPS,
            "cost": self.cost and self.cost.json(),
            "seconds": self.seconds,
            "span": self.span,
            "of_bandwidth": self.of_bandwidth,
        }


def least(case: Case, dtype: str) -> Least:
    """From shapes alone.

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
            idle = 1 - experts.top_k / experts.num_experts  # of a row
            size = round(size * (1 - idle**case.batch))
        read += size
    cache = lambda capacity: _bytes(_cache(decoder, case.batch, capacity).cores)
    flops = case.batch * cost.flops_per_token(decoder.config, case.context)
    return Least(read, cache(case.context), held + cache(case.capacity), flops)


def estimate(
    cases: Sequence[Case], target: Target, progress: Callable[[str], None] | None = None
) -> list[Row]:
    """Each on a chip that need not be there; `progress` is told of each that is compiled.

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
    """A dispatch as the engine's, for a device that need not exist; see `layouts.lower_steps`.

    The likeliest token is taken: other choices are branches, of which it is not known how often
    they are gone.

    Args:
      device: of a topology.
      **case: the fields of a Case.
    """
    case = Case(**case)
    graphdef, params = nnx.split(_abstract(case.model("bfloat16")), nnx.Param)
    here = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    decoder = nnx.merge(graphdef, jax.tree.map(placed, params))
    # Block sizes are looked up by the device of the mesh in use.
    with jax.sharding.use_abstract_mesh(here.mesh.abstract_mesh), warnings.catch_warnings():
        # Some kernels are for many tokens alone.
        warnings.filterwarnings("ignore", "no tpu kernel for this call")
        lay_out(decoder, case.batch)
        return lower_steps(*Model.of(decoder), case.batch, case.capacity, STEPS)


def copies(module: Module, least_bytes: int) -> tuple[int, int]:
    """Moves from HBM to HBM of at least so many bytes in a run: how many, and bytes of all."""
    calls = moved = 0
    for ran in module.run():
        instruction = ran.instruction
        starts = instruction.opcode.endswith("-start") and not instruction.is_prefetch
        if not (starts or module.moves_only(instruction)):
            continue
        written = sum(array.bytes for array in instruction.arrays if array.space == 0)
        # Of what is updated in place, a part alone is read and written.
        size = min(written, module.traffic(ran.computation, instruction).hbm // 2)
        if size >= least_bytes:
            calls, moved = calls + ran.times, moved + ran.times * size
    return calls, moved


def measure(
    cases: Iterable[Case], repeats: int, progress: Callable[[str], None] | None = None
) -> Iterator[Row]:
    """Each on this machine's first device, by the engine; random weights, prompts and choices.

    Rows grow to the case's context. A repeat's time is that of its median round of steps: neither
    prompts nor, as there is one repeat more than is told, compiling are in it.

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
    # One token comes of the prompt.
    requests = [Request(p, Sampling(max_tokens=new + 1, seed=n)) for n, p in enumerate(prompts)]
    for repeat in range(1 + repeats):
        ends = []
        for number, _ in enumerate(engine.run(requests)):
            if number % case.batch == case.batch - 1:
                ends.append(time.perf_counter())
        if repeat:  # ends[0] is that of the prompts, and the first round may still make room
            yield float(np.median(np.diff(ends[1:]))) / STEPS


def _random(config: ModelConfig) -> Decoder:
    draw = lambda: nnx.state(cast_once(Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    graphdef, _ = nnx.split(_abstract(config), nnx.Param)
    return nnx.merge(graphdef, jax.jit(draw)())  # as a whole: much faster than one by one


def _fault(case: Case, needs: Least, limit: int | float) -> str:
    """Why there can be no step, in a line; "" if there may be."""
    learned = case.model("auto").learned_positions
    if learned and learned.max_length < case.context:
        return f"has {learned.max_length} learned positions"
    if needs.held > limit:
        there = memory.told(int(limit))
        return f"does not fit: weights and cache are {memory.told(needs.held)}, of {there}"
    return ""


def _abstract(config: ModelConfig) -> Decoder:
    """A decoder of shapes, with its weights as products take them."""
    return nnx.eval_shape(lambda: cast_once(Decoder(config, rngs=nnx.Rngs(0))))


def _cache(decoder: Decoder, batch: int, capacity: int) -> Cache:
    """Of shapes."""
    return jax.eval_shape(lambda: decoder.empty_cache(batch, capacity))


def _of_layer(cache: Cache) -> int:
    """Bytes of the largest array of one layer: of its keys, say."""
    return max(_bytes(leaf) // leaf.shape[0] for leaf in jax.tree.leaves(cache.cores))


def _bytes(arrays: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
