"""The gated delta rule in chunks of tokens, in plain JAX.

With G the sum of g from the chunk's first token to each, S the state before it, and i >= j:

    M_ij = sum_c k_ic k_jc e^(G_ic - G_jc), i > j     P_ij = scale sum_c q_ic k_jc e^(G_ic - G_jc)
    U = (I + diag(beta) M)^-1 diag(beta) (V - (k e^G) S)
    O = scale (q e^G) S + P U     S' = e^(G_C) S + (k e^(G_C - G))^T U

`e^(G_i - G_j)` is a product, over halves of halves: rows of a lower half have the factor e to the
sum of g from the half's first row on, columns of the upper half e to the sum of what follows them
in that half. Sums are made of smaller sums and never of differences, no exponent is above 0
whatever the gates are, and no token depends on a later one, not even by rounding. The inverse grows
along the same halves, block by block: a series in powers of M would be off by orders of magnitude
where keys are alike.

A token and head cost about `6 K V + 2 C (K + V)` FLOPs. The backward pass keeps the state before
each chunk, and computes the chunk again.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_attention.interface import Gradients, Operands, chunk_size

# With products rounded to bfloat16, the inverse would be off by percents where keys are alike.
_EXACT = jax.lax.Precision.HIGHEST


def forward(
    operands: Operands, state: Float[Array, "B H K V"], *, scale: float
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Float[Array, "N B H V K"]]:
    """Compute `interface`'s `forward`."""

    def of_chunk(state, chunk):
        read, after = _chunk(chunk, state, scale)
        return after, (read, state.swapaxes(-1, -2))

    state, (read, states) = jax.lax.scan(of_chunk, state, _chunked(operands))
    return _tokens(read, operands.q.shape[1]), state, states


def backward(
    operands: Operands,
    states: Float[Array, "N B H V K"],
    d_read: Float[Array, "B T H V"],
    d_state: Float[Array, "B H K V"],
    *,
    scale: float,
) -> Gradients:
    """Compute `interface`'s `backward`."""

    def of_chunk(d_state, given):
        *chunk, documents, before, state, d_read = given

        def again(chunk, state):
            return _chunk(_Chunks(*chunk, documents, before), state, scale)

        _, pull_back = jax.vjp(again, tuple(chunk), state.swapaxes(-1, -2))
        d_chunk, d_state = pull_back((d_read, d_state))
        return d_state, d_chunk

    chunks = _chunked(operands)
    given = (*chunks, states, _in_chunks(d_read, chunks.q.shape[-2]))
    d_state, (*d_chunks, d_beta) = jax.lax.scan(of_chunk, d_state, given, reverse=True)
    d_tokens = [_tokens(x, d_read.shape[1]) for x in (*d_chunks, d_beta[..., None])]
    return Gradients(*d_tokens[:-1], d_tokens[-1][..., 0], d_state)


class _Chunks(NamedTuple):
    """Operands in N chunks of C tokens, or in a single chunk; `before` is the document before each.

    Past the last token everything is 0, and the document is the last one.
    """

    q: Float[Array, "*N B H C K"]
    k: Float[Array, "*N B H C K"]
    v: Float[Array, "*N B H C V"]
    log_decay: Float[Array, "*N B H C K"]
    beta: Float[Array, "*N B H C"]
    documents: Int[Array, "*N B C"]
    before: Int[Array, "*N B"]


def _chunked(operands: Operands) -> _Chunks:
    """Divide operands into chunks; for a short sequence a chunk is the next power of two."""
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
    """Undo `_in_chunks`."""
    x = jnp.transpose(x, (1, 0, 3, 2, 4))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :seq]


def _chunk(chunk: _Chunks, state, scale):
    """Return what the tokens of one chunk read, and the state after it."""
    q, k, v, log_decay, beta, documents, before = chunk
    dtype, narrow = state.dtype, v.dtype
    q, k = scale * q.astype(dtype), k.astype(dtype)
    dot = functools.partial(jnp.einsum, preferred_element_type=dtype)
    beta = beta.astype(dtype)[..., None]

    same = (documents[:, :, None] == documents[:, None, :])[:, None]
    products, own, total, following = _scores(jnp.stack([q, k]), k, log_decay, narrow)
    of_queries, of_keys = jnp.where(same, products, 0)
    of_queries = of_queries + own[0][..., None] * jnp.eye(q.shape[-2], dtype=dtype)

    # Only tokens of the earlier state's document see that state.
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
    """Return `sum_c x_ic k_jc e^(G_ic - G_jc)` for i > j, 0 elsewhere, of several x; and for i = j.

    The third result is G, the fourth the sum of g over the tokens after each token.
    """
    size, width = k.shape[-2:]
    own = jnp.sum(x * k, axis=-1)
    scores = jnp.zeros((*own.shape, 1, 1), k.dtype)  # Blocks of one token, later of more.
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
    """Join pairs of diagonal blocks, `[.., 2 n, b, b]`, with what is below: `[.., n, 2 b, 2 b]`."""
    size = blocks.shape[-1]
    blocks = blocks.reshape(*blocks.shape[:-3], -1, 2, size, size)
    first, second = blocks[..., 0, :, :], blocks[..., 1, :, :]
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([lower_left, second], axis=-1)], axis=-2)


@jax.custom_vjp
def solve(
    lower: Float[Array, "*heads C C"], right: Float[Array, "*heads C V"]
) -> Float[Array, "*heads C V"]:
    """Compute `(I + lower)^-1 right`; lower is 0 on and above its diagonal, C a power of two."""
    return _solve_forward(lower, right)[0]


def _solve_forward(lower, right):
    inverse = _inverse(lower)
    solved = jnp.einsum("...ij,...jv->...iv", inverse, right, precision=_EXACT)
    return solved, (inverse, solved)


def _solve_backward(saved, d_solved):
    inverse, solved = saved
    d_right = jnp.einsum("...ij,...iv->...jv", inverse, d_solved, precision=_EXACT)
    d_lower = -jnp.einsum("...iv,...jv->...ij", d_right, solved, precision=_EXACT)
    return d_lower, d_right  # Callers use only the part below the diagonal.


solve.defvjp(_solve_forward, _solve_backward)


def _inverse(lower):
    """Invert `I + lower`: blocks A, B with L below give A^-1, B^-1 with -B^-1 L A^-1 below."""
    size = lower.shape[-1]
    dot = functools.partial(jnp.matmul, precision=_EXACT)
    inverse = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)
    for half in (1 << n for n in range((size - 1).bit_length())):
        blocks = lower.reshape(*lower.shape[:-2], -1, 2 * half, size // (2 * half), 2 * half)
        below = jnp.diagonal(blocks, axis1=-4, axis2=-2)  # [.., 2 b, 2 b, n]
        below = jnp.moveaxis(below, -1, -3)[..., half:, :half]
        pairs = inverse.reshape(*inverse.shape[:-3], -1, 2, half, half)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        inverse = _joined(inverse, -dot(dot(second, below), first))
    return inverse[..., 0, :, :]
