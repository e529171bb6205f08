"""XLA compiler options for training that differ from the defaults, for each kind of device."""

import os

import jax

from pallas_kernels.target import slug

_VMEM = "xla_tpu_scoped_vmem_limit_kib"
# Maps each kind of TPU to the VMEM, in KiB, that one XLA instruction may use for its blocks. These
# limits exceed XLA's default and make compiled train steps cheaper, according to the best available
# estimate of their cost and, on v6e, according to XLA's own estimate
# (docs/benchmarks/train_step.md). XLA uses the rest of VMEM to keep arrays between instructions.
_VMEM_KIB = {"tpu_v5_lite": 65536, "tpu_v5": 49152, "tpu_v6_lite": 49152, "tpu7x": 49152}


def for_step(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """Return `jax.jit` compiler options for a train step on a mesh, or None for the defaults.

    A VMEM limit in the environment variable LIBTPU_INIT_ARGS takes precedence.
    """
    kib = _VMEM_KIB.get(slug(mesh.devices.flat[0].device_kind))
    if kib is None or _VMEM in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return None
    return {_VMEM: kib}


def for_init(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """Return `jax.jit` compiler options for computing the initial state, or None for the defaults.

    On a CPU this selects optimization level 0, because the program runs only once and the default
    level takes four times as long to compile. Level 0 also does not fuse products and sums, so
    rounding does not depend on the machine.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if on_cpu else None
