"""An estimate of what each part of a train step costs on a TPU that need not be present.

The exact step that `train` runs is compiled for one chip. An instruction takes the longer of two
times: that of its schedule, and that of moving its HBM bytes at full bandwidth. The time counts
once per iteration of the enclosing loops. Each conditional takes its most expensive branch: the one
that moves the most bytes. A kernel that reads a bank moves as many of its rows as exist on average
(`bank_rows`), but the highest estimate charges all rows. If copies between HBM and VMEM overlap
other work, only their bytes count. Collectives take no time here; see `preflight`.

`estimator.calibration` compares such estimates with measured times that others published. The other
cost models of `estimator.cost.MODELS` give lower and higher estimates.
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
from rmt_tpu.analysis.bank_rows import BankRows, Skipped, bank_rows
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.data import Batch
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.estimator import (
    BEST_GUESS,
    HIGHEST,
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
from rmt_tpu.training.remat_choice import Devices
from rmt_tpu.training.run import prepare, resolve_auto

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

# The part of the step that each scope or kernel belongs to. The op_name of an instruction is JAX's
# path of scopes. If it contains several of these names, the innermost one decides.
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
class InstructionCost:
    """An instruction with the cost of all its calls in one step.

    Attributes:
      name: the name of the instruction.
      part: the part of the step that it belongs to, one of PARTS.
      what: the last components of its op_name, JAX's path of scopes.
      result: the dtype and shape of its first result, as text.
      calls: the number of times that it runs in a step.
      by_model: maps each of MODELS to the cycles of all calls.
      bytes: the bytes that all calls move, in HBM and in VMEM.
      moves: whether it only moves data.
      in_loop: whether it is inside a loop, such as the loop over layers or chunks.
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
        """The cycles of all calls, according to the best-guess cost model."""
        return self.by_model[BEST_GUESS]


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The estimated cost of one train step on one chip.

    Attributes:
      preset, target: the names of the model and of the chip.
      rows: all instructions, most expensive first.
      temporary_bytes: the HBM in bytes needed in addition to `argument_bytes`.
      argument_bytes: the HBM in bytes for parameters, optimizer and batch.
      clock: the chip's clock rate in Hz.
      bandwidth: the chip's HBM bandwidth in bytes/s.
      tokens: the number of tokens per step.
      unknown_loops: the number of loops with an unknown trip count. They count as one iteration.
      unscheduled: the names of kernels without a schedule. Only their bytes count.
      compile_seconds: the time that compilation took on this machine, in seconds.
    """

    preset: str
    target: str
    rows: tuple[InstructionCost, ...]
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
        """The cycles of the step, according to the best-guess cost model."""
        return self.by_model[BEST_GUESS]

    @functools.cached_property
    def by_model(self) -> dict[str, float]:
        """A dict from each cost model of MODELS to its cycles of the step."""
        return {name: float(sum(row.by_model[name] for row in self.rows)) for name in MODELS}

    @property
    def seconds(self) -> float:
        """The estimated time of the step in seconds."""
        return self.cycles / self.clock

    @property
    def parts(self) -> dict[str, float]:
        """The cycles of each part of the step, in the order of PARTS."""
        total = Counter()
        for row in self.rows:
            total[row.part] += row.cycles
        return {part: float(total[part]) for part in PARTS}

    def json(self) -> dict[str, Any]:
        """Return all results as JSON values, without the individual instructions."""
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
        """The cycles that Pallas kernels take in each part of the step."""
        total = Counter()
        for row in self.rows:
            total[row.part] += row.cycles * row.kernel
        return {part: float(total[part]) for part in PARTS}

    @property
    def hbm_bytes(self) -> int:
        """The bytes that all instructions move from and to HBM, with asynchronous copies."""
        return sum(row.bytes.hbm for row in self.rows)

    @property
    def hbm_cycles(self) -> float:
        """The cycles to move `hbm_bytes` at full bandwidth, a lower bound on the step's time."""
        return self.hbm_bytes / self.bandwidth * self.clock

    @property
    def moves(self) -> tuple[int, float, int]:
        """The calls, cycles and bytes of those instructions in loops that only move data."""
        rows = [r for r in self.rows if r.moves and r.in_loop and r.cycles]
        calls = sum(row.calls for row in rows)
        cycles = float(sum(row.cycles for row in rows))
        return calls, cycles, sum(row.bytes.total for row in rows)


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A train step, as a preset, batch sizes, and changed config values."""

    preset: str
    batch_size: int = 16
    seq_len: int = 512
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, kind: str = "") -> RunConfig:
        """Return the run's config, with "auto" values resolved for one accelerator device.

        Args:
          kind: JAX's name for the kind of the device; "" if it does not matter.

        Raises:
          UsageError: the preset or a change is not legal.
        """
        changes = {
            "train.batch_size": self.batch_size,
            "data.seq_len": self.seq_len,
            "model.compute_dtype": "bfloat16",
            "train.mesh": "data=1",
        }
        config = overrides.apply(run(self.preset), changes | self.changes)
        return resolve_auto(config, devices=Devices(kind, 1) if kind else None)


def sizes(configs: Sequence[RunConfig]) -> str:
    """Return the sequences and the tokens per sequence of steps, as text like "16 x 512 tokens".

    Each size is named once, in the order of the configs.
    """
    texts = [f"{config.train.batch_size} x {config.data.seq_len}" for config in configs]
    return f"{', '.join(dict.fromkeys(texts))} tokens"


def step_costs(
    steps: Sequence[TrainStep], target: Target, progress: Callable[[str], None] | None = None
) -> list[StepCost]:
    """Compile steps for a chip, and return the estimated cost of each.

    After each step is compiled, `progress` is called with a line of text.

    Raises:
      UsageError: a preset or a change is not legal, or the step's mesh or a size does not fit one
        chip.
      CompilerError: there is no compiler.
      RunError: a step does not compile; the message states the reason.
    """
    configs = [step.config(target.kind) for step in steps]
    jobs = [Job(f"{__name__}:lower_step", dataclasses.asdict(step)) for step in steps]
    costs = []
    with contextlib.closing(compile_jobs(target, jobs, progress, buffers=True)) as compiled:
        for step, config, program in zip(steps, configs, compiled, strict=True):
            if isinstance(program, Failure):
                raise_usage(program)
                why = f"{step.preset} does not compile for {target.name}: {program.message}"
                raise RunError(why)
            tokens = config.train.batch_size * config.data.seq_len
            costs.append(step_cost(step.preset, tokens, program, bank_rows(config.model)))
    return costs


def raise_usage(failure: Failure) -> None:
    """Raise the failure of a job as a `UsageError` if flags or the config are its reason.

    Raises:
      UsageError: the failure was an `UsageError` or a `MeshError`.
    """
    if failure.error in ("MeshError", "UsageError"):
        raise UsageError(failure.message.removeprefix(f"{failure.error}: "))


def lower_step(device: jax.Device, **step: Any) -> jax.stages.Lowered:
    """Lower the train step for a device that need not be present.

    Args:
      device: a device of a topology description.
      **step: the fields of a `TrainStep`.
    """
    return lower_config(TrainStep(**step).config(device.device_kind), [device])


def lower_config(config: RunConfig, devices: Sequence[jax.Device]) -> jax.stages.Lowered:
    """Lower a run's train step, sharded over the devices, so that it can be compiled.

    Raises:
      MeshError: the run's mesh does not fit the devices, or a dimension is not divisible by the
        size of its mesh axis.
    """
    return trace_config(config, devices).lower()


def trace_config(config: RunConfig, devices: Sequence[jax.Device]) -> jax.stages.Traced:
    """Trace the train step of a run, sharded over the devices, without lowering it.

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
    """Return the compiler's buffer assignment, which shows whether a program fits in memory.

    JAX's `memory_analysis` is not used, because it overstates the temporary memory on a TPU by a
    factor of 1.5 or more.

    Raises:
      RunError: the program was compiled without the option `buffers`, or the compiler did not write
        the assignment.
    """
    if program.assignment is None:
        label = program.target.label
        raise RunError(f"the compiler for {label} did not report its buffer assignment")
    return program.assignment


