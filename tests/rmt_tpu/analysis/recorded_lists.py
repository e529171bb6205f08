"""Lists that `recorded` keeps: presets, experiments, plans, device cases, checks of arguments.

A config is kept as a checksum of its differences from that of gpt2-tiny.
"""

import json
import math
import zlib

import jax
import jax.numpy as jnp
import jaxtyping
from jax.experimental import topologies

import sharding
from rmt_tpu import cost
from rmt_tpu.analysis import device_cases
from rmt_tpu.config import RunConfig, overrides, presets
from rmt_tpu.estimator.ops import OPS
from rmt_tpu.execution.plan import plan_of
from rmt_tpu.experiments import catalog, plan
from rmt_tpu.training.remat_choice import Devices
from rmt_tpu.training.run import resolve_auto
from tests import cli
from tests.pallas_kernels import public_ops

_FIRST = overrides.to_json(presets.run("gpt2-tiny"))


def _checksum(*texts: str) -> str:
    return f"{zlib.crc32(json.dumps(texts).encode()):08x}"


def _text(config: RunConfig) -> str:
    return "; ".join(overrides.differences(_FIRST, overrides.to_json(config)))


def _rest(value: object) -> str:
    """Return the fields of a plan, an arm or a search as text, without configs."""
    left_out = ("arms", "config", "searches") if isinstance(value, plan.Plan) else ("config",)
    return repr([x for name, x in vars(value).items() if name not in left_out])


def all_presets() -> str:
    lines = []
    for name in presets.presets():
        config = presets.run(name)
        parameters = sum(cost.parameters(config.model).values())
        flops = cost.causal_flops_per_token(config.model, config.data.seq_len)
        kept = _checksum(_text(config))
        lines.append(f"{name} {kept} {parameters:,} {flops:,} {presets.about(name)}\n")
    return "".join(lines)


def all_experiments() -> str:
    lines = []
    for name, experiment in catalog.EXPERIMENTS.items():
        lines.append(f"{name}: {experiment.shows}; {experiment.source}; {experiment.takes}\n")
        for scale in ("tiny", "paper"):
            if experiment.plan is not None:
                made = experiment.plan(scale)
                parts = [*made.arms, *made.searches.values()]
                runs = len([*plan.all_runs(made)])
                kept = _checksum(
                    *(_text(part.config) for part in parts), *map(_rest, [made, *parts])
                )
                lines.append(f"  {scale}: {len(made.arms)} arms, {runs} runs {kept}\n")
            if experiment.reports is not None:
                commands = experiment.reports(scale, "runs/{}".format)
                lines += [f"  {scale}: {' '.join(command)}\n" for command in commands]
    return "".join(lines)


def all_device_cases() -> str:
    return "".join(
        f"{case.op} {case.size}: {case.flops:,} FLOPs, {case.gradients} {case.narrow} "
        f"{sorted(case.exact.items())} {sorted(case.wide)} {sorted(case.cancels)}\n"
        for scale in ("small", "real")
        for case in device_cases.cases(scale)
    )


def all_op_cases() -> str:
    """List the cases that kernel_report times, with their least work in both directions."""
    return "".join(
        f"{op} {case.name} {direction}: {case.work(direction)}\n"
        for op, entry in OPS.items()
        for case in entry.cases()
        for direction in ("forward", "training")
    )


def all_arguments() -> str:
    """List how each op answers an array with an entry or an axis too many, or of another kind."""
    lines = []
    jaxtyping.config.update("jaxtyping_disable", True)  # tests check annotations, others do not
    for op, call in public_ops.CALLS.items():
        for name, x in call.given.items():
            longer = [
                [size + (n == axis) for n, size in enumerate(x.shape)] for axis in range(x.ndim)
            ]
            other = "int32" if jnp.issubdtype(x.dtype, jnp.floating) else "float32"
            kinds = [(shape, x.dtype) for shape in [*longer, [*x.shape, 1]]]
            for shape, dtype in [*kinds, ([*x.shape], other)]:
                given = call.given | {name: jax.ShapeDtypeStruct(tuple(shape), dtype)}
                try:
                    jax.eval_shape(lambda given, call=call: call.op("xla", **given), given)
                    told = "fits"
                except ValueError as error:
                    told = "an error of the call" if "zip()" in str(error) else str(error)
                except TypeError:  # the call reshapes what it gives to the op
                    told = "an error of the call"
                lines.append(f"{op}: {name} {dtype}{shape}: {told}\n")
    jaxtyping.config.update("jaxtyping_disable", False)
    return "".join(lines)


def all_help() -> str:
    programs = [
        file.stem
        for file in sorted((cli.ROOT / "recipes").glob("*.py"))
        if 'if __name__ == "__main__"' in file.read_text(encoding="utf-8")
    ]
    return "\n".join(f"# {name}\n{cli.succeed(name, '--help').stdout}" for name in programs)


_PLANNED = {
    "": ("rmt-305m", "rmt-tiny", "gpt2-405m", "attnres-528m", "rmt-attnres-305m"),
    "model.store.dtype=bfloat16": ("rmt-305m",),
    "model.store.dtype=float32": ("rmt-305m",),
    "model.mixer=full_attention": ("rmt-attnres-305m", "kimi-tiny"),
    "model.store.dim=1160": ("attnres-528m",),
}
_PLACES = [
    (None, "data=1"),
    ("v5e:2x2", "data=1"),
    ("v5e:2x2", "data=2,fsdp=2"),
    ("v5e:2x2", "key=2"),
    ("v6e:2x2", "tensor=4"),
    ("tpu7x:2x2x1", "data=1"),
]


def all_plans() -> str:
    """List the choices for train steps on some chips and meshes, with the reason for each."""
    found = {}
    for change, names in _PLANNED.items():
        changes = dict(overrides.parse_assignment(each) for each in [change] if each)
        for name in names:
            given = {"model.compute_dtype": "bfloat16"} | changes
            for topology, mesh in _PLACES:
                config = overrides.apply(presets.run(name), given | {"train.mesh": mesh})
                devices = jax.devices()
                if topology is not None:
                    devices = topologies.get_topology_desc(topology, "tpu").devices
                count = math.prod(sharding.parse_mesh(mesh).values())
                made = sharding.make_mesh(mesh, devices[:count])
                resolved = resolve_auto(config, devices=Devices(devices[0].device_kind, count))
                lines = plan_of(resolved, made).lines()
                text = "".join(f"  {title}: {line}\n" for title, line in lines.items())
                found.setdefault(text, []).append(f"{name} {change} {topology} {mesh}\n")
    return "".join(f"{''.join(where)}{text}" for text, where in found.items())


_ALL = (
    all_presets,
    all_experiments,
    all_device_cases,
    all_op_cases,
    all_arguments,
    all_help,
    all_plans,
)
LISTS = {made.__name__: made for made in _ALL}
