"""What the compiler is asked for beside its defaults, by the kind of device."""

import os

import jax

from pallas_kernels.target import slug

_VMEM = "xla_tpu_scoped_vmem_limit_kib"
# KiB for the blocks of one of XLA's instructions, where more than its own rule gives made compiled
# steps cheaper: by the best guess of their cost, on v6e by XLA's own estimate
# (docs/benchmarks/train_step.md). The rest of VMEM keeps arrays between them.
_VMEM_KIB = {"tpu_v5_lite": 65536, "tpu_v5": 49152, "tpu_v6_lite": 49152, "tpu7x": 49152}


def of_step(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """Options for `jax.jit` of a train step on a mesh, or None; flags of the environment win."""
    kib = _VMEM_KIB.get(slug(mesh.devices.flat[0].device_kind))
    if kib is None or _VMEM in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return None
    return {_VMEM: kib}


def of_init(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """Options for `jax.jit` of a run's first state on a mesh, or None.

    A CPU's compiler takes four times as long to make a program fast that runs once. Unasked it also
    joins products and sums, which rounds otherwise here than there.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if on_cpu else None
