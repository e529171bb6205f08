"""Devices to compile for without one, and what the cost model knows of them.

Clocks follow from XLA's own estimates and the makers' peak FLOP/s; bandwidths are the makers'.
Matrix-unit timings are those of libtpu's critical-path dumps, except where measured times refute
them (see `_MATRIX_256`).
"""

import dataclasses
import math
import os
import re
from typing import Any

from pallas_kernels.target import chip_of


@dataclasses.dataclass(frozen=True)
class MatrixUnit:
    """Timing of a core's matrix units (MXUs), in cycles.

    Attributes:
      size: a unit has `size x size` cells.
      units: the number of units.
      rows16: the cycles in which a bfloat16 product of 16 rows occupies a unit.
      rows8_float32: the cycles in which a float32 product of 8 rows occupies a unit.
      push: the cycles of loading rows of the right-hand side.
      push_to_product: the cycles from such a load to a product that uses it.
    """

    size: int
    units: int
    rows16: int
    rows8_float32: int
    push: int = 4
    push_to_product: int = 3


@dataclasses.dataclass(frozen=True)
class Target:
    """One device of a generation, and its topology; units are bytes, bytes/s and Hz.

    The two cores of a v5p chip share the work of a program: a grid axis that is "parallel" is split
    over them in a kernel's schedule, and XLA's estimates count cycles in which both work (so a
    bfloat16 product of 8192^3 is rated at the chip's peak). The two cores of a TPU7x chip are two
    devices, with half of the chip's bandwidths each.

    Attributes:
      name: the name of the generation.
      topology: the topology, like "v5e:2x2".
      accelerator_type: libtpu's name of the topology, or a GPU's compute capability.
      cores: the number of cores that the peak counts; used for the peak only.
      clock: the clock of a core.
      bandwidth: the bandwidth of HBM.
      vmem: the bytes of a core's VMEM.
      matrix: the timing of the matrix units; None where there is no model of time.
      hbm: the bytes that libtpu's out-of-memory error says are available to a program (on a GPU,
        the maker's capacity).
      interconnect: the maker's bandwidth of all links of a chip together, in one direction.
      most: the number of devices or chips in the largest topology.
      kind: the device kind, as jax gives it.
      platform: "tpu" or "cuda".
      assumed: which figures are assumed, because nobody states them.
      dcn: a device's share of a host's or a pod's links to the data center, over which slices send
        to each other.
      slices: how many slices of the topology there are.
      grouped: the share of the peak at which others measured products of groups that only the data
        determines (the geometric mean, see docs/benchmarks/estimates.md).
    """

    name: str
    topology: str
    accelerator_type: str
    cores: int
    clock: float
    bandwidth: float
    vmem: int
    matrix: MatrixUnit | None
    hbm: int
    interconnect: float
    most: int
    kind: str
    platform: str = "tpu"
    assumed: str = ""
    dcn: float = 0.0
    slices: int = 1
    grouped: float = 1.0

    @property
    def label(self) -> str:
        """The topology, with the number of slices if there are several."""
        return self.topology if self.slices == 1 else f"{self.slices} slices of {self.topology}"

    def network(self, between_slices: bool) -> float:
        """Return the bytes/s out of a device, over its links or between slices."""
        return self.dcn if between_slices else self.interconnect

    @property
    def peak_flops(self) -> float:
        """The bfloat16 FLOP/s of the device; 0 where there is no model of time."""
        m = self.matrix
        if m is None:
            return 0.0
        return self.cores * m.units * m.size**2 * 2 * (16 / m.rows16) * self.clock

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the topology, in chips."""
        return tuple(int(n) for n in self.topology.partition(":")[2].split("x"))

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `jax.experimental.topologies.get_topology_desc`."""
        if self.platform == "cuda":
            return _cuda_options(self)
        options: dict[str, Any] = {"platform": "tpu", "topology_name": self.topology}
        if math.prod(self.shape) < _HOST:
            options["chips_per_host_bounds"] = [*self.shape, 1, 1][:3]
        return options | ({"num_slices": self.slices} if self.slices > 1 else {})


_MATRIX_128 = MatrixUnit(size=128, units=4, rows16=16, rows8_float32=8)
# libtpu's figure for rows8_float32 is 8, but with it the least time of kernels is longer than their
# measured time (docs/benchmarks/estimates.md).
_MATRIX_256 = MatrixUnit(size=256, units=2, rows16=8, rows8_float32=4)
_MIB = 2**20
_GIB = 2**30
_HOST = 4  # the most chips of a host, where libtpu itself does not know how many a host has


def _tpu(name: str, topology: str, accelerator_type: str, kind: str, **others: Any) -> Target:
    """Return a TPU of the table that kernels use too."""
    chip = chip_of(kind)
    return Target(
        name, topology, accelerator_type, chip.cores, chip.clock, chip.bandwidth, chip.vmem,
        _MATRIX_128 if chip.unit == 128 else _MATRIX_256, kind=kind, **others,
    )  # fmt: skip


def _gpu(name: str, kind: str, hbm: int) -> Target:
    """Return a GPU of Hopper's generation."""
    return Target(
        name, f"{name}:1", "9.0", 132, 1.755e9, chip_of(kind).bandwidth, 0, None,
        hbm=hbm, interconnect=450e9, most=8, platform="cuda", kind=kind,
    )  # fmt: skip


