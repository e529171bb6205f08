"""Bodies of the GPU kernels of the key-vector ops. `triton_gpu` describes the algorithm."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.key_vector.interface import LEAST_STEPS
from pallas_kernels.triton import dot, plgpu

_LARGEST = 2**15 - 1
_ROUND, _ROUND_BITS = 1.5 * 2.0**23, 0x4B400000  # a float32 and its bits

# Sizes, tiles and loops -----------------------------------------------------------------------


class Sizes(NamedTuple):
    """The static parameters of a call: T tokens, K x V residuals, R stored and P retrieved vectors.

    R is 0 if the call stores nothing, and P is 0 if it reads nothing.
    """

    T: int
    K: int
    V: int
    R: int
    P: int
    dtype: jnp.dtype
    norm: str
    fraction_bits: int

    @classmethod
    def of(cls, site, dtype, norm, fraction_bits):
        """Return the static parameters of a call with the operands of `site`."""
        B, N, K, V = site.residual.shape
        R, P = (0 if keys is None else keys.shape[0] for keys in (site.store_keys, site.read_keys))
        return cls(B * N, K, V, R, P, jnp.dtype(dtype), norm, fraction_bits)

    @property
    def steps(self) -> float:
        """The integer that an int16 residual stores for the value 1."""
        return 2.0**self.fraction_bits

    def groups(self, count) -> list[tuple[int, int]]:
        """Split `count` key vectors into groups that are small enough for one matrix product.

        Each group is a pair (index of its first vector, padded number of vectors).
        """
        most = (16384 // self.dtype.itemsize) // padded(self.V)
        size = min(64, most, padded(count))
        return [(first, size) for first in range(0, count, size)]


def padded(size):
    """Round `size` up to a block size that Triton can multiply: a power of two, at least 16."""
    return max(16, pl.next_power_of_2(size))


def _index(shape, rows, columns):
    """Return the row indices and column indices of a block of a matrix, and a mask.

    `rows` and `columns` are pairs (first index, size), where the first index is a multiple of the
    size. The mask is True for elements within the matrix. It is None if the block's sizes divide
    the matrix's sizes, so that no block can extend beyond the matrix.
    """
    (row, height), (column, width) = rows, columns
    i = row + jnp.arange(height)[:, None]
    j = column + jnp.arange(width)[None, :]
    masks = [
        index < most
        for index, size, most in ((i, height, shape[0]), (j, width, shape[1]))
        if most % size
    ]
    return i, j, functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref, lead, rows, columns, *, transposed=False):
    """Load a block of the matrix `ref[*lead]`, or of its transpose.

    Elements of the block that lie outside of the matrix are 0.
    """
    shape = ref.shape[-2:]
    if transposed:
        j, i, mask = _index(shape[::-1], rows, columns)
    else:
        i, j, mask = _index(shape, rows, columns)
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return plgpu.load(ref.at[(*lead, i, j)], mask=mask, other=other)


def _save(ref, lead, rows, columns, block):
    i, j, mask = _index(ref.shape[-2:], rows, columns)
    plgpu.store(ref.at[(*lead, i, j)], block.astype(ref.dtype), mask=mask)


def _each_token(site, body):
    """Return a function that loops over this program's tokens.

    It takes the initial carry, computes `carry = body(token, carry)` for each token, and returns
    the last carry.
    """
    program, programs = pl.program_id(0), pl.num_programs(0)

    def run(carry):
        count = (site.T - program + programs - 1) // programs
        return jax.lax.fori_loop(0, count, lambda i, c: body(program + i * programs, c), carry)

    return run


def _each_chunk(chunks, body, carry):
    """Run `carry = body(chunk, carry)` for every chunk, and return the carry.

    If there is only one chunk, no loop is emitted.
    """
    return body(0, carry) if chunks == 1 else jax.lax.fori_loop(0, chunks, body, carry)


def _values(site, block):
    """Convert a residual's `block` to float32; multiply int16 values by the fixed-point step."""
    values = block.astype(jnp.float32)
    return values / site.steps if block.dtype == jnp.int16 else values


def _written(store_keys, data):
    """Compute the write `sum_r w_r (x) y_r` for one chunk of K, with w the keys and y the data.

    The forward pass and the rebuilding of the residual sum the same products in the same order, so
    that an int16 residual is rebuilt exactly.
    """
    return sum(dot(w, y) for w, y in zip(store_keys, data, strict=True))


