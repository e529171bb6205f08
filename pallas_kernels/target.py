"""What a program is compiled for: the kind of device, its figures, and the limits of kernels on it.

`target()` is the one answer to "what am I compiled for?".
"""

import contextlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax

Platform = Literal["tpu", "cuda"]

# Kernels take no more VMEM than v5p's 64 MiB have, and of that some is left to XLA.
_MOST_VMEM = 2**26

# Other names that jax has for the same chips.
_ALIASES = {"tpu_v5e": "tpu_v5_lite", "tpu_v5p": "tpu_v5", "tpu_v6e": "tpu_v6_lite"}


class Chip(NamedTuple):
    """A device as JAX counts them, by its maker's figures; two are one chip of TPU7x.

    Attributes:
      peak_flops: dense bfloat16 FLOP/s.
      bandwidth: of its HBM in bytes/s; 0 where nothing here asks for it.
      clock: of a TPU in Hz, at which its matrix units have that peak.
      vmem: bytes of a TPU core's VMEM.
      cores: of a TPU, which share a program's work.
      unit: rows of a TPU's matrix unit.
    """

    peak_flops: float
    bandwidth: float = 0.0
    clock: float = 0.0
    vmem: int = 0
    cores: int = 1
    unit: int = 0


# By the start of a device kind, as `tuned.slug` has it: for all that asks what a device can do.
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
# The most that a kernel finds in any TPU.
_MOST = Chip(*map(max, zip(*_TPUS.values(), strict=True)))


def slug(device_kind: str) -> str:
    """Return a device kind as tables have it: "TPU v5 lite" and "TPU v5e" are tpu_v5_lite."""
    name = device_kind.lower().replace(" ", "_")
    return _ALIASES.get(name, name)


def platform_of(device: str) -> Platform | None:
    """Return the platform of a slug whose kernels may serve; None if none of ours can."""
    return "tpu" if device.startswith("tpu") else "cuda" if device.startswith("nvidia") else None


def chip_of(device_kind: str) -> Chip | None:
    """Return the device of a kind as jax says it, like "TPU v5 lite"; None if it is unknown."""
    name = slug(device_kind)
    matches = [kind for kind in CHIPS if name.startswith(kind)]
    return CHIPS[max(matches, key=len)] if matches else None


class Target(NamedTuple):
    """A kind of device to compile for.

    Attributes:
      kind: as jax says it, like "TPU v5 lite".
    """

    kind: str

    @property
    def slug(self) -> str:
        """The kind as tables have it."""
        return slug(self.kind)

    @property
    def platform(self) -> Platform | None:
        """Whose kernels may serve."""
        return platform_of(self.slug)

    @property
    def on_tpu(self) -> bool:
        """Whether it is a TPU."""
        return self.platform == "tpu"

    @property
    def chip(self) -> Chip:
        """The figures of the TPU; those of an unknown kind are the largest of any TPU."""
        return _TPUS.get(self.slug, _MOST)

    @property
    def unknown(self) -> str | None:
        """Why kernels cannot serve a TPU that is not known here, in a line; None elsewhere."""
        if not self.on_tpu or self.slug in _TPUS:
            return None
        return f"a TPU of kind {self.kind!r} is not known here; known: {', '.join(_TPUS)}"

    @property
    def vmem_limit(self) -> int:
        """Bytes of VMEM that a kernel may take; some is left to XLA."""
        return min(self.chip.vmem, _MOST_VMEM) // 64 * 60

    def vmem_part(self, mib: int) -> int:
        """Return the bytes that are to the chip's limit what `mib` MiB are to 60 MiB."""
        return self.vmem_limit * mib // 60


# The kind that `target` gives, whatever devices there are. The values of a user context are a part
# of what jitted functions are kept under.
_kind = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def lowering_for(device_kind: str) -> Iterator[None]:
    """Trace for devices of this kind, which need not be there or in a mesh."""
    with _kind(device_kind):
        yield


def target() -> Target:
    """Return what is traced for now, as far as that is known; it is never slow.

    It is the device of the mesh in use, be it of devices that are not there; else the default one.
    """
    if _kind.value is not None:
        return Target(_kind.value)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        default = jax.config.jax_default_device
        device = default if isinstance(default, jax.Device) else jax.devices()[0]
    return Target(device.device_kind)
