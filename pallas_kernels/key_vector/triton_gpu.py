"""GPU kernels of the key-vector ops, in Pallas through Triton, for compute capability 8.0 and up.

A program serves one token after another. It keeps a token's residual in registers between store and
read, so that the residual crosses memory once in and once out; one too big for that is handled in
chunks of keys, which it reads again from the cache right after writing them. The parameters stay on
chip. For T tokens

    forward    2 T (R + P) K V FLOPs       T (2 K V + R V + P V) elements
    backward   4 T (R + P) K V FLOPs       T (3 K V + 2 R V + P V) elements, one K V more to rebuild

and the statistics. The backward pass sums parameter gradients in each program's registers, and
those of the programs in a fixed order: no atomics, so the same bits every time. A residual too big
for that takes a second pass over X' and dX (5 K V in all).

Products are of the data's dtype with float32 sums: bfloat16 on tensor cores, or float32 in full.
Triton multiplies blocks whose sides are powers of two, 16 at least: others are padded on chip.
"""

import functools
import math
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, DTypeLike, Float, Shaped

from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Gradients,
    Norm,
    Statistics,
    UnsupportedImplementation,
)

__all__ = [
    "TUNED",
    "Blocks",
    "backward",
    "default_blocks",
    "norm_retrieve",
    "store",
    "store_norm_retrieve",
    "unsupported",
]

_SCALE = 2.0**FRACTION_BITS
_LARGEST = 2**15 - 1
# Of a token's data and retrieved vectors: what still compiles with 99 KiB of shared memory.
_MOST_BYTES = 128 * 1024
_DATA = (jnp.bfloat16, jnp.float32)
_RESIDUAL = (jnp.bfloat16, jnp.float32, jnp.int16)


class Blocks(NamedTuple):
    """How a kernel is cut up.

    keys: rows of the residual in a tile, a power of two, 16 at least; fewer than K means chunks.
    warps: of 32 threads, in a program.
    stages: depth of the loads' pipeline.
    programs: in the grid; each serves every `programs`-th token.
    """

    keys: int
    warps: int
    stages: int
    programs: int


# Measured choices, looked up before the rule in `default_blocks`: by kernel name, K, V, R, P and
# the name of the data's dtype.
TUNED: dict[tuple[str, int, int, int, int, str], Blocks] = {}


def unsupported(op: str, *args) -> str | None:
    """Why these kernels cannot serve the op named, called with `args`; None if they can."""
    residual = args[0]
    keys = {
        "store": (1,),
        "norm_retrieve": (2,),
        "store_norm_retrieve": (1, 4),
        "backward": (2, 5),
    }[op]
    data = {"store": (2,), "store_norm_retrieve": (2,), "backward": (3, 6, 7)}.get(op, ())
    if residual.dtype not in _RESIDUAL:
        return f"the residual is {residual.dtype}, not bfloat16, float32 or int16"
    for array in (args[i] for i in data):
        if array.dtype not in _DATA:
            return f"the data are {array.dtype}, not bfloat16 or float32"
    if 0 in residual.shape:
        return f"the residual of shape {residual.shape} is empty"
    V = residual.shape[3]
    if V > 256:
        return f"vectors of {V} entries are longer than 256"
    counts = [args[i].shape[0] for i in keys]
    for count in counts:
        if not 0 < count <= 256:
            return f"{count} key vectors are not 1 to 256"
    for array in (args[i] for i in data):
        width = 2 if array.dtype == jnp.bfloat16 else 6  # A float32 is three bfloat16.
        size = sum(map(_padded, counts)) * _padded(V) * width
        if size > _MOST_BYTES:
            return f"a token's vectors, padded, take {size} bytes on chip, more than {_MOST_BYTES}"
    return None