def _steps(site, written):
    """Return `written` in units of the int16 residual's fixed-point step, as int32.

    The values are rounded to the nearest integer. NaN is converted to an integer that overflows
    int16.
    """
    # A float32 of about `_ROUND` has no bits for a fraction, so adding that number rounds to an
    # integer, with ties to even. The integer is then read from the bits. If `_ROUND` were
    # subtracted instead, XLA would leave out both additions where the kernel is interpreted.
    limit = 2.0**21
    steps = site.steps * written
    outside = jnp.where(steps < 0, -limit, limit)
    steps = jnp.where(jnp.abs(steps) <= limit, steps, outside)
    return jax.lax.bitcast_convert_type(steps + _ROUND, jnp.int32) - _ROUND_BITS


# Forward pass ---------------------------------------------------------------------------------


def forward_kernel(site, blocks, epsilon, scale, ref):
    """Store vectors, normalise the residual and retrieve vectors, for a group of tokens.

    A store writes `ref.stored`; a read writes `ref.mean`, `ref.rstd` and `ref.retrieved`. With
    `scale`, the retrieved vectors are multiplied by rstd.
    """
    columns = (0, padded(site.V))
    chunks = pl.cdiv(site.K, blocks.keys)
    rows = lambda c: (c * blocks.keys, blocks.keys)
    stores, reads = site.groups(site.R), site.groups(site.P)
    load_store_keys = lambda c: [
        _load(ref.store_keys, (), rows(c), group, transposed=True) for group in stores
    ]
    load_read_keys = lambda c: [_load(ref.read_keys, (), group, rows(c)) for group in reads]
    load_gain = lambda c: _load(ref.gain, (), rows(c), columns).astype(jnp.float32)
    if chunks == 1:
        # The parameters fit in registers, so they are loaded once and used for all tokens.
        load_store_keys = _always(load_store_keys(0))
        if site.P:
            load_read_keys, load_gain = _always(load_read_keys(0)), _always(load_gain(0))

    def stored_chunk(t, c):
        """Store a chunk of a token's residual.

        Returns:
          The stored values in float32; and for an int16 residual, the maximum magnitude before
          clipping (0 for other dtypes).
        """
        x = _load(ref.residual, (t,), rows(c), columns)
        if not site.R:
            return _values(site, x), 0
        data = [_load(ref.data, (t,), group, columns) for group in stores]
        written = _written(load_store_keys(c), data)
        largest = 0
        if x.dtype == jnp.int16:
            total = x.astype(jnp.int32) + _steps(site, written)
            largest = jnp.max(jnp.abs(total))
            x = jnp.clip(total, -_LARGEST, _LARGEST).astype(jnp.int16)
        else:
            x = (x.astype(jnp.float32) + written).astype(x.dtype)
        _save(ref.stored, (t,), rows(c), columns, x)
        return _values(site, x), largest

    def token(t, _):
        single = None

        def chunk(c, carry):
            nonlocal single
            moments, largest = carry
            values, chunk_largest = stored_chunk(t, c)
            if chunks == 1:
                single = values
            if site.P:
                moments = _add_moments(site, moments, values, c, rows(c))
            return moments, jnp.maximum(largest, chunk_largest)

        carry = (jnp.float32(0),) * 3, jnp.int32(0)
        moments, largest = _each_chunk(chunks, chunk, carry)
        if not site.P:
            return
        mean, variance = _mean_and_variance(site, moments)
        rstd = jax.lax.rsqrt(variance + epsilon)
        valid = largest <= _LARGEST
        if ref.residual.dtype == jnp.int16 and scale:
            valid &= variance >= (LEAST_STEPS / site.steps) ** 2
        rstd = jnp.where(valid, rstd, jnp.nan)
        ref.mean[t], ref.rstd[t] = mean, rstd
        source = ref.stored if site.R else ref.residual
        if chunks > 1 and site.R:
            ref.barrier()  # Wait for elements that other threads store.

        def scaled(c):
            values = single if chunks == 1 else _values(site, _load(source, (t,), rows(c), columns))
            normalised = (values - mean) * rstd if scale else values - mean
            return (normalised * load_gain(c)).astype(site.dtype)

        if chunks == 1:
            single_scaled = scaled(0)
            scaled = _always(single_scaled)
        for g, group in enumerate(reads):
            add = lambda c, z, g=g: z + dot(load_read_keys(c)[g], scaled(c))
            z = _each_chunk(chunks, add, jnp.zeros((group[1], columns[1]), jnp.float32))
            _save(ref.retrieved, (t,), group, columns, z)

    _each_token(site, token)(None)


def _always(value):
    return lambda _: value


