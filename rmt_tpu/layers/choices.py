"""Implementation choices that depend on the chip and on array sizes, each with its reason.

There is one function per choice. Models call these functions instead of naming a chip or a tile
size themselves. `execution.plan` lists the choices made for a run's train step.
"""

from typing import Any, NamedTuple

from pallas_kernels.call import LANES
from pallas_kernels.target import Target

# tpu7x is left out: on that chip XLA uses a different layout for a matrix product that is written
# into a slot of a stack, and would copy the whole stack to that layout for each slot.
_WRITES_IN_PLACE = ("tpu_v5_lite", "tpu_v5", "tpu_v6_lite")
# On this chip, a single XLA instruction for both products of a feed-forward layer is faster even
# with many tokens (docs/benchmarks/train_step.md).
_FUSED_PRODUCTS = ("tpu_v6_lite",)
# The maximum share of VMEM that a residual may fill if XLA is to keep it in VMEM between kernels.
_MAX_VMEM_SHARE = 0.5
# On a GPU or a CPU, padding with zeros does not pay off if it adds more than this share of the
# width.
_MAX_PADDING_SHARE = 1 / 8


class Choice(NamedTuple):
    """A choice and the reason for it.

    Attributes:
      value: the choice.
      reason: a clause that says why.
    """

    value: Any
    reason: str


def outputs_in_place(target: Target) -> Choice:
    """Choose whether a core's last matrix product is written directly into a stack of outputs."""
    if target.slug in _WRITES_IN_PLACE:
        return Choice(
            True, "XLA writes the products in the layout that the residual's kernels read"
        )
    return Choice(False, f"it is not known to avoid a copy of the stack on {target.kind}")


def products_in_turn(target: Target, vectors: int, tokens: int) -> Choice:
    """Choose whether a feed-forward layer's two products run as separate XLA instructions.

    Args:
      target: the device that the program is compiled for.
      vectors: the number of data vectors per token that the layer reads.
      tokens: the number of tokens per sequence on one device.
    """
    if vectors == 1:
        return Choice(False, "a vector residual is read with tokens in rows")
    if few_tokens(tokens):
        return Choice(False, f"there are {tokens} tokens, fewer than {LANES}")
    if target.slug in _FUSED_PRODUCTS:
        return Choice(False, f"one instruction for both products is faster on {target.kind}")
    return Choice(True, "one instruction for both products takes a fifth longer with tokens last")


def rereads_rebuilt(target: Target, residual_bytes: int) -> Choice:
    """Choose whether the kernel that rebuilds a residual also reads it for the preceding sublayer.

    The choice concerns the backward pass of reversible layers. Reading in the same kernel saves a
    pass over HBM. However, XLA can keep a small residual in VMEM, and it is more likely to do so if
    a separate kernel reads the residual next.
    """
    share = residual_bytes / target.chip.vmem
    vmem = "VMEM" if target.on_tpu else "the largest TPU's VMEM"
    limit = f"a separate kernel reads one that takes at most {_MAX_VMEM_SHARE}"
    return Choice(share > _MAX_VMEM_SHARE, f"a residual takes {share:.2g} of {vmem}; {limit}")


def few_tokens(tokens: int) -> bool:
    """Return whether a sequence is short enough for the kernels that are written for decoding."""
    return tokens < LANES


def padded_width(size: int, *, by_kernels: bool) -> Choice:
    """Choose the width to which the vectors in a bank are padded with zeros at the end.

    Args:
      size: D, the number of entries per vector before padding.
      by_kernels: whether kernels read the bank through an RMS norm.
    """
    missing = -size % LANES
    if not by_kernels:
        return Choice(size, "no kernel reads a bank of vectors through an RMS norm")
    if missing > _MAX_PADDING_SHARE * size:
        return Choice(size, f"padding of {missing} is more than an eighth of {size}")
    return Choice(size + missing, f"the kernels need a multiple of {LANES}")


def cache_width(size: int) -> int:
    """Return the padded width of a key or value cache with `size` numbers per token.

    The width is rounded up to whole tiles, because a TPU would otherwise copy the cache to a new
    layout for each product. A size of less than half a tile is returned unchanged.
    """
    return size + -size % LANES if size >= LANES // 2 else size
