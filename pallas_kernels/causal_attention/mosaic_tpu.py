"""Causal attention on TPUs, by the faster of two kernels.

One kernel processes a whole sequence at a time, the other one blocks of it. Both read and write
rows in either memory order. The blockwise kernel cannot use "size_major" rows if there is an odd
number of bfloat16 heads, or if the gradients of all queries do not fit VMEM. In these cases XLA
transposes the rows to "head_major".
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import tuned
from pallas_kernels.arguments import read_slices, write_slice
from pallas_kernels.call import LANES, round_up
from pallas_kernels.causal_attention import block_sizes
from pallas_kernels.causal_attention import mosaic_tpu_blocks as by_blocks
from pallas_kernels.causal_attention import mosaic_tpu_whole as whole
from pallas_kernels.causal_attention.block_sizes import Blocks, Cut
from pallas_kernels.causal_attention.interface import Apart, Attended, Attention, Part, Rows
from pallas_kernels.causal_attention.mosaic_tpu_whole import tokens_first, tokens_last

# Maximum length for which the whole-sequence kernel is faster, although half of its logits are
# masked.
_WHOLE = 1024


def unsupported(op: str, given: Attention | Part, *attended: Attended) -> str | None:
    """Return the reason, in one line, if the kernels do not support these operands, else None."""
    if isinstance(given, Part):
        queries, keys = given.q.shape[1], given.apart[0].shape[1]
        if queries % LANES or keys % LANES:
            return f"parts of {queries} queries and {keys} keys (legal: multiples of {LANES})"
    qkv = given[0]
    if qkv.dtype not in (jnp.bfloat16, jnp.float32):
        return f"data vectors of {qkv.dtype} (legal: bfloat16 or float32)"
    for size in (x.shape[3] for x in jax.tree.leaves((qkv, given.kv))):
        if size % 8:
            return f"heads of size {size} (legal: multiples of 8)"
    heads, kv_heads = _heads(given, *attended)
    key = _key(given, (heads, kv_heads), "head_major")
    sizes = {name: key[name] for name in ("rows", "heads", "kv_heads", "size", "value_size")}
    blocks = block_sizes.default_blocks("attention_blocks_backward", qkv.shape[1], **key)
    if not Cut(**sizes, dtype=qkv.dtype, blocks=blocks).fits:
        each = heads // kv_heads
        return (
            f"{each} query heads of size {key['size']} per key head: a block does not fit in VMEM"
        )
    return None


def _heads(given: Attention | Part, *attended: Attended) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads.

    They are assumed to be equal if one array holds queries, keys and values and `attended` is not
    given.
    """
    if isinstance(given, Part):
        return given.q.shape[2], given.apart[0].shape[2]
    rows = given.qkv.shape[2]
    if given.kv is not None:
        return rows, given.kv[0].shape[2]
    if attended:
        heads = attended[0].log_sums.shape[2]
        return heads, (rows - heads) // 2
    return rows // 3, rows // 3


def attention_forward(
    given: Attention,
    *,
    kv_heads: int,
    rows: Rows = "size_major",
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "*count B N H Dv"], Float[Array, "B N H"]]:
    """Compute `attention_forward` as specified in `interface`.

    `blocks` are the block sizes of the blockwise kernel; None chooses the kernel and its block
    sizes.
    """
    if blocks is None and _is_whole(given, kv_heads, rows):
        return whole.attention_forward(given, rows=rows, interpret=interpret)
    cut = _Cut("attention_blocks_forward", given, kv_heads, rows, blocks)
    out, log_sums = by_blocks.attention_forward(cut.given, blocks=cut.blocks, interpret=interpret)
    return write_slice(cut.tokens_first(out), given.to), cut.sums_first(log_sums)


