"""TPU chips: what kernels may take of the one that is compiled for."""

from typing import NamedTuple

from pallas_kernels import tuned

# Kernels take no more VMEM than v5p's 64 MiB have, and of that some is left to XLA.
_MOST_VMEM = 2**26


class Chip(NamedTuple):
    """Of a TPU: bytes of a core's VMEM, cores that share a program's work, a matrix unit's rows.

    And bytes that come to a core from HBM in a cycle.
    """

    vmem: int
    cores: int
    unit: int
    hbm: int


_CHIPS = {
    "tpu_v4": Chip(2**24, 2, 128, 585),
    "tpu_v5_lite": Chip(2**27, 1, 128, 546),
    "tpu_v5": Chip(2**26, 2, 128, 790),
    "tpu_v6_lite": Chip(2**27, 1, 256, 937),
    "tpu7x": Chip(2**26, 1, 256, 1677),
}


def chip() -> Chip:
    """That which is lowered for; of a kind that is not known the most."""
    return _CHIPS.get(tuned.slug(tuned.device_lowered_for()), Chip(2**27, 2, 256, 1677))


def on_tpu() -> bool:
    """Whether that which is lowered for is one."""
    return tuned.platform_of(tuned.slug(tuned.device_lowered_for())) == "tpu"


def unknown_chip() -> str | None:
    """Why kernels cannot serve a TPU that is not known here, in a line; None elsewhere."""
    kind = tuned.device_lowered_for()
    if not on_tpu() or tuned.slug(kind) in _CHIPS:
        return None
    return f"a TPU of kind {kind!r} is not known here; known: {', '.join(_CHIPS)}"


def vmem_limit() -> int:
    """Bytes of VMEM that a kernel may take of the chip lowered for; some is left to XLA."""
    return min(chip().vmem, _MOST_VMEM) // 64 * 60


def vmem_part(mib: int) -> int:
    """Bytes that are to the chip's limit what so many MiB are to 60 MiB."""
    return vmem_limit() * mib // 60
