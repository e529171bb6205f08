"""What the compiler is asked for beside its defaults, by the kind of device."""

import os

import jax

from pallas_kernels import tuned

_VMEM = "xla_tpu_scoped_vmem_limit_kib"
# KiB for the blocks of one of XLA's instructions, where more than its own rule gives (32768 on v6e)
# is known to make steps cheaper; the rest of VMEM keeps arrays from one to the next.
_VMEM_KIB = {"tpu_v6_lite": 49152}


def of_step(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """Options for `jax.jit` of a train step on a mesh, or None; flags of the environment win."""
    kib = _VMEM_KIB.get(tuned.slug(mesh.devices.flat[0].device_kind))
    if kib is None or _VMEM in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return None
    return {_VMEM: kib}
