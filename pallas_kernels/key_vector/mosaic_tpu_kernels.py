"""The bodies of the TPU kernels: one tile of tokens each, in VMEM. See `mosaic_tpu`.

Every array is [rows.., tokens]: tokens in the lanes. Rows of several v are stacked, v-major.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import Norm
from pallas_kernels.call import LANES, largest_divisor, widen
from pallas_kernels.key_vector.block_sizes import BlockSizes, Sizes
from pallas_kernels.key_vector.interface import FRACTION_BITS, LEAST_STEPS
from pallas_kernels.products import dot, dot_columns

_LARGEST = 2**15 - 1
# Added to a float32 it leaves no bits for a fraction: the sum's low bits are the rounded integer.
_ROUND = 1.5 * 2.0**23
_ROUND_BITS = 0x4B400000


@dataclasses.dataclass(frozen=True)
class Call:
    """What is fixed while tracing."""

    sizes: Sizes
    blocks: BlockSizes
    norm: Norm
    epsilon: int | float
    interpret: bool
    scale: bool = True
    fraction_bits: int = FRACTION_BITS

    @property
    def integer(self) -> bool:
        return self.sizes.residual_dtype == "int16"

    @property
    def unit(self) -> float:
        """What 1 in the residual's array means."""
        return 2.0**-self.fraction_bits if self.integer else 1.0

    @property
    def centred(self) -> bool:
        return self.norm == "layernorm"

    @property
    def shifted(self) -> bool:
        """Whether products take the residual less a shift: it may not fit bfloat16 otherwise.

        A bfloat16 residual is an exact operand as it is, and its mean is taken off the result.
        """
        return self.centred and self.sizes.residual_dtype != "bfloat16"

    @property
    def slabs(self) -> int:
        return self.sizes.V // self.blocks.slab