def attention_backward(
    given: Attention,
    attended: Attended,
    *,
    kv_heads: int,
    rows: Rows = "size_major",
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B N P D"], Apart | None]:
    """Compute `attention_backward` as specified in `interface`.

    `blocks` are the block sizes of the blockwise kernel; None chooses the kernel and its block
    sizes.
    """
    attended = attended._replace(d_out=attended.d_out.astype(given.qkv.dtype))
    if blocks is None and _is_whole(given, kv_heads, rows):
        return whole.attention_backward(given, attended, rows=rows, interpret=interpret), None
    attended = read_slices(attended)
    cut = _Cut("attention_blocks_backward", given, kv_heads, rows, blocks)
    log_sums, d_out = cut.sums_last(attended.log_sums), cut.tokens_last(attended.d_out)
    options = {"blocks": cut.blocks, "interpret": interpret}
    if cut.rows == "size_major":
        of_queries = log_sums, cut.tokens_last(attended.out), d_out
        d_qkv = by_blocks.attention_backward_of_rows(cut.given, *of_queries, **options)
        return cut.tokens_first(d_qkv), None
    of_queries = log_sums, cut.sums_last(_delta(attended)), d_out
    gradients = by_blocks.attention_backward(cut.given, *of_queries, **options)
    if given.kv is None:
        return cut.tokens_first(jnp.concatenate(gradients, axis=1)), None
    d_q, *d_kv = map(cut.tokens_first, gradients)
    return d_q, tuple(d_kv)


def part_forward(
    given: Part, *, interpret: bool = False
) -> tuple[Float[Array, "B Q H Dv"], Float[Array, "B Q H"]]:
    """Compute `part_forward` as specified in `interface`."""
    of_part, blocks = _part("attention_blocks_forward", given)
    out, sums = by_blocks.attention_forward(of_part, blocks=blocks, interpret=interpret)
    return tokens_first(out, "head_major"), sums[:, :, 0].swapaxes(1, 2)


def part_backward(
    given: Part, attended: Attended, *, interpret: bool = False
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B K P D"] | Apart]:
    """Compute `part_backward` as specified in `interface`."""
    of_part, blocks = _part("attention_blocks_backward", given)
    attended = attended._replace(d_out=attended.d_out.astype(given.q.dtype))
    sums = (x.swapaxes(1, 2)[:, :, None] for x in (attended.log_sums, _delta(attended)))
    d_out = tokens_last(attended.d_out, "head_major")
    options = {"blocks": blocks, "interpret": interpret}
    d_q, d_k, d_v = by_blocks.attention_backward(of_part, *sums, d_out, **options)
    # Return float32, because the caller adds up the gradients of several parts.
    gradients = (tokens_first(x.astype(jnp.float32), "head_major") for x in (d_q, d_k, d_v))
    d_q, *d_kv = gradients
    return d_q, given.like_kv(*d_kv)


def _delta(attended: Attended) -> Float[Array, "B Q H"]:
    out, d_out = (x.astype(jnp.float32) for x in (attended.out, attended.d_out))
    return jnp.sum(out * d_out, axis=-1)


def _part(kernel: str, given: Part) -> tuple[by_blocks.Given, Blocks]:
    """Return the operands of the blockwise kernels, and block sizes that divide both lengths."""
    k, v = given.apart
    heads, kv_heads = given.q.shape[2], k.shape[2]
    blocks = _blocks(kernel, given, _key(given, (heads, kv_heads), "head_major"))
    tokens = math.gcd(blocks.queries, blocks.keys, given.q.shape[1], k.shape[1])
    if isinstance(given.kv, tuple):
        kv = (by_blocks.Heads(tokens_last(x, "head_major")) for x in given.kv)
    else:  # Keys and values are rows of one array.
        rows = tokens_last(given.kv, "head_major")
        kv = by_blocks.Heads(rows), by_blocks.Heads(rows, kv_heads)
    of_part = by_blocks.Given(
        by_blocks.Heads(tokens_last(given.q, "head_major")),
        *kv,
        (heads, kv_heads),
        given.scale,
        given.slopes,
        given.segments,
        offset=None,
        shift=given.shift,
    )
    return of_part, blocks._replace(queries=tokens, keys=tokens)


def _key(given: Attention | Part, heads: tuple[int, int], rows: Rows) -> dict[str, Any]:
    """Return the key under which tuning tables list block sizes."""
    return {
        "heads": heads[0],
        "kv_heads": heads[1],
        "size": given[0].shape[3],
        "value_size": (given[0] if given.kv is None else jax.tree.leaves(given.kv)[-1]).shape[3],
        "dtype": jnp.dtype(given[0].dtype).name,
        "rows": rows,
        "alibi": given.slopes is not None,
        "segments": given.segments is not None,
    }


def _blocks(kernel: str, given: Attention | Part, key: dict[str, Any]) -> Blocks:
    """Return the block sizes in the tuning table, or else the default ones."""
    tokens = given[0].shape[1]
    default = block_sizes.default_blocks(kernel, tokens, **key)
    return tuned.look_up(KERNELS[kernel], key, tokens, default)


def _is_whole(given: Attention, kv_heads: int, rows: Rows) -> bool:
    qkv = given.qkv
    if given.kv is not None:
        return False
    return 3 * kv_heads == qkv.shape[2] and qkv.shape[1] <= _WHOLE and whole.fits(qkv, rows)


class _Cut:
    """Operands in the layout of the blockwise kernels, padded at the end to whole blocks.

    No query sees the padding, because it is later than all queries.
    """

    def __init__(self, kernel: str, given: Attention, kv_heads: int, rows: Rows, blocks):
        _, self.length, P, D = given.qkv.shape
        heads = P if given.kv is not None else P - 2 * kv_heads
        rows = "head_major" if given.kv is not None else rows
        key = _key(given, (heads, kv_heads), rows)
        cut = blocks or block_sizes.default_blocks(kernel, self.length, **key)
        cut = Cut(rows, heads, kv_heads, D, key["value_size"], given.qkv.dtype, cut)
        self.rows = rows if cut.has(self.length) else "head_major"
        self.blocks = blocks or _blocks(kernel, given, key | {"rows": self.rows})
        whole = round_up(self.length, max(self.blocks.queries, self.blocks.keys))
        self._missing = whole - self.length
        ids = given.segment_ids
        ids = None if ids is None else self._whole(ids, axis=1)
        arrays = map(self.tokens_last, (given.qkv, *(given.kv or ())))
        arrays = [by_blocks.Heads(x) for x in arrays]
        if given.kv is None:
            firsts = 0, heads, heads + kv_heads
            arrays = [arrays[0]._replace(first=first) for first in firsts]
        self.given = by_blocks.Given(
            *arrays,
            (heads, kv_heads),
            given.scale,
            given.slopes,
            None if ids is None else (ids, ids),
            rows=self.rows,
        )

    def tokens_last(self, x: Float[Array, "B N R D"]) -> Float[Array, "B _ _ whole_N"]:
        return self._whole(tokens_last(x, self.rows), axis=3)

    def tokens_first(self, x: Float[Array, "B _ _ whole_N"]) -> Float[Array, "B N R D"]:
        return tokens_first(x[..., : self.length], self.rows)

    def sums_last(self, x: Float[Array, "B N H"]) -> Float[Array, "B H 1 whole_N"]:
        return self._whole(x.swapaxes(1, 2)[:, :, None], axis=3)

    def sums_first(self, x: Float[Array, "B H 1 whole_N"]) -> Float[Array, "B N H"]:
        return x[:, :, 0, : self.length].swapaxes(1, 2)

    def _whole(self, x, axis: int):
        missing = [(0, self._missing if a == axis else 0) for a in range(x.ndim)]
        return jnp.pad(x, missing) if self._missing else x


KERNELS = whole.KERNELS | block_sizes.KERNELS
