"""Implementation choices that depend on the chip and on array sizes, each with its reason.

There is one function per choice. Model code calls these functions and does not name a chip or a
tile size itself. `execution.plan` lists the choices made for a run's train step.
"""

from typing import Any, NamedTuple

from pallas_kernels.call import LANES
from pallas_kernels.stacked_product import MOST_ROWS
from pallas_kernels.target import Target

# The TPUs on which a matrix product is written directly into one slice of stacked outputs. On
# tpu7x, XLA uses a different layout for such a product, and would copy the entire stack for each
# slice.
_WRITES_IN_PLACE = ("tpu_v5_lite", "tpu_v5", "tpu_v6_lite")
# The TPUs on which a single XLA instruction for both products of a feed-forward layer is faster
# than two instructions, even with many tokens (docs/benchmarks/train_step.md).
_FUSED_PRODUCTS = ("tpu_v6_lite",)
# The rows of a tile of an array in HBM, on the TPUs of `_WRITES_IN_PLACE`.
_TILE_ROWS = 8
# The TPUs on which a step in parts was faster than a whole one, by estimate, if the residual of a
# part fits into half of VMEM and that of the whole does not (docs/benchmarks/train_step.md). A part
# had at least this number of tokens.
_FASTER_IN_PARTS, _PART_TOKENS = ("tpu_v5_lite", "tpu_v6_lite"), 8192
# A residual that fills at most this share of VMEM may stay there between two kernels.
MAX_VMEM_SHARE = 0.5
# The largest share of a vector's width that padding with zeros may add. More padding would cost
# more time than it saves on a GPU or a CPU.
_MAX_PADDING_SHARE = 1 / 8


class Choice(NamedTuple):
    """A choice and the reason for it.

    Attributes:
      value: the choice.
      reason: a clause that explains the choice in the printed plan.
    """

    value: Any
    reason: str


def outputs_in_place(target: Target, vectors: int) -> Choice:
    """Choose whether a sublayer's last matrix product is written directly into a stack of outputs.

    The stack contains the outputs of one sublayer in all repeats of the layers.

    Args:
      target: the device that the program is compiled for.
      vectors: the number of vectors that the sublayer writes for each token.
    """
    if target.slug not in _WRITES_IN_PLACE:
        return Choice(False, f"it is not known to avoid a copy of the stack on {target.kind}")
    if vectors % _TILE_ROWS:
        return Choice(
            False,
            f"the kernels read {vectors} vectors in tiles of {_TILE_ROWS}, and XLA would copy the "
            "entire stack for the padding",
        )
    return Choice(True, "XLA writes the products in the layout that the residual's kernels read")


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


def kept_in_rows(target: Target) -> Choice:
    """Choose whether the values kept for the backward pass have their last axis innermost.

    These are the residual vector, and the products and hidden neurons of feed-forward layers. The
    two products of a gated layer are then kept apart: XLA copies a slice of their joined stack
    before it takes the parts.
    """
    if not target.on_tpu:
        return Choice(False, "only XLA for TPUs is known to choose another layout")
    return Choice(True, "XLA would choose the layout of attention, and copy slices of stacks")


def rereads_rebuilt(target: Target, residual_bytes: int) -> Choice:
    """Choose whether the kernel that rebuilds a residual also reads it for the preceding sublayer.

    The choice concerns the backward pass of reversible layers. Reading in the same kernel saves a
    pass over HBM. However, XLA can keep a small residual in VMEM, and does so more often if a
    separate kernel reads it.

    Args:
      target: the device that the program is compiled for.
      residual_bytes: the size of the residual on one device.
    """
    share = residual_bytes / target.chip.vmem
    vmem = "VMEM" if target.on_tpu else "the largest TPU's VMEM"
    size = f"{share:.1%} of {vmem}" if share < 1 else f"{share:.1f} times {vmem}"
    limit = f"a separate kernel reads one that takes at most {MAX_VMEM_SHARE:.0%}"
    return Choice(share > MAX_VMEM_SHARE, f"a residual takes {size}; {limit}")


def faster_in_parts(target: Target, residual_bytes: int, tokens: int, rows: int) -> Choice:
    """Choose the number of parts of a batch in which a train step probably takes the least time.

    Args:
      target: the device that the program is compiled for.
      residual_bytes: the size of the residual on one device.
      tokens: the number of tokens per step on one device.
      rows: the number of sequences per step on one device.
    """
    if target.slug not in _FASTER_IN_PARTS:
        return Choice(1, f"parts are not known to be faster on {target.kind}")
    most = int(MAX_VMEM_SHARE * target.chip.vmem)
    if residual_bytes <= most:
        return Choice(1, "a residual of all tokens may stay in VMEM between two kernels")
    parts = -(-residual_bytes // most)
    while rows % parts and parts < rows:
        parts += 1
    if rows % parts or tokens // parts < _PART_TOKENS:
        return Choice(
            1, f"a part whose residual may stay in VMEM has less than {_PART_TOKENS} tokens"
        )
    return Choice(parts, "a residual of one part may stay in VMEM between two kernels")


def few_tokens(tokens: int) -> bool:
    """Return whether the kernels for decoding support a sequence with this number of tokens."""
    return tokens < LANES


def weights_in_stacks(target: Target, rows: int, divided: int) -> Choice:
    """Choose whether decode steps read weights directly from the stack of all layers.

    Args:
      target: the device that the program is compiled for.
      rows: the number of rows that are multiplied by the weights.
      divided: the number of devices over which the mesh axis `fsdp` shards each weight.
    """
    if not target.on_tpu:
        return Choice(False, "the kernel that reads them there runs on TPUs only")
    if rows > MOST_ROWS:
        return Choice(False, f"there are {rows} rows, more than {MOST_ROWS}")
    if divided > 1:
        return Choice(False, "a weight is gathered from several devices before it is used")
    return Choice(True, "a kernel reads them there, and no layer's weights are copied")


def padded_width(size: int, *, by_kernels: bool) -> Choice:
    """Choose the width to which the vectors in a bank are padded with zeros at the end.

    A bank is the stack of vectors that attention over depth reads.

    Args:
      size: D, the number of entries per vector before padding.
      by_kernels: whether kernels apply an RMS norm to the vectors.
    """
    missing = -size % LANES
    if not by_kernels:
        return Choice(size, "no kernel reads a bank of vectors through an RMS norm")
    if missing > _MAX_PADDING_SHARE * size:
        return Choice(size, f"padding of {missing} is more than an eighth of {size}")
    return Choice(size + missing, f"the kernels need a multiple of {LANES}")


def cache_width(size: int) -> int:
    """Return the padded width of a key or value cache with `size` numbers per token.

    The width is rounded up to a multiple of 128, the width of a TPU's tile. Otherwise, a TPU would
    copy the cache to a new layout for each product. A size below 64 is returned unchanged.
    """
    return size + -size % LANES if size >= LANES // 2 else size
