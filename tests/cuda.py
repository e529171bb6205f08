"""Compilation for NVIDIA GPUs on a machine without one.

`lowered` needs jax alone. `compiled` and `ptx` need the CUDA plugin of the same version; see
`tests/conftest.py` and the Makefile for where it is.
"""

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from rmt_tpu.estimator.tuning import Usage, parse_usage

# Compute capability and, from the vendor's tables: SMs, shared memory a block may ask for, bytes of
# second-level cache, bytes per second.
_TARGETS = {
    "sm_80": ("NVIDIA A100", 8, 0, 108, 166912, 41943040, 2039000000000),
    "sm_89": ("NVIDIA L40", 8, 9, 142, 101376, 100663296, 864000000000),
    "sm_90": ("NVIDIA H100", 9, 0, 132, 232448, 52428800, 3352320000000),
    "sm_100": ("NVIDIA B200", 10, 0, 148, 232448, 132644864, 7672320000000),
}
TARGETS = tuple(_TARGETS)
_CUDNN_CALL = re.compile(r"custom_call @(__cudnn\S+?)\(.*?\) (\{api_version.*)")


def lowered(function, *args, target: str = "sm_90") -> str:
    """The program that XLA is given for CUDA, its kernels named in `backend_config`."""
    kind = _TARGETS[target][0]
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("all",), axis_types=auto, abstract_device=device)
    # Newer jax asks for which GPU a kernel is lowered; older jax lowers for any.
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def cudnn_calls(function, *args) -> list[tuple[str, str]]:
    """Return the names of cuDNN's calls in a program, each with its attributes for XLA."""
    return _CUDNN_CALL.findall(lowered(function, *args))


def compiled(function, *args, target: str, **options) -> jax.stages.Compiled:
    """The program for one such device; `options` are the compiler's, and what is too large raises.

    `args` are `jax.ShapeDtypeStruct`s, in trees.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=target, topology="1x1x1", target_config=_config(target)
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("all",))
    sharding = NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    args = jax.tree.map(place, args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*args).compile(compiler_options=options)


def usage(call: str, target: str) -> dict[str, Usage]:
    """Return the resources that ptxas reports for the Mosaic GPU kernels that `call` compiles.

    The result maps names to resources. `call` is "module:function(arguments)". It runs in a process
    of its own, because a process compiles such kernels for one kind of GPU only.
    """
    module, _, expression = call.partition(":")
    program = f"import tests.conftest, {module} as module; module.{expression}"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    text = run.stdout + run.stderr
    assert run.returncode == 0, text[-3000:]
    # The code uses instructions that only this generation of GPUs has ("a").
    assert {*re.findall(r"entry function '\w+' for '(sm_\w+)'", text)} == {f"{target}a"}
    assert not re.search("[1-9][0-9]* bytes spill", text), text[-3000:]
    found = parse_usage("", text)
    return {re.sub("_mosaic_gpu_kernel$|_kernel$", "", name): use for name, use in found.items()}


def ptx(function, *args, target: str, folder: pathlib.Path) -> str:
    """The PTX of all of the compiled program, by way of `folder`; see `compiled`."""
    before = set(folder.glob("*.ptx"))
    options = {
        "xla_dump_to": str(folder),
        "xla_dump_emitter_re": "ptx",  # Newer XLA dumps nothing else, and no PTX unasked.
        "xla_backend_optimization_level": 3,
    }
    compiled(function, *args, target=target, **options)
    return "\n".join(path.read_text() for path in sorted(set(folder.glob("*.ptx")) - before))


def _config(target: str) -> str:
    """What XLA is told of a device that is not there."""
    name, major, minor, cores, shared, cache, bandwidth = _TARGETS[target]
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {shared}
  shared_memory_per_core: {shared + 1024}  core_count: {cores}  fpus_per_core: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: {cache}  clock_rate_ghz: 1.5
  device_memory_size: 80000000000  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
device_description_str: "{name}"
"""
