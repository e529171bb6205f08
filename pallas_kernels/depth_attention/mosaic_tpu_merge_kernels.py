"""Bodies of the TPU kernels of `merge` and `merge_backward` for vectors.

The kernels process one group of GROUP tokens at a time, on the vector unit. Intermediates that are
used several times are kept in VMEM in float32. This is cheaper than computing them again.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.depth_attention.mosaic_tpu_kernels import (
    GROUP,
    LANES,
    Tile,
    VectorsCall,
    centre,
    column_of,
    each_group,
    fold_lanes,
    fold_rows,
    group_rows,
    row_of,
    total,
)


def merge(inputs, outputs, scratch, *, call: VectorsCall):
    """Compute z, one site's mix, normalised if there is a norm, for one tile of tokens."""

    def rows_of(group):
        rows = group_rows(group)
        h = scratch["h"].at[rows]
        _mix(call, inputs, group, h)
        rstd = None if call.norm is None else centre(call, h)
        for lanes in call.lane_blocks:
            z = h[:, lanes]
            if rstd is not None:
                z = z * rstd * inputs["norm_gain"][:, lanes]
            outputs["z"][rows, lanes] = z.astype(outputs["z"].dtype)

    each_group(call, rows_of)


def merge_backward(inputs, outputs, scratch, *, call: VectorsCall):
    """Compute the cotangents of `merge` for one tile, and add to the parameters' cotangents.

    A parameter's cotangent has 8 rows of partial sums, which the caller adds up. Let n be the
    normalised h, h_rstd the rstd of h, and a = norm_gain * d_z. The cotangent of h is `d_h = h_rstd
    (a - mean(a) - n mean(a n))`. For rmsnorm, the term mean(a) is absent. Without a norm, d_h is
    d_z. The gradient of `mixed` is `(1 - p) d_h`. Let `d_logit = p (1 - p) <d_h, current - mixed>`.
    The gradient of `current` is `p d_h + d_logit (rstd query - rstd^2 / D logit current)`. It is
    added to the cotangent of `current`.
    """
    tile = Tile(call)

    @pl.when(tile.first)
    def _():
        for name in {"d_query", "d_norm_gain"} & outputs.keys():
            outputs[name][...] = jnp.zeros_like(outputs[name])

    outputs["d_log_sums"][...] = jnp.zeros_like(outputs["d_log_sums"])
    zero = jnp.zeros((GROUP, LANES), jnp.float32)

    def existing(x, group):
        """Return x with 0 beyond the last token, where memory may contain arbitrary values."""
        if call.tokens % call.blocks.tokens == 0:
            return x
        token = jax.lax.broadcasted_iota(jnp.int32, (GROUP, 1), 0)
        token = token + (tile.at(0) * call.groups + group) * GROUP
        return jnp.where(token < call.tokens, x, 0)

    def rows_of(group):
        rows = group_rows(group)
        # The buffer `h` contains first the mix h, then the normalised h (n), then the cotangent
        # d_h. The buffer `difference` contains current - mixed.
        h, difference = (scratch[k].at[rows] for k in ("h", "difference"))
        wide = lambda name, lanes: inputs[name][rows, lanes].astype(jnp.float32)
        p, logit, rstd = _mix(call, inputs, group, h, difference)
        if call.norm is None:
            of_mix = functools.partial(wide, "d_z")
        else:
            of_mix = _undo_norm(call, inputs, outputs, h, scratch["a"].at[rows], group, existing)
        products = zero
        for lanes in call.lane_blocks:
            d_h = of_mix(lanes)
            outputs["d_mixed"][rows, lanes] = (d_h - p * d_h).astype(outputs["d_mixed"].dtype)
            products = products + fold_lanes(d_h * difference[:, lanes])
            h[:, lanes] = d_h
        d_logit = p * (1 - p) * total(products)
        outputs["d_log_sums"][0] += row_of(-d_logit, group, call.blocks.tokens)
        d_product = d_logit * rstd
        shrink = d_product * rstd * logit / call.size
        for lanes in call.lane_blocks:
            current = wide("current", lanes)
            product = d_product * current
            d = p * h[:, lanes] + d_product * inputs["query"][:, lanes] - shrink * current
            d = d + wide("d_current_in", lanes)
            outputs["d_current"][rows, lanes] = d.astype(outputs["d_current"].dtype)
            outputs["d_query"][0, :, lanes] += fold_rows(existing(product, group))

    each_group(call, rows_of)


def _undo_norm(call, inputs, outputs, h, a, group, existing):
    """Start the backward pass of the norm for one group of tokens.

    The mix in `h` is replaced by the normalised mix, a is written to the buffer `a`, and the gain's
    cotangent is added up. `existing` replaces numbers beyond the last token.

    Returns:
      A function from a block of lanes to the cotangent of the mix there.
    """
    rows, zero = group_rows(group), jnp.zeros((GROUP, LANES), jnp.float32)
    h_rstd = centre(call, h)
    sum_a = sum_an = zero
    for lanes in call.lane_blocks:
        n, d_z = h[:, lanes] * h_rstd, inputs["d_z"][rows, lanes].astype(jnp.float32)
        d_n = d_z * inputs["norm_gain"][:, lanes]
        h[:, lanes], a[:, lanes] = n, d_n
        sum_a = sum_a + fold_lanes(d_n)
        sum_an = sum_an + fold_lanes(d_n * n)
        outputs["d_norm_gain"][0, :, lanes] += fold_rows(existing(d_z * n, group))
    mean_a = total(sum_a) / call.size if call.norm == "layernorm" else None
    slope = total(sum_an) / call.size

    def of_mix(lanes):
        d_h = a[:, lanes] - h[:, lanes] * slope
        return (d_h if mean_a is None else d_h - mean_a) * h_rstd

    return of_mix


def _mix(call, inputs, group, h, difference=None):
    """Compute one site's mix, including the running sum, for one group of tokens.

    The mix is written to `h`, and `current - mixed` is written to `difference` if `difference` is
    not None.

    Returns:
      The weight p, the logit and the rstd of the running sum, each [GROUP, 1].
    """
    rows = group_rows(group)
    squares = products = jnp.zeros((GROUP, LANES), jnp.float32)
    for lanes in call.lane_blocks:
        current = inputs["current"][rows, lanes].astype(jnp.float32)
        squares = squares + fold_lanes(current * current)
        products = products + fold_lanes(current * inputs["query"][:, lanes])
    rstd = jax.lax.rsqrt(total(squares) / call.size + call.epsilon)
    logit = total(products) * rstd
    p = jax.nn.sigmoid(logit - column_of(inputs["log_sums"][0], group))
    p = jnp.where(inputs["active"][0] != 0, p, 0)
    for lanes in call.lane_blocks:
        current, mixed = (inputs[k][rows, lanes].astype(jnp.float32) for k in ("current", "mixed"))
        d = current - mixed
        h[:, lanes] = mixed + p * d
        if difference is not None:
            difference[:, lanes] = d
    return p, logit, rstd
