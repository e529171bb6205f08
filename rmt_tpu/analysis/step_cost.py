"""What one train step costs on a TPU, part by part, estimated without a TPU.

The very step that `train` runs is compiled for one chip. Every instruction that XLA makes has its
own estimate of cycles; a Pallas kernel has none and takes the longer of its schedule and of its HBM
bytes over the bandwidth. Each counts as often as the loops around it run. Copies between HBM and
VMEM that run beside other work are counted in the bytes, not in the cycles. Collectives take no
cycles here: what they take of the network is for `preflight` to say.

Estimates all: fit to compare programs and to find what to mend, not to say how fast a chip is.
"""

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import sharding
from pallas_kernels.compiler import Failure, Job, Program, Target, compile_jobs, kernel_cost
from pallas_kernels.compiler.collectives import only_communicates
from pallas_kernels.compiler.hlo import Bytes, Executed, Instruction
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.data import Batch
from rmt_tpu.errors import RunError
from rmt_tpu.training.run import prepare

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
    "attention_forward": "attention",
    "attention_backward": "attention",
}
_WORD = re.compile(r"[A-Za-z_]\w*")
_ASYNCHRONOUS = ("-start", "-done", "-update")


@dataclasses.dataclass(frozen=True)
class Row:
    """Instructions that are alike: `cycles` of all of them, in one step.

    Attributes:
      name: of the instruction, or of the first.
      part: one of PARTS.
      what: the end of its op_name, with a copy or transpose said to be one.
      result: dtype and shape of its first result.
      calls: in a step.
      cycles: of all calls.
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
    cycles: float
    bytes: Bytes
    moves: bool
    in_loop: bool
    kernel: bool


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
    compile_seconds: float

    @property
    def cycles(self) -> float:
        return float(sum(row.cycles for row in self.rows))

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
        return overrides.apply(run(self.preset), changes | self.changes)


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
    with contextlib.closing(compile_jobs(target, jobs, progress)) as compiled:
        for step, config, program in zip(steps, configs, compiled, strict=True):
            if isinstance(program, Failure):
                why = f"{step.preset} does not compile for {target.name}: {program.message}"
                raise RunError(why)
            costs.append(step_cost(step.preset, config, program))
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
    prepared = prepare(config, sharding.make_mesh(config.train.mesh, devices))
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    state = jax.tree.map(place, jax.eval_shape(prepared.init), prepared.state_shardings)
    shape = (config.train.batch_size, config.data.seq_len)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=prepared.batch_sharding)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=prepared.batch_sharding)
    step = jax.jit(prepared.step, donate_argnums=0)
    return step.lower(state, Batch(ids, ids, ids, weights))


def step_cost(preset: str, config: RunConfig, program: Program) -> StepCost:
    """The cost of a compiled step."""
    executed = list(program.module.run())
    names = _op_names(program)
    rows = [_row(program, ran, names) for ran in executed]
    return StepCost(
        preset=preset,
        target=program.target.name,
        rows=tuple(sorted(rows, key=lambda row: -row.cycles)),
        temporary_bytes=program.memory["temp"],
        argument_bytes=program.memory["argument"],
        clock=program.target.clock,
        bandwidth=program.target.bandwidth,
        tokens=config.train.batch_size * config.data.seq_len,
        unknown_loops=sum(ran.unknown_trips for ran in executed)
        + sum(schedule.unknown_loops for schedule in program.schedules.values()),
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
    op_name = names[instruction.name]
    return Row(
        name=instruction.name,
        part=part_of(op_name),
        what="/".join(op_name.split("/")[-3:]),
        result=instruction.result,
        calls=ran.times,
        cycles=_cycles(program, ran, traffic) * ran.times,
        bytes=Bytes(traffic.hbm * ran.times, traffic.vmem * ran.times),
        moves=module.moves_only(instruction),
        in_loop=ran.depth > 0,
        kernel=instruction.is_kernel,
    )


def _cycles(program: Program, ran: Executed, traffic: Bytes) -> float:
    """Of one call."""
    target = program.target
    by_bytes = traffic.hbm / target.bandwidth * target.clock
    if only_communicates(program.module, ran.instruction):
        return 0.0
    if ran.instruction.is_kernel:
        return max(float(kernel_cost(program, ran).cycles or 0), by_bytes)
    if ran.instruction.opcode.endswith(_ASYNCHRONOUS):
        return 0.0
    return by_bytes if ran.instruction.cycles is None else float(ran.instruction.cycles)


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


# Tables and the picture -----------------------------------------------------------------------


def step_table(costs: Sequence[StepCost]) -> str:
    """Markdown: million cycles by part of each model, and of the first model over the second."""
    columns: list[tuple[str, Callable[[Callable[[StepCost], float]], str]]] = []
    for target in dict.fromkeys(cost.target for cost in costs):
        here = [cost for cost in costs if cost.target == target]
        for cost in here:
            columns.append((f"{cost.preset}, {target}", _one(cost)))
        if len(here) > 1:
            columns.append((f"{here[0].preset} / {here[1].preset}", _ratio(*here[:2])))
    lines = [
        f"| million cycles | {' | '.join(name for name, _ in columns)} |",
        f"|---{'|---' * len(columns)}|",
    ]

    def line(name: str, figure: Callable[[StepCost], float]) -> None:
        lines.append(f"| {name} | {' | '.join(cell(figure) for _, cell in columns)} |")

    for part in PARTS:
        line(part, lambda cost, part=part: cost.parts[part] / 1e6)
    line("**whole step**", lambda cost: cost.cycles / 1e6)
    line("without attention", lambda cost: (cost.cycles - cost.parts["attention"]) / 1e6)
    line("of it, Pallas kernels", lambda cost: sum(cost.kernel_parts.values()) / 1e6)
    line("of it, moves in loops", lambda cost: cost.moves[1] / 1e6)
    line("moves in loops, calls", lambda cost: cost.moves[0])
    line("moves in loops, GB", lambda cost: cost.moves[2] / 1e9)
    line("HBM traffic, GB", lambda cost: cost.hbm_bytes / 1e9)
    line("HBM traffic at peak, million cycles", lambda cost: cost.hbm_cycles / 1e6)
    line("milliseconds", lambda cost: cost.seconds * 1e3)
    line("temporary memory, GB", lambda cost: cost.temporary_bytes / 1e9)
    unknown = sum(cost.unknown_loops for cost in costs)
    note = f"\n{unknown} loops of unknown trip count are counted once.\n" if unknown else ""
    return "\n".join(lines) + "\n" + note


def largest_table(cost: StepCost, count: int = 25) -> str:
    """Markdown: the instructions that take most of a step."""
    lines = [
        "| million cycles | calls | part | instruction | result | |",
        "|---|---|---|---|---|---|",
    ]
    for row in cost.rows[:count]:
        kind = "move: " if row.moves else "kernel: " if row.kernel else ""
        lines.append(
            f"| {row.cycles / 1e6:.2f} | {row.calls} | {row.part} | {row.name} | {row.result} "
            f"| {kind}{row.what} |"
        )
    return "\n".join(lines) + "\n"


def draw_steps(costs: Sequence[StepCost], path: str | Path, note: str) -> None:
    """Draws a bar for each model and chip, stacked by part, in milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6, 2.5 + 1.3 * len(costs)), 5), layout="constrained")
    axes = figure.subplots()
    names = [f"{cost.preset}\n{cost.target}" for cost in costs]
    bottom = [0.0] * len(costs)
    for i, part in enumerate(PARTS):
        heights = [cost.parts[part] / cost.clock * 1e3 for cost in costs]
        axes.bar(range(len(costs)), heights, 0.7, bottom=bottom, label=part, color=f"C{i}")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(costs)), names, fontsize=8)
    axes.set(ylabel="milliseconds a step, estimated")
    axes.grid(axis="y", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    figure.supxlabel(note, fontsize=7)
    figure.savefig(path, dpi=150)


def _one(cost: StepCost) -> Callable[[Callable[[StepCost], float]], str]:
    return lambda figure: f"{figure(cost):.1f}"


def _ratio(first: StepCost, second: StepCost) -> Callable[[Callable[[StepCost], float]], str]:
    return lambda figure: f"{figure(first) / figure(second):.2f}" if figure(second) else "-"
