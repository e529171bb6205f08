"""Estimates of our train step beside MaxText's, for the same Llama, batch and TPUs.

Both steps are compiled by the same compiler for TPUs that need not be present, and their costs are
estimated in the same way (see `step_cost`), with one correction. The schedules of attention kernels
contain work above the diagonal that the kernels skip: MaxText's whole blocks, ours also parts of
the blocks on the diagonal. Only the share of the other work counts.

Several choices of rematerialization, compiler options, weights and attention kernels are tried on
each side, and the fastest step counts. Each choice changes one thing of the fastest step so far. No
step is measured.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

import pallas_kernels
import rmt_tpu
import sharding
from pallas_kernels import tuned
from pallas_kernels.causal_attention.block_sizes import Blocks, computed_share
from rmt_tpu import analysis, estimator
from rmt_tpu import cost as resources
from rmt_tpu.analysis import maxtext
from rmt_tpu.analysis.prompt import sizes_of
from rmt_tpu.analysis.step_cost import lower_config, step_cost
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.estimator import (
    BEST_GUESS,
    MODELS,
    CompilerError,
    Failure,
    Job,
    Program,
    Target,
    Worker,
    collectives,
    versions,
    work_of,
)
from rmt_tpu.runs.environment import source_hash
from rmt_tpu.storage import Folder
from rmt_tpu.training import compiler_options
from rmt_tpu.training.run import resolve_auto

Side = Literal["maxtext", "rmt_tpu"]
SIDES: tuple[Side, ...] = ("maxtext", "rmt_tpu")
_ATTENTION = re.compile("attention|splash")
_NO_MEMORY = "RESOURCE_EXHAUSTED"
_TOO_LARGE = "does not fit in memory"


@dataclasses.dataclass(frozen=True)
class Row:
    """A model, a batch and a topology for which both steps are compiled.

    Attributes:
      preset: the name of the model's preset.
      seq_len: the number of tokens of each sequence.
      batch_size: the number of sequences per step, on all devices together.
      topology: the name of the topology, like "v5e:2x2".
    """

    preset: str
    seq_len: int
    batch_size: int
    topology: str

    def config(self, devices: int) -> RunConfig:
        """Return the config of our run, whose parameters are sharded over all devices."""
        changes = {
            "train.batch_size": self.batch_size,
            "train.mesh": f"fsdp={devices}",
            "data.seq_len": self.seq_len,
            "model.compute_dtype": "bfloat16",
        }
        return resolve_auto(overrides.apply(run(self.preset), changes))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The options with which a step is compiled.

    Attributes:
      remat: the policy of rematerialization.
      options: "own" for the side's own compiler options, or "both" for these and those of the other
        side. The other side's value counts if both set an option.
      attention: the setting of MaxText's attention kernels, one of `maxtext.ATTENTION`; "" for our
        step, whose kernels choose their block sizes from the tuning tables.
      weights: the form of MaxText's weights, one of `maxtext.WEIGHTS`; "" for our step.
    """

    remat: str
    options: str = "own"
    attention: str = ""
    weights: str = ""

    def __str__(self) -> str:
        given = dataclasses.asdict(self).items()
        return ", ".join(f"{name} {value}" for name, value in given if value)


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step, or the reason why it could not be compiled.

    All figures are for one device.

    Attributes:
      choice: what it was compiled with.
      fault: the reason, in one line; "" for a compiled step.
      argument_bytes: the bytes of parameters, optimizer and batch.
      temporary_bytes: the bytes needed in addition.
      hbm_bytes: the bytes that all instructions move from and to HBM.
      product_seconds: the time of XLA's matrix products at peak throughput, without kernels.
      attention_seconds: the time of the attention kernels in the best-guess cost model.
      sent_seconds: the time of all collectives.
      hidden_seconds: the time of those collectives that other work can hide.
      seconds: maps each of `estimator.MODELS` to the time of the step. Collectives that other work
        can hide take time only if the other work is shorter.
      launches: the number of instructions that run.
      unknown_loops: the number of loops with an unknown trip count. They count as one iteration.
    """

    choice: Choice
    fault: str = ""
    argument_bytes: int = 0
    temporary_bytes: int = 0
    hbm_bytes: int = 0
    product_seconds: float = 0.0
    attention_seconds: float = 0.0
    sent_seconds: float = 0.0
    hidden_seconds: float = 0.0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    launches: int = 0
    unknown_loops: int = 0


# The first choice of each side, and the changes to the fastest step so far, in order. The policies
# of rematerialization come first, from the one that saves the most.
_FIRST: Mapping[Side, Choice] = {
    "maxtext": Choice(maxtext.REMAT[0], attention="1024 fused", weights="joined"),
    "rmt_tpu": Choice("dots"),
}
_CHANGES: Mapping[Side, tuple[dict[str, str], ...]] = {
    "maxtext": (
        *({"remat": policy} for policy in maxtext.REMAT[1:]),
        {"weights": "default"},
        {"options": "both"},
        {"attention": "script"},
        {"attention": "1024"},
        {"attention": "default"},
    ),
    "rmt_tpu": ({"remat": "full"}, {"options": "both"}),
}
MOST_COMPILES = 6


def sweep(
    row: Row,
    side: Side,
    target: Target,
    folder: Folder,
    compiles: int = MOST_COMPILES,
    progress: Callable[[str], None] | None = None,
) -> list[Step]:
    """Compile the steps of one side of a row, and return them in order.

    Each outcome is kept in the folder, except failures for other reasons than memory. The next call
    takes it from there if the versions and the code that makes it are the same. MaxText's outcomes
    outlive changes of our models and kernels.

    Args:
      row: the model, batch and topology.
      side: the side.
      target: the row's topology.
      folder: the folder for the outcomes.
      compiles: the maximum number of choices.
      progress: a function that is called with a line of text for each step.

    Raises:
      UsageError: MaxText cannot train the model.
      CompilerError: the compiler is missing, or it stopped without a result; or all choices failed,
        at least one of them for another reason than memory.
    """
    found: list[Step] = []
    request: dict[str, Any] = {"row": dataclasses.asdict(row), "side": side}
    request["versions"] = versions() | {"maxtext": maxtext.VERSION}
    if side == "maxtext":
        request["source"] = source_hash(analysis, estimator, compiler_options)
    else:
        request["source"] = source_hash(pallas_kernels, rmt_tpu, sharding)
        request["blocks"] = tuned.fingerprint()
    # The worker starts its process when it compiles for the first time.
    with contextlib.closing(Worker(target, buffers=True)) as worker:
        for choice in itertools.islice(_choices(side, found), compiles):
            job = _job(row, side, target, choice)
            asked = request | {"choice": dataclasses.asdict(choice), "arguments": job.arguments}
            name = f"step-{_digest(asked)}.json"
            if (kept := folder.read(name)) is not None:
                step = step_from_json(json.loads(kept.data)["step"])
            else:
                step = _step_of(worker.compile(job), choice, row)
                if step.fault in ("", _TOO_LARGE):
                    text = json.dumps(asked | {"step": dataclasses.asdict(step)}, indent=1)
                    folder.write(name, f"{text}\n".encode())
            found.append(step)
            if progress is not None:
                progress(_line(row, side, step))
    others = [step for step in found if step.fault != _TOO_LARGE]
    if others and fastest(found) is None:
        raise CompilerError(_line(row, side, others[0]))
    return found


def fastest(steps: Sequence[Step]) -> Step | None:
    """Return the step with the shortest best-guess time, or None if none was compiled."""
    compiled = [step for step in steps if not step.fault]
    return min(compiled, key=lambda step: step.seconds[BEST_GUESS], default=None)


def _choices(side: Side, found: list[Step]) -> Iterator[Choice]:
    """Yield the choices of a side; `found` receives the step of each before the next one."""
    yield _FIRST[side]
    for change in _CHANGES[side]:
        best = fastest(found)
        # "full" saves the least, and is slower than any other policy that fits.
        if change.get("remat") == "full" and best is not None and side == "maxtext":
            continue
        yield dataclasses.replace((best or found[0]).choice, **change)


def _digest(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]


def _job(row: Row, side: Side, target: Target, choice: Choice) -> Job:
    devices = math.prod(target.shape)
    config = row.config(devices)
    theirs = dict(maxtext.OPTIONS[target.name])
    both = choice.options == "both"
    if side == "maxtext":
        parts = choice.attention, choice.remat, choice.weights
        values = maxtext.overrides_of(config, devices, *parts)
        arguments = {"overrides": values, "options": theirs, "with_ours": both}
        return Job(f"{maxtext.__name__}:lower", arguments, whole_topology=True)
    config = overrides.apply(config, {"model.remat": choice.remat})
    arguments = {"config": overrides.to_json(config), "options": theirs if both else {}}
    return Job(f"{__name__}:lower_ours", arguments, whole_topology=True)


def lower_ours(
    devices: Sequence[jax.Device], config: dict[str, Any], options: dict[str, Any]
) -> tuple[maxtext.WithOptions, dict[str, Any]]:
    """Lower our train step for all devices of a topology, so that it can be compiled.

    Args:
      devices: the devices, which need not be present.
      config: a RunConfig as JSON values.
      options: compiler options that are set in addition to our own.

    Returns:
      The lowered step; and the result of `sizes_of` for its mesh, with the shares of attention
      kernels' work that is computed, by the names of the kernels.
    """
    values = overrides.from_json(RunConfig, config)
    mesh = sharding.make_mesh(values.train.mesh, devices)
    with tuned.collecting() as looks:
        lowered = lower_config(values, devices)
    shares = {
        look.kernel.name: computed_share(look.chosen, look.tokens)
        for look in looks
        if isinstance(look.chosen, Blocks)
    }
    return maxtext.WithOptions(lowered, options), sizes_of(mesh) | {"shares": shares}


def step_from_json(values: Mapping[str, Any]) -> Step:
    """Return the step with these fields, as `dataclasses.asdict` returns them."""
    return Step(**dict(values) | {"choice": Choice(**values["choice"])})


def _step_of(program: Program | Failure, choice: Choice, row: Row) -> Step:
    if isinstance(program, Failure):
        return Step(choice, _TOO_LARGE if _NO_MEMORY in program.message else program.message)
    target, module = program.target, program.module
    cost = step_cost(row.preset, row.seq_len * row.batch_size, program)
    works = ((work_of(program, ran), ran.times) for ran in module.run())
    products = sum(work.matrix * times for work, times in works if work.kind == "matmul")
    cycles, attention = dict.fromkeys(MODELS, 0.0), 0.0
    for instruction in cost.rows:
        of_attention = instruction.kernel and _ATTENTION.search(instruction.name)
        share = 1.0
        if of_attention and choice.attention:
            share = maxtext.computed_share(instruction.name, choice.attention, row.seq_len)
        elif of_attention:
            share = program.info["shares"].get(instruction.name.split(".")[0], 1.0)
        for name in MODELS:
            cycles[name] += share * instruction.by_model[name]
        attention += share * instruction.cycles if of_attention else 0.0
    sent = collectives(module, program.info["mesh"], program.info["ids"])
    seconds = [c.bytes / target.network(c.between_slices) for c in sent]
    hidden = sum(s for s, c in zip(seconds, sent, strict=True) if c.overlaps)
    exposed = sum(seconds) - hidden
    return Step(
        choice,
        argument_bytes=cost.argument_bytes,
        temporary_bytes=cost.temporary_bytes,
        hbm_bytes=cost.hbm_bytes,
        product_seconds=products / target.clock,
        attention_seconds=attention / target.clock,
        sent_seconds=float(sum(seconds)),
        hidden_seconds=float(hidden),
        seconds={
            name: max(of_model / target.clock, hidden) + exposed
            for name, of_model in cycles.items()
        },
        launches=module.launches(),
        unknown_loops=cost.unknown_loops,
    )


def _line(row: Row, side: Side, step: Step) -> str:
    result = step.fault or f"{1e3 * step.seconds[BEST_GUESS]:,.1f} ms"
    return f"{row.topology} {row.preset} {row.seq_len}: {side}, {step.choice}: {result}"


def row_json(row: Row, target: Target, steps: Mapping[Side, Sequence[Step]]) -> dict[str, Any]:
    """Return a row as JSON values: its steps, and the model FLOPs of a step on each device."""
    devices = math.prod(target.shape)
    config = row.config(devices)
    forward = resources.causal_flops_per_token(config.model, row.seq_len)
    flops = resources.train_flops(forward, row.batch_size * row.seq_len) / devices
    return dataclasses.asdict(row) | {
        "peak_seconds": flops / target.peak_flops,
        "sides": {side: [dataclasses.asdict(step) for step in steps[side]] for side in SIDES},
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the fastest steps of both sides as a Markdown table.

    Args:
      rows: the results of `row_json`.
    """
    titles = [
        "topology, model, tokens",
        "side",
        f"step, ms: {' / '.join(MODELS)}",
        "MFU",
        "memory, GB",
        "HBM traffic, GB",
        "XLA's products at peak, ms",
        "attention kernels, ms",
        "collectives, ms",
        "launches",
        "fastest of the choices tried",
    ]
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        lines += _cells_of(row)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def ratio(row: Mapping[str, Any]) -> dict[str, float] | None:
    """Return our time over MaxText's in each cost model; None if a side has no step."""
    ours, theirs = (fastest(_steps(row, side)) for side in ("rmt_tpu", "maxtext"))
    if ours is None or theirs is None:
        return None
    return {name: ours.seconds[name] / theirs.seconds[name] for name in MODELS}


