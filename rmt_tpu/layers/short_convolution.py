"""A causal convolution over a few tokens, applied to each channel separately."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def convolve(
    x: Float[Array, "batch seq *channels"],
    weights: Float[Array, "taps *channels"],
    before: Float[Array, "batch taps_less_1 *channels"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq *channels"]:
    """Compute `sum_j weights[taps - 1 - j] x[t - j]` at each token t, with j from 0 to `taps - 1`.

    Tokens of a different segment (document) from that of t count as zero. The result has the dtype
    of x.

    Args:
      x: the input values per token.
      weights: the weight of each tap; the last tap multiplies the token itself.
      before: the values of the tokens that precede x; None means zeros.
      segment_ids: the segment of each token of x; the tokens in `before` belong to the segment of
        the first token of x. None means that there is only one segment.
    """
    taps, seq = len(weights), x.shape[1]
    if before is None:
        before = jnp.zeros((len(x), taps - 1, *x.shape[2:]), x.dtype)
    all_x = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    y = x * weights[-1]
    for j in range(1, taps):
        earlier = all_x[:, taps - 1 - j : taps - 1 - j + seq]
        if segment_ids is not None:
            ids = jnp.pad(segment_ids, ((0, 0), (j, 0)), mode="edge")[:, :seq]
            own = (ids == segment_ids).reshape(*ids.shape, *[1] * (x.ndim - 2))
            earlier = jnp.where(own, earlier, 0)
        y = y + earlier * weights[-1 - j]
    return y


def tail(
    x: Float[Array, "batch seq *channels"],
    before: Float[Array, "batch count *channels"],
    lengths: Int[Array, " batch"] | None,
) -> Float[Array, "batch count *channels"]:
    """Return the values to pass as `before` when the next tokens are convolved.

    The result has as many tokens as `before`: the last tokens of `before` followed by x. `lengths`
    is the number of valid tokens in each row of x; None means that all tokens are valid.
    """
    count = before.shape[1]
    all_x = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    if lengths is None:
        return all_x[:, x.shape[1] :]
    places = lengths[:, None] + jnp.arange(count)
    return jnp.take_along_axis(all_x, places.reshape(*places.shape, *[1] * (x.ndim - 2)), axis=1)
