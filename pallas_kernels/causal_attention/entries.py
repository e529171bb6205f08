"""ALiBi and segments as extra entries in queries and keys, for kernels with a causal mask only.

Let i be a query's position and j a key's. Adding a term that depends only on i does not change a
softmax over j. So ALiBi's term `-slope (i - j)` may be replaced by `slope j`. This is the dot
product `(256 slope, slope) . (j // 256, j % 256)`. In bfloat16, integers up to 256 and slopes that
are powers of two are exact. For other slopes, two more entries contain the rounding error.

Each segment has a code `c`, a vector of signs. The term `512 (c_i . c_j - len(c))` is 0 within a
segment and at most -1024 between two segments. In float32, this gives a weight of 0 as long as
logits differ by less than about 900.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Maximum sequence length whose positions are exact in all supported dtypes.
POSITIONS = 65536
# The factor by which each sign in a segment's code is multiplied. Dot products of codes are exact
# for up to 256 signs in bfloat16, and for up to 127 in float16.
_APART = 512


def of_positions(
    slopes: Float[Array, " H"], positions: Int[Array, "B K"], dtype: jnp.dtype
) -> tuple[Float[Array, "1 1 H 4"], Float[Array, "B K 1 4"]]:
    """Return extra entries for queries and for keys whose dot product is `slope j`.

    `positions` are the positions j of the keys, from 0 to POSITIONS - 1.
    """
    high = slopes.astype(dtype)
    low = (slopes - high.astype(slopes.dtype)).astype(dtype)
    of_queries = jnp.stack([256 * high, high, 256 * low, low], axis=-1)
    of_keys = jnp.stack([positions // 256, positions % 256] * 2, axis=-1).astype(dtype)
    return of_queries[None, None], of_keys[:, :, None]


def of_segments(
    queries: Int[Array, "B Q"], keys: Int[Array, "B K"], dtype: jnp.dtype
) -> tuple[Float[Array, "B Q 1 E"], Float[Array, "B K 1 E"]]:
    """Return extra entries for queries and for keys whose dot product is 0 within a segment.

    Between two segments, the dot product is at most -1024.
    """
    length = keys.shape[1]
    bits = jnp.arange(code_size(length))

    def signs(ids):
        # A segment's code encodes the index of its first key, or `length` if it has no key.
        here = jnp.where(ids[:, :, None] == keys[:, None, :], jnp.arange(length), length)
        return (2 * (jnp.min(here, axis=2)[..., None] >> bits & 1) - 1).astype(dtype)

    def with_last(x, last):
        return jnp.concatenate([x, jnp.full_like(x[..., :1], last)], axis=-1)[:, :, None]

    of_queries = with_last(_APART * signs(queries), -_APART * len(bits))
    return of_queries, with_last(signs(keys), 1)


def code_size(length: int) -> int:
    """Return the number of signs in a segment's code. `of_segments` adds one more entry."""
    return length.bit_length()


def append_entries(x: Float[Array, "B N H D"], *entries: Float[Array, "#B #N #H _"]) -> Array:
    """Append `entries` to each vector of x, and zeros up to a multiple of 8 entries."""
    entries = (jnp.broadcast_to(e, (*x.shape[:3], e.shape[-1])) for e in entries)
    return pad_vectors(jnp.concatenate([x, *entries], axis=-1))


def pad_vectors(x: Array, size: int | None = None) -> Array:
    """Append zeros to each vector of x, up to `size` entries or to a multiple of 8."""
    missing = -x.shape[-1] % 8 if size is None else size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)])
