"""A check that a train step fits in the memory of a topology, and an estimate of its time.

The exact step that `train` runs is compiled for all devices of a topology. The devices need not be
present. A program of the text generator can be checked too (see `prompt`).

The contents of memory come from XLA's buffer assignment, which exists even if a program does not
fit. The time is an estimate (see `step_cost`). A collective takes as long as a device needs to send
its bytes. The bandwidth within a slice is the manufacturer's figure for all links of the device;
the upper end of the range counts only the links that the collective can use (see
`estimator.links`). Between slices, it is the device's share of the data center's network.

Each conditional takes its most expensive branch. In the program that generates tokens it takes the
cheapest one, because the branches are ways of sampling: the estimate is that of greedy steps.
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
from rmt_tpu.analysis.attention_forms import AttentionForm, attention_forms
from rmt_tpu.analysis.bank_rows import bank_rows
from rmt_tpu.analysis.prompt import Prompt, lower_prompt, sizes_of
from rmt_tpu.analysis.step_cost import (
    PARTS,
    StepCost,
    assignment_of,
    lower_config,
    raise_usage,
    step_cost,
)
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.errors import RunError
from rmt_tpu.estimator import (
    Assignment,
    Collective,
    Failure,
    Job,
    Program,
    Target,
    collectives,
    compile_jobs,
    seconds_on_links,
)
from rmt_tpu.training.remat_choice import Devices
from rmt_tpu.training.run import resolve_auto

# The kinds of memory use: arguments, buffers that exist only during a step, and the program's code.
KINDS = ("parameters", "optimizer", "cache", "batch", "activations", "temporaries", "program")
# The parts of `step_cost` that each reported part of a step's time consists of.
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
# An op_name is JAX's path of scopes. `readable` shortens components with wrappers, like
# "transpose(jvp(attention))", and drops names that JAX adds, like "while".
_WRAPPED = re.compile(r"^(?:transpose\()?(?:jvp|vmap)\(([\w/]*)\)\)?$")
_PLUMBING = re.compile(
    r"^(jit\(.*\)|while|body|cond|branch_\d+_fun|closed_call|checkpoint|rematted_computation"
    r"|shard_map|custom_vjp_call|pallas_call|remat\d*)?$"
)


@dataclasses.dataclass(frozen=True)
class PeakBuffer:
    """A buffer that is in memory when the step needs the most memory.

    Attributes:
      kind: the kind of memory use, one of KINDS.
      name: the parameter or the scopes of the model that the buffer belongs to.
      shape: the dtype and per-device shape, as text.
      bytes: the size in bytes, including padding.
    """

    kind: str
    name: str
    shape: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class CollectiveTraffic:
    """All collectives of one kind over the same mesh axes, in one step.

    Attributes:
      kind: XLA's name for the kind.
      axes: the mesh axes, joined by " x ".
      instructions: the number of such instructions in the program.
      calls: the number of times that they run in a step.
      bytes: the bytes that one device sends.
      overlapped: the part of `bytes` that is sent during other work.
      between_slices: whether the bytes are sent over the data center's network.
    """

    kind: str
    axes: str
    instructions: int
    calls: int
    bytes: int
    overlapped: int
    between_slices: bool = False


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The estimated time of one step; times are in seconds.

    Attributes:
      parts: maps each of GROUPS to its time in the best-guess cost model, without collectives.
      by_model: maps each of `estimator.MODELS` to the time of all parts together.
      collectives: the time of all collectives if none overlaps with other work.
      slow_collectives: the same, if each collective uses only the links of its mesh axes.
      overlapped: the time of those collectives that can overlap with other work.
      mfu: the model FLOPs utilization of a step that takes `total`. It is the model's FLOPs/s
        divided by the peak of the devices. In a train step and in a prompt, only the causal half of
        attention is counted. A new token attends to the whole prompt. Of a part of a prompt, only
        the last token has logits.
      unknown_loops: the number of loops with an unknown trip count. They count as one iteration.
    """

    parts: dict[str, float]
    by_model: dict[str, float]
    collectives: float
    slow_collectives: float
    overlapped: float
    mfu: float
    unknown_loops: int

    @property
    def compute(self) -> float:
        """The time of all parts of the step in seconds, without collectives."""
        return sum(self.parts.values())

    @property
    def total(self) -> float:
        """The time of the step in seconds, if no collective overlaps with other work."""
        return self.compute + self.collectives

    @property
    def least(self) -> float:
        """The time of the step in seconds, if all collectives that can overlap do so completely."""
        return self._hidden(self.compute)

    @property
    def range(self) -> tuple[float, float]:
        """The range of the step's time in seconds over the cost models, as a pair.

        The lower end is the smallest `least` of any cost model. The upper end is the largest time
        of any, with `slow_collectives`.
        """
        shortest, longest = min(self.by_model.values()), max(self.by_model.values())
        return self._hidden(shortest), longest + self.slow_collectives

    def mfu_of(self, seconds: float) -> float:
        """Return the model FLOPs utilization of a step that takes `seconds`."""
        return self.mfu * self.total / seconds if seconds else 0.0

    def _hidden(self, compute: float) -> float:
        return max(compute, self.overlapped) + self.collectives - self.overlapped


