"""A check of whether a train step fits the devices of a topology, and of what it costs there.

The exact step that `train` runs, or what an engine runs for a part of a prompt, is compiled for all
devices of a topology that need not exist. What is in memory comes from XLA's own buffer assignment,
which exists even for a program that does not fit. Time is estimated: see `step_cost`. Collectives
take the bytes that a device sends over the maker's bandwidth of all its links, or, between slices,
over its share of the data center's network.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

import sharding
from rmt_tpu import cost as resources
from rmt_tpu.analysis.attention_forms import Attends, attention_forms
from rmt_tpu.analysis.prompt import Prompt, lower_prompt, sizes_of
from rmt_tpu.analysis.step_cost import PARTS, StepCost, assignment_of, lower_config, step_cost
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.estimator import (
    Assignment,
    Collective,
    Failure,
    Job,
    Program,
    Target,
    collectives,
    compile_jobs,
)
from rmt_tpu.training.run import resolved

# The kinds of what is in memory: arguments, what only a step needs, and the program itself.
KINDS = ("parameters", "optimizer", "cache", "batch", "activations", "temporaries", "program")
# The parts of a step's time, and the parts of `step_cost` that they consist of.
GROUPS = {
    "cores": ("attention", "feed_forward", "projections"),
    "residual": ("residual",),
    "embedding": ("embedding",),
    "loss": ("loss",),
    "optimizer": ("optimizer",),
    "other": ("other",),
}
_AVAILABLE = re.compile(r"exceeds available HBM \(([\d.]+)([KMGT])\)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NO_MEMORY = "Ran out of memory on HBM"
# In an op_name, JAX's wrappers of scopes, and parts that say nothing about the model.
_WRAPPED = re.compile(r"^(?:transpose\()?(?:jvp|vmap)\(([\w/]*)\)\)?$")
_PLUMBING = re.compile(
    r"^(jit\(.*\)|while|body|cond|branch_\d+_fun|closed_call|checkpoint|rematted_computation"
    r"|shard_map|custom_vjp_call|pallas_call|remat\d*)?$"
)


@dataclasses.dataclass(frozen=True)
class Held:
    """A buffer at the moment when most memory is needed.

    Attributes:
      kind: one of KINDS.
      name: its meaning in the model.
      shape: its dtype and shape on a device.
      bytes: its size with padding.
    """

    kind: str
    name: str
    shape: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along the same axes, in one step.

    Attributes:
      kind: XLA's name of the kind.
      axes: the axes of the mesh, joined by " x ".
      instructions: the number of instructions in the program.
      calls: how often they run in a step.
      bytes: the bytes that a device sends.
      overlapped: the part of `bytes` that is sent during other work.
      between_slices: whether they use the data center's network.
    """

    kind: str
    axes: str
    instructions: int
    calls: int
    bytes: int
    overlapped: int
    between_slices: bool = False


@dataclasses.dataclass(frozen=True)
class Time:
    """The estimated time of one step, in seconds.

    Attributes:
      parts: the time by GROUPS, without collectives, by the best guess.
      by_model: the time of all parts, by each of `estimator.MODELS`.
      collectives: the time of all collectives, if none is hidden behind other work.
      overlapped: the part of it that may be hidden.
      mfu: model FLOPs, with the causal half of attention, relative to the devices' peak, for a step
        that takes `total`.
      unknown_loops: the number of loops whose trip count could not be read; they count as running
        once.
    """

    parts: dict[str, float]
    by_model: dict[str, float]
    collectives: float
    overlapped: float
    mfu: float
    unknown_loops: int

    @property
    def compute(self) -> float:
        return sum(self.parts.values())

    @property
    def total(self) -> float:
        """The time if no collective were hidden."""
        return self.compute + self.collectives

    @property
    def least(self) -> float:
        """The time if every collective that can be hidden were."""
        return self._hidden(self.compute)

    @property
    def range(self) -> tuple[float, float]:
        """The range from `least` by the lowest model of cost to `total` by the highest."""
        shortest, longest = min(self.by_model.values()), max(self.by_model.values())
        return self._hidden(shortest), longest + self.collectives

    def mfu_of(self, seconds: float) -> float:
        """Return the `mfu` of a step that takes `seconds`."""
        return self.mfu * self.total / seconds if seconds else 0.0

    def _hidden(self, compute: float) -> float:
        return max(compute, self.overlapped) + self.collectives - self.overlapped


