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


# These options let SparseCores perform collectives while TensorCores compute something else
# (docs/benchmarks/pods.md). MaxText's scripts for these chips set them. Without them, XLA does this
# on tpu7x alone. v4 has SparseCores too, but XLA gives them no collectives there.
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
_OFFLOADED = (
    "all_gather", "2d_all_gather", "3d_all_gather",
    "reduce_scatter", "nd_reduce_scatter", "all_reduce",
)  # fmt: skip
_SPARSE_CORES = {
    **{_OFFLOAD + kind: True for kind in _OFFLOADED},
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
}
_WITH_SPARSE_CORES = ("tpu_v5", "tpu_v6_lite", "tpu7x")


def for_step(mesh: jax.sharding.Mesh) -> dict[str, int | bool] | None:
    """Return `jax.jit` compiler options for a train step on a mesh, or None for the defaults.

    An option in the environment variable LIBTPU_INIT_ARGS takes precedence.
    """
    kind, options = slug(mesh.devices.flat[0].device_kind), {}
    if kind in _VMEM_KIB:
        options[_VMEM] = _VMEM_KIB[kind]
    if kind in _WITH_SPARSE_CORES and mesh.size > 1:
        options |= _SPARSE_CORES
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    return {name: value for name, value in options.items() if name not in given} or None


def for_init(mesh: jax.sharding.Mesh) -> dict[str, int] | None:
    """Return `jax.jit` compiler options for computing the initial state, or None for the defaults.

    On a CPU this selects optimization level 0, because the program runs only once and the default
    level takes four times as long to compile. Level 0 also does not fuse products and sums, so
    rounding does not depend on the machine.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if on_cpu else None
