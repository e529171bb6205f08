"""Advice on which flags to change if a program does not fit in memory."""

import contextlib
import dataclasses
import math

import sharding
from rmt_tpu.analysis.preflight import Preflight
from rmt_tpu.config import REVERSIBLE, overrides
from rmt_tpu.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Advice:
    """A change of flags that reduces the memory that a step needs.

    Attributes:
      flags: the flags to set; they replace earlier values of the same flags.
      why: the effect of the change.
      bytes: an estimate of the memory that a device would then need, in bytes, or None.
    """

    flags: str
    why: str
    bytes: int | None


# The fraction of a device's memory to aim for. The rest is a margin for errors of estimates.
_ROOM = 0.95


def advice(report: Preflight) -> list[Advice]:
    """Return changes of flags that help a step to fit in memory, best first.

    Each change makes the step fit, or saves at least 5% of its memory.
    """
    if report.prompt is not None:
        return _smaller_part(report)
    state = report.memory["parameters"] + report.memory["optimizer"]
    steps = [*_remat(report), *_parts(report), *_smaller_batch(report)]
    shards = _more_shards(report)
    # If parameters and optimizer take most of the memory, saving activations is not enough, so
    # sharding comes first.
    ordered = [*shards, *steps] if state > report.limit // 2 else [*steps, *shards]
    helps = lambda size: size is None or size <= max(report.limit, _ROOM * report.used)
    return [step for step in [*ordered, *_more_chips(report)] if helps(step.bytes)]


