"""Bodies of the Mosaic GPU kernels of the key-vector ops; `mosaic_gpu` describes the algorithm."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.call import round_up
from pallas_kernels.key_vector.interface import LEAST_STEPS
from pallas_kernels.key_vector.mosaic_gpu_products import (
    ROWS,
    Instructions,
    add_product,
    finish,
    product,
    products_scratch,
    total_of,
    with_sums,
)
from pallas_kernels.mosaic_gpu import (
    PROGRAMS,
    buffer,
    each_token,
    load,
    matrix_instructions,
    plgpu,
    save,
)

_LARGEST = 2**15 - 1


class Sizes(NamedTuple):
    """The static parameters of a call: B x N tokens, K x V residuals, R stored and P read vectors.

    R is 0 if the call stores nothing, and P is 0 if it reads nothing.
    """

    B: int
    N: int
    K: int
    V: int
    R: int
    P: int
    residual: jnp.dtype
    norm: str
    fraction_bits: int
    instructions: Instructions = "wgmma"

    @classmethod
    def of(cls, site, norm, fraction_bits):
        """Return the static parameters of a call with the operands of `site`."""
        R, P = (0 if keys is None else keys.shape[0] for keys in (site.store_keys, site.read_keys))
        dtype, kind = jnp.dtype(site.residual.dtype), matrix_instructions()
        return cls(*site.residual.shape, R, P, dtype, norm, fraction_bits, kind)

    @property
    def T(self) -> int:
        """The number of tokens."""
        return self.B * self.N

    @property
    def steps(self) -> float:
        """The integer that an int16 residual stores for the value 1."""
        return 2.0**self.fraction_bits

    @property
    def width(self) -> int:
        """The width in bytes of the tiles of a product's operands.

        It is at most the 2 V bytes of a row. The `tcgen05` instructions process half of the V
        columns of a result at a time, so that there it is at most half of that.
        """
        return min(128, 2 * self.V) if self.instructions == "wgmma" else self.V

    def width_of(self, count: int) -> int:
        """Return the width in bytes of the operands' tiles, for a product over `count` vectors.

        The width is 32, 64 or 128 bytes. A product must sum over a multiple of `width / 2` vectors.
        The result is the largest width up to `self.width` for which `count` is such a multiple. If
        there is none, it is the largest width.
        """
        if self.instructions == "tcgen05":
            return self.width
        widths = [width for width in (128, 64, 32) if width <= self.width]
        return next((width for width in widths if count % (width // 2) == 0), widths[0])

    def padded(self, count: int) -> int:
        """Return the number of vectors that a product sums over, including zeros as padding.

        The number is `count` if a product can sum over `count` vectors. Otherwise it is ROWS,
        because a kernel can clear only buffers of ROWS rows. With `tcgen05` it is always ROWS,
        because the vectors are also the columns of sums, which must be as wide as two tiles.
        """
        if self.instructions == "tcgen05":
            return ROWS
        return count if count % (self.width_of(count) // 2) == 0 else ROWS

    @property
    def sums(self) -> dict[str, int]:
        """The number of columns of the sums for the gradients of the store and the read keys."""
        if self.instructions == "tcgen05":
            return {"dw": ROWS, "dr": ROWS}
        return {"dw": self.R, "dr": self.P}


# Helpers for several kernels ------------------------------------------------------------------


def _product(sizes, ref, a, b):
    return product(sizes.instructions, ref, a, b)


def _total(values):
    return jnp.sum(jnp.sum(values, axis=1))


def _inside(sizes, values):
    """Return `values` with the entries of the padding, the rows from K on, set to 0."""
    if sizes.K == ROWS:
        return values
    rows = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
    return jnp.where(rows < sizes.K, values, 0.0)


def _clear(ref):
    """Fill every matrix of a buffer [stages, ROWS, columns] with zeros."""
    zeros = plgpu.layout_cast(jnp.zeros(ref.shape[1:], ref.dtype), plgpu.Layout.WGMMA)
    for stage in range(ref.shape[0]):
        ref[stage] = zeros


def _copy_rows(source, target, rows, barrier):
    """Start copying a matrix to the first `rows` rows of a buffer in shared memory."""
    plgpu.copy_gmem_to_smem(source, target.at[pl.ds(0, rows)], barrier)


def _values(sizes, x):
    """Convert the residual `x` to float32; int16 values are multiplied by the fixed-point step."""
    values = x.astype(jnp.float32)
    return values * (1 / sizes.steps) if x.dtype == jnp.int16 else values


def _steps(sizes, written):
    """Return `written` in units of the int16 residual's fixed-point step, as int32.

    The values are rounded to the nearest integer. NaN is converted to an integer that overflows
    int16.
    """
    limit = 2.0**21
    steps = sizes.steps * written
    outside = jnp.where(steps < 0, -limit, limit)
    return jnp.round(jnp.where(jnp.abs(steps) <= limit, steps, outside)).astype(jnp.int32)


# Forward pass ---------------------------------------------------------------------------------


def forward_scratch(sizes, stages):
    """Return the scratch buffers of `forward_kernel`."""
    bf16, width = jnp.bfloat16, sizes.width_of(sizes.R)
    R, P = sizes.padded(sizes.R), round_up(sizes.P, ROWS)
    scratch = products_scratch(sizes.instructions, sizes.V) | {
        "x": buffer((stages, ROWS, sizes.V), sizes.residual),
        "ready": plgpu.Barrier(num_arrivals=1 + bool(sizes.R), num_barriers=stages),
        "once": plgpu.Barrier(num_arrivals=bool(sizes.R) + bool(sizes.P)),
    }
    if sizes.R:
        scratch |= {
            "y": buffer((stages, R, sizes.V), bf16, width),
            "w": buffer((R, ROWS), bf16, width),
        }
    if sizes.P:
        scratch |= {
            "r": buffer((P, ROWS), bf16, sizes.width),
            "scaled": buffer((ROWS, sizes.V), bf16, sizes.width),
            "z": buffer((P, sizes.V), bf16),
        }
    return scratch


def forward_kernel(sizes, stages, epsilon, scale, ref):
    """Store, normalise and retrieve for every token of a program.

    A store writes `ref.stored`; a read writes `ref.statistics` and `ref.retrieved`. With `scale`,
    the retrieved vectors are multiplied by rstd.
    """
    if sizes.K < ROWS:
        _clear(ref.x)
    if sizes.R:
        if sizes.R < ref.y.shape[1]:
            _clear(ref.y)
        plgpu.copy_gmem_to_smem(ref.store_keys, ref.w, ref.once)
    if sizes.P:
        plgpu.copy_gmem_to_smem(ref.read_keys, ref.r, ref.once)
        gain = load(ref.gain, plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    plgpu.barrier_wait(ref.once)

    def start(slot, t):
        _copy_rows(ref.residual.at[t], ref.x.at[slot], sizes.K, ref.ready.at[slot])
        if sizes.R:
            _copy_rows(ref.data.at[t], ref.y.at[slot], sizes.R, ref.ready.at[slot])

    def token(slot, t, prefetch, _):
        plgpu.barrier_wait(ref.ready.at[slot])
        x, overflows = _stored(sizes, ref, slot)
        # The previous token's buffers can be reused once its results have been copied from them.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        prefetch()
        if sizes.R:
            ref.x[slot] = x
        if sizes.P:
            values = _values(sizes, x)
            normalised = _normalised_anew(sizes, ref, t, values, overflows, epsilon, scale)
            ref.scaled[...] = (normalised * gain).astype(jnp.bfloat16)
        plgpu.commit_smem()
        if sizes.R:
            plgpu.copy_smem_to_gmem(ref.x.at[slot, pl.ds(0, sizes.K)], ref.stored.at[t])
        if sizes.P:
            ref.z[...] = _product(sizes, ref, ref.r, ref.scaled).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(ref.z.at[pl.ds(0, sizes.P)], ref.retrieved.at[t])

    each_token(sizes.T, stages, start, token)
    plgpu.wait_smem_to_gmem(0)


def _stored(sizes, ref, slot):
    """Return a token's residual after the store, and a mask of overflowing int16 entries."""
    x = ref.x[slot]
    if not sizes.R:
        return x, None
    # The padding's keys are 0, but 0 times NaN or infinity is NaN. The padding must stay 0, because
    # it is written back to the slot, and the copy of the slot's next token does not replace it.
    written = _inside(sizes, _product(sizes, ref, ref.w.T, ref.y.at[slot]))
    if x.dtype != jnp.int16:
        return (x.astype(jnp.float32) + written).astype(x.dtype), None
    total = x.astype(jnp.int32) + _steps(sizes, written)
    clipped = jnp.minimum(jnp.maximum(total, -_LARGEST), _LARGEST)
    return clipped.astype(jnp.int16), total != clipped


