"""What is said to kernels that know causal attention alone, by more entries of queries and keys.

A softmax over j ignores what depends on i alone. So `-slope (i - j)` of ALiBi may be `slope j`,
which is `(256 slope, slope) . (j // 256, j % 256)`: whole numbers to 256 are exact in bfloat16. So
is a slope that is a power of two; what another one is off by is two entries more.

A segment has a code of signs, `c`. `512 (c_i . c_j - len(c))` is 0 within a segment, and -1024 or
less to another one: of weight 0 in float32, as long as logits differ by some 900 at most.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# The longest sequence whose positions are exact, in all dtypes.
POSITIONS = 65536
# Of each sign: exact in bfloat16 with up to 256 of them, and in float16 up to 127.
_APART = 512


def of_positions(
    slopes: Float[Array, " H"], length: int, dtype: jnp.dtype
) -> tuple[Float[Array, "1 1 H 4"], Float[Array, "1 K 1 4"]]:
    """Of queries and of keys, whose products are `slope j`."""
    high = slopes.astype(dtype)
    low = (slopes - high.astype(slopes.dtype)).astype(dtype)
    of_queries = jnp.stack([256 * high, high, 256 * low, low], axis=-1)
    j = jnp.arange(length)
    of_keys = jnp.stack([j // 256, j % 256] * 2, axis=-1).astype(dtype)
    return of_queries[None, None], of_keys[None, :, None]


def of_segments(
    queries: Int[Array, "B Q"], keys: Int[Array, "B K"], dtype: jnp.dtype
) -> tuple[Float[Array, "B Q 1 E"], Float[Array, "B K 1 E"]]:
    """Of queries and of keys, whose products are 0 within a segment."""
    length = keys.shape[1]
    bits = jnp.arange(code_size(length))

    def signs(ids):
        # A segment is known by its first key, and one without keys by none.
        here = jnp.where(ids[:, :, None] == keys[:, None, :], jnp.arange(length), length)
        return (2 * (jnp.min(here, axis=2)[..., None] >> bits & 1) - 1).astype(dtype)

    def with_last(x, last):
        return jnp.concatenate([x, jnp.full_like(x[..., :1], last)], axis=-1)[:, :, None]

    of_queries = with_last(_APART * signs(queries), -_APART * len(bits))
    return of_queries, with_last(signs(keys), 1)


def code_size(length: int) -> int:
    """Signs of the code of a segment, of so many keys; there is one entry more."""
    return length.bit_length()


def added(x: Float[Array, "B N H D"], *entries: Float[Array, "#B #N #H _"]) -> Array:
    """x with these entries after its own, and zeros up to a multiple of 8."""
    entries = (jnp.broadcast_to(e, (*x.shape[:3], e.shape[-1])) for e in entries)
    return padded(jnp.concatenate([x, *entries], axis=-1))


def padded(x: Array, size: int | None = None) -> Array:
    """x with zeros after its entries, up to `size` of them, or to a multiple of 8."""
    missing = -x.shape[-1] % 8 if size is None else size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)])
