"""The device that a program is compiled for: its kind, its figures and the limits of kernels on it.

`target()` is the only function that says what a program is compiled for.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax

Platform = Literal["tpu", "cuda"]

# Kernels use at most the 64 MiB of VMEM that a v5p has, less a part that is left to XLA.
_MOST_VMEM = 2**26

# Other names that JAX has for the same chips.
_ALIASES = {"tpu_v5e": "tpu_v5_lite", "tpu_v5p": "tpu_v5", "tpu_v6e": "tpu_v6_lite"}


class Chip(NamedTuple):
    """A device as JAX counts devices, with its maker's figures. A TPU7x chip has two devices.

    Attributes:
      peak_flops: peak dense bfloat16 rate in FLOP/s.
      bandwidth: HBM bandwidth in bytes/s; 0 if nothing in this package needs it.
      clock: a TPU's clock in Hz, at which its matrix units reach `peak_flops`.
      vmem: bytes of VMEM of a TPU core.
      cores: the TPU cores that share a program's work.
      unit: the number of rows of a TPU's matrix unit.
    """

    peak_flops: float
    bandwidth: float = 0.0
    clock: float = 0.0
    vmem: int = 0
    cores: int = 1
    unit: int = 0


# Devices by the start of their kind, written as `slug` does. All code that needs figures of a
# device takes them from here.
CHIPS = {
    "tpu_v4": Chip(275e12, 1228e9, 1.05e9, 2**24, 2, 128),
    "tpu_v5_lite": Chip(197e12, 819e9, 1.5e9, 2**27, 1, 128),
    "tpu_v5": Chip(459e12, 2765e9, 1.75e9, 2**26, 2, 128),
    "tpu_v6_lite": Chip(918e12, 1640e9, 1.75e9, 2**27, 1, 256),
    "tpu7x": Chip(1153.5e12, 3690e9, 2.2e9, 2**26, 1, 256),
    "nvidia_a100": Chip(312e12),
    "nvidia_h100": Chip(989e12, 3352e9),
    "nvidia_h100_pcie": Chip(756e12),
    "nvidia_h100_nvl": Chip(835e12),
    "nvidia_h200": Chip(989e12, 4800e9),
    "nvidia_b200": Chip(2250e12),
}
_TPUS = {kind: device for kind, device in CHIPS.items() if device.vmem}
# The largest figures of any TPU.
_MOST = Chip(*map(max, zip(*_TPUS.values(), strict=True)))


def slug(device_kind: str) -> str:
    """Return a device kind as tables name it: "TPU v5 lite" and "TPU v5e" are tpu_v5_lite."""
    name = device_kind.lower().replace(" ", "_")
    return _ALIASES.get(name, name)


def platform_of(device: str) -> Platform | None:
    """Return the platform of a slug's kernels; None if this package has no kernels for it."""
    return "tpu" if device.startswith("tpu") else "cuda" if device.startswith("nvidia") else None


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip of a device kind as JAX names it, like "TPU v5 lite"; None if unknown."""
    name = slug(device_kind)
    matches = [kind for kind in CHIPS if name.startswith(kind)]
    return CHIPS[max(matches, key=len)] if matches else None


class Target(NamedTuple):
    """A kind of device to compile for.

    Attributes:
      kind: the device kind as JAX names it, like "TPU v5 lite".
    """

    kind: str

    @property
    def slug(self) -> str:
        """The kind as tables name it."""
        return slug(self.kind)

    @property
    def platform(self) -> Platform | None:
        """The platform whose kernels may serve this target; None if there is none."""
        return platform_of(self.slug)

    @property
    def on_tpu(self) -> bool:
        """Whether the target is a TPU."""
        return self.platform == "tpu"

    @property
    def chip(self) -> Chip:
        """The figures of the TPU. Unknown kinds get the largest figures of any TPU."""
        return _TPUS.get(self.slug, _MOST)

    @property
    def unknown(self) -> str | None:
        """The reason why kernels cannot serve a TPU of an unknown kind, or None."""
        if not self.on_tpu or self.slug in _TPUS:
            return None
        return f"a TPU of kind {self.kind!r} is not known here; known: {', '.join(_TPUS)}"

    @property
    def vmem_limit(self) -> int:
        """Bytes of VMEM that a kernel may use; the rest is left to XLA."""
        return min(self.chip.vmem, _MOST_VMEM) // 64 * 60

    def vmem_part(self, mib: int) -> int:
        """Return the share `mib` / 60 of the chip's VMEM limit, in bytes."""
        return self.vmem_limit * mib // 60


# The device kind that `target` returns, whatever devices exist. It is a user context, whose value
# is part of the cache key of jitted functions.
_kind = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def lowering_for(device_kind: str) -> Iterator[None]:
    """Trace for devices of this kind, which need not exist or be in a mesh."""
    with _kind(device_kind):
        yield


def target() -> Target:
    """Return the device that is being traced for, as far as it is known; the call is cheap.

    This is the device of the mesh in use, which may consist of devices that do not exist on this
    machine; without a mesh it is the default device.
    """
    if _kind.value is not None:
        return Target(_kind.value)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        default = jax.config.jax_default_device
        device = default if isinstance(default, jax.Device) else jax.devices()[0]
    return Target(device.device_kind)