def _unknown(step: Step) -> str:
    count = step.unknown_loops
    return f"; {count} loops of unknown length count as one iteration" if count else ""


def _failed(steps: Sequence[Step]) -> str:
    count = sum(step.fault not in ("", _TOO_LARGE) for step in steps)
    return f" ({count} failed)" if count else ""


def _steps(row: Mapping[str, Any], side: Side) -> list[Step]:
    return [step_from_json(step) for step in row["sides"][side]]


def _cells_of(row: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's lines for a row: one per side, and one with the ratio."""
    shape = f"{row['batch_size']} x {row['seq_len']}"
    lines = []
    for side in SIDES:
        steps = _steps(row, side)
        best = fastest(steps)
        cells = ["", side]
        if best is None:
            lines.append([*cells, steps[0].fault, *["-"] * 8])
            continue
        sent = "-"
        if best.sent_seconds:
            sent = f"{1e3 * best.sent_seconds:,.0f} ({1e3 * best.hidden_seconds:,.0f} hidden)"
        lines.append(
            [
                *cells,
                " / ".join(f"{1e3 * best.seconds[model]:,.0f}" for model in MODELS),
                f"{100 * row['peak_seconds'] / best.seconds[BEST_GUESS]:.0f}%",
                f"{best.argument_bytes / 1e9:.1f} + {best.temporary_bytes / 1e9:.1f}",
                f"{best.hbm_bytes / 1e9:,.0f}",
                f"{1e3 * best.product_seconds:,.0f}",
                f"{1e3 * best.attention_seconds:,.0f}",
                sent,
                f"{best.launches:,}",
                f"{best.choice}; of {len(steps)}{_failed(steps)}{_unknown(best)}",
            ]
        )
    ratios = ratio(row)
    if ratios is not None:
        values = " / ".join(f"{value:.2f}" for value in ratios.values())
        lines.append(["", "ours over MaxText's", f"**{values}**", *[""] * 8])
    lines[0][0] = f"{row['topology']} {row['preset']}, {shape}"
    return lines