def _normalised_anew(sizes, ref, t, values, overflows, epsilon, scale):
    """Compute a token's statistics, write them, and return the token's normalised residual.

    For int16, rstd is NaN if an entry overflows. With `scale`, it is also NaN if the entries'
    standard deviation is less than LEAST_STEPS fixed-point steps. Without `scale`, only the mean
    is subtracted.
    """
    size = sizes.K * sizes.V
    mean = jnp.float32(0)
    if sizes.norm == "layernorm":
        mean = _total(values) * (1 / size)
        values = _inside(sizes, values - mean)
    squares = values * values
    if overflows is not None:
        squares = jnp.where(overflows, jnp.nan, squares)
    variance = _total(squares) * (1 / size)
    rstd = jax.lax.rsqrt(variance + epsilon)
    if sizes.residual == jnp.int16 and scale:
        rstd = jnp.where(variance >= (LEAST_STEPS / sizes.steps) ** 2, rstd, jnp.nan)
    _write_statistics(sizes, ref, t, mean, rstd)
    return values * rstd if scale else values


def _write_statistics(sizes, ref, t, mean, rstd):
    row, column = t // sizes.N, jax.lax.rem(t, sizes.N)
    ref.statistics[row, 0, column] = mean
    ref.statistics[row, 1, column] = rstd


