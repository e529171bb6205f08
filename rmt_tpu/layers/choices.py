"""The choices that a chip and sizes make in a model: one function each, with the reason.

Models ask these functions, and name no chip and no tile themselves. `execution.plan` lists what
they answer for a run.
"""

from typing import Any, NamedTuple

from pallas_kernels.call import LANES
from pallas_kernels.target import Target

# On tpu7x XLA has another layout for a product that it makes in a slot of a stack, and would lay
# the whole stack out anew for each slot.
_MADE_IN_PLACE = ("tpu_v5_lite", "tpu_v5", "tpu_v6_lite")
# XLA's one instruction for both products of a feed-forward layer is the better way of many tokens
# there too (docs/benchmarks/train_step.md).
_AT_ONCE = ("tpu_v6_lite",)
# The share of VMEM that a residual may fill so that XLA keeps it there between kernels.
_KEPT = 0.5
# More zeros than this share of a width are not worth it on a GPU, or on a CPU.
_MOST_ZEROS = 1 / 8


class Choice(NamedTuple):
    """What is chosen, and why.

    Attributes:
      value: the choice.
      reason: a clause that says why.
    """

    value: Any
    reason: str


def outputs_in_place(target: Target) -> Choice:
    """Choose whether a product that a core ends with is made in its slot of a stack."""
    if target.slug in _MADE_IN_PLACE:
        return Choice(True, "XLA makes a product in the layout that the residual's kernels take")
    return Choice(False, f"XLA would lay the stack out anew for each product on {target.kind}")


def products_in_turn(target: Target, vectors: int, tokens: int) -> Choice:
    """Choose whether the products of a feed-forward layer are instructions of their own.

    Args:
      target: what is compiled for.
      vectors: data vectors that the layer reads.
      tokens: of a sequence, on a device.
    """
    if vectors == 1:
        return Choice(False, "a residual of vectors is read with tokens in rows")
    if few_tokens(tokens):
        return Choice(False, f"{tokens} tokens are fewer than {LANES}")
    if target.slug in _AT_ONCE:
        return Choice(False, f"one instruction for both is faster on {target.kind}")
    return Choice(True, "one instruction for both takes a fifth longer where tokens are last")


def rereads_rebuilt(target: Target, residual_bytes: int) -> Choice:
    """Choose whether the kernel that rebuilds a residual reads it too, for the site before.

    That saves a pass over HBM. A smaller residual XLA keeps in VMEM, the more so if a kernel of its
    own reads it next.
    """
    share = residual_bytes / target.chip.vmem
    told = f"a residual of {residual_bytes:,} bytes fills {share:.2g} of VMEM, where XLA keeps one"
    return Choice(share > _KEPT, f"{told} of at most {_KEPT}")


def few_tokens(tokens: int) -> bool:
    """Return whether so few tokens of a sequence are taken by the kernels for decoding."""
    return tokens < LANES


def padded_width(size: int, *, by_kernels: bool) -> Choice:
    """Choose the width in which a bank holds vectors of `size` numbers, with zeros behind them.

    Args:
      size: D.
      by_kernels: whether kernels read the bank, by an RMS norm.
    """
    missing = -size % LANES
    if not by_kernels:
        return Choice(size, "no kernel reads a bank of vectors by an RMS norm")
    if missing > _MOST_ZEROS * size:
        return Choice(size, f"{missing} zeros are more than an eighth of {size}")
    return Choice(size + missing, f"kernels take whole tiles of {LANES}")


def cache_width(size: int) -> int:
    """Return the width of a cache of keys or values of `size` numbers a token.

    It is whole tiles, for else TPUs lay the cache out anew for each product; a small one stays.
    """
    return size + -size % LANES if size >= LANES // 2 else size