def _smaller_part(report: Preflight) -> list[Advice]:
    """Return advice to read fewer tokens of a prompt at a time."""
    if report.prompt.rows is not None:
        return []
    part, work = report.prompt.part, report.memory["temporaries"]
    sized = [(part // n, report.used - work + work // n) for n in (2, 4, 8, 16) if part % n == 0]
    fitting = [(tokens, size) for tokens, size in sized if size <= _ROOM * report.limit]
    why = "reads fewer tokens of the prompt at a time; in code: Engine(part=...)"
    return [Advice(f"--part={tokens}", why, size) for tokens, size in fitting[:1]]


def _enough(report: Preflight, sized: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the first (value, bytes) pair that fits in memory, or else the last."""
    fitting = (s for s in sized if s[1] <= _ROOM * report.limit)
    return next(fitting, sized[-1] if sized else None)


_REMAT = {
    "full": "keeps one residual per layer and recomputes the rest",
    "reversible": "keeps the sublayers' outputs and rebuilds the residual from them",
    "blocks": "keeps only the bank and runs a second forward pass",
}


def _remat(report: Preflight) -> list[Advice]:
    order = ["none", "dots", "offload", "full", "reversible_dots", "reversible", "blocks"]
    now = report.config.model.remat
    if report.mesh.get("stage", 1) > 1:
        order = [policy for policy in order if policy not in REVERSIBLE]
    found = []
    for policy in order[order.index(now) + 1 :]:
        with contextlib.suppress(UsageError):
            overrides.apply(report.config, {"model.remat": policy})
            if policy in _REMAT:
                found.append(Advice(f"--set=model.remat={policy}", _REMAT[policy], None))
    return found


def _rows(report: Preflight) -> int:
    """Return how many sequences of a batch one device processes."""
    return report.config.train.batch_size // _batch_shards(report.mesh)


def _batch_shards(mesh: dict[str, int]) -> int:
    return math.prod(mesh.get(axis, 1) for axis in sharding.RULES["batch"])


def _parts_in_turn(report: Preflight) -> int:
    """Return into how many parts a device divides its rows: accumulated parts and microbatches."""
    train, stages = report.config.train, report.mesh.get("stage", 1)
    return train.parts * ((train.microbatches or stages) if stages > 1 else 1)


def _same_parts(report: Preflight) -> str:
    """Return a flag that keeps the accumulated parts, or "" if there is only one.

    A run that chooses their number would choose fewer parts for fewer rows per device, and no part
    would be smaller.
    """
    parts = report.config.train.parts
    return f" --set=train.accumulate={parts}" if parts > 1 else ""


def _with_rows(report: Preflight, part: float, extra: int = 0) -> int:
    """Estimate the bytes needed if a device processes the fraction `part` of its tokens at a time.

    Gradients need the same memory for any number of tokens. `extra` bytes are added.
    """
    gradients = min(report.memory["parameters"], report.memory["temporaries"])
    work = report.memory["activations"] + report.memory["temporaries"] - gradients
    return int(report.used - work + work * part + extra)


def _parts(report: Preflight) -> list[Advice]:
    """Return advice to accumulate gradients over the fewest parts that fit in memory.

    Memory is estimated in proportion to the tokens of a part. If no number of parts fits, the
    maximum is advised.
    """
    if report.mesh.get("stage", 1) > 1:
        return _microbatches(report)
    now, rows = report.config.train.parts, _rows(report)
    more = [n for n in range(now + 1, rows + 1) if rows % n == 0]
    # Accumulation keeps a sum of gradients in addition to the current gradient.
    extra = report.memory["parameters"] if now == 1 else 0
    chosen = _enough(report, [(n, _with_rows(report, now / n, extra)) for n in more])
    if chosen is None:
        return []
    n, size = chosen
    return [Advice(f"--set=train.accumulate={n}", f"computes the same batch in {n} parts", size)]


def _microbatches(report: Preflight) -> list[Advice]:
    """Return advice to use the fewest microbatches of a pipeline that fit in memory.

    Memory is estimated in proportion to a microbatch's tokens. Smaller microbatches save memory,
    because the number that a pipeline keeps in memory is bounded.
    """
    stages, train = report.mesh["stage"], report.config.train
    now, rows = train.microbatches or stages, _rows(report) // train.parts
    microbatch_fraction = lambda count: (
        sharding.Schedule(stages, train.virtual_stages, count).max_in_flight() / count
    )
    more = [n for n in range(now + stages, rows + 1, stages) if rows % n == 0]
    chosen = _enough(
        report,
        [(n, _with_rows(report, microbatch_fraction(n) / microbatch_fraction(now))) for n in more],
    )
    if chosen is None:
        return []
    n, size = chosen
    return [Advice(f"--set=train.microbatches={n}", f"computes the same batch in {n} parts", size)]


def _smaller_batch(report: Preflight) -> list[Advice]:
    parts = _parts_in_turn(report)
    smallest, rows = _batch_shards(report.mesh) * parts, _rows(report) // parts
    fewer = [n for n in range(rows - 1, 0, -1) if rows % n == 0]
    chosen = _enough(report, [(n * smallest, _with_rows(report, n / rows)) for n in fewer])
    if chosen is None:
        return []
    size, needed = chosen
    return [
        Advice(
            f"--batch_size={size}{_same_parts(report)}",
            "trains on fewer sequences per step, which changes the training run",
            needed,
        )
    ]


def _mesh_flag(mesh: dict[str, int]) -> str:
    return "--mesh=" + (",".join(f"{a}={n}" for a, n in mesh.items() if n > 1) or "data=1")


def _more_shards(report: Preflight) -> list[Advice]:
    """Return advice to enlarge the `fsdp` mesh axis and reduce the `data` axis.

    If a device already has only one row of the batch, enlarging the `sequence` axis is advised too.
    """
    mesh, model = report.mesh, report.config.model
    state = report.memory["parameters"] + report.memory["optimizer"]
    found = []
    factors = [f for f in range(2, mesh["data"] + 1) if mesh["data"] % f == 0]
    legal = [f for f in factors if model.width % (mesh["fsdp"] * f) == 0]
    chosen = _enough(report, [(f, report.used - state + state // f) for f in legal])
    if chosen is not None:
        f, size = chosen
        changed = mesh | {"data": mesh["data"] // f, "fsdp": mesh["fsdp"] * f}
        why = f"divides parameters and optimizer state over {f} times as many devices"
        found.append(Advice(_mesh_flag(changed), why, size))
    parts, twice = report.config.train.parts, 2 * mesh.get("sequence", 1)
    tokens = twice * mesh.get("tensor", 1)  # Devices of both axes share the tokens and the heads.
    heads = (count for core in model.cores for count in core.divided_heads.values())
    sizes = [report.config.data.seq_len, *heads]
    divides = all(size % tokens == 0 for size in sizes)
    if "sequence" in mesh and _rows(report) == parts and mesh["data"] % 2 == 0 and divides:
        changed = mesh | {"data": mesh["data"] // 2, "sequence": twice}
        why = "divides each sequence over twice as many devices"
        flags = f"{_mesh_flag(changed)} --set=train.accumulate={2 * parts}"
        found.append(Advice(flags, why, _with_rows(report, 0.5)))
    return found


def _more_chips(report: Preflight) -> list[Advice]:
    """Return advice to use twice as many chips, along the `fsdp` axis."""
    target = report.target
    name, sides = target.topology.partition(":")[0], list(target.shape)
    if len(sides) > 1 and math.prod(sides) == 1:
        sides[:2] = [2, 2]
    else:
        shortest = max(i for i, side in enumerate(sides) if side == min(sides))
        sides[shortest] *= 2
    times = math.prod(sides) // math.prod(target.shape)
    mesh = report.mesh | {"fsdp": report.mesh["fsdp"] * times}
    rows = report.config.train.batch_size % (_batch_shards(mesh) * _parts_in_turn(report)) == 0
    width = report.config.model.width % mesh["fsdp"] == 0
    if math.prod(sides) > target.max_chips or not (rows and width):
        return []
    flags = f"--topology={name}:{'x'.join(map(str, sides))} {_mesh_flag(mesh)}"
    flags += _same_parts(report)
    return [Advice(flags, f"uses {times} times as many chips", report.used // times)]
