"""Logits on TPUs: a matrix product that accumulates the log-sum-exp while it writes the logits.

The outer grid axis runs over blocks of tokens and the inner one over blocks of the vocabulary. Each
of the 128 lanes keeps a running maximum and sum over its own columns (online softmax). The lanes
are combined only once, after the last block, and no logits are read again.

For T tokens of width W in bfloat16 and a vocabulary of V, the kernel takes `2 T W V` FLOPs, writes
`4 T V` bytes and reads `2 (T + V ceil(T / block tokens)) W` bytes. Lower bounds for T = 8192 (in
four calls), W = 1024 and V = 50257: on v5e (197 TFLOP/s, 819 GB/s), the arithmetic takes 4.3 ms and
the memory transfers take 2.5 ms. On v6e (918 TFLOP/s, 1640 GB/s), they take 0.9 ms and 1.3 ms.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.call import LANES, round_up, tpu_call
from pallas_kernels.logits.interface import Logits
from pallas_kernels.products import dot
from pallas_kernels.target import target

# `_COLUMNS`: maximum number of columns per block. The other constants are VMEM budgets, as
# arguments of `Target.vmem_part`: for the block of x, for two blocks of the matrix, for two blocks
# of the logits, and for the logits of one matrix product.
_COLUMNS, _OF_X, _OF_MATRIX, _OF_LOGITS, _OF_ROWS = 1024, 4, 32, 16, 2
# `_WIDEST`: maximum width of x; a wider matrix leaves no room in VMEM for a block of its columns.
# `_LEAST`: minimum number of logits for which the kernel is faster than XLA.
_WIDEST, _LEAST = 8192, 2**20
# A finite number below any logit, used in place of -inf so that differences are finite.
_NONE = -1e38


def unsupported(op: str, x, kernel, targets) -> str | None:
    """Return a one-line reason why the kernel does not support this call, or None if it does."""
    if x.dtype != jnp.bfloat16:
        return f"x of {x.dtype} (legal: bfloat16)"
    if x.shape[1] > _WIDEST:
        return f"x of width {x.shape[1]} (legal: at most {_WIDEST})"
    return None


def wins(op: str, x, kernel, targets) -> bool:
    """Return whether the kernel is estimated to be faster than XLA for this call."""
    return unsupported(op, x, kernel, targets) is None and len(x) * kernel.shape[1] >= _LEAST


def logits(
    x: Float[Array, "tokens width"],
    kernel: Float[Array, "width vocab"],
    targets: Int[Array, " tokens"],
    *,
    multiplier: int | float,
    interpret: bool | pltpu.InterpretParams = False,
) -> Logits:
    """Compute the logits and their sums, as specified in `pallas_kernels.logits`."""
    (count, width), vocab = x.shape, kernel.shape[1]
    tokens, rows = _block(count, width)
    most = target().vmem_part(_OF_MATRIX) // (4 * width) // LANES * LANES
    columns = min(_COLUMNS, round_up(vocab, LANES), most)
    # Replace ids outside the vocabulary with -1, which matches no lane.
    words = jnp.where(targets < vocab, targets, -1).astype(jnp.int32)
    of_tokens = lambda *shape: pl.BlockSpec((tokens, *shape), lambda i, j: (i, 0))
    values = jax.ShapeDtypeStruct((count, vocab), jnp.float32)
    lanes = jax.ShapeDtypeStruct((count, LANES), jnp.float32), of_tokens(LANES)
    out = tpu_call(
        functools.partial(_kernel, multiplier=multiplier, vocab=vocab, rows=rows),
        "logits",
        {
            "x": (x, of_tokens(width)),
            "kernel": (kernel, pl.BlockSpec((width, columns), lambda i, j: (0, j))),
            "words": (words[:, None], of_tokens(1)),
        },
        {
            "values": (values, pl.BlockSpec((tokens, columns), lambda i, j: (i, j))),
            "most": lanes,
            "sum": lanes,
            "chosen": lanes,
        },
        {},
        grid=(-(-count // tokens), -(-vocab // columns)),
        semantics=("parallel", "arbitrary"),
        flops=2 * count * width * vocab,
        transcendentals=count * vocab,
        interpret=interpret,
    )
    log_sums = jax.nn.logsumexp(out["most"], axis=1, b=out["sum"])
    return Logits(out["values"], log_sums, jnp.sum(out["chosen"], axis=1))


def _block(count: int, width: int) -> tuple[int, int]:
    """Return the number of tokens per block, and the number of tokens per matrix product.

    There is at least one block per core if there are enough tokens.
    """
    own = round_up(-(-count // target().chip.cores), 16)
    most = min(
        target().vmem_part(_OF_LOGITS) // (8 * _COLUMNS), target().vmem_part(_OF_X) // (2 * width)
    )
    rows = min(target().vmem_part(_OF_ROWS) // (4 * _COLUMNS), most // 16 * 16, own)
    return min(round_up(own, rows), most // rows * rows), rows


def _kernel(inputs, outputs, _, *, multiplier, vocab, rows):
    tokens, columns = outputs["values"].shape
    block = pl.program_id(1)

    @pl.when(block == 0)
    def _begin():
        outputs["most"][...] = jnp.full((tokens, LANES), _NONE)
        outputs["sum"][...] = jnp.zeros((tokens, LANES))
        outputs["chosen"][...] = jnp.zeros((tokens, LANES))

    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    starts, left = range(0, columns, LANES), vocab - block * columns

    def add(part: jax.Array, _: None):
        """Compute logits for one part of the block's tokens, and update the running values."""
        at = pl.ds(pl.multiple_of(part * rows, rows), rows)
        values = multiplier * dot(inputs["x"][at, :], inputs["kernel"][...])
        outputs["values"][at, :] = values
        pieces = [values[:, start : start + LANES] for start in starts]
        if vocab % columns:  # Columns past the end of the vocabulary are undefined; mask them.
            inside = [lane < left - start for start in starts]
            pieces = [jnp.where(*one, _NONE) for one in zip(inside, pieces, strict=True)]
        before = outputs["most"][at, :]
        most = functools.reduce(jnp.maximum, pieces, before)
        outputs["most"][at, :] = most
        sums = [jnp.exp(piece - most) for piece in pieces]
        outputs["sum"][at, :] = sum(sums, outputs["sum"][at, :] * jnp.exp(before - most))
        # A target in another block of columns matches no lane here and leaves `chosen` unchanged.
        word = jnp.broadcast_to(inputs["words"][at, :] - block * columns, (rows, LANES))
        chosen = outputs["chosen"][at, :]
        for start, piece in zip(starts, pieces, strict=True):
            chosen = jnp.where(lane == word - start, piece, chosen)
        outputs["chosen"][at, :] = chosen

    jax.lax.fori_loop(0, tokens // rows, add, None)
