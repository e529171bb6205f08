"""The gated delta rule in chunks of tokens, in plain JAX.

Within a chunk of C tokens, let G_i be the sum of the log decays g from the chunk's first token to
token i, and S the state before the chunk. For i >= j:

    M_ij = sum_c k_ic k_jc e^(G_ic - G_jc), i > j     P_ij = scale sum_c q_ic k_jc e^(G_ic - G_jc)
    U = (I + diag(beta) M)^-1 diag(beta) (V - (k e^G) S)
    O = scale (q e^G) S + P U     S' = e^(G_C) S + (k e^(G_C - G))^T U

O is what the tokens read, and S' the state after the chunk.

To compute `e^(G_i - G_j)`, the chunk is halved recursively. For i in the second half and j in the
first, the exponential is a product of two factors. The exponent of the factor for i is the sum of g
from the start of the second half up to i. The exponent of the factor for j is the sum of g after j
in the first half. Sums are built from smaller sums and never from differences. So no exponent is
positive, and no token depends on a later one, not even through rounding. The inverse is built from
the same halves, block by block. A series in powers of M would be wrong by orders of magnitude for
similar keys.

The cost is about `6 K V + 2 C (K + V)` FLOPs per token and head. The forward pass saves the state
before each chunk, and the backward pass recomputes the chunk from it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_attention.interface import DeltaGradients, DeltaOperands, chunk_size

# With products in bfloat16, the inverse would be wrong by several percent for similar keys.
_EXACT = jax.lax.Precision.HIGHEST


def forward(
    operands: DeltaOperands, state: Float[Array, "B H K V"], *, scale: float
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Float[Array, "N B H V K"]]:
    """Return what each token reads, the final state and the saved states (see `interface.py`)."""

    def of_chunk(state, chunk):
        read, after = _chunk(chunk, state, scale)
        return after, (read, state.swapaxes(-1, -2))

    state, (read, states) = jax.lax.scan(of_chunk, state, _chunked(operands))
    return _tokens(read, operands.q.shape[1]), state, states


def backward(
    operands: DeltaOperands,
    states: Float[Array, "N B H V K"],
    d_read: Float[Array, "B T H V"],
    d_state: Float[Array, "B H K V"],
    *,
    scale: float,
) -> DeltaGradients:
    """Return the cotangents of the operands and of the initial state (see `interface.py`)."""

    def of_chunk(d_state, xs):
        *chunk, documents, before, state, d_read = xs

        def recompute(chunk, state):
            return _chunk(_Chunks(*chunk, documents, before), state, scale)

        _, pull_back = jax.vjp(recompute, tuple(chunk), state.swapaxes(-1, -2))
        d_chunk, d_state = pull_back((d_read, d_state))
        return d_state, d_chunk

    chunks = _chunked(operands)
    xs = (*chunks, states, _in_chunks(d_read, chunks.q.shape[-2]))
    d_state, (*d_chunks, d_beta) = jax.lax.scan(of_chunk, d_state, xs, reverse=True)
    d_tokens = [_tokens(x, d_read.shape[1]) for x in (*d_chunks, d_beta[..., None])]
    return DeltaGradients(*d_tokens[:-1], d_tokens[-1][..., 0], d_state)


class _Chunks(NamedTuple):
    """The operands in N chunks of C tokens; or one such chunk, without the axis N.

    `documents` contains each token's document, and `before` contains the document of the last token
    before each chunk. After the last token, arrays are padded with zeros, and `documents` is padded
    with the last token's document.
    """

    q: Float[Array, "*N B H C K"]
    k: Float[Array, "*N B H C K"]
    v: Float[Array, "*N B H C V"]
    log_decay: Float[Array, "*N B H C K"]
    beta: Float[Array, "*N B H C"]
    documents: Int[Array, "*N B C"]
    before: Int[Array, "*N B"]


def _chunked(operands: DeltaOperands) -> _Chunks:
    """Divide the operands into chunks. A short sequence is one chunk, padded to a power of two."""
    *floats, beta, documents = operands
    _, seq, _, keys = operands.q.shape
    size = min(chunk_size(keys), 1 << (seq - 1).bit_length())
    *floats, beta = (_in_chunks(x, size) for x in (*floats, beta[..., None]))
    documents = jnp.pad(documents, ((0, 0), (0, -seq % size)), mode="edge")
    documents = documents.reshape(documents.shape[0], -1, size).swapaxes(0, 1)
    before = jnp.concatenate([jnp.zeros_like(documents[:1, :, 0]), documents[:-1, :, -1]])
    return _Chunks(*floats, beta[..., 0], documents, before)


def _in_chunks(x, size):
    """Convert `[batch, seq, heads, ..]` to `[chunks, batch, heads, size, ..]`, zero-padded."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.transpose(x, (1, 0, 3, 2, 4))


def _tokens(x, seq):
    """Convert chunks to `[batch, seq, heads, ..]`, the inverse of `_in_chunks`."""
    x = jnp.transpose(x, (1, 0, 3, 2, 4))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :seq]