# Backward pass --------------------------------------------------------------------------------


def backward_scratch(sizes, stages):
    """Return the scratch buffers of `backward_kernel`."""
    bf16, V = jnp.bfloat16, sizes.V
    R, P = sizes.padded(sizes.R), sizes.padded(sizes.P)
    of_R, of_P = sizes.width_of(sizes.R), sizes.width_of(sizes.P)
    scratch = products_scratch(sizes.instructions, V, **sizes.sums)
    if sizes.instructions == "tcgen05":
        scratch["scaled"] = buffer((ROWS, V), bf16, sizes.width)
    return scratch | {
        "x": buffer((stages, ROWS, V), sizes.residual),
        "dx": buffer((stages, ROWS, V), bf16, sizes.width),
        "y": buffer((stages, R, V), bf16, of_R),
        "dz": buffer((stages, P, V), bf16, of_P),
        # The store keys are kept twice. `w` is padded to ROWS keys, for the data's cotangent.
        # `few_w` has less padding, and is used to undo the store.
        "w": buffer((ROWS, ROWS), bf16, sizes.width),
        "few_w": buffer((R, ROWS), bf16, of_R),
        "r": buffer((P, ROWS), bf16, of_P),
        "gains": buffer((ROWS, V), jnp.float32),
        "dy": buffer((ROWS, V), bf16),
        "ready": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        "once": plgpu.Barrier(num_arrivals=4),
    }


def backward_kernel(sizes, stages, rebuild, ref):
    """Compute the backward pass for every token of a program.

    Each program sums the gradients of the parameters over its tokens. It writes these sums side by
    side to `ref.sums`: first the gain's [K, V], then the store keys' [K, R], then the read keys'
    [K, P].
    """
    rows = {"x": sizes.K, "dx": sizes.K, "y": sizes.R, "dz": sizes.P}
    for name, count in rows.items():
        if count < getattr(ref, name).shape[1]:
            _clear(getattr(ref, name))
    few = ref.store_keys.at[pl.ds(0, ref.few_w.shape[0])]
    plgpu.copy_gmem_to_smem(ref.store_keys, ref.w, ref.once)
    plgpu.copy_gmem_to_smem(few, ref.few_w, ref.once)
    plgpu.copy_gmem_to_smem(ref.read_keys, ref.r, ref.once)
    plgpu.copy_gmem_to_smem(ref.gain, ref.gains, ref.once)
    plgpu.commit_smem()
    plgpu.barrier_wait(ref.once)
    run = functools.partial(_backward_tokens, sizes, stages, rebuild, ref)
    with_sums(sizes.instructions, ref, run, **sizes.sums)


