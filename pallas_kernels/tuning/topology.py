"""TPU generations to compile for without one, and what the cost model knows of them.

Clocks follow from XLA's own estimates and the makers' peak FLOP/s; bandwidths are the makers'.
Matrix-unit timings are those of libtpu's critical-path dumps. None was measured on a device.
"""

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class MatrixUnit:
    """Timing of a core's matrix units (MXUs), in cycles.

    `units` of `size x size`. A bfloat16 product of 16 rows occupies a unit for `rows16`, a float32
    product of 8 rows for `rows8_float32`. Its first result comes `latency` after its issue, each
    further one `result_interval` later. Loading rows of the right-hand side takes `push`.
    """

    size: int
    units: int
    rows16: int
    rows8_float32: int
    latency: int
    result_interval: int
    push: int = 4
    push_to_product: int = 3


@dataclasses.dataclass(frozen=True)
class Target:
    """One chip of a TPU generation: bytes, bytes/s, Hz.

    The two cores of a v5p chip share the work of a program: a grid axis that is "parallel" is split
    over them in a kernel's schedule, and XLA's estimates count cycles in which both work (so a
    bfloat16 product of 8192^3 is rated at the chip's peak). `cores` is for the peak only.
    """

    name: str
    topology: str
    accelerator_type: str
    cores: int
    clock: float
    bandwidth: float
    vmem: int
    matrix: MatrixUnit

    @property
    def peak_flops(self) -> float:
        """bfloat16 FLOP/s of the chip."""
        m = self.matrix
        return self.cores * m.units * m.size**2 * 2 * (16 / m.rows16) * self.clock


_MATRIX_128 = MatrixUnit(
    size=128, units=4, rows16=16, rows8_float32=8, latency=125, result_interval=8
)
_MATRIX_256 = MatrixUnit(
    size=256, units=2, rows16=8, rows8_float32=8, latency=192, result_interval=2
)
_MIB = 2**20

TARGETS = {
    t.name: t
    for t in (
        Target("v5e", "v5e:2x2", "v5litepod-4", 1, 1.5e9, 819e9, 128 * _MIB, _MATRIX_128),
        Target("v5p", "v5p:2x2x1", "v5p-8", 2, 1.75e9, 2765e9, 64 * _MIB, _MATRIX_128),
        Target("v6e", "v6e:2x2", "v6e-4", 1, 1.75e9, 1640e9, 128 * _MIB, _MATRIX_256),
    )
}


def compiler_environment(target: Target, dump_folder: str | None = None) -> dict[str, str]:
    """Variables with which a process that has not loaded libtpu compiles for a TPU without one.

    With a `dump_folder`, libtpu writes there the final schedule of every instruction.
    """
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if dump_folder is not None:
        # All passes of a train step would be gigabytes.
        flags += (
            f" --xla_jf_dump_to={dump_folder} --xla_jf_dump_llo_text=true"
            " --xla_jf_dump_llo_pass_label_regex=^final_(bundles|hlo.*)$"
        )
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "LIBTPU_INIT_ARGS": flags.strip(),
        "TPU_SKIP_MDS_QUERY": "1",
        # Else a second process that compiles dies on a lock file.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": target.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    }