@dataclasses.dataclass(frozen=True)
class Preflight:
    """The memory and time of a train step, or of a program of the text generator.

    Attributes:
      config: the run's config.
      target: the device and its topology.
      mesh: maps the name of each mesh axis to its size.
      fits: whether the step fits in memory.
      limit: the bytes of a device's memory that are available to a program.
      memory: maps each of KINDS to the bytes that this kind occupies on one device.
      gaps: the unused bytes between buffers, which are part of "temporaries".
      buffers: the buffers in memory at the peak, largest first.
      traffic: the collectives, in descending order of bytes.
      time: the estimated time, or None if the step does not fit or the target has no time model.
      compile_seconds: the time that compilation took in seconds, or None if the step does not fit.
      launches: for a GPU, the number of kernels and copies that a step launches; otherwise None.
      prompt: the prompt to read or continue, or None for a train step.
    """

    config: RunConfig
    target: Target
    mesh: dict[str, int]
    fits: bool
    limit: int
    memory: dict[str, int]
    gaps: int
    buffers: tuple[PeakBuffer, ...]
    traffic: tuple[CollectiveTraffic, ...]
    time: StepTime | None
    compile_seconds: float | None
    launches: int | None = None
    prompt: Prompt | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of memory use in this program, a subset of KINDS.

        A program for a prompt has no optimizer, and a train step has no cache.
        """
        others = {"cache"} if self.prompt is None else {"optimizer", "activations"}
        return tuple(kind for kind in KINDS if kind not in others)

    @property
    def tokens(self) -> int:
        """The number of tokens that a step processes."""
        if self.prompt is not None:
            return self.prompt.new_tokens
        return self.config.train.batch_size * self.config.data.seq_len

    @property
    def attention(self) -> tuple[AttentionForm, ...]:
        """The implementations of attention. Decode steps use a separate op and have none here."""
        if self.prompt is None:
            length = self.config.data.seq_len
        elif self.prompt.rows is None:
            length = self.prompt.tokens
        else:
            return ()
        return attention_forms(self.config.model, self.target, length)

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(self.mesh.values())

    @property
    def used(self) -> int:
        """The bytes of memory that each device needs in total."""
        return sum(self.memory.values())

    def json(self) -> dict[str, Any]:
        """Return all results as JSON values: sizes in bytes, and estimated times in seconds."""
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
    """Compile a run's train step for a topology, and report its memory and time.

    Args:
      config: the run's config; "auto" values are resolved as they would be on an accelerator.
      target: the device and topology, from `parse_topology`.
      progress: a function that is called with a line of text when the step has been compiled.
      prompt: a prompt to read or continue. If given, the program that does this is compiled instead
        of the train step.

    Raises:
      UsageError: the run's mesh or a size does not fit the topology.
      CompilerError: there is no compiler.
      RunError: the step does not compile for a reason other than memory.
    """
    if config.model.compute_dtype == "auto":
        config = overrides.apply(config, {"model.compute_dtype": "bfloat16"})
    if prompt is None:
        # The residual's dtype stays "auto", so that the advice can try another remat, which may
        # need another dtype.
        chosen = resolve_auto(config, devices=Devices(target.kind, target.devices))
        resolved = {"model.remat": chosen.model.remat, "train.accumulate": chosen.train.accumulate}
        config = overrides.apply(config, resolved)
    arguments, lower = {"config": overrides.to_json(config)}, f"{__name__}:lower_run"
    if prompt is not None:
        arguments, lower = (
            arguments | dataclasses.asdict(prompt),
            f"{lower_prompt.__module__}:lower_prompt",
        )
    job = Job(lower, arguments, whole_topology=True)
    with contextlib.closing(compile_jobs(target, [job], progress, buffers=True)) as compiled:
        (outcome,) = compiled
    if isinstance(outcome, Program):
        return _compiled_preflight(config, prompt, outcome)
    return _failed_preflight(config, target, prompt, outcome)


def lower_run(
    devices: Sequence[jax.Device], config: dict[str, Any]
) -> tuple[jax.stages.Lowered, dict[str, Any]]:
    """Lower the train step for all devices of a topology, so that it can be compiled.

    Args:
      devices: the devices, which need not be present.
      config: a RunConfig as JSON values.

    Returns:
      The lowered step, and the result of `sizes_of` for its mesh.
    """
    run = overrides.from_json(RunConfig, config)
    mesh = sharding.make_mesh(run.train.mesh, devices)
    return lower_config(run, devices), sizes_of(mesh)


def _compiled_preflight(config: RunConfig, prompt: Prompt | None, program: Program) -> Preflight:
    target, mesh = program.target, program.info["mesh"]
    memory, gaps, buffers = _memory(assignment_of(program))
    memory["program"] = program.memory["generated_code"]
    if prompt is not None and prompt.rows is not None:
        # An estimate cannot know how often tokens are sampled, so only greedy steps count.
        program = dataclasses.replace(program, module=program.module.taking("cheapest"))
    sent = collectives(program.module, mesh, program.info["ids"])
    # The TPU compiler rejects a program that does not fit in memory, but the GPU compiler does not.
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
    bank = bank_rows(config.model) if prompt is None else None
    cost = step_cost(target.topology, report.tokens, program, bank)
    return dataclasses.replace(report, time=_time(report, cost, sent, program.info["coordinates"]))


def _failed_preflight(
    config: RunConfig, target: Target, prompt: Prompt | None, failure: Failure
) -> Preflight:
    raise_usage(failure)
    message = failure.message.removeprefix(f"{failure.error}: ")
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


def _memory(assignment: Assignment) -> tuple[dict[str, int], int, tuple[PeakBuffer, ...]]:
    buffers = [
        PeakBuffer(_argument(b.name), readable(b.name), b.shape, b.bytes)
        for b in assignment.arguments
    ]
    for b in assignment.live:
        copied = "a copy of " if _is_path(b.name) else ""
        kind = "activations" if b.is_saved else "temporaries"
        buffers.append(PeakBuffer(kind, copied + readable(b.name), b.shape, b.bytes))
    memory = {kind: sum(h.bytes for h in buffers if h.kind == kind) for kind in KINDS}
    memory["temporaries"] += assignment.gaps + assignment.other
    return memory, assignment.gaps, tuple(sorted(buffers, key=lambda h: -h.bytes))


def _argument(path: str) -> str:
    """Return which of KINDS the program argument at a path belongs to."""
    names = re.findall(r"\w+", path)
    kinds = {"params": "parameters", "cache": "cache"}
    kinds |= dict.fromkeys(("optimizer", "copies"), "optimizer")
    return next((kinds[name] for name in names[:2] if name in kinds), "batch")


def readable(op_name: str) -> str:
    """Return an op_name or the path of an argument without the wrappers of JAX and XLA."""
    if _is_path(op_name):
        # The text in double quotes is a key of a dict, and may itself be a path.
        path = re.sub(r'\["(.*)"\]', r"\1", op_name)
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
    """Return whether a name is an argument's path, rather than an op_name."""
    return re.match(r"\w+(\[|\.\w)", name) is not None and "/" not in name


