"""List the kernels that train steps call, with grids, blocks, and the number of other block sizes.

`recorded` keeps these lists as text, because a change of blocks changes no result.
"""

import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuned
from pallas_kernels.target import lowering_for
from rmt_tpu.analysis.step_cost import TrainStep, trace_config
from rmt_tpu.estimator import DEVICES
from rmt_tpu.estimator.spaces import Problem, problem_of

# Mosaic GPU's kernels run only with a later jax here, so with this one a checksum of their text is
# kept. Another version writes the same kernel otherwise.
HAS_BODIES = jax.__version__.startswith("0.10.")
_DEPTH = {"model.num_layers": 4}
AT_NIGHT = (
    "rmt-305m@v5e",
    "attnres-528m@v5e",
    "kimi-tiny@v5e",
    "rmt-attnres-305m@h100",
    "attnres-528m@h100",
    "attnres-528m@b200",
)
STEPS = {
    "rmt-305m@v5e": TrainStep("rmt-305m"),
    "rmt-attnres-305m@v5e": TrainStep("rmt-attnres-305m"),
    "attnres-528m@v5e": TrainStep("attnres-528m", changes=_DEPTH),
    "kimi-tiny@v5e": TrainStep("kimi-tiny"),
    "llama-374m@v5e": TrainStep("llama-374m", 4, 2048),
    "rmt-attnres-305m@h100": TrainStep("rmt-attnres-305m", changes={"model.kernels": "pallas"}),
    "attnres-528m@h100": TrainStep("attnres-528m", changes=_DEPTH | {"model.kernels": "pallas"}),
    "rmt-305m@h100": TrainStep("rmt-305m", changes={"model.kernels": "mosaic_gpu"}),
    "attnres-528m@b200": TrainStep(
        "attnres-528m", changes=_DEPTH | {"model.kernels": "mosaic_gpu"}
    ),
}


def report(name: str) -> str:
    """Return a line for each kernel and for each of its blocks, and then what can be tuned."""
    chip = DEVICES[name.split("@")[1]]
    with lowering_for(chip.kind), tuned.collecting() as looks, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no kernel for a call
        traced = trace_config(STEPS[name].config(), jax.devices()[:1])
    problems = dict.fromkeys(problem_of(look) for look in looks)
    # A trace has a branch for each platform.
    found = (params for params in _kernels(traced.jaxpr) if _is_tpu(params) == (chip.name == "v5e"))
    kernels = dict.fromkeys(map(_described, found))
    return "\n".join([*kernels, *map(_candidates, problems)]) + "\n"


def _candidates(problem: Problem) -> str:
    found = problem.candidates()
    kept = zlib.crc32(repr(found).encode())
    return f"{problem.name}: {len(found)} candidates {kept:08x}, default {found[0]}"


def _kernels(jaxpr: Any) -> Iterator[dict[str, Any]]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        params = equation.params
        if equation.primitive.name in ("pallas_call", "mpmd_map"):
            yield params
            continue
        for value in params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _kernels(inner)


def _is_tpu(params: dict[str, Any]) -> bool:
    return isinstance(params["compiler_params"], pltpu.CompilerParams)


def _described(params: dict[str, Any]) -> str:
    if "meshes" in params:  # Mosaic GPU's
        (mesh,), (jaxpr,) = params["meshes"], params["jaxprs"]
        body = f" body {zlib.crc32(str(jaxpr).encode()):08x}" if HAS_BODIES else ""
        lines = [f"{params['name']} {mesh.grid} {mesh.num_threads}{body}"]
        arrays = [str(var.aval) for var in getattr(jaxpr, "jaxpr", jaxpr).invars]
    else:
        mapping, cost = params["grid_mapping"], params["cost_estimate"]
        lines = [f"{params['name']} {mapping.grid} {_options(params['compiler_params'])}"]
        lines += [] if cost is None else [f"  {cost}"]
        arrays = [
            "x".join(str(getattr(size, "block_size", 1)) for size in block.block_shape)
            for block in mapping.block_mappings
        ]
        arrays += [str(ref) for ref in mapping.scratch_avals]
    return "\n".join([*lines, *(f"  {n} {x}" for n, x in enumerate(arrays))])


def _options(chosen: Any) -> str:
    names = ("vmem_limit_bytes", "num_warps", "num_stages")
    found = {name: getattr(chosen, name, None) for name in names}
    return " ".join(f"{name}={value}" for name, value in found.items() if value is not None)
