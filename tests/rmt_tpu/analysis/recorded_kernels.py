"""The TPU kernels that train steps call, with grids and blocks: part of what `recorded` keeps."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.target import lowering_for
from rmt_tpu.analysis.step_cost import TrainStep, trace_config
from rmt_tpu.estimator import TARGETS

STEPS = {
    "rmt-305m": TrainStep("rmt-305m"),
    "rmt-attnres-305m": TrainStep("rmt-attnres-305m"),
    "attnres-528m": TrainStep("attnres-528m", changes={"model.num_layers": 8}),
    "kimi-tiny": TrainStep("kimi-tiny"),
    "llama-374m": TrainStep("llama-374m", 4, 2048),
}


def report(name: str) -> str:
    """A line for each kernel of a step on v5e, and below it a line for each shape of its blocks."""
    with lowering_for(TARGETS["v5e"].kind):
        traced = trace_config(STEPS[name].config(), jax.devices()[:1])
    return "\n".join(dict.fromkeys(map(_described, _kernels(traced.jaxpr)))) + "\n"


def _kernels(jaxpr: Any) -> Iterator[dict[str, Any]]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        params = equation.params
        if isinstance(params.get("compiler_params"), pltpu.CompilerParams):
            yield params
            continue
        for value in params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _kernels(inner)


def _described(params: dict[str, Any]) -> str:
    mapping, chosen = params["grid_mapping"], params["compiler_params"]
    blocks = [
        "x".join(str(getattr(size, "block_size", 1)) for size in block.block_shape)
        for block in mapping.block_mappings
    ]
    scratch = [str(ref) for ref in getattr(mapping, "scratch_avals", ())]
    lines = [f"{params['name']} {mapping.grid} VMEM {chosen.vmem_limit_bytes}"]
    return "\n".join([*lines, *(f"  {n} {x}" for n, x in enumerate([*blocks, *scratch]))])