def _add_moments(site, moments, values, c, rows):
    """Update a token's `moments` with the values of one chunk.

    The moments are a shift, the sum of the values' differences from the shift, and the sum of the
    squares of these differences. The shift is the mean of the first chunk, or 0 for rmsnorm.
    Without a shift, E[x^2] - E[x]^2 would lose precision to cancellation if the mean is large.
    """
    shift, total, squares = moments
    if site.norm == "layernorm":
        first = jnp.sum(values) / (min(rows[1], site.K) * site.V)
        shift = jnp.where(c == 0, first, shift)
        values = values - shift
        _, _, inside = _index((site.K, site.V), rows, (0, values.shape[1]))
        if inside is not None:
            values = jnp.where(inside, values, 0)
        total += jnp.sum(values)
    return shift, total, squares + jnp.sum(jnp.square(values))


def _mean_and_variance(site, moments):
    shift, total, squares = moments
    size = site.K * site.V
    rest = total / size
    return shift + rest, jnp.maximum(squares / size - jnp.square(rest), 0)


# Backward pass --------------------------------------------------------------------------------


def _normalised(site, ref, t, rows, columns, mean, rstd):
    """Load a block of the stored residual X'.

    Returns:
      `norm(X')` for the block, which is 0 outside of the residual, and the block itself.
    """
    x = _load(ref.stored, (t,), rows, columns)
    n = (_values(site, x) - mean) * rstd
    _, _, inside = _index((site.K, site.V), rows, columns)
    return (n if inside is None else jnp.where(inside, n, 0)), x


def _passed_means(site, ref, t):
    """Return token t's means of `a` (None for rmsnorm) and of `a n`, which the caller passed."""
    return (ref.mean_a[t] if site.norm == "layernorm" else None), ref.mean_an[t]


def _d_stored(site, d_stored, a, n, rstd, means):
    """Compute the residual's cotangent, `dX' + rstd (a - mean(a) - n mean(a n))`, for one block."""
    mean_a, mean_an = means
    through_norm = a - n * mean_an
    if site.norm == "layernorm":
        through_norm = through_norm - mean_a
    return d_stored.astype(jnp.float32) + rstd * through_norm


def _undone(site, stored, written):
    if stored.dtype == jnp.int16:
        return (stored.astype(jnp.int32) - _steps(site, written)).astype(jnp.int16)
    return (stored.astype(jnp.float32) - written).astype(stored.dtype)


def backward_kernel(site, blocks, ref):
    """Compute the backward pass of a store and a read, with whole residuals in registers."""
    rows, columns = (0, blocks.keys), (0, padded(site.V))
    stores, reads = (0, padded(site.R)), (0, padded(site.P))
    store_keys = _load(ref.store_keys, (), stores, rows)
    read_keys = _load(ref.read_keys, (), reads, rows)
    # The gain is loaded again (from the cache) for every token, because it does not fit in
    # registers.
    load_gain = lambda: _load(ref.gain, (), rows, columns).astype(jnp.float32)

    def token(t, sums):
        d_store_keys, d_gain, d_read_keys = sums
        mean, rstd = ref.mean[t], ref.rstd[t]
        n, x = _normalised(site, ref, t, rows, columns, mean, rstd)
        y = _load(ref.data, (t,), stores, columns)
        dz = _load(ref.d_retrieved, (t,), reads, columns)
        if hasattr(ref, "rebuilt"):
            written = _written([store_keys.T], [y])
            _save(ref.rebuilt, (t,), rows, columns, _undone(site, x, written))
        d_scaled = dot(read_keys, dz, transpose_a=True)
        d_gain += d_scaled * n
        d_read_keys += dot((n * load_gain()).astype(site.dtype), dz, transpose_b=True)
        a = d_scaled * load_gain()
        d_stored = _load(ref.d_stored, (t,), rows, columns)
        if hasattr(ref, "mean_an"):
            means = _passed_means(site, ref, t)
        else:
            means = jnp.sum(a) / (site.K * site.V), jnp.sum(a * n) / (site.K * site.V)
        dx = _d_stored(site, d_stored, a, n, rstd, means)
        _save(ref.d_residual, (t,), rows, columns, dx)
        dx = dx.astype(site.dtype)
        _save(ref.d_data, (t,), stores, columns, dot(store_keys, dx))
        d_store_keys += dot(y, dx, transpose_b=True)
        return d_store_keys, d_gain, d_read_keys

    shapes = (stores[1], rows[1]), (rows[1], columns[1]), (rows[1], reads[1])
    sums = _each_token(site, token)(tuple(jnp.zeros(s, jnp.float32) for s in shapes))
    program = pl.program_id(0)
    _save(ref.d_store_keys, (program,), stores, rows, sums[0])
    _save(ref.d_gain, (program,), rows, columns, sums[1])
    _save(ref.d_read_keys, (program,), rows, reads, sums[2])