@dataclasses.dataclass(frozen=True)
class Preflight:
    """The result of compiling a train step for a topology.

    Attributes:
      config: the config of the run.
      target: the device and its topology.
      mesh: the sizes of the axes.
      fits: whether the step fits in memory.
      limit: bytes of a device's memory that a program can use.
      memory: bytes of a device, by KINDS.
      gaps: the part of the temporaries that lies unused between them.
      buffers: the buffers, the largest first.
      traffic: the collectives, those with most bytes first.
      time: the estimated time; None if the step does not fit, or there is no model of time.
      compile_seconds: the seconds of compilation; None if the step does not fit.
      launches: on a GPU, how many kernels and copies a step launches; else None.
      prompt: the prompt that is read or continued instead of a train step, or None.
    """

    config: RunConfig
    target: Target
    mesh: dict[str, int]
    fits: bool
    limit: int
    memory: dict[str, int]
    gaps: int
    buffers: tuple[Held, ...]
    traffic: tuple[Traffic, ...]
    time: Time | None
    compile_seconds: float | None
    launches: int | None = None
    prompt: Prompt | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The KINDS that can occur."""
        others = {"cache"} if self.prompt is None else {"optimizer", "activations"}
        return tuple(kind for kind in KINDS if kind not in others)

    @property
    def tokens(self) -> int:
        """The number of tokens that are read in a step."""
        if self.prompt is not None:
            return self.prompt.new_tokens
        return self.config.train.batch_size * self.config.data.seq_len

    @property
    def attention(self) -> tuple[Attends, ...]:
        """The forms that attention takes; empty for decode steps, which use another attention."""
        if self.prompt is None:
            length = self.config.data.seq_len
        elif self.prompt.rows is None:
            length = self.prompt.tokens
        else:
            return ()
        return attention_forms(self.config.model, self.target, length)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def used(self) -> int:
        """The bytes of all kinds."""
        return sum(self.memory.values())

    def json(self) -> dict[str, Any]:
        """Return all results, in bytes and seconds; times are estimates."""
        time = self.time and dataclasses.asdict(self.time) | {
            "total": self.time.total,
            "least": self.time.least,
            "range": self.time.range,
        }
        return {
            "topology": self.target.topology,
            "num_slices": self.target.slices,
            "mesh": self.mesh,
            "devices": self.devices,
            "attention": [dataclasses.asdict(attends) for attends in self.attention],
            "fits": self.fits,
            "hbm_bytes": self.limit,
            "used_bytes": self.used,
            "memory_bytes": self.memory,
            "gap_bytes": self.gaps,
            "buffers": [dataclasses.asdict(buffer) for buffer in self.buffers],
            "collectives": [dataclasses.asdict(traffic) for traffic in self.traffic],
            "estimated_seconds": time,
            "launches": self.launches,
            "interconnect_bytes_per_second": self.target.interconnect,
            "data_center_bytes_per_second": self.target.dcn,
            "compile_seconds": self.compile_seconds,
            "prompt": self.prompt and dataclasses.asdict(self.prompt),
            "config": overrides.to_json(self.config),
        }


def preflight(
    config: RunConfig,
    target: Target,
    progress: Callable[[str], None] | None = None,
    prompt: Prompt | None = None,
) -> Preflight:
    """Compile the train step of a run for all devices of a topology.

    Args:
      config: the config of the run; "auto" values are taken as on an accelerator.
      target: the target, from `parse_topology`.
      progress: is called with a line when the step is compiled.
      prompt: a prompt to read a part of, or to continue, instead of a train step.

    Raises:
      UsageError: the run's mesh or a size does not fit the topology.
      CompilerError: there is no compiler.
      RunError: the step does not compile, for another reason than its memory.
    """
    if config.model.compute_dtype == "auto":
        config = overrides.apply(config, {"model.compute_dtype": "bfloat16"})
    if prompt is None:
        # Only remat is resolved here: the residual's dtype follows from it, and has to follow from
        # another remat that is advised.
        config = overrides.apply(config, {"model.remat": resolved(config).model.remat})
    given, lower = {"config": overrides.to_json(config)}, f"{__name__}:lower_run"
    if prompt is not None:
        given, lower = given | dataclasses.asdict(prompt), f"{lower_prompt.__module__}:lower_prompt"
    job = Job(lower, given, whole_topology=True)
    with contextlib.closing(compile_jobs(target, [job], progress, buffers=True)) as compiled:
        (outcome,) = compiled
    if isinstance(outcome, Program):
        return _of_program(config, prompt, outcome)
    return _of_failure(config, target, prompt, outcome)


def lower_run(
    devices: Sequence[jax.Device], config: dict[str, Any]
) -> tuple[jax.stages.Lowered, dict[str, Any]]:
    """Return the train step lowered for all devices of a topology, and `sizes_of` its mesh.

    Args:
      devices: the devices, which need not exist.
      config: a RunConfig as JSON values.
    """
    run = overrides.from_json(RunConfig, config)
    mesh = sharding.make_mesh(run.train.mesh, devices)
    return lower_config(run, devices), sizes_of(mesh)


def _of_program(config: RunConfig, prompt: Prompt | None, program: Program) -> Preflight:
    target, mesh = program.target, program.info["mesh"]
    memory, gaps, buffers = _memory(assignment_of(program))
    memory["program"] = program.memory["generated_code"]
    sent = collectives(program.module, mesh, program.info["ids"])
    # The TPU compiler refuses what does not fit; the GPU compiler does not.
    fits = target.platform == "tpu" or sum(memory.values()) <= target.hbm
    report = Preflight(
        config=config,
        target=target,
        mesh=mesh,
        fits=fits,
        limit=target.hbm,
        memory=memory,
        gaps=gaps,
        buffers=buffers,
        traffic=_traffic(sent),
        time=None,
        compile_seconds=program.seconds,
        launches=program.module.launches() if target.platform == "cuda" else None,
        prompt=prompt,
    )
    if not fits or target.matrix is None:
        return report
    cost = step_cost(target.topology, report.tokens, program)
    return dataclasses.replace(report, time=_time(report, cost, sent))


def _of_failure(
    config: RunConfig, target: Target, prompt: Prompt | None, failure: Failure
) -> Preflight:
    message = failure.message.removeprefix(f"{failure.error}: ")
    if failure.error in ("MeshError", "UsageError"):
        raise UsageError(message)
    if failure.assignment is None or _NO_MEMORY not in message:
        raise RunError(f"the step does not compile for {target.label}: {message}")
    memory, gaps, buffers = _memory(failure.assignment)
    available = _AVAILABLE.search(message)
    limit = float(available[1]) * _UNITS[available[2]] if available else target.hbm
    return Preflight(
        config=config,
        target=target,
        mesh=failure.info["mesh"],
        fits=False,
        limit=int(limit),
        memory=memory,
        gaps=gaps,
        buffers=buffers,
        traffic=(),
        time=None,
        compile_seconds=None,
        prompt=prompt,
    )


def _memory(assignment: Assignment) -> tuple[dict[str, int], int, tuple[Held, ...]]:
    held = [
        Held(_argument(b.name), readable(b.name), b.shape, b.bytes) for b in assignment.arguments
    ]
    for b in assignment.live:
        copied = "a copy of " if _is_path(b.name) else ""
        kind = "activations" if b.kept else "temporaries"
        held.append(Held(kind, copied + readable(b.name), b.shape, b.bytes))
    memory = {kind: sum(h.bytes for h in held if h.kind == kind) for kind in KINDS}
    memory["temporaries"] += assignment.gaps + assignment.other
    return memory, assignment.gaps, tuple(sorted(held, key=lambda h: -h.bytes))


def _argument(path: str) -> str:
    """Return the kind of an argument, by its path."""
    names = re.findall(r"\w+", path)
    kinds = {"params": "parameters", "cache": "cache"}
    kinds |= dict.fromkeys(("optimizer", "copies"), "optimizer")
    return next((kinds[name] for name in names[:2] if name in kinds), "batch")


def readable(op_name: str) -> str:
    """Return an op_name without the wrappers of JAX and XLA, or an argument's path."""
    if _is_path(op_name):
        path = re.sub(r'\["(.*)"\]', r"\1", op_name)  # the path may be a key itself
        path = re.sub(r"\['([^']*)'\]", r".\1", path)
        return re.sub(r"^(args\[\d\]|state|batch)\.|\.value$", "", path)
    scopes = []
    for part in op_name.split("/"):
        wrapped = _WRAPPED.match(part)
        part = wrapped.group(1) if wrapped else part
        if not _PLUMBING.match(part):
            scopes.append(part)
    where = "forward"
    if "transpose(jvp" in op_name:
        where = "recomputed" if "rematted_computation" in op_name else "backward"
    elif "jvp(" not in op_name:
        where = ""
    return " ".join(filter(None, ["/".join(scopes) or op_name, where and f"({where})"]))