def step_cost(preset: str, tokens: int, program: Program, bank: BankRows | None = None) -> StepCost:
    """Return the cost of a compiled step.

    Args:
      preset: the name of the model.
      tokens: the number of tokens that a step processes.
      program: the step. It must have been compiled with the option `buffers`.
      bank: how many rows of the model's bank are read on average; None counts all of them.

    Raises:
      RunError: see `assignment_of`.
    """
    executed = list(program.module.run())
    names = _op_names(program)
    skipped = {} if bank is None else bank.skipped(program.module, executed)
    rows = [
        _row(program, ran, names, skipped.get(ran.instruction.name, Skipped())) for ran in executed
    ]
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
    """Return the part of the step that the innermost known scope of an op_name belongs to.

    Scopes are the components of an op_name. They may have JAX's wrappers around them, as in
    `transpose(jvp(attention))`.
    """
    words = [_PART_OF_WORD[w] for w in _WORD.findall(op_name) if w in _PART_OF_WORD]
    return words[-1] if words else "other"


def _row(
    program: Program, ran: Executed, names: dict[str, str], skipped: Skipped
) -> InstructionCost:
    instruction, module = ran.instruction, program.module
    traffic = module.traffic(ran.computation, instruction)
    op_name, work = names[instruction.name], work_of(program, ran)
    per_byte, unread = program.target.clock / program.target.bandwidth, skipped.bytes
    on_average = dataclasses.replace(
        work,
        hbm=max(0.0, work.hbm - unread.hbm * per_byte),
        schedule=None if work.schedule is None else work.schedule * (1 - skipped.schedule),
    )
    work_in = {name: work if name == HIGHEST else on_average for name in MODELS}
    return InstructionCost(
        name=instruction.name,
        part=part_of(op_name),
        what="/".join(op_name.split("/")[-3:]),
        result=instruction.result,
        calls=ran.times,
        by_model={name: model(work_in[name]) * ran.times for name, model in MODELS.items()},
        bytes=Bytes(
            max(0, traffic.hbm - unread.hbm) * ran.times,
            max(0, traffic.vmem - unread.vmem) * ran.times,
        ),
        moves=module.moves_only(instruction),
        in_loop=ran.depth > 0,
        kernel=module.kernel(instruction) is not None,
    )


def _op_names(program: Program) -> dict[str, str]:
    """Return the op_name (JAX's path of scopes) of each instruction of a program.

    An instruction without an op_name gets the op_name of a nearby operand or user.
    """
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
    """Return the op_name of the nearest instruction that belongs to a part of the step.

    The search follows `neighbours` for at most four steps, and returns "" if it finds none.
    """
    layer = [name]
    for _ in range(4):
        layer = [n for near in layer for n in neighbours.get(near, ()) if n in scope]
        for near in layer:
            if part_of(scope[near].op_name) != "other":
                return scope[near].op_name
        layer = list(dict.fromkeys(layer))
    return ""