def forward(inputs, outputs, scratch, *, call: Call):
    """Store if there are `store_keys`, then norm and read if there are `read_keys`.

    A read is with the `statistics` among the inputs, where they are.
    """
    s, blocks = call.sizes, call.blocks
    stores, reads = "store_keys" in inputs, "read_keys" in inputs
    residual = inputs["residual"]
    stored = outputs["residual"] if stores else residual
    slab = pl.program_id(2)
    if "statistics" in inputs:
        _read_again(inputs, residual, outputs["retrieved"], slab * blocks.slab, slab, call)
        return
    steps, keys, data = stores and call.integer, None, None
    if stores:
        keys, data = inputs["store_keys"], _aligned(inputs["data"], scratch.get("data"))

    def store_group(i, sums, shift):
        v = i * blocks.store_group
        x = _values(residual, v, blocks.store_group, jnp.int32 if steps else jnp.float32)
        if "empty" in inputs:
            x = jnp.where(inputs["empty"][0] != 0, 0, x)
        if stores:
            x = x + _written(call, keys, data, v)
        if steps:
            # Numbers are `_ROUND_BITS` more here: the bits of what is `_ROUND` more.
            value = jax.lax.bitcast_convert_type(x, jnp.float32)
            kept = jnp.clip(value, _ROUND - _LARGEST, _ROUND + _LARGEST)
            kept = jax.lax.bitcast_convert_type(kept, jnp.int32)
            _put(stored, v, blocks.store_group, kept)
            if not reads:
                return sums
            # Statistics are those before the clip, which hides an overflow.
            value = value - (shift + _ROUND)
            if "operand" in scratch:
                _put(scratch["operand"], v, blocks.store_group, value)
            changed = functools.reduce(jnp.bitwise_or, _by_eight(x ^ kept))
            return *_add_to_sums(sums, value), sums[2] | changed
        if stores:
            x = x.astype(stored.dtype)
            _put(stored, v, blocks.store_group, x)
            x = x.astype(jnp.float32)
        return _add_to_sums(sums, x - shift if call.centred else x) if reads else sums

    groups = blocks.slab // blocks.store_group
    if not reads:
        _loop(groups, lambda i, _: store_group(i, (), None), (), blocks.store_unroll)
        return

    if call.slabs > 1:

        @pl.when(slab == 0)
        def _():
            scratch["sums"][...] = jnp.zeros_like(scratch["sums"])
            scratch["shift"][...] = _shift(call, residual, keys, data)

        shift = scratch["shift"][...]
    else:
        shift = _shift(call, residual, keys, data)
    rows = (8 if s.K % 8 == 0 else 1, blocks.tokens)
    sums = (jnp.zeros(rows, jnp.float32),) * 2
    if steps:
        sums += (jnp.zeros(rows, jnp.int32),)
    sums = _loop(groups, lambda i, sums: store_group(i, sums, shift), sums, blocks.store_unroll)
    sums = [jnp.sum(x, axis=0, keepdims=True) for x in sums[:2]] + [
        jnp.max((x != 0).astype(jnp.float32), axis=0, keepdims=True) for x in sums[2:]
    ]
    if call.slabs > 1:
        previous = scratch["sums"]
        sums = [previous[0:1] + sums[0], previous[1:2] + sums[1]] + [
            jnp.maximum(previous[2:3], x) for x in sums[2:]
        ]
        for i, x in enumerate(sums):
            previous[i : i + 1] = x

    mean, above_operand, rstd = _statistics(call, sums, shift)
    read_keys, group = inputs["read_keys"], blocks.read_group
    groups = blocks.slab // group

    def product(i):
        if "operand" in scratch:
            return dot(read_keys[i], _rows(scratch["operand"], i * group, group))
        return dot(read_keys[i], _operand(call, stored, i * group, shift))

    def finish(i, product):
        if call.centred:
            product = product - above_operand * widen(inputs["read_key_sums"][i], blocks.tokens)
        factor = rstd * call.unit if call.scale else call.unit
        _put(outputs["retrieved"], i * group, group, product * factor)

    def write_statistics():
        outputs["statistics"][0, 0:1] = mean
        outputs["statistics"][0, 1:2] = rstd

    if call.slabs == 1:
        write_statistics()
        _loop(groups, lambda i, _: finish(i, product(i)), None, blocks.read_unroll)
        return

    def keep(i, _):
        scratch["products"][slab * groups + i] = product(i)

    _loop(groups, keep, None, blocks.read_unroll)

    @pl.when(slab == call.slabs - 1)
    def _():
        write_statistics()
        all_groups = s.V // group
        _loop(all_groups, lambda i, _: finish(i, scratch["products"][i]), None, blocks.read_unroll)


class Tail(NamedTuple):
    """Of the last tile along N: how many tokens exist, and where it is; core None is every core."""

    tokens: int
    core: int | None
    tile: int


