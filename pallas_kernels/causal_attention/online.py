"""Causal attention in plain JAX, with an online softmax over pairs of blocks.

Both passes process one pair of a query block and a key block at a time. Pairs in which no query
sees a key are skipped. A single loop of static length runs over the pairs, so that a GPU need not
wait for its host. The backward pass recomputes the weights of each pair from the log-sum-exps.

Milakov and Gimelshein 2018, Online normalizer calculation for softmax; Dao et al. 2022,
FlashAttention; Rabe and Staats 2021, Self-attention Does Not Need O(n^2) Memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import read_slices, write_slice
from pallas_kernels.call import round_up
from pallas_kernels.causal_attention import reference
from pallas_kernels.causal_attention.divided import merged
from pallas_kernels.causal_attention.interface import (
    AttentionOperands,
    KeysAndValues,
    PartOperands,
    ResultsAndCotangent,
    Rows,
    capped,
)
from pallas_kernels.platform import vary_alike

# Maximum number of logits in memory, over all batch rows and heads: 128 MiB in float32.
LOGITS = 2**25
# Candidate numbers of tokens per block. The largest one with at most LOGITS logits is used, or else
# the smallest.
SIZES = (512, 256, 128)


def attention_forward(
    operands: AttentionOperands, *, kv_heads: int, rows: Rows = "size_major"
) -> tuple[Float[Array, "*count B N H Dv"], Float[Array, "B N H"]]:
    """Return the attention output and each softmax's log-sum-exp, as `interface.py` specifies.

    Sums are in float32 or wider.
    """
    out, log_sums = _forward(True, _as_part(operands, kv_heads))
    return write_slice(out, operands.to), log_sums


def attention_backward(
    operands: AttentionOperands,
    results: ResultsAndCotangent,
    *,
    kv_heads: int,
    rows: Rows = "size_major",
) -> tuple[Float[Array, "B N P D"], KeysAndValues | None]:
    """Return the cotangents of qkv and kv, as `interface.py` specifies."""
    gradients = _backward(True, _as_part(operands, kv_heads), read_slices(results))
    d_q, *d_kv = (x.astype(operands.qkv.dtype) for x in gradients)
    if operands.kv is not None:
        return d_q, tuple(d_kv)
    return jnp.concatenate([d_q, *d_kv], axis=2), None


def part_forward(operands: PartOperands) -> tuple[Float[Array, "B Q H Dv"], Float[Array, "B Q H"]]:
    """Attend from one part of a sequence to another, as `interface.py` specifies."""
    return _forward(False, _separated(operands))


def part_backward(
    operands: PartOperands, results: ResultsAndCotangent
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B K P D"] | KeysAndValues]:
    """Return the cotangents of `part_forward`'s q and kv, as `interface.py` specifies."""
    d_q, d_k, d_v = _backward(False, _separated(operands), results)
    return d_q, operands.like_kv(d_k, d_v)


def _as_part(operands: AttentionOperands, kv_heads: int) -> PartOperands:
    """Return the operands of attention from a sequence to itself, without the causal mask."""
    q, *kv = reference.split(operands, kv_heads)
    return _separated(
        PartOperands(
            q,
            tuple(kv),
            operands.scale,
            0,
            operands.slopes,
            operands.segments,
            operands.window,
            operands.cap,
        )
    )