def _d_scaled(ref, t, reads, rows, columns):
    """Compute `r^T dz` for one chunk of K, with r the read keys and dz the cotangent of z."""
    return sum(
        dot(
            _load(ref.read_keys, (), rows, group, transposed=True),
            _load(ref.d_retrieved, (t,), group, columns),
        )
        for group in reads
    )


def backward_tokens_kernel(site, blocks, ref):
    """Compute the backward pass, except the parameters' gradients, in chunks along K.

    The kernel is for residuals that are too large for registers; `backward_sums_kernel` computes
    the parameters' gradients.
    """
    columns = (0, padded(site.V))
    chunks = pl.cdiv(site.K, blocks.keys)
    rows = lambda c: (c * blocks.keys, blocks.keys)
    stores, reads = site.groups(site.R), site.groups(site.P)

    def token(t, _):
        mean, rstd = ref.mean[t], ref.rstd[t]

        def terms(c):
            n, x = _normalised(site, ref, t, rows(c), columns, mean, rstd)
            gain = _load(ref.gain, (), rows(c), columns).astype(jnp.float32)
            return _d_scaled(ref, t, reads, rows(c), columns) * gain, n, x

        def add(c, totals):
            a, n, _ = terms(c)
            return totals[0] + jnp.sum(a), totals[1] + jnp.sum(a * n)

        if hasattr(ref, "mean_an"):
            means = _passed_means(site, ref, t)
        else:
            totals = _each_chunk(chunks, add, (jnp.float32(0), jnp.float32(0)))
            means = [total / (site.K * site.V) for total in totals]

        def write(c, _):
            a, n, x = terms(c)
            d_stored = _load(ref.d_stored, (t,), rows(c), columns)
            dx = _d_stored(site, d_stored, a, n, rstd, means)
            _save(ref.d_residual, (t,), rows(c), columns, dx)
            if hasattr(ref, "rebuilt"):
                keys = [_load(ref.store_keys, (), rows(c), g, transposed=True) for g in stores]
                data = [_load(ref.data, (t,), group, columns) for group in stores]
                _save(ref.rebuilt, (t,), rows(c), columns, _undone(site, x, _written(keys, data)))

        _each_chunk(chunks, write, None)
        ref.barrier()  # Wait for elements that other threads store.
        for group in stores:

            def add(c, dy, group=group):
                dx = _load(ref.d_residual, (t,), rows(c), columns).astype(site.dtype)
                return dy + dot(_load(ref.store_keys, (), group, rows(c)), dx)

            dy = jnp.zeros((group[1], columns[1]), jnp.float32)
            _save(ref.d_data, (t,), group, columns, _each_chunk(chunks, add, dy))

    _each_token(site, token)(None)


def backward_sums_kernel(site, blocks, ref):
    """Sum the parameters' gradients for one chunk of K over the tokens of this program.

    The kernel reads dX, which `backward_tokens_kernel` has computed.
    """
    rows, columns = (pl.program_id(1) * blocks.keys, blocks.keys), (0, padded(site.V))
    stores, reads = site.groups(site.R), site.groups(site.P)
    gain = _load(ref.gain, (), rows, columns).astype(jnp.float32)

    def token(t, sums):
        d_store_keys, d_gain, d_read_keys = sums
        n, _ = _normalised(site, ref, t, rows, columns, ref.mean[t], ref.rstd[t])
        scaled = (n * gain).astype(site.dtype)
        dx = _load(ref.d_residual, (t,), rows, columns).astype(site.dtype)
        d_store_keys = [
            d + dot(_load(ref.data, (t,), group, columns), dx, transpose_b=True)
            for d, group in zip(d_store_keys, stores, strict=True)
        ]
        d_read_keys = [
            d + dot(scaled, _load(ref.d_retrieved, (t,), group, columns), transpose_b=True)
            for d, group in zip(d_read_keys, reads, strict=True)
        ]
        return d_store_keys, d_gain + _d_scaled(ref, t, reads, rows, columns) * n, d_read_keys

    zeros = lambda height, width: jnp.zeros((height, width), jnp.float32)
    sums = _each_token(site, token)(
        (
            [zeros(size, rows[1]) for _, size in stores],
            zeros(rows[1], columns[1]),
            [zeros(rows[1], size) for _, size in reads],
        )
    )
    program = pl.program_id(0)
    for group, d in zip(stores, sums[0], strict=True):
        _save(ref.d_store_keys, (program,), group, rows, d)
    _save(ref.d_gain, (program,), rows, columns, sums[1])
    for group, d in zip(reads, sums[2], strict=True):
        _save(ref.d_read_keys, (program,), rows, group, d)