def _chunk(chunk: _Chunks, state, scale):
    """Return what the tokens of one chunk read, and the state after the chunk."""
    q, k, v, log_decay, beta, documents, before = chunk
    dtype, narrow = state.dtype, v.dtype
    q, k = scale * q.astype(dtype), k.astype(dtype)
    dot = functools.partial(jnp.einsum, preferred_element_type=dtype)
    beta = beta.astype(dtype)[..., None]

    same = (documents[:, :, None] == documents[:, None, :])[:, None]
    products, own, total, following = _scores(jnp.stack([q, k]), k, log_decay, narrow)
    of_queries, of_keys = jnp.where(same, products, 0)
    of_queries = of_queries + own[0][..., None] * jnp.eye(q.shape[-2], dtype=dtype)

    # The state before the chunk belongs to the document of the token before the chunk. Only tokens
    # of that document read it.
    sees = (documents == before[:, None])[:, None, :, None]
    decay = jnp.where(sees, jnp.exp(total), 0)
    narrow_state = state.astype(narrow)
    missing = v.astype(dtype) - dot("bhck,bhkv->bhcv", (decay * k).astype(narrow), narrow_state)
    written = solve(beta * of_keys, beta * missing)
    narrow_written = written.astype(narrow)
    read = dot("bhck,bhkv->bhcv", (decay * q).astype(narrow), narrow_state)
    read = read + dot("bhcd,bhdv->bhcv", of_queries.astype(narrow), narrow_written)

    last = (documents == documents[:, -1:])[:, None, :, None]
    left = jnp.where(last, jnp.exp(following), 0)
    state = decay[..., -1, :, None] * state
    state = state + dot("bhck,bhcv->bhkv", (left * k).astype(narrow), narrow_written)
    return read.astype(narrow), state


def _scores(x, k, log_decay, narrow):
    """Compute the inner products of x with decayed keys, and sums of the log decays g.

    Returns:
      Four arrays. The first contains a matrix for each of several x. For tokens i > j, its entries
      are `sum_c x_ic k_jc e^(G_ic - G_jc)`, and elsewhere 0. The second contains the products for i
      = j, where the exponential is 1. The third is G, the sum of g up to each token. The fourth is
      the sum of g over the later tokens of the chunk.
    """
    size, width = k.shape[-2:]
    own = jnp.sum(x * k, axis=-1)
    # Begin with blocks of one token. The loop joins pairs of blocks.
    scores = jnp.zeros((*own.shape, 1, 1), k.dtype)
    before, behind = log_decay.astype(k.dtype), jnp.zeros_like(k)
    for half in (1 << n for n in range((size - 1).bit_length())):
        in_halves = (*k.shape[:-2], size // (2 * half), 2, half, width)
        before, behind = before.reshape(in_halves), behind.reshape(in_halves)
        rows = x.reshape(-1, *in_halves)[..., 1, :, :] * jnp.exp(before[..., 1, :, :])
        columns = k.reshape(in_halves)[..., 0, :, :] * jnp.exp(behind[..., 0, :, :])
        block = jnp.einsum(
            "z...ik,...jk->z...ij",
            rows.astype(narrow),
            columns.astype(narrow),
            preferred_element_type=k.dtype,
        )
        scores = _joined(scores, block)
        of_upper, of_lower = jnp.split(before[..., -1:, :], 2, axis=-3)
        none = jnp.zeros_like(of_upper)
        before = before + jnp.concatenate([none, of_upper], axis=-3)
        behind = behind + jnp.concatenate([of_lower, none], axis=-3)
    return scores[..., 0, :, :], own, before.reshape(k.shape), behind.reshape(k.shape)


def _joined(blocks, lower_left):
    """Join pairs of diagonal blocks into larger blocks.

    Args:
      blocks: `[.., 2 n, b, b]`, the diagonal blocks.
      lower_left: `[.., n, b, b]`, the block below each pair's first block.

    Returns:
      `[.., n, 2 b, 2 b]`, which is 0 above each pair's diagonal blocks.
    """
    size = blocks.shape[-1]
    blocks = blocks.reshape(*blocks.shape[:-3], -1, 2, size, size)
    first, second = blocks[..., 0, :, :], blocks[..., 1, :, :]
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([lower_left, second], axis=-1)], axis=-2)


@jax.custom_vjp
def solve(
    lower: Float[Array, "*heads C C"], right: Float[Array, "*heads C V"]
) -> Float[Array, "*heads C V"]:
    """Compute `(I + lower)^-1 right`.

    Args:
      lower: a matrix that is 0 on and above its diagonal. C is a power of two.
      right: the right-hand side.
    """
    return _solve_forward(lower, right)[0]


def _solve_forward(lower, right):
    inverse = _inverse(lower)
    solved = jnp.einsum("...ij,...jv->...iv", inverse, right, precision=_EXACT)
    return solved, (inverse, solved)


def _solve_backward(saved, d_solved):
    inverse, solved = saved
    d_right = jnp.einsum("...ij,...iv->...jv", inverse, d_solved, precision=_EXACT)
    d_lower = -jnp.einsum("...iv,...jv->...ij", d_right, solved, precision=_EXACT)
    # Callers ignore d_lower on and above the diagonal, so it is not set to 0 there.
    return d_lower, d_right


solve.defvjp(_solve_forward, _solve_backward)


def _inverse(lower):
    """Invert `I + lower`, with blocks that double in size.

    If the diagonal blocks are A and B, and L is below A, the inverse has A^-1 and B^-1 on its
    diagonal, and -B^-1 L A^-1 below A^-1.
    """
    size = lower.shape[-1]
    dot = functools.partial(jnp.matmul, precision=_EXACT)
    inverse = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)
    for half in (1 << n for n in range((size - 1).bit_length())):
        blocks = lower.reshape(*lower.shape[:-2], -1, 2 * half, size // (2 * half), 2 * half)
        below = jnp.diagonal(blocks, axis1=-4, axis2=-2)  # Shape [.., 2 half, 2 half, blocks].
        below = jnp.moveaxis(below, -1, -3)[..., half:, :half]
        pairs = inverse.reshape(*inverse.shape[:-3], -1, 2, half, half)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        inverse = _joined(inverse, -dot(dot(second, below), first))
    return inverse[..., 0, :, :]
