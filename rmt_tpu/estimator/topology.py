"""Devices to compile for without one, and what the cost model knows of them.

Clocks follow from XLA's own estimates and the makers' peak FLOP/s; bandwidths are the makers'.
Matrix-unit timings are those of libtpu's critical-path dumps, but for what measured times refute
(see `_MATRIX_256`).
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

    `units` of `size x size`. A bfloat16 product of 16 rows occupies a unit for `rows16`, a float32
    product of 8 rows for `rows8_float32`. Loading rows of the right-hand side takes `push`.
    """

    size: int
    units: int
    rows16: int
    rows8_float32: int
    push: int = 4
    push_to_product: int = 3


@dataclasses.dataclass(frozen=True)
class Target:
    """One device of a generation, and the topology it is in: bytes, bytes/s, Hz.

    The two cores of a v5p chip share the work of a program: a grid axis that is "parallel" is split
    over them in a kernel's schedule, and XLA's estimates count cycles in which both work (so a
    bfloat16 product of 8192^3 is rated at the chip's peak). `cores` is for the peak only. The two
    cores of a TPU7x chip are two devices, with half of the chip's bandwidths each.

    `hbm` is what libtpu's out-of-memory error says is available to a program (on a GPU, the
    maker's capacity). `interconnect` is what the maker states for all links of a chip together, in
    one direction; `dcn` is a device's share of a host's or a pod's links to the data center, over
    which `slices` of the topology send to each other. `most` devices or chips make up the largest
    topology. `kind` is the device kind, as jax says it. `matrix` is None where there is no model of
    time. `assumed` says of what a figure is that nobody states. `grouped` is the share of the peak
    at which others measured products of groups that only the data gives (the geometric mean, see
    docs/benchmarks/estimates.md).
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
        """The topology, and of how many slices."""
        return self.topology if self.slices == 1 else f"{self.slices} slices of {self.topology}"

    def network(self, between_slices: bool) -> float:
        """Bytes/s out of a device, over its links or between slices."""
        return self.dcn if between_slices else self.interconnect

    @property
    def peak_flops(self) -> float:
        """bfloat16 FLOP/s of the device; 0 where there is no model of time."""
        m = self.matrix
        if m is None:
            return 0.0
        return self.cores * m.units * m.size**2 * 2 * (16 / m.rows16) * self.clock

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the topology, in chips."""
        return tuple(int(n) for n in self.topology.partition(":")[2].split("x"))

    @property
    def options(self) -> dict[str, Any]:
        """For `jax.experimental.topologies.get_topology_desc`."""
        if self.platform == "cuda":
            return _cuda_options(self)
        options: dict[str, Any] = {"platform": "tpu", "topology_name": self.topology}
        if math.prod(self.shape) < _HOST:
            options["chips_per_host_bounds"] = [*self.shape, 1, 1][:3]
        return options | ({"num_slices": self.slices} if self.slices > 1 else {})


_MATRIX_128 = MatrixUnit(size=128, units=4, rows16=16, rows8_float32=8)
# libtpu's figure for rows8_float32 is 8, with which the least time of kernels is longer than what
# was measured of them (docs/benchmarks/estimates.md).
_MATRIX_256 = MatrixUnit(size=256, units=2, rows16=8, rows8_float32=4)
_MIB = 2**20
_GIB = 2**30
_HOST = 4  # chips, at most, where libtpu does not know by itself how many a host has


def _tpu(name: str, topology: str, accelerator_type: str, kind: str, **others: Any) -> Target:
    """A TPU of the table that kernels have, too."""
    chip = chip_of(kind)
    return Target(
        name, topology, accelerator_type, chip.cores, chip.clock, chip.bandwidth, chip.vmem,
        _MATRIX_128 if chip.unit == 128 else _MATRIX_256, kind=kind, **others,
    )  # fmt: skip


def _gpu(name: str, kind: str, hbm: int) -> Target:
    """A GPU of Hopper's generation."""
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

# What a whole program is compiled for, kernels' schedules aside. Nothing is known here of a TPU7x
# core's matrix units: they are taken for those of a v6e at the clock that gives the maker's peak.
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
# What reports can be asked for; TARGETS are what they are for unasked.
TPUS = {name: target for name, target in DEVICES.items() if target.platform == "tpu"}


def parse_topology(text: str, slices: int = 1) -> Target:
    """The device of a topology like "v5e:16x16", "v5p:4x4x8" or "h100:8", with that topology.

    Args:
      text: the topology.
      slices: of it, of a TPU, that are connected by the data center's network.

    Raises:
      ValueError: there is no such generation, its topologies have another form, or it has no
        slices.
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
    # Hosts of a slice have 2x2 chips; a host can also be had with one or two.
    hosts = len(sizes) == 1 or max(sizes) == 1 or all(n % 2 == 0 for n in sizes[:2])
    if min(sizes) < 1 or not hosts or math.prod(sizes) > device.most:
        raise ValueError(f"{text!r} is no topology of {name}; legal: {_LEGAL}")
    return dataclasses.replace(device, topology=text, slices=slices)


_LEGAL = (
    "v5e:AxB and v6e:AxB (A and B even, like v5e:4x4, up to 16x16; or 1x1), v5p:AxBxC and "
    "tpu7x:AxBxC (A and B even, like v5p:4x4x8; or 1x1x1), h100:N and h200:N (N up to 8)"
)


def _cuda_options(target: Target) -> dict[str, Any]:
    """XLA's description of a GPU, by the maker's figures."""
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
    """Variables with which a process that has not loaded a compiler compiles for a device.

    Args:
      target: the device.
      dump_folder: for what follows.
      buffers: XLA writes there how it assigned memory (see `memory`).
      schedules: libtpu writes there the final schedule of every instruction, and XLA a GPU's PTX.
    """
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if dump_folder is not None and schedules:
        # All passes of a train step would be gigabytes.
        flags += (
            f" --xla_jf_dump_to={dump_folder} --xla_jf_dump_llo_text=true"
            " --xla_jf_dump_llo_pass_label_regex=^final_(bundles|hlo.*)$"
        )
    dump = [f"--xla_dump_to={dump_folder}"]
    dump += ["--xla_dump_hlo_as_text"] * buffers
    # Newer XLA dumps nothing else then, and no PTX unasked.
    dump += ["--xla_dump_emitter_re=ptx"] * (schedules and not buffers)
    wanted = dump_folder and (buffers or (schedules and target.platform == "cuda"))
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(dump) if wanted else "",
        # Programs for a device that is not there can be kept in a cache, and not be read back.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    if target.platform == "cuda":
        return environment
    return environment | {
        "LIBTPU_INIT_ARGS": flags.strip(),
        "TPU_SKIP_MDS_QUERY": "1",
        # Else a second process that compiles dies on a lock file.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": target.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    }