def _traffic(sent: Sequence[Collective]) -> tuple[CollectiveTraffic, ...]:
    groups: dict[tuple[str, str, bool], list[Collective]] = {}
    for collective in sent:
        key = collective.kind, " x ".join(collective.axes), collective.between_slices
        groups.setdefault(key, []).append(collective)
    found = [
        CollectiveTraffic(
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


def _time(
    report: Preflight,
    cost: StepCost,
    sent: Sequence[Collective],
    coordinates: Sequence[Sequence[int]] | None,
) -> StepTime:
    target = report.target
    seconds = {part: cycles / target.clock for part, cycles in cost.parts.items()}
    duration = lambda sent: sent.bytes / target.network(sent.between_slices)
    assert set(PARTS) == {part for parts in GROUPS.values() for part in parts}
    time = StepTime(
        parts={group: sum(seconds[p] for p in parts) for group, parts in GROUPS.items()},
        by_model={name: cycles / target.clock for name, cycles in cost.by_model.items()},
        collectives=sum((duration(c) for c in sent), start=0.0),
        slow_collectives=sum(
            (seconds_on_links(c, target, report.mesh, coordinates) for c in sent), start=0.0
        ),
        overlapped=sum((duration(c) for c in sent if c.overlaps), start=0.0),
        mfu=0.0,
        unknown_loops=cost.unknown_loops,
    )
    peak = report.devices * target.peak_flops
    mfu = _model_flops(report) / (time.total * peak) if time.total else 0.0
    return dataclasses.replace(time, mfu=mfu)


def _model_flops(report: Preflight) -> int | float:
    """Return the FLOPs of a step that the model needs, on all devices together."""
    model, prompt, tokens = report.config.model, report.prompt, report.tokens
    if prompt is None:
        forward = resources.causal_flops_per_token(model, report.config.data.seq_len)
        return resources.train_flops(forward, tokens)
    if prompt.rows is not None:
        return tokens * resources.flops_per_token(model, prompt.tokens)
    # Only the last token of a part has logits.
    unembedding = resources.forward_flops(model, prompt.tokens)["unembedding"]
    mean = resources.causal_flops_per_token(model, prompt.tokens)
    return tokens * mean - (tokens - 1) * unembedding
