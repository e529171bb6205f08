"""What one train step costs on a TPU, part by part, estimated without a TPU.

The very step that `train` runs is compiled for one chip. An instruction takes the longer of its
schedule and of its HBM bytes over the bandwidth, as often as the loops around it run. Copies
between HBM and VMEM that run beside other work are counted in the bytes, not in the cycles.
Collectives take no cycles here: what they take of the network is for `preflight` to say.

All of these are estimates: `estimator.calibration` says how near such estimates came to times that
others measured, and the other models of `estimator.cost.MODELS` give less and more.
"""

import contextlib
import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import sharding
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.data import Batch
from rmt_tpu.errors import RunError
from rmt_tpu.estimator import (
    BEST_GUESS,
    MODELS,
    Assignment,
    Failure,
    Job,
    Program,
    Target,
    compile_jobs,
    work_of,
)
from rmt_tpu.estimator.hlo import Bytes, Executed, Instruction
from rmt_tpu.training.run import prepare, resolved

PARTS = (
    "embedding",
    "residual",
    "projections",
    "attention",
    "feed_forward",
    "loss",
    "optimizer",
    "other",
)

# Words of an instruction's op_name, innermost last: names of scopes, and of kernels.
_PART_OF_WORD = {part: part for part in PARTS} | {
    "projection": "projections",
    "key_vector_store": "residual",
    "key_vector_read": "residual",
    "key_vector_forward": "residual",
    "key_vector_backward": "residual",
    "unembedding": "loss",
    "experts": "feed_forward",
    "mla": "attention",
    "kda": "attention",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "attention_blocks_forward": "attention",
    "attention_blocks_backward": "attention",
}
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True)
class Row:
    """An instruction, and what all its calls in one step take.

    Attributes:
      name: of the instruction, or of the first.
      part: one of PARTS.
      what: the end of its op_name, with a copy or transpose said to be one.
      result: dtype and shape of its first result.
      calls: in a step.
      by_model: cycles of all calls, by MODELS.
      bytes: of all calls, in HBM and in VMEM.
      moves: whether it only moves data.
      in_loop: whether a loop over layers or chunks runs it.
      kernel: whether it is a Pallas kernel.
    """

    name: str
    part: str
    what: str
    result: str
    calls: int
    by_model: dict[str, float]
    bytes: Bytes
    moves: bool
    in_loop: bool
    kernel: bool

    @property
    def cycles(self) -> float:
        """All calls take so many by the best guess."""
        return self.by_model[BEST_GUESS]


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The cost of one step on one chip.

    Attributes:
      preset, target: names of the model and of the chip.
      rows: every instruction, the dearest first.
      temporary_bytes: HBM beside parameters, optimizer and batch.
      argument_bytes: of those.
      clock: of the chip in Hz.
      bandwidth: of its HBM in bytes/s.
      tokens: in a step.
      unknown_loops: loops whose trip count could not be read, counted as running once.
      unscheduled: kernels without a schedule, which count by their bytes alone.
      compile_seconds: what compiling took here.
    """

    preset: str
    target: str
    rows: tuple[Row, ...]
    temporary_bytes: int
    argument_bytes: int
    clock: float
    bandwidth: float
    tokens: int
    unknown_loops: int
    unscheduled: tuple[str, ...]
    compile_seconds: float

    @property
    def cycles(self) -> float:
        """The step takes so many by the best guess, as all figures that name no model."""
        return self.by_model[BEST_GUESS]

    @functools.cached_property
    def by_model(self) -> dict[str, float]:
        """Cycles of the step, by MODELS."""
        return {name: float(sum(row.by_model[name] for row in self.rows)) for name in MODELS}

    @property
    def seconds(self) -> float:
        return self.cycles / self.clock

    @property
    def parts(self) -> dict[str, float]:
        """Cycles by part, in the order of PARTS."""
        total = Counter()
        for row in self.rows:
            total[row.part] += row.cycles
        return {part: float(total[part]) for part in PARTS}

    def json(self) -> dict[str, Any]:
        """All figures, without the instructions."""
        fields = dataclasses.asdict(dataclasses.replace(self, rows=()))
        del fields["rows"]
        calls, cycles, moved = self.moves
        return fields | {
            "cycles": self.cycles,
            "cycles_by_model": self.by_model,
            "seconds": self.seconds,
            "parts": self.parts,
            "kernel_parts": self.kernel_parts,
            "hbm_bytes": self.hbm_bytes,
            "moves_in_loops": {"calls": calls, "cycles": cycles, "bytes": moved},
        }

    @property
    def kernel_parts(self) -> dict[str, float]:
        """Of `parts`, what Pallas kernels take."""
        total = Counter()
        for row in self.rows:
            total[row.part] += row.cycles * row.kernel
        return {part: float(total[part]) for part in PARTS}

    @property
    def hbm_bytes(self) -> int:
        """Read and written by all instructions, asynchronous copies too."""
        return sum(row.bytes.hbm for row in self.rows)

    @property
    def hbm_cycles(self) -> float:
        """Cycles that `hbm_bytes` take at the full bandwidth: no step can take less."""
        return self.hbm_bytes / self.bandwidth * self.clock

    @property
    def moves(self) -> tuple[int, float, int]:
        """Copies, transposes and the like within loops: how many, their cycles and their bytes."""
        rows = [r for r in self.rows if r.moves and r.in_loop and r.cycles]
        calls = sum(row.calls for row in rows)
        cycles = float(sum(row.cycles for row in rows))
        return calls, cycles, sum(row.bytes.total for row in rows)


@dataclasses.dataclass(frozen=True)
class Step:
    """Which step: a preset, its batch, and values at dotted paths of its config."""

    preset: str
    batch_size: int = 16
    seq_len: int = 512
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self) -> RunConfig:
        """The run as it is on an accelerator, for one device.

        Raises:
          UsageError: the preset or a change is not legal.
        """
        changes = {
            "train.batch_size": self.batch_size,
            "data.seq_len": self.seq_len,
            "model.compute_dtype": "bfloat16",
            "train.mesh": "data=1",
        }
        return resolved(overrides.apply(run(self.preset), changes | self.changes))


def step_costs(
    steps: Sequence[Step], target: Target, progress: Callable[[str], None] | None = None
) -> list[StepCost]:
    """The cost of each step on a chip; `progress` is told of each that is compiled.

    Raises:
      UsageError: a preset or a change is not legal.
      CompilerError: there is no compiler.
      RunError: a step does not compile; the message says why.
    """
    configs = [step.config() for step in steps]
    jobs = [Job(f"{__name__}:lower_step", dataclasses.asdict(step)) for step in steps]
    costs = []
    with contextlib.closing(compile_jobs(target, jobs, progress, buffers=True)) as compiled:
        for step, config, program in zip(steps, configs, compiled, strict=True):
            if isinstance(program, Failure):
                why = f"{step.preset} does not compile for {target.name}: {program.message}"
                raise RunError(why)
            tokens = config.train.batch_size * config.data.seq_len
            costs.append(step_cost(step.preset, tokens, program))
    return costs


def lower_step(device: jax.Device, **step: Any) -> jax.stages.Lowered:
    """The train step lowered for a device that need not exist; the state is donated.

    Args:
      device: of a topology.
      **step: the fields of a Step.
    """
    return lower_config(Step(**step).config(), [device])


def lower_config(config: RunConfig, devices: Sequence[jax.Device]) -> jax.stages.Lowered:
    """The train step of a run, lowered for all of the devices.

    Raises:
      MeshError: the run's mesh does not fit the devices, or a size does not divide over it.
    """
    return trace_config(config, devices).lower()


def trace_config(config: RunConfig, devices: Sequence[jax.Device]) -> jax.stages.Traced:
    """The same, no further than traced.

    Raises:
      MeshError: see `lower_config`.
    """
    prepared = prepare(config, sharding.make_mesh(config.train.mesh, devices))
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    state = jax.tree.map(place, jax.eval_shape(prepared.init), prepared.state_shardings)
    shape = (config.train.batch_size, config.data.seq_len)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=prepared.batch_sharding)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=prepared.batch_sharding)
    return prepared.jitted_step().trace(state, Batch(ids, ids, ids, weights))


def assignment_of(program: Program) -> Assignment:
    """What lies in memory, by which the compiler says whether a program fits.

    `memory_analysis` gives a TPU's temporary memory half as large again, or more.

    Raises:
      RunError: it was compiled without `buffers`, or the compiler did not say.
    """
    if program.assignment is None:
        label = program.target.label
        raise RunError(f"the compiler for {label} did not say how it assigned memory")
    return program.assignment


def step_cost(preset: str, tokens: int, program: Program) -> StepCost:
    """The cost of a step of so many tokens that was compiled with `buffers`.

    Raises:
      RunError: as `assignment_of`.
    """
    executed = list(program.module.run())
    names = _op_names(program)
    rows = [_row(program, ran, names) for ran in executed]
    kernels = [row.name for row in rows if row.kernel]
    return StepCost(
        preset=preset,
        target=program.target.name,
        rows=tuple(sorted(rows, key=lambda row: -row.cycles)),
        temporary_bytes=assignment_of(program).temporary,
        argument_bytes=program.memory["argument"],
        clock=program.target.clock,
        bandwidth=program.target.bandwidth,
        tokens=tokens,
        unknown_loops=sum(ran.unknown_trips for ran in executed)
        + sum(
            program.schedules[name].unknown_loops for name in kernels if name in program.schedules
        ),
        unscheduled=tuple(name for name in kernels if name not in program.schedules),
        compile_seconds=program.seconds,
    )


def part_of(op_name: str) -> str:
    """The part of an instruction, by the innermost scope in its op_name.

    A scope is also named in what JAX wraps around it, as in `transpose(jvp(attention))`.
    """
    words = [_PART_OF_WORD[w] for w in _WORD.findall(op_name) if w in _PART_OF_WORD]
    return words[-1] if words else "other"


def _row(program: Program, ran: Executed, names: dict[str, str]) -> Row:
    instruction, module = ran.instruction, program.module
    traffic = module.traffic(ran.computation, instruction)
    op_name, asked = names[instruction.name], work_of(program, ran)
    return Row(
        name=instruction.name,
        part=part_of(op_name),
        what="/".join(op_name.split("/")[-3:]),
        result=instruction.result,
        calls=ran.times,
        by_model={name: model(asked) * ran.times for name, model in MODELS.items()},
        bytes=Bytes(traffic.hbm * ran.times, traffic.vmem * ran.times),
        moves=module.moves_only(instruction),
        in_loop=ran.depth > 0,
        kernel=module.kernel(instruction) is not None,
    )


def _op_names(program: Program) -> dict[str, str]:
    """Each instruction's op_name; where XLA gives none, that of what it is made from or for."""
    names = {}
    for scope in program.module.computations.values():
        operands = {name: instruction.operands for name, instruction in scope.items()}
        users: dict[str, list[str]] = {}
        for name, used in operands.items():
            for operand in used:
                users.setdefault(operand, []).append(name)
        for name, instruction in scope.items():
            names[name] = (
                instruction.op_name
                or _nearest(scope, name, operands)
                or _nearest(scope, name, users)
            )
    return names


def _nearest(
    scope: dict[str, Instruction], name: str, neighbours: Mapping[str, Sequence[str]]
) -> str:
    """The op_name of a part of the step, at most four steps away."""
    layer = [name]
    for _ in range(4):
        layer = [n for near in layer for n in neighbours.get(near, ()) if n in scope]
        for near in layer:
            if part_of(scope[near].op_name) != "other":
                return scope[near].op_name
        layer = list(dict.fromkeys(layer))
    return ""
