"""Descriptions of devices, for compiling and for estimates; the devices need not be present.

Clock rates are computed from XLA's cycle estimates and the vendors' peak FLOP/s. Bandwidths are
those that the vendors publish. Matrix-unit timings come from libtpu's critical-path dumps, except
where measured times contradict the dumps (see `_MATRIX_256`).
"""

import dataclasses
import math
import os
import re
from typing import Any, NamedTuple

from pallas_kernels.target import chip_of


@dataclasses.dataclass(frozen=True)
class MatrixUnit:
    """The timing of the matrix units (MXUs) of one core, in cycles.

    Attributes:
      size: the side length of a unit, which has `size x size` cells.
      units: the number of units per core.
      rows16: the number of cycles that a unit needs for a bfloat16 product with 16 rows.
      rows8_float32: the number of cycles that a unit needs for a float32 product with 8 rows.
      push: the number of cycles that a unit needs to load rows of the right-hand side.
      push_to_product: the minimum number of cycles from such a load to a product that uses it.
    """

    size: int
    units: int
    rows16: int
    rows8_float32: int
    push: int = 4
    push_to_product: int = 3


@dataclasses.dataclass(frozen=True)
class Target:
    """A device generation, with a topology to compile for; units are bytes, bytes/s and Hz.

    The two cores of a v5p chip are one device and share the work of a program. In a kernel's
    schedule, a grid axis marked "parallel" is split over the two cores. In XLA's estimates, both
    cores work in every cycle. The two cores of a TPU7x chip are two devices, each with half of the
    chip's bandwidths.

    Attributes:
      name: the name of the generation.
      topology: the name of the topology, like "v5e:2x2".
      accelerator_type: libtpu's name for the topology, or the compute capability of a GPU.
      cores: the number of cores, which is used only to compute the peak FLOP/s.
      clock: the clock rate of a core in Hz.
      bandwidth: the HBM bandwidth in bytes/s.
      vmem: the bytes of a core's VMEM.
      matrix: the timing of the matrix units, or None for a device without a time model.
      hbm: the bytes of HBM available to a program, according to libtpu's out-of-memory error; for a
        GPU, the capacity that the vendor publishes.
      interconnect: the total published bandwidth of a chip's links in one direction.
      max_chips: the number of chips (for a GPU: devices) in the largest topology.
      kind: the device kind, as in `jax.Device.device_kind`.
      platform: "tpu" or "cuda".
      assumed: a text that describes assumptions about the device, for which there is no source; ""
        without assumptions.
      dcn: the bandwidth per device between slices, which communicate over the data center's
        network.
      slices: the number of slices of this topology.
      grouped: the fraction of peak FLOP/s that grouped matrix products reach if the sizes of groups
        are known only at run time. It is a geometric mean of others' measurements; see
        docs/benchmarks/estimates.md.
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
    max_chips: int
    kind: str
    platform: str = "tpu"
    assumed: str = ""
    dcn: float = 0.0
    slices: int = 1
    grouped: float = 1.0

    @property
    def label(self) -> str:
        """The name of the topology, with the number of slices if there are several."""
        return self.topology if self.slices == 1 else f"{self.slices} slices of {self.topology}"

    def network(self, between_slices: bool) -> float:
        """Return a device's outgoing bandwidth in bytes/s: over its links, or between slices."""
        return self.dcn if between_slices else self.interconnect

    @property
    def peak_flops(self) -> float:
        """The peak bfloat16 FLOP/s of the device, or 0 for a device without a time model."""
        m = self.matrix
        if m is None:
            return 0.0
        return self.cores * m.units * m.size**2 * 2 * (16 / m.rows16) * self.clock

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the topology's dimensions, in chips."""
        return tuple(int(n) for n in self.topology.partition(":")[2].split("x"))

    @property
    def devices(self) -> int:
        """The number of devices of all slices: two per chip on tpu7x, and otherwise one."""
        return math.prod(self.shape) * self.slices * (2 if self.name == "tpu7x" else 1)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for `jax.experimental.topologies.get_topology_desc`."""
        if self.platform == "cuda":
            return _cuda_options(self)
        options: dict[str, Any] = {"platform": "tpu", "topology_name": self.topology}
        if math.prod(self.shape) < _HOST:
            options["chips_per_host_bounds"] = [*self.shape, 1, 1][:3]
        return options | ({"num_slices": self.slices} if self.slices > 1 else {})


_MATRIX_128 = MatrixUnit(size=128, units=4, rows16=16, rows8_float32=8)
# libtpu states 8 for rows8_float32. This cannot be right: the minimum time of some kernels would
# then exceed their measured time (docs/benchmarks/estimates.md).
_MATRIX_256 = MatrixUnit(size=256, units=2, rows16=8, rows8_float32=4)
_MIB = 2**20
_SIDE = 16  # The largest side of a topology with two dimensions; libtpu aborts on a v5e with more.
_HOST = 4  # The number of chips per host, which libtpu needs for topologies with fewer chips.


def _tpu(name: str, topology: str, accelerator_type: str, kind: str, **others: Any) -> Target:
    """Return the target for a TPU; most values come from the device table of the kernels."""
    chip = chip_of(kind)
    return Target(
        name, topology, accelerator_type, chip.cores, chip.clock, chip.bandwidth, chip.vmem,
        _MATRIX_128 if chip.unit == 128 else _MATRIX_256, kind=kind, hbm=chip.hbm, **others,
    )  # fmt: skip


class _Generation(NamedTuple):
    """The properties that all GPUs of a compute capability share, as the vendor publishes them.

    Attributes:
      multiprocessors: the number of multiprocessors.
      clock: their boost clock in Hz.
      block_memory, shared_memory: the bytes of shared memory of a block, and of a multiprocessor.
      cache: the bytes of the second-level cache.
      links: the total bandwidth of a GPU's links in one direction, in bytes/s.
    """

    multiprocessors: int
    clock: float
    block_memory: int
    shared_memory: int
    cache: int
    links: float


_GENERATIONS = {
    "8.0": _Generation(108, 1.41e9, 166912, 167936, 40 * _MIB, 300e9),
    "9.0": _Generation(132, 1.755e9, 232448, 233472, 50 * _MIB, 450e9),
    "10.0": _Generation(148, 1.965e9, 232448, 233472, 126 * _MIB, 900e9),
}


def _gpu(name: str, kind: str, capability: str, hbm: int) -> Target:
    """Return the target for a GPU of a known compute capability."""
    of = _GENERATIONS[capability]
    return Target(
        name, f"{name}:1", capability, of.multiprocessors, of.clock, chip_of(kind).bandwidth, 0,
        None, hbm=hbm, interconnect=of.links, max_chips=8, platform="cuda", kind=kind,
    )  # fmt: skip


TARGETS = {
    t.name: t
    for t in (
        _tpu(
            "v5e", "v5e:2x2", "v5litepod-4", "TPU v5 lite",
            interconnect=200e9, max_chips=256, dcn=25e9 / 8,
            grouped=0.72,
        ),
        _tpu(
            "v5p", "v5p:2x2x1", "v5p-8", "TPU v5",
            interconnect=600e9, max_chips=6144, dcn=50e9 / 8,
            grouped=0.38,
        ),
        _tpu(
            "v6e", "v6e:2x2", "v6e-4", "TPU v6 lite",
            interconnect=400e9, max_chips=256, dcn=100e9 / 8,
            grouped=0.45,
        ),
    )
}  # fmt: skip

# Maps names to the devices that whole programs can be compiled for. For some of them, libtpu dumps
# no kernel schedules. The matrix units of TPU7x are not documented. They are assumed to be those of
# v6e, with a clock rate that results in the published peak FLOP/s.
DEVICES = TARGETS | {
    t.name: t
    for t in (
        _tpu(
            "tpu7x", "tpu7x:2x2x1", "tpu7x-8", "TPU7x",
            interconnect=300e9, max_chips=9216, dcn=50e9 / 8, grouped=0.43,
            assumed="the matrix units of v6e, at the clock that gives the published peak",
        ),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", "8.0", 80 * 10**9),
        _gpu("h100", "NVIDIA H100 80GB HBM3", "9.0", 80 * 10**9),
        _gpu("h200", "NVIDIA H200", "9.0", 141 * 10**9),
        _gpu("b200", "NVIDIA B200", "10.0", 180 * 10**9),
    )
}  # fmt: skip
# Maps names to the TPUs that reports accept; by default, reports use TARGETS.
TPUS = {name: target for name, target in DEVICES.items() if target.platform == "tpu"}


def parse_topology(text: str, slices: int = 1) -> Target:
    """Return the target for a topology like "v5e:16x16", "v5p:4x4x8" or "h100:8".

    Args:
      text: the name of the topology.
      slices: the number of TPU slices with this topology, connected by the data center's network.

    Raises:
      ValueError: the generation is unknown, the text does not have the form of the
        generation's topologies, or the generation does not support several slices.
    """
    name, colon, shape = text.partition(":")
    device = DEVICES.get(name)
    if device is None or (device.platform == "tpu" and not colon):
        raise ValueError(f"{text!r} is not a known topology; legal: {_LEGAL}")
    if slices > 1 and device.platform != "tpu":
        raise ValueError(f"{text!r} has several slices, but only TPUs can have more than one")
    if not colon:
        return device
    form = r"\d+" + r"x\d+" * (len(device.shape) - 1)
    sizes = [int(n) for n in shape.split("x")] if re.fullmatch(form, shape) else [0]
    # A host in a slice has 2x2 chips; only the smallest topologies have hosts with one or two
    # chips.
    hosts = len(sizes) == 1 or max(sizes) == 1 or all(n % 2 == 0 for n in sizes[:2])
    largest = _SIDE if len(sizes) == 2 else math.inf
    if min(sizes) < 1 or not hosts or max(sizes) > largest or math.prod(sizes) > device.max_chips:
        raise ValueError(f"{text!r} is not a topology of {name}; legal: {_LEGAL}")
    return dataclasses.replace(device, topology=text, slices=slices)


_LEGAL = (
    "v5e:AxB and v6e:AxB (A and B even and at most 16, like v5e:4x4; or 1x1), v5p:AxBxC and "
    "tpu7x:AxBxC (A and B even, like v5p:4x4x8; or 1x1x1), a100:N, h100:N, h200:N and b200:N "
    "(N up to 8)"
)


def _cuda_options(target: Target) -> dict[str, Any]:
    """Return options that describe a GPU to XLA. The values are those that the vendor publishes."""
    major, minor = target.accelerator_type.split(".")
    of = _GENERATIONS[target.accelerator_type]
    feature = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    config = f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {of.block_memory}
  shared_memory_per_core: {of.shared_memory}  core_count: {target.cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {int(target.bandwidth)}  l2_cache_size: {of.cache}
  clock_rate_ghz: {target.clock / 1e9}  device_memory_size: {target.hbm}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability {{
    major: {major} minor: {minor} {feature}
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
    """Return the environment variables for a process that compiles for a device.

    The variables must be set before the process loads a compiler.

    Args:
      target: the device.
      dump_folder: the folder for the compiler's dumps.
      buffers: whether XLA dumps its buffer assignment (see `memory`).
      schedules: whether libtpu dumps the final schedule of every instruction or, for a GPU, whether
        XLA dumps the PTX code.
    """
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if dump_folder is not None and schedules:
        # Only some passes are dumped: dumps of all passes of a train step would take gigabytes.
        flags += (
            f" --xla_jf_dump_to={dump_folder} --xla_jf_dump_llo_text=true"
            " --xla_jf_dump_llo_pass_label_regex=^final_(bundles|hlo.*)$"
        )
    dump = [f"--xla_dump_to={dump_folder}"]
    dump += ["--xla_dump_hlo_as_text"] * buffers
    # Recent XLA versions dump PTX only with this flag, and then dump nothing else.
    dump += ["--xla_dump_emitter_re=ptx"] * (schedules and not buffers)
    wanted = dump_folder and (buffers or (schedules and target.platform == "cuda"))
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(dump) if wanted else "",
        # JAX's compilation cache cannot load programs for a device that is not present.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    if target.platform == "cuda":
        return environment
    return environment | {
        "LIBTPU_INIT_ARGS": flags.strip(),
        "TPU_SKIP_MDS_QUERY": "1",
        # Without this variable, a second compiling process fails on libtpu's lock file.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": target.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    }