def _backward_tokens(sizes, stages, rebuild, ref, sums):
    kind = sizes.instructions
    columns = {name: pl.ds(0, count) for name, count in sizes.sums.items()}

    def start(slot, t):
        ready = ref.ready.at[slot]
        _copy_rows(ref.stored.at[t], ref.x.at[slot], sizes.K, ready)
        _copy_rows(ref.d_stored.at[t], ref.dx.at[slot], sizes.K, ready)
        _copy_rows(ref.data.at[t], ref.y.at[slot], sizes.R, ready)
        _copy_rows(ref.d_retrieved.at[t], ref.dz.at[slot], sizes.P, ready)

    def token(slot, t, prefetch, carry):
        d_gain, mean, rstd = carry
        # The previous token's buffers can be reused once its results have been copied from them.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        prefetch()
        of_next = statistics_of(t + jax.lax.axis_size(PROGRAMS))
        plgpu.barrier_wait(ref.ready.at[slot])
        x = ref.x[slot]
        n = _inside(sizes, (_values(sizes, x) - mean) * rstd)
        if rebuild:
            ref.x[slot] = _undone(sizes, x, _product(sizes, ref, ref.few_w.T, ref.y.at[slot]))
        d_scaled = _product(sizes, ref, ref.r.T, ref.dz.at[slot])
        d_gain = d_gain + d_scaled * n
        gain = ref.gains[...]
        a = d_scaled * gain
        scaled = (n * gain).astype(jnp.bfloat16)
        first = t < jax.lax.axis_size(PROGRAMS)
        if kind == "wgmma":
            add_product(
                kind, ref, sums["dr"], scaled, ref.dz.at[slot, columns["dr"]].T, first=first
            )
        else:
            ref.scaled[...] = scaled
        dx = ref.dx[slot].astype(jnp.float32) + rstd * _through_norm(sizes, ref, t, a, n)
        dx = _inside(sizes, dx).astype(jnp.bfloat16)
        ref.dx[slot] = dx
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ref.dx.at[slot, pl.ds(0, sizes.K)], ref.d_residual.at[t])
        if rebuild:
            plgpu.copy_smem_to_gmem(ref.x.at[slot, pl.ds(0, sizes.K)], ref.rebuilt.at[t])
        if kind == "tcgen05":
            # These instructions read both operands from shared memory.
            add_product(kind, ref, sums["dr"], ref.scaled, ref.dz.at[slot].T, first=first)
            dx = ref.dx.at[slot]
        add_product(kind, ref, sums["dw"], dx, ref.y.at[slot, columns["dw"]].T, first=first)
        dy = _product(sizes, ref, ref.w, ref.dx.at[slot])
        finish(kind, ref)
        ref.dy[...] = dy.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ref.dy.at[pl.ds(0, sizes.R)], ref.d_data.at[t])
        return d_gain, *of_next

    def statistics_of(t):
        t = jnp.minimum(t, sizes.T - 1)
        row, column = t // sizes.N, jax.lax.rem(t, sizes.N)
        return ref.statistics[row, 0, column], ref.statistics[row, 1, column]

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, sizes.V), jnp.float32), plgpu.Layout.WGMMA)
    carry = zeros, *statistics_of(jax.lax.axis_index(PROGRAMS))
    d_gain, *_ = each_token(sizes.T, stages, start, token, carry)
    first = 0
    for total in (d_gain, *(total_of(kind, sums[name]) for name in sizes.sums)):
        width = total.shape[1]
        save(ref.sums.at[jax.lax.axis_index(PROGRAMS), :, pl.ds(first, width)], total)
        first += width
    plgpu.wait_smem_to_gmem(0)


def _through_norm(sizes, ref, t, a, n):
    """Return `a - mean(a) - n mean(a n)`; compute the means unless the caller passed them."""
    size, passed = sizes.K * sizes.V, hasattr(ref, "mean_an")
    of_residual = a - n * (ref.mean_an[t] if passed else _total(a * n) * (1 / size))
    if sizes.norm == "layernorm":
        of_residual = of_residual - (ref.mean_a[t] if passed else _total(a) * (1 / size))
    return of_residual


def _undone(sizes, stored, written):
    if stored.dtype == jnp.int16:
        return (stored.astype(jnp.int32) - _steps(sizes, written)).astype(jnp.int16)
    return (stored.astype(jnp.float32) - written).astype(stored.dtype)
