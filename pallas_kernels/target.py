"""The kind of device that a program is compiled for, and its specifications.

All code that needs to know this device calls `target()`.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax

Platform = Literal["tpu", "cuda"]

# The maximum VMEM in bytes that kernels and XLA share: 64 MiB, the VMEM of a TPU v5p. Kernels use
# no more than this, even on chips with more VMEM.
_MOST_VMEM = 2**26

# JAX has more than one name for some chips. This dict maps other slugs to the slug in `CHIPS`.
_ALIASES = {"tpu_v5e": "tpu_v5_lite", "tpu_v5p": "tpu_v5", "tpu_v6e": "tpu_v6_lite"}


class Chip(NamedTuple):
    """The published specifications of one JAX device. A TPU7x chip consists of two devices.

    Attributes:
      peak_flops: the peak dense bfloat16 rate in FLOP/s.
      bandwidth: the HBM bandwidth in bytes/s; 0 if this package does not need it.
      clock: the clock frequency in Hz at which a TPU's matrix units reach `peak_flops`.
      vmem: bytes of VMEM per TPU core.
      cores: the number of TPU cores that share a program's work.
      unit: the number of rows in a TPU's matrix unit.
      hbm: the bytes of a TPU's HBM that programs can use, according to libtpu's error when they run
        out; 0 if they are not known.
    """

    peak_flops: float
    bandwidth: float = 0.0
    clock: float = 0.0
    vmem: int = 0
    cores: int = 1
    unit: int = 0
    hbm: int = 0


_MIB = 2**20
# Maps the start of a device kind's slug (see `slug`) to the device's specifications.
CHIPS = {
    "tpu_v4": Chip(275e12, 1228e9, 1.05e9, 2**24, 2, 128),
    "tpu_v5_lite": Chip(197e12, 819e9, 1.5e9, 2**27, 1, 128, 16128 * _MIB),
    "tpu_v5": Chip(459e12, 2765e9, 1.75e9, 2**26, 2, 128, int(95.74 * 2**30)),
    "tpu_v6_lite": Chip(918e12, 1640e9, 1.75e9, 2**27, 1, 256, 32000 * _MIB),
    "tpu7x": Chip(1153.5e12, 3690e9, 2.2e9, 2**26, 1, 256, 97024 * _MIB),
    "nvidia_a100": Chip(312e12, 2039e9),
    "nvidia_a100-sxm4-40gb": Chip(312e12, 1555e9),
    "nvidia_a100-pcie-40gb": Chip(312e12, 1555e9),
    "nvidia_a100_80gb_pcie": Chip(312e12, 1935e9),
    "nvidia_h100": Chip(989e12, 3352e9),
    "nvidia_h100_pcie": Chip(756e12),
    "nvidia_h100_nvl": Chip(835e12),
    "nvidia_h200": Chip(989e12, 4800e9),
    "nvidia_b200": Chip(2250e12, 7672e9),
}
# Maps ten times the compute capability to patterns of a word or two in the slugs of GPUs. Unlisted
# GPUs count as Ampere (80), because newer devices support what Ampere supports.
_CAPABILITIES = {
    90: r"h100|h200|h800|h20",
    100: r"b100|b200",
    103: r"b300",
    70: r"p100|v100s?|t4\d*|quadro_rtx|titan|gtx|geforce_rtx_20\d\d",
}
_TPUS = {kind: device for kind, device in CHIPS.items() if device.vmem}
# The specifications of an unknown kind of TPU: each is the largest value of all TPUs.
_MOST = Chip(*map(max, zip(*_TPUS.values(), strict=True)))


def slug(device_kind: str) -> str:
    """Return the slug of a device kind, which is its name in tables and file names.

    For example, both "TPU v5 lite" and "TPU v5e" become "tpu_v5_lite".
    """
    name = device_kind.lower().replace(" ", "_")
    return _ALIASES.get(name, name)


def platform_of(device: str) -> Platform | None:
    """Return the platform of a device slug; None if this package has no kernels for the device."""
    return "tpu" if device.startswith("tpu") else "cuda" if device.startswith("nvidia") else None


def chip_of(device_kind: str) -> Chip | None:
    """Return the specifications of a device kind, or None if it is unknown.

    `device_kind` is JAX's name for the kind, such as "TPU v5 lite".
    """
    name = slug(device_kind)
    matches = [kind for kind in CHIPS if name.startswith(kind)]
    return CHIPS[max(matches, key=len)] if matches else None


class Target(NamedTuple):
    """A kind of device to compile for.

    Attributes:
      kind: JAX's name for the device kind, such as "TPU v5 lite".
    """

    kind: str

    @property
    def slug(self) -> str:
        """The slug of the kind, which is its name in tables and file names."""
        return slug(self.kind)

    @property
    def platform(self) -> Platform | None:
        """The platform whose kernels can run on this device; None if there are no such kernels."""
        return platform_of(self.slug)

    @property
    def capability(self) -> int:
        """Ten times the compute capability of a GPU; 80 if the GPU is not known."""
        matches = lambda words: re.search(rf"({words})(_|-|$)", self.slug)
        return next((n for n, words in _CAPABILITIES.items() if matches(words)), 80)

    @property
    def on_tpu(self) -> bool:
        """Whether the target is a TPU."""
        return self.platform == "tpu"

    @property
    def chip(self) -> Chip:
        """The specifications of the TPU; for an unknown kind, the largest values among all TPUs."""
        return _TPUS.get(self.slug, _MOST)

    @property
    def unknown(self) -> str | None:
        """The reason to refuse kernels if the device is a TPU of an unknown kind, or else None."""
        if not self.on_tpu or self.slug in _TPUS:
            return None
        return f"an unknown kind of TPU, {self.kind!r} (known: {', '.join(_TPUS)})"

    @property
    def vmem_limit(self) -> int:
        """Bytes of VMEM that a kernel may use. XLA uses the remaining VMEM."""
        return min(self.chip.vmem, _MOST_VMEM) // 64 * 60

    def vmem_part(self, mib: int) -> int:
        """Return a VMEM budget in bytes: `mib` / 60 of `vmem_limit`.

        On a chip whose limit is 60 MiB, the result is `mib` MiB.
        """
        return self.vmem_limit * mib // 60


# The device kind that `target` returns, regardless of which devices exist. None means the kind of
# the actual device. The value is stored in a user context because JAX includes user contexts in the
# cache keys of jitted functions.
_kind = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def lowering_for(device_kind: str) -> Iterator[None]:
    """Make `target` return the kind `device_kind` in this context.

    No device of this kind needs to exist or to be in the mesh.
    """
    with _kind(device_kind):
        yield


# The device kind that the current trace is lowered for, if there is only one and it is known;
# otherwise None.
_only = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def lowering_only_for(device_kind: str) -> Iterator[None]:
    """Declare that all code traced in the context is lowered for this kind of device and no other.

    An op then traces only the implementation for this kind, and not one for each platform. Use the
    context for code whose devices are known, such as the code that runs on a mesh.
    """
    with _only(device_kind):
        yield


def only_platform() -> str | None:
    """Return the platform that `lowering_only_for` declares, or None if it is not known.

    The result is "other" for devices for which this package has no kernels. It is None within
    `lowering_for`, where the device may differ from the mesh's devices.
    """
    if _only.value is None or _kind.value is not None:
        return None
    return platform_of(slug(_only.value)) or "other"


def target() -> Target:
    """Return the kind of device that the current trace is expected to be compiled for.

    The result is the kind that was passed to `lowering_for`. Without one, it is the kind of the
    current mesh's devices, which need not exist on this machine. Without a mesh, it is the kind of
    the default device. The call is cheap.
    """
    if _kind.value is not None:
        return Target(_kind.value)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        default = jax.config.jax_default_device
        device = default if isinstance(default, jax.Device) else jax.devices()[0]
    return Target(device.device_kind)