def backward(inputs, outputs, scratch, *, call: Call, tail: Tail | None):
    """All cotangents, from the residual as stored; of one half, if only its keys are given.

    With a = G^T dz, rstd folded into dz, and n = norm(X):
    `dX = dX' + a - mean(a) - rstd n mean(a n)`. The two means need all of a token first: they are
    given as `means`, without rstd, or a first pass over VMEM takes them, and keeps a if there is
    room.

    `tail` is None where every tile is full.
    """
    s, blocks = call.sizes, call.blocks
    group, groups = blocks.read_group, blocks.slab // blocks.read_group
    core, slab, i, j = (pl.program_id(axis) for axis in range(4))
    first_tile = (i == 0) & (j == 0)
    exists = None if tail is None else _zero_tail(call, inputs, tail, core, j)
    reads, stores = "read_keys" in inputs, "store_keys_rows" in inputs

    if reads:

        @pl.when(first_tile)
        def _():
            outputs["d_read_keys"][...] = jnp.zeros_like(outputs["d_read_keys"])

        through_read = _read_backward(call, inputs, outputs, scratch, exists)

    if stores:
        data = _aligned(inputs["data"], scratch.get("data"))

        @pl.when(first_tile & (slab == 0))
        def _():
            outputs["d_store_keys"][...] = jnp.zeros_like(outputs["d_store_keys"])

    def store_gradients(i, _):
        v = i * group
        parts = [_values(inputs["d_residual"], v, group)] if "d_residual" in inputs else []
        d_stored = sum(parts + ([through_read(i)] if reads else []))
        if reads:
            _put(outputs["d_residual"], v, group, d_stored)
        if not stores:
            return
        if exists is not None:
            d_stored = jnp.where(exists, d_stored, 0)
        d_stored = d_stored.astype(s.data_dtype)
        _put(outputs["d_data"], v, group, dot(inputs["store_keys_rows"][...], d_stored))
        outputs["d_store_keys"][0] += dot_columns(_rows(data, v, group), d_stored)

    _loop(groups, store_gradients, None, blocks.read_unroll)

    if "rebuilt" in outputs:
        residual = inputs["residual"]

        def take_back(i, _):
            v = i * blocks.store_group
            wide = jnp.int32 if call.integer else jnp.float32
            x = _values(residual, v, blocks.store_group, wide)
            # Of an int16 residual's `_ROUND_BITS` the low bits are 0.
            x = x - _written(call, inputs["store_keys"], data, v)
            _put(outputs["rebuilt"], v, blocks.store_group, x)

        _loop(blocks.slab // blocks.store_group, take_back, None, blocks.store_unroll)
        again = {k.removesuffix("_again"): ref for k, ref in inputs.items() if k.endswith("_again")}
        if again:
            _read_again(again, outputs["rebuilt"], outputs["retrieved"], 0, slab, call)


def _read_again(inputs, residual, retrieved, first, slab, call: Call):
    """A read of a residual of before, with the statistics of then, to the values from `first`."""
    group, groups = call.blocks.read_group, call.blocks.slab // call.blocks.read_group
    mean, rstd = inputs["statistics"][0, 0:1] / call.unit, inputs["statistics"][0, 1:2]

    def read(i, _):
        product = dot(inputs["read_keys"][i], _operand(call, residual, i * group, mean))
        if "read_key_sums" in inputs:
            sums = inputs["read_key_sums"][slab * groups + i]
            product = product - mean * widen(sums, call.blocks.tokens)
        _put(retrieved, first + i * group, group, product * (rstd * call.unit))

    _loop(groups, read, None, call.blocks.read_unroll)


def _read_backward(call: Call, inputs, outputs, scratch, exists):
    """Adds to the gradient of the read keys; what gives a group's `dX - dX'`."""
    s, blocks = call.sizes, call.blocks
    group, groups = blocks.read_group, blocks.slab // blocks.read_group
    residual, d_scaled = inputs["residual"], scratch["d_scaled"]
    # In the units of the residual's array.
    mean = inputs["statistics"][0, 0:1] / call.unit
    rstd = inputs["statistics"][0, 1:2]
    shift = mean if call.shifted else None
    as_it_is = exists is None and _is_operand(call, residual)

    if s.P_padded != s.P:
        d_scaled[...] = jnp.zeros_like(d_scaled)

    def scale(i, _):
        v = i * group
        for g in range(group):
            scaled = inputs["d_retrieved"][0, v + g].astype(jnp.float32) * rstd
            d_scaled[0, v + g, : s.P] = scaled.astype(d_scaled.dtype)

    _loop(groups, scale, None, blocks.read_unroll)

    def d_normalised(i):
        return dot(inputs["read_keys"][i], _rows(d_scaled, i * group, group))

    def read_keys_and_sums(i, sums):
        v = i * group
        dz = _rows(d_scaled, v, group)
        # Made of the residual's numbers, the operand and these are worked out once.
        x = None if as_it_is else _shifted(call, residual, v, shift)
        d_keys = dot_columns(dz, _operand(call, residual, v, shift, exists, x))
        if call.centred and not call.shifted:
            # sum_tokens dz (x - mean)
            d_keys = d_keys - jnp.sum(dz.astype(jnp.float32) * mean, axis=1, keepdims=True)
        outputs["d_read_keys"][0, i] += d_keys
        if "means" in inputs:
            return sums
        a = d_normalised(i)
        if blocks.keep:
            scratch["a"][i] = a
        x = _shifted(call, residual, v, shift) if as_it_is else x
        return sums[0] + _fold(a), sums[1] + _fold(a * x)

    if "means" in inputs:
        _loop(groups, read_keys_and_sums, (), blocks.read_unroll)
        means = inputs["means"]
        mean_an = means[0, means.shape[1] - 1 :]
        mean_a = means[0, 0:1] * rstd if call.centred else None
    else:
        zero = jnp.zeros((8 if s.K % 8 == 0 else 1, blocks.tokens), jnp.float32)
        sums = _loop(groups, read_keys_and_sums, (zero, zero), blocks.read_unroll)
        mean_a, mean_ax = (jnp.sum(x, axis=0, keepdims=True) / (s.K * s.V) for x in sums)
        if call.centred and not call.shifted:
            mean_ax = mean_ax - mean * mean_a
        mean_an = mean_ax * call.unit

    slope = -(rstd * rstd * call.unit) * mean_an
    offset = -mean_a if call.centred else jnp.zeros_like(mean_an)
    # Of float32 numbers the mean may be so large that only they less it are exact; of steps, 2^15
    # of them, it is not.
    less_mean = call.shifted and not call.integer
    if not less_mean:
        offset = offset - slope * mean

    def through_read(i):
        x = _values(residual, i * group, group)
        x = x - mean if less_mean else x
        a = scratch["a"][i] if blocks.keep else d_normalised(i)
        return a + (x * slope + offset)

    return through_read


# What a token's residual was given, and its statistics --------------------------------------


def _written(call, keys, data, v):
    """`sum_r w_r (x) y_r` in the residual's units.

    For an int16 residual rounded, as int32 and `_ROUND_BITS` more.
    """
    y = _rows(data, v, call.blocks.store_group)
    if not call.integer:
        return dot(keys[...], y)
    # 128 tokens at a time whatever the tile is: taken back, it has to be the same product.
    parts = [dot(keys[...], y[:, t : t + LANES]) for t in range(0, y.shape[1], LANES)]
    return _low_bits(jnp.concatenate(parts, axis=1))


def _shift(call, residual, keys, data):
    """Near the mean, of each token: the mean of v = 0 as stored. [1, tokens]

    Of an int16 residual a whole number.
    """
    x = _values(residual, 0, 1)
    if not call.centred:
        return jnp.zeros((1, x.shape[1]), jnp.float32)
    if keys is not None:
        K, R = call.sizes.K, call.sizes.R_padded
        first = keys[:K, :R] if keys.shape != (K, R) else keys[...]
        x = x + dot(first, data[0, 0])
    mean = jnp.mean(x, axis=0, keepdims=True)
    return (_low_bits(mean) - _ROUND_BITS).astype(jnp.float32) if call.integer else mean


def _add_to_sums(sums, x):
    return sums[0] + _fold(x), sums[1] + _fold(x * x)


def _statistics(call, sums, shift):
    """Mean and rstd in the residual's own numbers, and the mean less what an operand lacks."""
    count = call.sizes.K * call.sizes.V
    total, squares = sums[0] / count, sums[1] / count
    above = total if call.centred else jnp.zeros_like(total)
    variance = jnp.maximum(squares - above * above, 0) * call.unit**2
    rstd = jax.lax.rsqrt(variance + call.epsilon)
    if call.integer:
        # A NaN fails the comparison too.
        held = variance >= (LEAST_STEPS * call.unit) ** 2 if call.scale else variance >= 0
        if len(sums) > 2:
            held &= sums[2] == 0
        rstd = jnp.where(held, rstd, jnp.nan)
    mean = shift + above
    return mean * call.unit, above if call.shifted else mean, rstd


def _is_operand(call, ref):
    return ref.dtype == jnp.bfloat16 and call.sizes.data_dtype == "bfloat16"


def _shifted(call, ref, v, shift):
    """Rows of `read_group` values of v, less the shift where products take them so."""
    x = _values(ref, v, call.blocks.read_group)
    return x - shift if call.shifted else x


def _operand(call, ref, v, shift, exists=None, x=None):
    """`_shifted`, or x, for a product: [group * K, tokens] in the data's dtype."""
    if exists is None and _is_operand(call, ref):
        return _rows(ref, v, call.blocks.read_group)
    x = _shifted(call, ref, v, shift) if x is None else x
    return (x if exists is None else jnp.where(exists, x, 0)).astype(call.sizes.data_dtype)


# Rows of several v ---------------------------------------------------------------------------


def _rows(ref, v, count):
    """[count * rows, tokens] of a block [1, V, rows, tokens]."""
    if count == 1:
        return ref[0, v]
    block = ref[0, pl.ds(v, count)]
    shape = (count * block.shape[1], block.shape[2])
    if block.shape[1] % (32 // block.dtype.itemsize):
        # Narrow tiles are only half full: whole ones are made in 32 bits.
        wide = jnp.float32 if block.dtype == jnp.bfloat16 else jnp.int32
        return block.astype(wide).reshape(shape).astype(block.dtype)
    return block.reshape(shape)


def _values(ref, v, count, dtype=jnp.float32):
    """`_rows` in 32 bits."""
    block = ref[0, v] if count == 1 else ref[0, pl.ds(v, count)]
    if block.dtype == jnp.int16:
        block = block.astype(jnp.int32)
    return block.astype(dtype).reshape(-1, block.shape[-1])


def _put(ref, v, count, value):
    """Rows to a block [1, V, rows, tokens], each v's to its first; whole numbers to int16."""
    rows = ref.shape[2]
    value = value.reshape(count, -1, value.shape[1])
    if ref.dtype == jnp.int16 and value.dtype == jnp.float32:
        value = _low_bits(value)
    value = value.astype(ref.dtype)
    if value.shape[1] == rows:
        ref[0, pl.ds(v, count)] = value
    else:
        for g in range(count):
            ref[0, v + g] = value[g, :rows]


def _low_bits(x):
    """`_ROUND_BITS` more than x rounded, of which the low 16 bits are 0, for |x| < 2^22.

    Beyond that, and for NaN, what is left after `_ROUND_BITS` are taken off is still no
    int16. A conversion takes longer, and XLA would drop an addition of `_ROUND` that is undone.
    """
    return jax.lax.bitcast_convert_type(x + _ROUND, jnp.int32)


def _aligned(ref, padded):
    """A block whose rows are whole tiles, the ones past the data zero."""
    if padded is None:
        return ref
    padded[...] = jnp.zeros_like(padded)
    for v in range(ref.shape[1]):
        padded[0, v, : ref.shape[2]] = ref[0, v]
    return padded


def _zero_tail(call, inputs, tail, core, j):
    """What lies past the last token is anything, and sums over tokens are taken: which exist.

    Not of inputs that are outputs too: those would be written.
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
    """The sum of rows, in 8: without crossing sublanes."""
    if x.shape[0] % 8:
        return jnp.sum(x, axis=0, keepdims=True)
    return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0)


def _by_eight(x):
    """Rows in eights, or one by one."""
    rows = 1 if x.shape[0] % 8 else 8
    return [x[i : i + rows] for i in range(0, x.shape[0], rows)]


def _loop(count, body, carry, unroll):
    return jax.lax.fori_loop(0, count, body, carry, unroll=largest_divisor(count, unroll))