def _is_path(name: str) -> bool:
    """Return whether a name is the path of an argument, and not an op_name."""
    return re.match(r"\w+(\[|\.\w)", name) is not None and "/" not in name


def _traffic(sent: Sequence[Collective]) -> tuple[Traffic, ...]:
    groups: dict[tuple[str, str, bool], list[Collective]] = {}
    for collective in sent:
        key = collective.kind, " x ".join(collective.axes), collective.between_slices
        groups.setdefault(key, []).append(collective)
    found = [
        Traffic(
            kind,
            axes,
            instructions=len(group),
            calls=sum(c.calls for c in group),
            bytes=sum(c.bytes for c in group),
            overlapped=sum(c.bytes for c in group if c.overlaps),
            between_slices=between_slices,
        )
        for (kind, axes, between_slices), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda traffic: -traffic.bytes))


def _time(report: Preflight, cost: StepCost, sent: Sequence[Collective]) -> Time:
    config, target = report.config, report.target
    seconds = {part: cycles / target.clock for part, cycles in cost.parts.items()}
    duration = lambda sent: sent.bytes / target.network(sent.between_slices)
    assert set(PARTS) == {part for parts in GROUPS.values() for part in parts}
    time = Time(
        parts={group: sum(seconds[p] for p in parts) for group, parts in GROUPS.items()},
        by_model={name: cycles / target.clock for name, cycles in cost.by_model.items()},
        collectives=sum((duration(c) for c in sent), start=0.0),
        overlapped=sum((duration(c) for c in sent if c.overlaps), start=0.0),
        mfu=0.0,
        unknown_loops=cost.unknown_loops,
    )
    if report.prompt is not None:
        flops = cost.tokens * resources.causal_flops_per_token(config.model, report.prompt.tokens)
    else:
        forward = resources.causal_flops_per_token(config.model, config.data.seq_len)
        flops = resources.train_flops(forward, cost.tokens)
    peak = report.devices * target.peak_flops
    mfu = flops / (time.total * peak) if time.total else 0.0
    return dataclasses.replace(time, mfu=mfu)