TARGETS = {
    t.name: t
    for t in (
        _tpu(
            "v5e", "v5e:2x2", "v5litepod-4", "TPU v5 lite",
            hbm=16128 * _MIB, interconnect=200e9, most=256, dcn=25e9 / 8,
            grouped=0.72,
        ),
        _tpu(
            "v5p", "v5p:2x2x1", "v5p-8", "TPU v5",
            hbm=int(95.74 * _GIB), interconnect=600e9, most=6144, dcn=50e9 / 8,
            grouped=0.38,
        ),
        _tpu(
            "v6e", "v6e:2x2", "v6e-4", "TPU v6 lite",
            hbm=32000 * _MIB, interconnect=400e9, most=256, dcn=100e9 / 8,
            grouped=0.45,
        ),
    )
}  # fmt: skip

# Devices that whole programs can be compiled for; not all have schedules of kernels. Nothing is
# known here of a TPU7x core's matrix units: they are assumed to be those of a v6e at the clock that
# gives the maker's peak.
DEVICES = TARGETS | {
    t.name: t
    for t in (
        _tpu(
            "tpu7x", "tpu7x:2x2x1", "tpu7x-8", "TPU7x",
            hbm=97024 * _MIB, interconnect=300e9, most=9216, dcn=50e9 / 8, grouped=0.43,
            assumed="matrix units as those of v6e, at the clock that gives the maker's peak",
        ),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 80 * 10**9),
        _gpu("h200", "NVIDIA H200", 141 * 10**9),
    )
}  # fmt: skip
# The TPUs that reports accept; TARGETS are those that they use by default.
TPUS = {name: target for name, target in DEVICES.items() if target.platform == "tpu"}


def parse_topology(text: str, slices: int = 1) -> Target:
    """Return the device of a topology like "v5e:16x16", "v5p:4x4x8" or "h100:8", with it.

    Args:
      text: the topology.
      slices: how many slices of it, of a TPU, the data center's network connects.

    Raises:
      ValueError: the generation is unknown, its topologies have another form, or it has no slices.
    """
    name, colon, shape = text.partition(":")
    device = DEVICES.get(name)
    if device is None or (device.platform == "tpu" and not colon):
        raise ValueError(f"{text!r} is unknown; legal: {_LEGAL}")
    if slices > 1 and device.platform != "tpu":
        raise ValueError(f"{text!r} has no slices: only those of TPUs are connected by a network")
    if not colon:
        return device
    form = r"\d+" + r"x\d+" * (len(device.shape) - 1)
    sizes = [int(n) for n in shape.split("x")] if re.fullmatch(form, shape) else [0]
    # Hosts of a slice have 2x2 chips; smaller hosts have one chip or two.
    hosts = len(sizes) == 1 or max(sizes) == 1 or all(n % 2 == 0 for n in sizes[:2])
    if min(sizes) < 1 or not hosts or math.prod(sizes) > device.most:
        raise ValueError(f"{text!r} is no topology of {name}; legal: {_LEGAL}")
    return dataclasses.replace(device, topology=text, slices=slices)


_LEGAL = (
    "v5e:AxB and v6e:AxB (A and B even, like v5e:4x4, up to 16x16; or 1x1), v5p:AxBxC and "
    "tpu7x:AxBxC (A and B even, like v5p:4x4x8; or 1x1x1), h100:N and h200:N (N up to 8)"
)


def _cuda_options(target: Target) -> dict[str, Any]:
    """Return XLA's description of a GPU, from the maker's figures."""
    major, minor = target.accelerator_type.split(".")
    config = f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472  core_count: {target.cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {int(target.bandwidth)}  l2_cache_size: 52428800
  clock_rate_ghz: {target.clock / 1e9}  device_memory_size: {target.hbm}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
  }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
device_description_str: "{target.kind}"
"""
    return {
        "platform": "cuda",
        "topology_name": target.name,
        "topology": f"1x1x{target.shape[0]}",
        "target_config": config,
    }


def compiler_environment(
    target: Target,
    dump_folder: str | None = None,
    *,
    buffers: bool = False,
    schedules: bool = True,
) -> dict[str, str]:
    """Return the environment of a process that compiles for a device.

    The process must not have loaded a compiler before.

    Args:
      target: the device.
      dump_folder: the folder for dumps.
      buffers: whether XLA dumps its buffer assignment (see `memory`).
      schedules: whether libtpu dumps the final schedule of every instruction, and XLA a GPU's PTX.
    """
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if dump_folder is not None and schedules:
        # The dumps of all passes of a train step would take gigabytes.
        flags += (
            f" --xla_jf_dump_to={dump_folder} --xla_jf_dump_llo_text=true"
            " --xla_jf_dump_llo_pass_label_regex=^final_(bundles|hlo.*)$"
        )
    dump = [f"--xla_dump_to={dump_folder}"]
    dump += ["--xla_dump_hlo_as_text"] * buffers
    # With this flag newer XLA dumps nothing else, and without it no PTX.
    dump += ["--xla_dump_emitter_re=ptx"] * (schedules and not buffers)
    wanted = dump_folder and (buffers or (schedules and target.platform == "cuda"))
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(dump) if wanted else "",
        # A cache can store programs for an absent device, but not load them.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    if target.platform == "cuda":
        return environment
    return environment | {
        "LIBTPU_INIT_ARGS": flags.strip(),
        "TPU_SKIP_MDS_QUERY": "1",
        # Without this, a second process that compiles dies on a lock file.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": target.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    }
