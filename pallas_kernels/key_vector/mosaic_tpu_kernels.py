"""Bodies of the key-vector TPU kernels; each call processes one tile of tokens in VMEM.

Every array is [V, rows, tokens], with the tokens in the lanes. `v` is an index along V. See
`mosaic_tpu` for the algorithm.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.call import LANES, largest_divisor
from pallas_kernels.key_vector.interface import LEAST_STEPS
from pallas_kernels.key_vector.mosaic_tpu_call import KeyVectorKernelCall, Tail
from pallas_kernels.key_vector.mosaic_tpu_keys import ReadKeys, store_columns, store_rows
from pallas_kernels.products import dot, dot_columns, dot_rows

_LARGEST = 2**15 - 1
# A float32 as large as `_ROUND` has no bits for a fraction. If it is added to a float32 x, the low
# bits of the sum are therefore x rounded to an integer. `_ROUND_BITS` is the bit pattern of
# `_ROUND`.
_ROUND = 1.5 * 2.0**23
_ROUND_BITS = 0x4B400000


def forward(inputs, outputs, scratch, *, call: KeyVectorKernelCall):
    """Compute the forward pass (store, norm and read) for one tile of tokens.

    The kernel stores if the inputs include `store_keys`, and then normalises and reads if the
    inputs include `read_keys`. If the inputs include `statistics`, the read uses them and does not
    compute its own.
    """
    s, blocks = call.sizes, call.blocks
    stores, reads = "store_keys" in inputs, "read_keys" in inputs
    residual = inputs["residual"]
    stored = outputs["residual"] if stores else residual
    slab = pl.program_id(2)
    first = slab * blocks.slab
    read = ReadKeys(call, inputs, scratch, first) if reads else None
    if "statistics" in inputs:
        _reread(inputs["statistics"], read, residual, outputs["retrieved"], first)
        return
    steps, write = stores and call.integer, None
    if stores:
        keys = store_columns(call, inputs["store_keys"])
        write = keys, _aligned(inputs["data"], scratch.get("data"))
    store_value = functools.partial(_store_value, call, inputs, stored, scratch, write, reads)
    if not reads:
        _loop(blocks.slab, lambda v, _: store_value(v, (), None), (), blocks.store_unroll)
        return

    if call.slabs > 1:

        @pl.when(slab == 0)
        def _():
            scratch["sums"][...] = jnp.zeros_like(scratch["sums"])
            scratch["shift"][...] = _shift(call, residual, write)

        shift = scratch["shift"][...]
    else:
        shift = _shift(call, residual, write)
    rows = (8 if s.K % 8 == 0 else 1, blocks.tokens)
    sums = (jnp.zeros(rows, jnp.float32),) * 2
    if steps:
        sums += (jnp.full(rows, _ROUND, jnp.float32),) * 2
    sums = _loop(
        blocks.slab, lambda v, sums: store_value(v, sums, shift), sums, blocks.store_unroll
    )
    if steps:
        left = (sums[2] < _ROUND - _LARGEST) | (sums[3] > _ROUND + _LARGEST)
        sums = *sums[:2], left.astype(jnp.float32)
    sums = [jnp.sum(x, axis=0, keepdims=True) for x in sums]
    if call.slabs > 1:
        previous = scratch["sums"]
        sums = [previous[i : i + 1] + x for i, x in enumerate(sums)]
        for i, x in enumerate(sums):
            previous[i : i + 1] = x

    mean, above_operand, rstd = _statistics(call, sums, shift)

    def product(v):
        if "operand" in scratch:
            return dot(read.folded(v), scratch["operand"][0, v])
        return dot(read.folded(v), _operand(call, stored, v, shift))

    def finish(v, product, sums):
        if call.centred:
            product = product - above_operand * sums
        factor = rstd * call.unit if call.scale else call.unit
        _put(outputs["retrieved"], v, product * factor)

    def write_statistics():
        outputs["statistics"][0, 0:1] = mean
        outputs["statistics"][0, 1:2] = rstd

    if call.slabs == 1:
        write_statistics()
        _loop(s.V, lambda v, _: finish(v, product(v), read.sums(v)), None, blocks.read_unroll)
        return

    def store_product(v, _):
        scratch["products"][first + v] = product(v)

    _loop(blocks.slab, store_product, None, blocks.read_unroll)

    @pl.when(slab == call.slabs - 1)
    def _():
        write_statistics()
        of_all = ReadKeys(call, inputs, scratch, 0)
        finished = lambda v, _: finish(v, scratch["products"][v], of_all.sums(v))
        _loop(s.V, finished, None, blocks.read_unroll)


def _store_value(call, inputs, stored, scratch, write, reads, v, sums, shift):
    """Store the residual's rows at index v along V, and add them to the sums for the statistics.

    Without a write, nothing is stored. Without a read, nothing is added. For an int16 residual,
    `sums` also contains the smallest and the largest value.
    """
    stores = write is not None
    steps = stores and call.integer
    x = _values(inputs["residual"], v, jnp.int32 if steps else jnp.float32)
    if "empty" in inputs:
        x = jnp.where(inputs["empty"][0] != 0, 0, x)
    if stores:
        x = x + _written(call, *write, v)
    if steps:
        # The integers in x have an offset of `_ROUND_BITS`. If their bits are read as float32, they
        # are the residual's values with an offset of `_ROUND`.
        value = jax.lax.bitcast_convert_type(x, jnp.float32)
        if not reads:
            x = jnp.clip(value, _ROUND - _LARGEST, _ROUND + _LARGEST)
            _put(stored, v, jax.lax.bitcast_convert_type(x, jnp.int32))
            return sums
        # Values that overflow are not clipped, because the retrieved vectors become NaN anyway.
        _put(stored, v, x)
        least = functools.reduce(jnp.minimum, _by_eight(value), sums[2])
        most = functools.reduce(jnp.maximum, _by_eight(value), sums[3])
        value = value - (shift + _ROUND)
        if "operand" in scratch:
            _put(scratch["operand"], v, value)
        return *_add_to_sums(sums, value), least, most
    if stores:
        x = x.astype(stored.dtype)
        _put(stored, v, x)
        x = x.astype(jnp.float32)
    return _add_to_sums(sums, x - shift if call.centred else x) if reads else sums


def backward(inputs, outputs, scratch, *, call: KeyVectorKernelCall, tail: Tail | None):
    """Compute the cotangents of a store, a read or both for one tile of tokens.

    The pass includes the store if the inputs include `store_keys`, and the read if they include
    `read_keys`. The residual's cotangent is `dX = dX' + a - mean(a) - n mean(a n)`, where n is
    norm(X') and a is G^T dz. G are the read keys times the gain, and dz are the cotangents of the
    retrieved vectors times rstd.

    The two means are over all entries of a token, and are needed before dX. They are either passed
    as `means`, without the factor rstd, or computed by a first pass over the tile. This first pass
    keeps `a` in VMEM if it fits. `tail` is the last tile if it is only partly filled, else None.
    """
    s, blocks = call.sizes, call.blocks
    core, slab, i, j = (pl.program_id(axis) for axis in range(4))
    first = slab * blocks.slab
    exists = None if tail is None else _zero_tail(call, inputs, tail, core, j)
    reads, stores = "read_keys" in inputs, "store_keys" in inputs

    @pl.when((i == 0) & (j == 0) & (slab == 0))
    def _():
        for name in ("d_gain", "d_read_keys", "d_store_keys"):
            if name in outputs:
                outputs[name][...] = jnp.zeros_like(outputs[name])

    if reads:
        through_read = _read_backward(call, inputs, outputs, scratch, first, exists)
    if stores:
        data = _aligned(inputs["data"], scratch.get("data"))
        keys = store_rows(call, inputs["store_keys"])

    def store_gradients(v, _):
        parts = [_values(inputs["d_residual"], v)] if "d_residual" in inputs else []
        d_stored = sum(parts + ([through_read(v)] if reads else []))
        if reads:
            _put(outputs["d_residual"], v, d_stored)
        if not stores:
            return
        if exists is not None:
            d_stored = jnp.where(exists, d_stored, 0)
        d_stored = d_stored.astype(s.data_dtype)
        _put(outputs["d_data"], v, dot(keys, d_stored))
        outputs["d_store_keys"][0] += dot_columns(data[0, v], d_stored)

    _loop(blocks.slab, store_gradients, None, blocks.read_unroll)

    if "rebuilt" not in outputs:
        return
    columns = store_columns(call, inputs["store_keys"])

    def undo_write(v, _):
        x = _values(inputs["residual"], v, jnp.int32 if call.integer else jnp.float32)
        # The cast to int16 removes the offset `_ROUND_BITS`, whose low 16 bits are 0.
        _put(outputs["rebuilt"], v, x - _written(call, columns, data, v))

    _loop(blocks.slab, undo_write, None, blocks.store_unroll)
    if "read_keys_again" in inputs:
        again, of_again = (_of_reread(refs) for refs in (inputs, scratch))
        read = ReadKeys(call, again, of_again, first)
        _reread(again["statistics"], read, outputs["rebuilt"], outputs["retrieved"], 0)


def _of_reread(refs):
    return {k.removesuffix("_again"): ref for k, ref in refs.items() if k.endswith("_again")}


def _reread(statistics, keys: ReadKeys, residual, retrieved, first):
    """Read from a residual whose statistics are known.

    The retrieved vectors are written to `retrieved`, starting at index `first` along V.
    """
    call = keys.call
    mean, rstd = statistics[0, 0:1] / call.unit, statistics[0, 1:2]

    def read(v, _):
        product = dot(keys.folded(v), _operand(call, residual, v, mean))
        if call.centred and not call.shifted:
            product = product - mean * keys.sums(v)
        _put(retrieved, first + v, product * (rstd * call.unit))

    _loop(call.blocks.slab, read, None, call.blocks.read_unroll)


def _read_backward(call: KeyVectorKernelCall, inputs, outputs, scratch, first, exists):
    """Accumulate the gradients of read keys and gain, and prepare the residual's gradient.

    Returns:
      A function of an index v along V. It returns the rows of `dX - dX'` at v, which are the part
      of the residual's gradient that comes from the read.
    """
    keys = ReadKeys(call, inputs, scratch, first)
    s, blocks = call.sizes, call.blocks
    residual, d_scaled = inputs["residual"], scratch["d_scaled"]
    # Convert the mean to the scale of the stored values, which are fixed-point steps for int16.
    mean = inputs["statistics"][0, 0:1] / call.unit
    rstd = inputs["statistics"][0, 1:2]
    shift = mean if call.shifted else None
    as_it_is = exists is None and _is_operand(call, residual)

    if s.P_padded != s.P:
        d_scaled[...] = jnp.zeros_like(d_scaled)

    def scale(v, _):
        scaled = inputs["d_retrieved"][0, v].astype(jnp.float32) * rstd
        d_scaled[0, v, : s.P] = scaled.astype(d_scaled.dtype)

    _loop(blocks.slab, scale, None, blocks.read_unroll)

    def d_normalised(v):
        return dot_rows(keys.folded(v), d_scaled[0, v])

    def folded_and_sums(v, sums):
        dz = d_scaled[0, v]
        x = None if as_it_is else _shifted(call, residual, v, shift)
        d_folded = dot_columns(dz, _operand(call, residual, v, shift, exists, x))
        if call.centred and not call.shifted:
            # After this subtraction, d_folded is the sum of dz (x - mean) over tokens.
            d_folded = d_folded - jnp.sum(dz.astype(jnp.float32) * mean, axis=1, keepdims=True)
        keys.add_gradients(outputs, v, d_folded)
        if "means" in inputs:
            return sums
        a = d_normalised(v)
        if blocks.keep:
            scratch["a"][v] = a
        x = _shifted(call, residual, v, shift) if as_it_is else x
        return sums[0] + _fold(a), sums[1] + _fold(a * x)

    if "means" in inputs:
        _loop(blocks.slab, folded_and_sums, (), blocks.read_unroll)
        means = inputs["means"]
        mean_an = means[0, means.shape[1] - 1 :]
        mean_a = means[0, 0:1] * rstd if call.centred else None
    else:
        zero = jnp.zeros((8 if s.K % 8 == 0 else 1, blocks.tokens), jnp.float32)
        sums = _loop(blocks.slab, folded_and_sums, (zero, zero), blocks.read_unroll)
        mean_a, mean_ax = (jnp.sum(x, axis=0, keepdims=True) / (s.K * s.V) for x in sums)
        if call.centred and not call.shifted:
            mean_ax = mean_ax - mean * mean_a
        mean_an = mean_ax * call.unit

    slope = -(rstd * rstd * call.unit) * mean_an
    offset = -mean_a if call.centred else jnp.zeros_like(mean_an)
    # A float32 residual may have a large mean, which must be subtracted before multiplying to avoid
    # cancellation. An int16 residual's mean is at most 2^15 fixed-point steps, which is
    # small enough.
    less_mean = call.shifted and not call.integer
    if not less_mean:
        offset = offset - slope * mean

    def through_read(v):
        x = _values(residual, v)
        x = x - mean if less_mean else x
        a = scratch["a"][v] if blocks.keep else d_normalised(v)
        return a + (x * slope + offset)

    return through_read


# Writing to a token's residual, and computing its statistics ----------------------------------


def _written(call, keys, data, v):
    """Compute the write `sum_r w_r (x) y_r` at index v along V, in the scale of stored values.

    w are the store keys and y the data. For an int16 residual, the result is the sum rounded to an
    int32, plus an offset of `_ROUND_BITS`.
    """
    y = data[0, v]
    if not call.integer:
        return dot(keys, y)
    # Each matrix product covers 128 tokens, whatever the tile size. The backward pass may have a
    # different tile size, but must compute identical products to undo a write exactly.
    of_tokens = [y[:, t : t + LANES] for t in range(0, y.shape[1], LANES)]
    if y.dtype == jnp.bfloat16:
        return _low_bits(jnp.concatenate([dot(keys, part) for part in of_tokens], axis=1))
    # The compiler computes a float32 product as a sum of several bfloat16 products. If the tile has
    # only 128 tokens, the compiler would add `_ROUND` to the first of these products, so that every
    # partial sum would be rounded. Writing the addition as a subtraction prevents this.
    parts = [_ROUND - dot(-keys, part) for part in of_tokens]
    return jax.lax.bitcast_convert_type(jnp.concatenate(parts, axis=1), jnp.int32)


def _shift(call, residual, write):
    """Return a number near each token's mean, [1, tokens]: its mean over the entries at v = 0.

    The entries are those after the write. The number is rounded to an integer for an int16
    residual. It is 0 for rmsnorm.
    """
    x = _values(residual, 0)
    if not call.centred:
        return jnp.zeros((1, x.shape[1]), jnp.float32)
    mean = jnp.mean(x, axis=0, keepdims=True)
    if write is not None:
        keys, data = write
        of_keys = jnp.mean(keys.astype(jnp.float32), axis=0, keepdims=True)
        mean = mean + dot(of_keys, data[0, 0].astype(jnp.float32))
    return (_low_bits(mean) - _ROUND_BITS).astype(jnp.float32) if call.integer else mean


def _add_to_sums(sums, x):
    return sums[0] + _fold(x), sums[1] + _fold(x * x)


def _statistics(call, sums, shift):
    """Compute the statistics from sums of differences from `shift`, and of their squares.

    Returns:
      The mean, with the fixed-point scale removed; the mean of the operands of the matrix products,
      from which the shift is subtracted if `call.shifted`; and rstd.
    """
    count = call.sizes.K * call.sizes.V
    total, squares = sums[0] / count, sums[1] / count
    above = total if call.centred else jnp.zeros_like(total)
    spread = squares - above * above
    variance = jnp.maximum(spread, 0) * call.unit**2
    rstd = jax.lax.rsqrt(variance + call.epsilon)
    if call.integer:
        # A NaN fails both comparisons. The variance does not show a NaN, because on some chips the
        # maximum of NaN and a number is this number.
        valid = spread >= LEAST_STEPS**2 if call.scale else spread > -jnp.inf
        if len(sums) > 2:
            valid &= sums[2] == 0
        rstd = jnp.where(valid, rstd, jnp.nan)
    mean = shift + above
    return mean * call.unit, above if call.shifted else mean, rstd


def _is_operand(call, ref):
    return ref.dtype == jnp.bfloat16 and call.sizes.data_dtype == "bfloat16"


def _shifted(call, ref, v, shift):
    """Return the rows of a residual at index v along V, minus `shift` if `call.shifted`."""
    x = _values(ref, v)
    return x - shift if call.shifted else x


def _operand(call, ref, v, shift, exists=None, x=None):
    """Return the residual's rows at index v as a matrix operand: [K, tokens] in the data's dtype.

    Args:
      call, ref, v, shift: the arguments of `_shifted`.
      exists: a mask of the tokens that exist; the others are set to 0. None means that all tokens
        exist.
      x: the result of `_shifted`, if it is already computed.
    """
    if exists is None and _is_operand(call, ref):
        return ref[0, v]
    x = _shifted(call, ref, v, shift) if x is None else x
    return (x if exists is None else jnp.where(exists, x, 0)).astype(call.sizes.data_dtype)


# Loading and storing the rows at one index v along V ------------------------------------------


def _values(ref, v, dtype=jnp.float32):
    """Return the rows at index v of a block [1, V, rows, tokens], converted to a 32-bit dtype."""
    rows = ref[0, v]
    return (rows.astype(jnp.int32) if rows.dtype == jnp.int16 else rows).astype(dtype)


def _put(ref, v, value):
    """Write `value` to a block's rows at index v; additional rows of `value` are dropped.

    A float32 value is rounded if the block is int16.
    """
    if ref.dtype == jnp.int16 and value.dtype == jnp.float32:
        value = _low_bits(value)
    ref[0, v] = value[: ref.shape[2]].astype(ref.dtype)


def _low_bits(x):
    """Round x to int32 and add `_ROUND_BITS`, whose low 16 bits are 0; |x| must be below 2^22.

    For larger x and for NaN, the result minus `_ROUND_BITS` does not fit in int16, so it counts as
    an overflow. This is faster than a conversion to int32. The offset stays, because XLA would
    optimise away an addition of `_ROUND` that is followed by its subtraction.
    """
    return jax.lax.bitcast_convert_type(x + _ROUND, jnp.int32)


def _aligned(ref, padded):
    """Copy the block `ref` to the scratch buffer `padded`, with zeros in the additional rows.

    The buffer's number of rows is a multiple of the register tile's height. If `padded` is None,
    `ref` needs no padding and is returned.
    """
    if padded is None:
        return ref
    padded[...] = jnp.zeros_like(padded)
    for v in range(ref.shape[1]):
        padded[0, v, : ref.shape[2]] = ref[0, v]
    return padded


def _zero_tail(call, inputs, tail, core, j):
    """Zero the inputs beyond the last token, and return a mask of the tokens that exist.

    The memory beyond the last token has arbitrary values. Without zeroing, they would be included
    in sums over tokens. An input that shares its buffer with an output is not zeroed, because that
    would change the output.
    """
    last = j == tail.tile
    if tail.core is not None:
        last &= core == tail.core

    @pl.when(last)
    def _():
        for name in ("statistics", "data", "d_retrieved", "means"):
            if name in inputs:
                ref = inputs[name]
                shape = (*ref.shape[:-1], ref.shape[-1] - tail.tokens)
                ref[..., tail.tokens :] = jnp.zeros(shape, ref.dtype)

    tokens = call.blocks.tokens
    token = jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1)
    return token < jnp.where(last, tail.tokens, tokens)


def _fold(x):
    """Add the groups of 8 rows to each other, so that 8 rows of partial sums remain.

    This needs no sum across sublanes. If the number of rows is not a multiple of 8, all rows are
    summed to a single row.
    """
    if x.shape[0] % 8:
        return jnp.sum(x, axis=0, keepdims=True)
    return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0)


def _by_eight(x):
    """Split the rows into groups of 8, or of 1 if their number is not a multiple of 8."""
    rows = 1 if x.shape[0] % 8 else 8
    return [x[i : i + rows] for i in range(0, x.shape[0], rows)]


def _loop(count, body, carry, unroll):
    return jax.lax.fori_loop(0, count, body, carry, unroll=largest_divisor(count, unroll))