def _separated(operands: PartOperands) -> PartOperands:
    """Return the operands with separate keys and values, and with scalars converted to arrays."""
    scale = jnp.asarray(operands.scale, jnp.result_type(operands.q, jnp.float32))
    return operands._replace(
        kv=operands.keys_and_values, scale=scale, shift=jnp.asarray(operands.shift, jnp.int32)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(
    causal: bool, operands: PartOperands
) -> tuple[Float[Array, "B Q H Dv"], Float[Array, "B Q H"]]:
    """Return the output in q's dtype, and the log-sum-exps in float32 or wider."""
    blocks = _OnlineBlocks(causal, operands)
    q, k, v = blocks.of_queries(operands.q), *map(blocks.of_keys, operands.keys_and_values)

    def step(state, pair):
        i, j = pair
        logits, *_ = blocks.logits(_at(q, i), _at(k, j), pair)
        largest = jnp.max(logits, axis=-1)
        weights = jnp.exp(logits - largest[..., None])
        sums = jnp.sum(weights, axis=-1)
        out = blocks.product("bgenm,bgmd->bgend", weights.astype(q.dtype), _at(v, j))
        found = out / sums[..., None], largest + jnp.log(sums)
        return _write_at(state, i, merged(_at(state, i), found)), None

    # The initial log-sum-exps are the lowest finite float. The initial outputs (zeros) then get no
    # weight when the first block is merged.
    rows = q.shape[:-1]
    state = blocks.zeros((*rows, v.shape[-1])), blocks.zeros(rows) + jnp.finfo(blocks.dtype).min
    (out, sums), _ = jax.lax.scan(step, state, blocks.pairs)
    return blocks.join_queries(out).astype(operands.q.dtype), blocks.join_queries(sums)


def _backward(
    causal: bool,
    operands: PartOperands,
    results: ResultsAndCotangent,
    d_sums: Float[Array, "B Q H"] | None = None,
) -> tuple[Float[Array, "B Q H D"], Float[Array, "B K G D"], Float[Array, "B K G Dv"]]:
    """Return the cotangents of q, k and v, in float32 or wider.

    `d_sums` is the cotangent of the log-sum-exps; None means zero.
    """
    blocks, (out, sums, d_out) = _OnlineBlocks(causal, operands), results
    delta = jnp.sum(out.astype(blocks.dtype) * d_out, axis=-1)
    if d_sums is not None:
        delta = delta - d_sums
    q, d_out, sums, delta = map(blocks.of_queries, (operands.q, d_out, sums, delta))
    k, v = map(blocks.of_keys, operands.keys_and_values)

    def step(carry, pair):
        (i, j), product = pair, blocks.product
        of_q, of_out, of_k = _at(q, i), _at(d_out, i), _at(k, j)
        logits, mask, slope = blocks.logits(of_q, of_k, pair)
        weights = jnp.where(mask, jnp.exp(logits - _at(sums, i)[..., None]), 0)
        d_weights = product("bgend,bgmd->bgenm", of_out, _at(v, j)) - _at(delta, i)[..., None]
        d_logits = (operands.scale * weights * d_weights * slope).astype(q.dtype)
        d_q, d_k, d_v = carry
        d_q = _add(d_q, i, product("bgenm,bgmd->bgend", d_logits, of_k))
        d_k = _add(d_k, j, product("bgenm,bgend->bgmd", d_logits, of_q))
        d_v = _add(d_v, j, product("bgenm,bgend->bgmd", weights.astype(q.dtype), of_out))
        return (d_q, d_k, d_v), None

    carry = tuple(blocks.zeros(x.shape) for x in (q, k, v))
    (d_q, d_k, d_v), _ = jax.lax.scan(step, carry, blocks.pairs)
    return blocks.join_queries(d_q), blocks.join_keys(d_k), blocks.join_keys(d_v)


def _forward_saving(causal: bool, operands: PartOperands):
    out, sums = _forward(causal, operands)
    return (out, sums), (operands, out, sums)


def _pull_back(causal: bool, saved, cotangents):
    operands, out, sums = saved
    d_out, d_sums = cotangents
    gradients = _backward(causal, operands, ResultsAndCotangent(out, sums, d_out), d_sums)
    d_q, *d_kv = (x.astype(operands.q.dtype) for x in gradients)
    none = lambda x: np.zeros(x.shape, jax.dtypes.float0)
    scale, slopes = jax.tree.map(jnp.zeros_like, (operands.scale, operands.slopes))
    shift, segments = jax.tree.map(none, (operands.shift, operands.segments))
    static = operands.window, operands.cap
    return (PartOperands(d_q, tuple(d_kv), scale, shift, slopes, segments, *static),)


_forward.defvjp(_forward_saving, _pull_back)


class _OnlineBlocks:
    """The division of queries and keys into blocks.

    `pairs` lists the pairs of a query block and a key block in which a query may see a key.
    """

    def __init__(self, causal: bool, operands: PartOperands):
        (B, Q, H, _), (K, G) = operands.q.shape, operands.keys_and_values[0].shape[1:3]
        self.dtype = jnp.result_type(operands.q, jnp.float32)
        self._causal, self._operands, self._lengths = causal, operands, (Q, K)
        self._heads = G, H // G
        window = operands.window
        most = SIZES[0] if window is None else max(window, SIZES[-1])
        fits = (size for size in SIZES if B * H * size**2 <= LOGITS and size <= most)
        size = next(fits, SIZES[-1])
        self._sizes = tuple(_even(length, size) for length in (Q, K))
        counts = (-(-n // size) for n, size in zip((Q, K), self._sizes, strict=True))
        pairs = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), -1).reshape(-1, 2)
        if causal:
            pairs = pairs[pairs[:, 0] >= pairs[:, 1]]
        if window is not None:
            # The first query and the last key of a pair of blocks have the smallest distance.
            first_queries, next_keys = (
                pairs[:, 0] * self._sizes[0],
                (pairs[:, 1] + 1) * self._sizes[1],
            )
            pairs = pairs[first_queries - (next_keys - 1) < window]
        self.pairs = tuple(jnp.asarray(pairs.T, jnp.int32))
        self._ids = None
        if operands.segments is not None:
            self._ids = tuple(
                self._cut(x, size) for x, size in zip(operands.segments, self._sizes, strict=True)
            )

    def of_queries(self, x: Float[Array, "B Q H *D"]) -> Float[Array, "T B G E q *D"]:
        """Cut an array of queries into blocks, and group its heads by key head."""
        x = self._cut(x, self._sizes[0])
        x = x.reshape(*x.shape[:3], *self._heads, *x.shape[4:])
        return jnp.moveaxis(x, 2, 4)

    def of_keys(self, x: Float[Array, "B K G D"]) -> Float[Array, "T B G k D"]:
        """Cut an array of keys or of values into blocks."""
        return jnp.moveaxis(self._cut(x, self._sizes[1]), 2, 3)

    def join_queries(self, x: Float[Array, "T B G E q *D"]) -> Float[Array, "B Q H *D"]:
        """Join blocks of queries, the inverse of `of_queries`."""
        x = jnp.moveaxis(x, 4, 2)
        return self._join(x.reshape(*x.shape[:3], -1, *x.shape[5:]), self._lengths[0])

    def join_keys(self, x: Float[Array, "T B G k D"]) -> Float[Array, "B K G D"]:
        """Join blocks of keys or of values, the inverse of `of_keys`."""
        return self._join(jnp.moveaxis(x, 3, 2), self._lengths[1])

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Return zeros to start a loop with, marked as varying over the operands' mesh axes."""
        return vary_alike((jnp.zeros(shape, self.dtype), self._operands))[0]

    def product(self, spec: str, *operands: Array) -> Array:
        """Compute `jnp.einsum`, accumulating in float32 or wider."""
        return jnp.einsum(spec, *operands, preferred_element_type=self.dtype)

    def logits(
        self,
        q: Float[Array, "B G E q D"],
        k: Float[Array, "B G k D"],
        pair: tuple[Int[Array, ""], Int[Array, ""]],
    ) -> tuple[Float[Array, "B G E q k"], Bool[Array, "#B 1 1 q k"], Array | float]:
        """Return a block pair's logits, the mask of visible keys, and a derivative of the logits.

        Masked logits are the lowest finite float instead of -inf. The derivative is with respect to
        the scaled products of queries and keys.
        """
        operands = self._operands
        ranges = zip(pair, self._sizes, strict=True)
        queries, keys = (n * size + jnp.arange(size, dtype=jnp.int32) for n, size in ranges)
        distance = queries[:, None] - keys
        # The padding tokens of the last blocks see no token, and no token sees them.
        mask = (queries < self._lengths[0])[:, None] & (keys < self._lengths[1])
        if self._causal:
            mask = mask & (distance >= 0)
        if operands.window is not None:
            mask = mask & (distance < operands.window)
        mask = mask[None]
        if self._ids is not None:
            of_queries, of_keys = (_at(x, n) for x, n in zip(self._ids, pair, strict=True))
            mask = mask & (of_queries[:, :, None] == of_keys[:, None])
        mask = mask[:, None, None]
        products = operands.scale * self.product("bgend,bgmd->bgenm", q, k)
        logits, slope = capped(products, operands.cap)
        if operands.slopes is not None:
            slopes = operands.slopes.astype(self.dtype).reshape(*self._heads, 1, 1)
            logits = logits - slopes * (operands.shift + distance)
        logits = jnp.where(mask, logits, jnp.finfo(self.dtype).min).astype(self.dtype)
        return logits, mask, slope

    def _cut(self, x: Array, size: int) -> Array:
        """Reshape [B, N, ...] to [blocks, B, size, ...], padding with zeros."""
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    def _join(self, x: Array, length: int) -> Array:
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _even(length: int, most: int) -> int:
    """Return the number of tokens per block that cuts `length` tokens into nearly equal blocks.

    It is at most `most`, rounded up to a multiple of 8.
    """
    return round_up(-(-length // -(-length // most)), 8)


def _at(tree: Any, i: Int[Array, ""]) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _write_at(tree: Any, i: Int[Array, ""], values: Any) -> Any:
    write = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0)
    return jax.tree.map(write, tree, values)


def _add(x: Array, i: Int[Array, ""], y: Array) -> Array:
    return _write_at(x, i, _at(x, i) + y)
