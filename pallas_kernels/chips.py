"""Figures of devices, and limits of kernels on the TPU that is compiled for."""

from typing import NamedTuple

from pallas_kernels import tuned

# Kernels take no more VMEM than v5p's 64 MiB have, and of that some is left to XLA.
_MOST_VMEM = 2**26


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

    @property
    def hbm(self) -> int:
        """Bytes that come to a TPU's core from HBM in a cycle."""
        return int(self.bandwidth / self.clock / self.cores)


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


def of_kind(device_kind: str) -> Chip | None:
    """The device of a kind as jax says it, like "TPU v5 lite", or None if it is unknown here."""
    name = tuned.slug(device_kind)
    matches = [kind for kind in CHIPS if name.startswith(kind)]
    return CHIPS[max(matches, key=len)] if matches else None


def chip() -> Chip:
    """That which is lowered for; of a kind that is not known the most."""
    return _TPUS.get(tuned.slug(tuned.device_lowered_for()), _MOST)


def on_tpu() -> bool:
    """Whether that which is lowered for is one."""
    return tuned.platform_of(tuned.slug(tuned.device_lowered_for())) == "tpu"


def unknown_chip() -> str | None:
    """Why kernels cannot serve a TPU that is not known here, in a line; None elsewhere."""
    kind = tuned.device_lowered_for()
    if not on_tpu() or tuned.slug(kind) in _TPUS:
        return None
    return f"a TPU of kind {kind!r} is not known here; known: {', '.join(_TPUS)}"


def vmem_limit() -> int:
    """Bytes of VMEM that a kernel may take of the chip lowered for; some is left to XLA."""
    return min(chip().vmem, _MOST_VMEM) // 64 * 60


def vmem_part(mib: int) -> int:
    """Bytes that are to the chip's limit what so many MiB are to 60 MiB."""
    return vmem_limit() * mib // 60
