"""Compiler options that differ from the compiler's defaults, by kind of device."""

import os

import jax

from pallas_kernels.target import slug

_VMEM = "xla_tpu_scoped_vmem_limit_kib"
# VMEM in KiB for the blocks of one XLA instruction, by kind of TPU. On these kinds more than XLA's
# own rule gives made compiled steps cheaper: by the best guess of their cost, and on v6e by XLA's
# own estimate (docs/benchmarks/train_step.md). The rest of VMEM keeps arrays between instructions.
_VMEM_KIB = {"tpu_v5_lite": 65536, "tpu_v5": 49152, "tpu_v6_lite": 49152, "tpu7x": 49152}


def of_step(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """Return `jax.jit` compiler options for a train step on a mesh, or None for the defaults.

    A VMEM limit that the environment sets in LIBTPU_INIT_ARGS takes precedence.
    """
    kib = _VMEM_KIB.get(slug(mesh.devices.flat[0].device_kind))
    if kib is None or _VMEM in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return None
    return {_VMEM: kib}


def of_init(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """Return `jax.jit` compiler options for making a run's first state, or None for the defaults.

    A CPU's compiler takes four times as long to optimize this program, which runs only once. At
    level 0 it also does not fuse products and sums, which would make rounding depend on where the
    program runs.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if on_cpu else None