def default_blocks(
    kernel: str, *, K: int, V: int, R: int, P: int, dtype: DTypeLike, tokens: int
) -> Blocks:
    """Blocks that compile without spilled registers, from `TUNED` or by rule.

    32 values of a tile a thread in the forward kernels, 16 in the backward ones, which hold sums
    and cotangents too. The grid fills every multiprocessor of today's largest GPUs (about 150)
    twice over and more; the backward one is smaller, as each program writes sums of its own.
    """
    tuned = TUNED.get((kernel, K, V, R, P, jnp.dtype(dtype).name))
    if tuned is not None:
        return tuned
    columns, narrow = _padded(V), jnp.dtype(dtype) == jnp.bfloat16
    backward_ = kernel.startswith("key_vector_backward")
    # Each thread's share of a tile; a float32 takes three registers' worth of tensor core operands.
    largest, wide = (4096 if narrow else 1024), columns
    if kernel == "key_vector_backward_sums":
        largest, wide = largest // 2, columns + _padded(R) + _padded(P)
    keys = max(16, min(_padded(K), pl.next_power_of_2(largest // wide + 1) // 2))
    warps = 4 if narrow and not backward_ else 8
    # The next token's vectors are fetched ahead where shared memory can hold two tokens'.
    vectors = (_padded(R) + _padded(P)) * columns * (2 if narrow else 6)
    stages = 2 if vectors <= 80 * 1024 else 1
    return Blocks(keys, warps, stages, min(264 if backward_ else 1056, tokens))


# The ops ---------------------------------------------------------------------------------------


def store(
    residual: Shaped[Array, "B N K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "B N R V"],
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Shaped[Array, "B N K V"]:
    """`X + sum_r w_r (x) y_r`, in the residual's dtype.

    Raises:
      UnsupportedImplementation: for what `unsupported` names.
    """
    _refuse("store", residual, store_keys, data)
    stored, *_ = _forward(residual, store_keys, data, blocks=blocks, interpret=interpret)
    return stored


def norm_retrieve(
    residual: Shaped[Array, "B N K V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm,
    epsilon: int | float,
    dtype: DTypeLike,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N P V"], Statistics]:
    """`r_p . (gain * norm(X))` in `dtype`, and the statistics of X.

    Raises:
      UnsupportedImplementation: for what `unsupported` names, and any `dtype` but bfloat16 and
        float32.
    """
    _refuse("norm_retrieve", residual, gain, read_keys)
    if dtype not in _DATA:
        raise UnsupportedImplementation(f"dtype={dtype} is not bfloat16 or float32")
    return _forward(
        residual,
        gain=gain,
        read_keys=read_keys,
        norm=norm,
        epsilon=epsilon,
        dtype=jnp.dtype(dtype),
        blocks=blocks,
        interpret=interpret,
    )


def store_norm_retrieve(
    residual: Shaped[Array, "B N K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "B N R V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm,
    epsilon: int | float,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[Shaped[Array, "B N K V"], Float[Array, "B N P V"], Statistics]:
    """`store`, then `norm_retrieve` of what it stored, in the data's dtype.

    Raises:
      UnsupportedImplementation: for what `unsupported` names.
    """
    _refuse("store_norm_retrieve", residual, store_keys, data, gain, read_keys)
    return _forward(
        residual,
        store_keys,
        data,
        gain,
        read_keys,
        norm=norm,
        epsilon=epsilon,
        blocks=blocks,
        interpret=interpret,
    )


def backward(
    residual: Shaped[Array, "B N K V"],
    statistics: Statistics,
    store_keys: Float[Array, "R K"],
    data: Float[Array, "B N R V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    d_residual: Float[Array, "B N K V"],
    d_retrieved: Float[Array, "B N P V"],
    *,
    norm: Norm,
    rebuild: bool = False,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Gradients:
    """Cotangents of `store_norm_retrieve`, from the residual that it stored.

    With n = norm(X') and a = gain * r^T dz: `dX = dX' + rstd (a - mean(a) - n mean(a n))`, and
    `dy = w dX`, `dw = y dX^T`, `dr = dz (gain n)^T`, `dgain = (r^T dz) n`.

    Raises:
      UnsupportedImplementation: for what `unsupported` names.
    """
    _refuse(
        "backward",
        residual,
        statistics,
        store_keys,
        data,
        gain,
        read_keys,
        d_residual,
        d_retrieved,
    )
    site = _Site.of(residual, store_keys, read_keys, data.dtype, norm)
    name = "key_vector_backward"
    blocks = blocks or site.blocks(name)
    whole = blocks.keys >= site.K and len(site.groups(site.R) + site.groups(site.P)) == 2
    T, K, V = site.T, site.K, site.V
    inputs = {
        "stored": residual.reshape(T, K, V),
        "mean": statistics.mean.reshape(T),
        "rstd": statistics.rstd.reshape(T),
        "store_keys": store_keys.astype(data.dtype),
        "data": data.reshape(T, site.R, V),
        "gain": gain,
        "read_keys": read_keys.astype(data.dtype),
        "d_retrieved": d_retrieved.reshape(T, site.P, V).astype(data.dtype),
    }
    token_outputs = {
        "d_residual": jax.ShapeDtypeStruct((T, K, V), d_residual.dtype),
        "d_data": jax.ShapeDtypeStruct((T, site.R, V), data.dtype),
    }
    if rebuild:
        token_outputs["rebuilt"] = jax.ShapeDtypeStruct((T, K, V), residual.dtype)

    def sums(programs):
        shapes = {
            "d_store_keys": (programs, site.R, K),
            "d_gain": (programs, K, V),
            "d_read_keys": (programs, K, site.P),
        }
        return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}

    run = functools.partial(_call, interpret=interpret)
    inputs_and_cotangent = inputs | {"d_stored": d_residual.reshape(T, K, V)}
    flops = 2 * T * (site.R + site.P) * K * V
    if whole:
        kernel = functools.partial(_backward_kernel, site, blocks)
        outputs = token_outputs | sums(blocks.programs)
        out = run(name, kernel, inputs_and_cotangent, outputs, blocks, 2 * flops)
    else:
        kernel = functools.partial(_backward_tokens_kernel, site, blocks)
        out = run(name, kernel, inputs_and_cotangent, token_outputs, blocks, 2 * flops)
        name = "key_vector_backward_sums"
        sum_blocks = site.blocks(name)._replace(programs=min(T, 64))
        kernel = functools.partial(_backward_sums_kernel, site, sum_blocks)
        inputs = {k: inputs[k] for k in inputs if k != "store_keys"}
        inputs["d_residual"] = out["d_residual"]
        outputs = sums(sum_blocks.programs)
        chunks = pl.cdiv(K, sum_blocks.keys)
        out |= run(name, kernel, inputs, outputs, sum_blocks, 2 * flops, chunks)
    return Gradients(
        residual=out["d_residual"].reshape(d_residual.shape),
        data=out["d_data"].reshape(data.shape),
        store_keys=jnp.sum(out["d_store_keys"], axis=0),
        gain=jnp.sum(out["d_gain"], axis=0),
        read_keys=jnp.sum(out["d_read_keys"], axis=0).T,
        rebuilt=out["rebuilt"].reshape(residual.shape) if rebuild else None,
    )


def _forward(
    residual,
    store_keys=None,
    data=None,
    gain=None,
    read_keys=None,
    *,
    norm="layernorm",
    epsilon=0.0,
    dtype=None,
    blocks,
    interpret,
):
    """Any of the three forward ops: with what to store, with what to read, or both."""
    dtype = dtype or data.dtype
    site = _Site.of(residual, store_keys, read_keys, dtype, norm)
    T, K, V = site.T, site.K, site.V
    inputs = {"residual": residual.reshape(T, K, V)}
    outputs = {}
    if site.R:
        inputs |= {"store_keys": store_keys.astype(dtype), "data": data.reshape(T, site.R, V)}
        outputs["stored"] = jax.ShapeDtypeStruct((T, K, V), residual.dtype)
    if site.P:
        inputs |= {"gain": gain, "read_keys": read_keys.astype(dtype)}
        outputs["retrieved"] = jax.ShapeDtypeStruct((T, site.P, V), dtype)
        outputs["mean"] = outputs["rstd"] = jax.ShapeDtypeStruct((T,), jnp.float32)
    name = {(True, True): "key_vector_forward", (True, False): "key_vector_store"}.get(
        (site.R > 0, site.P > 0), "key_vector_read"
    )
    blocks = blocks or site.blocks(name)
    kernel = functools.partial(_forward_kernel, site, blocks, float(epsilon))
    flops = 2 * T * (site.R + site.P) * K * V
    out = _call(name, kernel, inputs, outputs, blocks, flops, interpret=interpret)
    tokens, results = residual.shape[:2], ()
    if site.R:
        results += (out["stored"].reshape(residual.shape),)
    if site.P:
        results += (
            out["retrieved"].reshape(*tokens, site.P, V),
            Statistics(out["mean"].reshape(tokens), out["rstd"].reshape(tokens)),
        )
    return results


def _refuse(op, *args):
    why = unsupported(op, *args)
    if why is not None:
        raise UnsupportedImplementation(why)


def _call(name, kernel, inputs, outputs, blocks, flops, *more_grid, interpret):
    """`kernel(refs)` over the grid, with refs by name; the outputs, by name."""
    names = (*inputs, *outputs)
    # Programs are interpreted by one thread, which has nobody to wait for.
    barrier = (lambda: None) if interpret else plgpu.debug_barrier

    def body(*refs):
        kernel(SimpleNamespace(barrier=barrier, **dict(zip(names, refs, strict=True))))

    arrays = (*inputs.values(), *outputs.values())
    moved = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
    tokens = next(iter(inputs.values())).shape[0]
    out = pl.pallas_call(
        body,
        out_shape=list(outputs.values()),
        grid=(blocks.programs, *more_grid),
        in_specs=[pl.no_block_spec] * len(inputs),
        out_specs=[pl.no_block_spec] * len(outputs),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=tokens),
        interpret=interpret,
        name=name,
    )(*inputs.values())
    return dict(zip(outputs, out, strict=True))


# Tiles -----------------------------------------------------------------------------------------


class _Site(NamedTuple):
    """The sizes of a call; R or P is 0 where it stores or reads nothing."""

    T: int
    K: int
    V: int
    R: int
    P: int
    dtype: jnp.dtype
    norm: str

    @classmethod
    def of(cls, residual, store_keys, read_keys, dtype, norm):
        B, N, K, V = residual.shape
        count = lambda keys: 0 if keys is None else keys.shape[0]
        return cls(B * N, K, V, count(store_keys), count(read_keys), jnp.dtype(dtype), norm)

    def blocks(self, kernel) -> Blocks:
        return default_blocks(
            kernel, K=self.K, V=self.V, R=self.R, P=self.P, dtype=self.dtype, tokens=self.T
        )

    def groups(self, count) -> list[tuple[int, int]]:
        """(first, size) of groups of key vectors, few enough for one product."""
        most = (16384 // self.dtype.itemsize) // _padded(self.V)
        size = min(64, most, _padded(count))
        return [(first, size) for first in range(0, count, size)]


def _padded(size):
    """A side of a block that Triton can multiply."""
    return max(16, pl.next_power_of_2(size))


def _index(shape, rows, columns):
    """Indices of a block, (first, size) each way, in a matrix of `shape`; a mask if it sticks out.

    A block that starts at a multiple of its size stays within a shape that its size divides.
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
    """Block of the matrix `ref[*lead]`, or of its transpose; zero outside of it."""
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


def _dot(a, b, *, transpose_a=False, transpose_b=False):
    """`a b` with float32 sums, on tensor cores.

    A float32 is the sum of three bfloat16. The products of parts left out are as small as float32's
    own rounding; small ones are added first.
    """
    dimensions = (((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ()))
    multiply = lambda a, b: jax.lax.dot_general(
        a, b, dimensions, preferred_element_type=jnp.float32
    )
    if a.dtype == jnp.bfloat16:
        return multiply(a, b)
    a, b = _thirds(a), _thirds(b)
    order = (1, 1), (0, 2), (2, 0), (0, 1), (1, 0), (0, 0)
    return sum(multiply(a[i], b[j]) for i, j in order)


def _thirds(x):
    """Three bfloat16, of falling size, that sum to the float32 exactly."""
    parts = []
    for _ in range(3):
        # Cut off by its bits: a compiler may take a cast there and back for nothing.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def _each_token(site, body):
    """`carry = body(token, carry)` over this program's tokens."""
    program, programs = pl.program_id(0), pl.num_programs(0)

    def run(carry):
        count = (site.T - program + programs - 1) // programs
        return jax.lax.fori_loop(0, count, lambda i, c: body(program + i * programs, c), carry)

    return run


def _each_chunk(chunks, body, carry):
    """`carry = body(chunk, carry)`; without a loop where there is one chunk."""
    return body(0, carry) if chunks == 1 else jax.lax.fori_loop(0, chunks, body, carry)


def _values(block):
    """In float32, of what the residual's dtype holds."""
    values = block.astype(jnp.float32)
    return values / _SCALE if block.dtype == jnp.int16 else values


def _written(store_keys, data):
    """`sum_r w_r (x) y_r` of one chunk of keys.

    Forward and rebuild sum the same products in the same order, so that an int16 residual is
    rebuilt without error.
    """
    return sum(_dot(w, y) for w, y in zip(store_keys, data, strict=True))


def _steps(written):
    """Rounded to steps of an int16 residual, as int32; NaN becomes out of range."""
    # Adding 1.5 * 2^23 leaves no bits for a fraction, so it rounds, ties to even.
    limit, shifter = 2.0**21, 1.5 * 2.0**23
    steps = _SCALE * written
    outside = jnp.where(steps < 0, -limit, limit)
    steps = jnp.where(jnp.abs(steps) <= limit, steps, outside)
    return ((steps + shifter) - shifter).astype(jnp.int32)


# Forward ---------------------------------------------------------------------------------------


def _forward_kernel(site, blocks, epsilon, ref):
    columns = (0, _padded(site.V))
    chunks = pl.cdiv(site.K, blocks.keys)
    rows = lambda c: (c * blocks.keys, blocks.keys)
    stores, reads = site.groups(site.R), site.groups(site.P)
    load_store_keys = lambda c: [
        _load(ref.store_keys, (), rows(c), group, transposed=True) for group in stores
    ]
    load_read_keys = lambda c: [_load(ref.read_keys, (), group, rows(c)) for group in reads]
    load_gain = lambda c: _load(ref.gain, (), rows(c), columns).astype(jnp.float32)
    if chunks == 1:
        # Once, for all of the program's tokens.
        load_store_keys = _always(load_store_keys(0))
        if site.P:
            load_read_keys, load_gain = _always(load_read_keys(0)), _always(load_gain(0))

    def stored_chunk(t, c):
        """Values of the chunk as stored, and the largest magnitude there was to store."""
        x = _load(ref.residual, (t,), rows(c), columns)
        if not site.R:
            return _values(x), 0
        data = [_load(ref.data, (t,), group, columns) for group in stores]
        written = _written(load_store_keys(c), data)
        largest = 0
        if x.dtype == jnp.int16:
            total = x.astype(jnp.int32) + _steps(written)
            largest = jnp.max(jnp.abs(total))
            x = jnp.clip(total, -_LARGEST, _LARGEST).astype(jnp.int16)
        else:
            x = (x.astype(jnp.float32) + written).astype(x.dtype)
        _save(ref.stored, (t,), rows(c), columns, x)
        return _values(x), largest

    def token(t, _):
        kept = None

        def chunk(c, carry):
            nonlocal kept
            moments, largest = carry
            values, chunk_largest = stored_chunk(t, c)
            if chunks == 1:
                kept = values
            if site.P:
                moments = _add_moments(site, moments, values, c, rows(c))
            return moments, jnp.maximum(largest, chunk_largest)

        zero = jnp.float32(0)
        carry = (zero, zero, zero), jnp.int32(0)
        moments, largest = _each_chunk(chunks, chunk, carry)
        if not site.P:
            return
        mean, rstd = _mean_and_rstd(site, moments, epsilon)
        rstd = jnp.where(largest <= _LARGEST, rstd, jnp.nan)
        ref.mean[t], ref.rstd[t] = mean, rstd
        source = ref.stored if site.R else ref.residual
        if chunks > 1 and site.R:
            ref.barrier()  # Other threads of the program read what this one stored.

        def scaled(c):
            values = kept if chunks == 1 else _values(_load(source, (t,), rows(c), columns))
            return ((values - mean) * rstd * load_gain(c)).astype(site.dtype)

        if chunks == 1:
            whole = scaled(0)
            scaled = _always(whole)
        for g, group in enumerate(reads):
            add = lambda c, z, g=g: z + _dot(load_read_keys(c)[g], scaled(c))
            z = _each_chunk(chunks, add, jnp.zeros((group[1], columns[1]), jnp.float32))
            _save(ref.retrieved, (t,), group, columns, z)

    _each_token(site, token)(None)


def _always(value):
    return lambda _: value


def _add_moments(site, moments, values, c, rows):
    """A shift, and the sums of differences from it and of their squares, over chunks up to `c`.

    The shift is the first chunk's mean: E[x^2] - E[x]^2 would cancel where the mean is large, and
    about the mean of a part of the token it does not.
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


def _mean_and_rstd(site, moments, epsilon):
    shift, total, squares = moments
    size = site.K * site.V
    rest = total / size
    variance = jnp.maximum(squares / size - jnp.square(rest), 0)
    return shift + rest, jax.lax.rsqrt(variance + epsilon)


# Backward --------------------------------------------------------------------------------------


def _normalised(site, ref, t, rows, columns, mean, rstd):
    """`norm(X')` of a block, 0 outside of the residual, and the block as stored."""
    x = _load(ref.stored, (t,), rows, columns)
    n = (_values(x) - mean) * rstd
    _, _, inside = _index((site.K, site.V), rows, columns)
    return (n if inside is None else jnp.where(inside, n, 0)), x


def _d_stored(site, d_stored, a, n, rstd, totals):
    """`dX' + rstd (a - mean(a) - n mean(a n))`, from the sums of a and a n over the token."""
    total_a, total_an = totals
    size = site.K * site.V
    through_norm = a - n * (total_an / size)
    if site.norm == "layernorm":
        through_norm = through_norm - total_a / size
    return d_stored.astype(jnp.float32) + rstd * through_norm


def _taken_back(stored, written):
    if stored.dtype == jnp.int16:
        return (stored.astype(jnp.int32) - _steps(written)).astype(jnp.int16)
    return (stored.astype(jnp.float32) - written).astype(stored.dtype)


def _backward_kernel(site, blocks, ref):
    """All of the backward pass, with a whole token in registers."""
    rows, columns = (0, blocks.keys), (0, _padded(site.V))
    stores, reads = (0, _padded(site.R)), (0, _padded(site.P))
    store_keys = _load(ref.store_keys, (), stores, rows)
    read_keys = _load(ref.read_keys, (), reads, rows)
    # From the cache for every token, as there are no registers to keep it in.
    load_gain = lambda: _load(ref.gain, (), rows, columns).astype(jnp.float32)

    def token(t, sums):
        d_store_keys, d_gain, d_read_keys = sums
        mean, rstd = ref.mean[t], ref.rstd[t]
        n, x = _normalised(site, ref, t, rows, columns, mean, rstd)
        y = _load(ref.data, (t,), stores, columns)
        dz = _load(ref.d_retrieved, (t,), reads, columns)
        if hasattr(ref, "rebuilt"):
            written = _written([store_keys.T], [y])
            _save(ref.rebuilt, (t,), rows, columns, _taken_back(x, written))
        d_scaled = _dot(read_keys, dz, transpose_a=True)
        d_gain += d_scaled * n
        d_read_keys += _dot((n * load_gain()).astype(site.dtype), dz, transpose_b=True)
        a = d_scaled * load_gain()
        d_stored = _load(ref.d_stored, (t,), rows, columns)
        dx = _d_stored(site, d_stored, a, n, rstd, (jnp.sum(a), jnp.sum(a * n)))
        _save(ref.d_residual, (t,), rows, columns, dx)
        dx = dx.astype(site.dtype)
        _save(ref.d_data, (t,), stores, columns, _dot(store_keys, dx))
        d_store_keys += _dot(y, dx, transpose_b=True)
        return d_store_keys, d_gain, d_read_keys

    shapes = (stores[1], rows[1]), (rows[1], columns[1]), (rows[1], reads[1])
    sums = _each_token(site, token)(tuple(jnp.zeros(s, jnp.float32) for s in shapes))
    program = pl.program_id(0)
    _save(ref.d_store_keys, (program,), stores, rows, sums[0])
    _save(ref.d_gain, (program,), rows, columns, sums[1])
    _save(ref.d_read_keys, (program,), rows, reads, sums[2])


def _d_scaled(ref, t, reads, rows, columns):
    """`r^T dz` of a chunk of keys."""
    return sum(
        _dot(
            _load(ref.read_keys, (), rows, group, transposed=True),
            _load(ref.d_retrieved, (t,), group, columns),
        )
        for group in reads
    )


def _backward_tokens_kernel(site, blocks, ref):
    """What the backward pass gives for each token, in chunks of keys."""
    columns = (0, _padded(site.V))
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

        totals = _each_chunk(chunks, add, (jnp.float32(0), jnp.float32(0)))

        def write(c, _):
            a, n, x = terms(c)
            d_stored = _load(ref.d_stored, (t,), rows(c), columns)
            dx = _d_stored(site, d_stored, a, n, rstd, totals)
            _save(ref.d_residual, (t,), rows(c), columns, dx)
            if hasattr(ref, "rebuilt"):
                keys = [_load(ref.store_keys, (), rows(c), g, transposed=True) for g in stores]
                data = [_load(ref.data, (t,), group, columns) for group in stores]
                _save(ref.rebuilt, (t,), rows(c), columns, _taken_back(x, _written(keys, data)))

        _each_chunk(chunks, write, None)
        ref.barrier()  # Other threads of the program read what this one stored.
        for group in stores:

            def add(c, dy, group=group):
                dx = _load(ref.d_residual, (t,), rows(c), columns).astype(site.dtype)
                return dy + _dot(_load(ref.store_keys, (), group, rows(c)), dx)

            dy = jnp.zeros((group[1], columns[1]), jnp.float32)
            _save(ref.d_data, (t,), group, columns, _each_chunk(chunks, add, dy))

    _each_token(site, token)(None)


def _backward_sums_kernel(site, blocks, ref):
    """Sums over a program's tokens for one chunk of the parameters, from dX."""
    rows, columns = (pl.program_id(1) * blocks.keys, blocks.keys), (0, _padded(site.V))
    stores, reads = site.groups(site.R), site.groups(site.P)
    gain = _load(ref.gain, (), rows, columns).astype(jnp.float32)

    def token(t, sums):
        d_store_keys, d_gain, d_read_keys = sums
        n, _ = _normalised(site, ref, t, rows, columns, ref.mean[t], ref.rstd[t])
        scaled = (n * gain).astype(site.dtype)
        dx = _load(ref.d_residual, (t,), rows, columns).astype(site.dtype)
        d_store_keys = [
            d + _dot(_load(ref.data, (t,), group, columns), dx, transpose_b=True)
            for d, group in zip(d_store_keys, stores, strict=True)
        ]
        d_read_keys = [
            d + _dot(scaled, _load(ref.d_retrieved, (t,), group, columns), transpose_b=True)
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
