"""Compiles the calls of calibration.json again, and writes there what the compiler makes of them.

    pip install tokamax==0.0.12
    python -m pallas_kernels.compiler.calibrate v5p v6e

Published times and blocks stay as they are. tokamax has the kernels that were timed, and is needed
for nothing else; no device is needed. Ends with the table and the lines of
docs/benchmarks/estimates.md.
"""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.compiler import calibration
from pallas_kernels.compiler.cost import program_cost
from pallas_kernels.compiler.programs import Failure, Job, compile_jobs, versions
from pallas_kernels.compiler.topology import DEVICES

_LOWER = {"attention": f"{__name__}:lower_splash"}


def main() -> int:
    if importlib.util.find_spec("tokamax") is None:
        print("tokamax is missing; pip install tokamax==0.0.12 brings the kernels", file=sys.stderr)
        return 1
    values = json.loads(calibration.PATH.read_text(encoding="utf-8"))
    rows = list(calibration.parse(values))
    legal = list(dict.fromkeys(row.target for row in rows))
    for target in sys.argv[1:] or legal:
        if target not in legal:
            print(f"{target!r} has no rows; legal: {', '.join(legal)}", file=sys.stderr)
            return 2
        mine = [i for i, row in enumerate(rows) if row.target == target]
        for i, row in zip(mine, compiled([rows[i] for i in mine]), strict=True):
            print(f"{target} {row.shape}: {rows[i].ratio:.3f}, now {row.ratio:.3f}", flush=True)
            rows[i] = row
    values["versions"] |= versions()
    calibration.PATH.write_text(calibration.text(values, rows), encoding="utf-8")
    print(calibration.table())
    return 0


def compiled(rows: Sequence[calibration.Row]) -> Iterator[calibration.Row]:
    """Rows of one target, as today's compiler and model have them.

    Raises:
      RuntimeError: one does not compile.
    """
    jobs = [Job(_LOWER[row.op], {"shape": row.shape, "blocks": row.blocks}) for row in rows]
    for row, outcome in zip(rows, compile_jobs(DEVICES[rows[0].target], jobs), strict=True):
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{row.target} {row.shape}: {outcome.message}")
        cost = program_cost(outcome)
        (kernel,) = cost.kernels
        yield dataclasses.replace(
            row,
            beside=round(cost.seconds - kernel.seconds, 9),
            cycles=kernel.cycles,
            bundles=kernel.bundles,
            mxu_cycles=kernel.mxu_cycles,
            bytes=kernel.bytes.total,
        )


def lower_splash(
    device: jax.Device, shape: Sequence[int], blocks: Mapping[str, int]
) -> jax.stages.Lowered:
    """Attention without a mask by tokamax's kernel, as it was timed: with its transposes.

    Args:
      device: of a topology.
      shape: of queries, keys, values and the result: [batch, tokens, heads, head size].
      blocks: fields of tokamax's config.
    """
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    layouts = {k: splash.QKVLayout(v) for k, v in blocks.items() if k.endswith("layout")}
    config = dataclasses.replace(splash.SplashConfig.get_default(), **{**blocks, **layouts})
    kernel = splash.make_splash_mha(
        masks.FullMask((shape[1], shape[1])), config=config, q_seq_shards=1,
        downcast_smem_data=False, mask_value=float(jnp.finfo(jnp.float32).min),
    )  # fmt: skip

    def call(q, k, v):
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * shape[-1] ** -0.5, k, v))
        return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)

    # Arrays that lie in memory as JAX lays them out.
    mesh = Mesh(np.array([device]), ("device",))
    here = NamedSharding(mesh, PartitionSpec())
    array = jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16, sharding=here)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(call).lower(array, array, array)


if __name__ == "__main__":
    # As the module that worker processes import, and not as __main__.
    from pallas_kernels.compiler import calibrate

    sys.exit(calibrate.main())
