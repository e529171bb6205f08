"""GPU kernels of the key-vector ops, in Pallas Triton, for compute capability 8.0 and above.

Each program processes a sequence of tokens, one at a time. It keeps a token's residual in registers
between the store and the read, so the residual is read and written only once. A residual that is
too large for registers is processed in chunks of rows along K. The program then loads each chunk a
second time for the read, usually from the cache. The parameters stay on chip. The costs for T
tokens, apart from the statistics, are:

    pass       FLOPs               elements moved to or from memory
    forward    2 T (R + P) K V     T (2 K V + R V + P V)
    backward   4 T (R + P) K V     T (3 K V + 2 R V + P V), and T K V more to rebuild the residual

The backward pass sums parameter gradients in each program's registers, and then sums over programs
in a fixed order. It uses no atomics, so results are bitwise reproducible. If a residual is too
large for registers, the backward pass reads the stored residual X' and its cotangent dX a second
time. It then moves 5 T K V elements of residuals and cotangents instead of 3 T K V. The backward
passes of a store alone and of a read alone are plain JAX.

Operands of matrix products have the data's dtype, and sums are float32: bfloat16 products use
tensor cores, and float32 products have full precision. Triton multiplies blocks whose sides are
powers of two and at least 16; other sizes are padded on chip.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, DTypeLike

from pallas_kernels import tuned
from pallas_kernels.arguments import Norm, read_slices
from pallas_kernels.call import gpu_call, is_power_of_2
from pallas_kernels.key_vector import xla
from pallas_kernels.key_vector.gpu import forward_name, is_plain, reread
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Gradients,
    Reread,
    SiteBackward,
    SiteOperands,
    SiteResults,
    Statistics,
)
from pallas_kernels.key_vector.triton_gpu_kernels import (
    Sizes,
    backward_kernel,
    backward_sums_kernel,
    backward_tokens_kernel,
    forward_kernel,
    padded,
)
from pallas_kernels.platform import UnsupportedImplementation
from pallas_kernels.triton import no_triton

# Maximum number of bytes of a token's padded data and retrieved vectors. Kernels up to this size
# were found to compile with 99 KiB of shared memory.
_MOST_BYTES = 128 * 1024
_DATA = (jnp.bfloat16, jnp.float32)
_RESIDUAL = (jnp.bfloat16, jnp.float32, jnp.int16)


class Blocks(NamedTuple):
    """The block sizes and launch parameters of a key-vector GPU kernel.

    Attributes:
      keys: the number of a residual's rows (along K) in a tile: a power of two, at least 16. If it
        is less than K, residuals are processed in chunks.
      warps: the number of warps (of 32 threads) per program.
      stages: the number of stages of the software pipeline for loads.
      programs: the number of programs in the grid. Each processes every `programs`-th token.
    """

    keys: int
    warps: int
    stages: int
    programs: int


def unsupported(
    op: str, operands: SiteOperands | SiteBackward, *others, dtype: DTypeLike | None = None
) -> str | None:
    """Return a one-line reason why the kernels do not support these operands, or None.

    `dtype` is the dtype of the vectors that a site without a store retrieves; None means a legal
    one.
    """
    site, *others = operands if isinstance(operands, SiteBackward) else (operands, *others)
    if why := no_triton():
        return why
    if is_plain(op, site):
        return None
    residual = site.residual
    for again in (x for x in others if isinstance(x, Reread)):
        read = SiteOperands(residual, gain=again.gain, read_keys=again.read_keys)
        if why := unsupported("forward", read):
            return why
    data = [site.data] * site.stores
    data += others[1:3] if op == "backward" else []
    if residual.dtype not in _RESIDUAL:
        return f"the residual is {residual.dtype}, not bfloat16, float32 or int16"
    for array in data:
        if array.dtype not in _DATA:
            return f"the data are {array.dtype}, not bfloat16 or float32"
    if dtype is not None and dtype not in _DATA:
        return f"retrieved vectors of {jnp.dtype(dtype)}, not bfloat16 or float32"
    if 0 in residual.shape:
        return f"the residual of shape {residual.shape} is empty"
    V = residual.shape[3]
    if V > 256:
        return f"vectors of {V} entries are longer than 256"
    counts = [keys.shape[0] for keys in (site.store_keys, site.read_keys) if keys is not None]
    for count in counts:
        if not 0 < count <= 256:
            return f"the number of key vectors is {count}, not 1 to 256"
    for array in data:
        # The number of bytes per element on chip. A float32 is split into three bfloat16 terms of 2
        # bytes each.
        width = 2 if array.dtype == jnp.bfloat16 else 6
        size = sum(map(padded, counts)) * padded(V) * width
        if size > _MOST_BYTES:
            return f"a token's vectors, padded, take {size} bytes on chip, more than {_MOST_BYTES}"
    return None


def wins(
    op: str, operands: SiteOperands | SiteBackward, *others, dtype: DTypeLike | None = None
) -> bool:
    """Return whether a table lists the op's kernel as the fastest for these operands.

    `dtype` is as in `unsupported`.
    """
    site = operands.site if isinstance(operands, SiteBackward) else operands
    if is_plain(op, site) or unsupported(op, operands, *others, dtype=dtype) is not None:
        return False
    B, N, K, V = site.residual.shape
    vectors = site.data.dtype if site.stores else dtype or site.residual.dtype
    key = {
        "K": K,
        "V": V,
        "R": site.store_keys.shape[0] if site.stores else 0,
        "P": site.read_keys.shape[0] if site.reads else 0,
        "dtype": jnp.dtype(vectors).name,
    }
    names = {"key_vector_backward" if op == "backward" else forward_name(site)}
    if site.residual.dtype == jnp.int16 and site.stores and site.reads:
        # Plain JAX adds in another order, and could not undo exactly what a kernel has written.
        names = {"key_vector_forward", "key_vector_backward"}
    return all(tuned.winner(KERNELS[name], key, B * N) == "triton" for name in names)


def default_blocks(
    kernel: str, *, K: int, V: int, R: int, P: int, dtype: DTypeLike, tokens: int
) -> Blocks:
    """Return block sizes that compile without register spills, by a fixed rule.

    A thread of a forward kernel keeps 32 elements of a tile in registers. A thread of a backward
    kernel keeps only 16, because it also keeps sums and cotangents. A forward grid has up to 1056
    programs, several for each of a GPU's up to 150 multiprocessors. A backward grid has up to 264
    programs, because each writes its own sums of parameter gradients to memory.
    """
    columns, narrow = padded(V), jnp.dtype(dtype) == jnp.bfloat16
    backward_ = kernel.startswith("key_vector_backward")
    # The maximum number of elements in a tile. It is smaller for float32, which needs three times
    # as many registers for the operands of tensor cores.
    largest, wide = (4096 if narrow else 1024), columns
    if kernel == "key_vector_backward_sums":
        largest, wide = largest // 2, columns + padded(R) + padded(P)
    keys = max(16, min(padded(K), pl.next_power_of_2(largest // wide + 1) // 2))
    warps = 4 if narrow and not backward_ else 8
    # The next token's vectors are prefetched if the vectors of two tokens fit in shared memory.
    vectors = (padded(R) + padded(P)) * columns * (2 if narrow else 6)
    stages = 2 if vectors <= 80 * 1024 else 1
    return Blocks(keys, warps, stages, min(264 if backward_ else 1056, tokens))


# Calling the kernels ---------------------------------------------------------------------------


def forward(
    site: SiteOperands,
    statistics: Statistics | None = None,
    empty: Bool[Array, ""] | bool = False,
    *,
    norm: Norm = "rmsnorm",
    epsilon: int | float = 0.0,
    dtype: DTypeLike | None = None,
    scale: bool = True,
    in_place: bool = True,
    fraction_bits: int = FRACTION_BITS,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> SiteResults:
    """Write to a residual matrix, normalise it and read from it, as `interface` defines.

    Statistics that are passed in are not used, because this kernel computes them in almost no time.

    Raises:
      UnsupportedImplementation: a read without a store has a `dtype` other than bfloat16 or
        float32.
    """
    if not site.stores and dtype not in _DATA:
        raise UnsupportedImplementation(
            f"dtype={dtype} is not supported for a read without a store; legal: bfloat16 or float32"
        )
    residual, store_keys, data, gain, read_keys = read_slices(site)
    if empty is not False:
        residual = jnp.where(empty, 0, residual)
    dtype = data.dtype if dtype is None else jnp.dtype(dtype)
    sizes = Sizes.of(site, dtype, norm, fraction_bits)
    T, K, V = sizes.T, sizes.K, sizes.V
    inputs = {"residual": residual.reshape(T, K, V)}
    outputs = {}
    if site.stores:
        inputs |= {"store_keys": store_keys.astype(dtype), "data": data.reshape(T, sizes.R, V)}
        outputs["stored"] = jax.ShapeDtypeStruct((T, K, V), residual.dtype)
    if site.reads:
        inputs |= {"gain": gain, "read_keys": read_keys.astype(dtype)}
        outputs["retrieved"] = jax.ShapeDtypeStruct((T, sizes.P, V), dtype)
        outputs["mean"] = outputs["rstd"] = jax.ShapeDtypeStruct((T,), jnp.float32)
    name = forward_name(site)
    blocks = blocks or _blocks_of(sizes, name, residual.dtype)
    kernel = functools.partial(forward_kernel, sizes, blocks, float(epsilon), scale)
    flops = 2 * T * (sizes.R + sizes.P) * K * V
    out = _run(name, kernel, inputs, outputs, blocks, flops, interpret=interpret)
    tokens = residual.shape[:2]
    stored = out["stored"].reshape(residual.shape) if site.stores else None
    if not site.reads:
        return SiteResults(stored)
    both = (out[name].reshape(tokens) for name in ("mean", "rstd"))
    found = Statistics.of(*both) if statistics is None else None
    return SiteResults(stored, out["retrieved"].reshape(*tokens, sizes.P, V), found)


def backward(
    operands: SiteBackward,
    *,
    norm: Norm = "rmsnorm",
    rebuild: bool = False,
    fraction_bits: int = FRACTION_BITS,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Gradients:
    """Return the cotangents of a write and a read, as `interface` defines.

    The backward pass of a store alone or a read alone is plain JAX. The read `again` from the
    rebuilt residual runs as a separate kernel.
    """
    if is_plain("backward", operands.site):
        return xla.backward(operands, norm=norm, fraction_bits=fraction_bits)
    site, statistics, d_residual, d_retrieved, means, again, *_ = read_slices(operands)
    residual, store_keys, data, gain, read_keys = site
    sizes = Sizes.of(site, data.dtype, norm, fraction_bits)
    name = "key_vector_backward"
    blocks = blocks or _blocks_of(sizes, name, residual.dtype)
    in_registers = (
        blocks.keys >= sizes.K and len(sizes.groups(sizes.R) + sizes.groups(sizes.P)) == 2
    )
    T, K, V = sizes.T, sizes.K, sizes.V
    inputs = {
        "stored": residual.reshape(T, K, V),
        "mean": statistics.mean.reshape(T),
        "rstd": statistics.rstd.reshape(T),
        "store_keys": store_keys.astype(data.dtype),
        "data": data.reshape(T, sizes.R, V),
        "gain": gain,
        "read_keys": read_keys.astype(data.dtype),
        "d_retrieved": d_retrieved.reshape(T, sizes.P, V).astype(data.dtype),
    }
    token_outputs = {
        "d_residual": jax.ShapeDtypeStruct((T, K, V), d_residual.dtype),
        "d_data": jax.ShapeDtypeStruct((T, sizes.R, V), data.dtype),
    }
    if rebuild:
        token_outputs["rebuilt"] = jax.ShapeDtypeStruct((T, K, V), residual.dtype)

    def sums(programs):
        shapes = {
            "d_store_keys": (programs, sizes.R, K),
            "d_gain": (programs, K, V),
            "d_read_keys": (programs, K, sizes.P),
        }
        return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}

    run = functools.partial(_run, interpret=interpret)
    inputs_and_cotangent = inputs | {"d_stored": d_residual.reshape(T, K, V)}
    if means is not None:
        both = {"mean_an": means.an} | ({"mean_a": means.a} if norm == "layernorm" else {})
        inputs_and_cotangent |= {k: mean.reshape(T) for k, mean in both.items()}
    flops = 2 * T * (sizes.R + sizes.P) * K * V
    if in_registers:
        kernel = functools.partial(backward_kernel, sizes, blocks)
        outputs = token_outputs | sums(blocks.programs)
        out = run(name, kernel, inputs_and_cotangent, outputs, blocks, 2 * flops)
    else:
        kernel = functools.partial(backward_tokens_kernel, sizes, blocks)
        out = run(name, kernel, inputs_and_cotangent, token_outputs, blocks, 2 * flops)
        name = "key_vector_backward_sums"
        sum_blocks = _blocks_of(sizes, name, residual.dtype)._replace(programs=min(T, 64))
        kernel = functools.partial(backward_sums_kernel, sizes, sum_blocks)
        inputs = {k: inputs[k] for k in inputs if k != "store_keys"}
        inputs["d_residual"] = out["d_residual"]
        outputs = sums(sum_blocks.programs)
        chunks = pl.cdiv(K, sum_blocks.keys)
        out |= run(name, kernel, inputs, outputs, sum_blocks, 2 * flops, chunks)
    rebuilt = out["rebuilt"].reshape(residual.shape) if rebuild else None
    options = {"norm": norm, "dtype": data.dtype, "fraction_bits": fraction_bits}
    options["interpret"] = interpret
    return Gradients(
        residual=out["d_residual"].reshape(d_residual.shape),
        data=out["d_data"].reshape(data.shape),
        store_keys=jnp.sum(out["d_store_keys"], axis=0),
        gain=jnp.sum(out["d_gain"], axis=0),
        read_keys=jnp.sum(out["d_read_keys"], axis=0).T,
        rebuilt=rebuilt,
        retrieved=None if again is None else reread(forward, rebuilt, again, **options),
    )


def _run(name, kernel, inputs, outputs, blocks: Blocks, flops, *more_grid, interpret):
    return gpu_call(
        kernel,
        name,
        inputs,
        outputs,
        grid=(blocks.programs, *more_grid),
        warps=blocks.warps,
        stages=blocks.stages,
        flops=flops,
        transcendentals=next(iter(inputs.values())).shape[0],
        interpret=interpret,
    )


def _blocks_of(sizes: Sizes, kernel: str, residual: DTypeLike) -> Blocks:
    """Return the block sizes of a tuning table, or the default ones for writes in int16.

    A product of other block sizes may use another kind of tensor cores, which add in another order,
    so that the backward pass could not undo a write exactly. All default ones use the same kind.
    """
    key = {name: getattr(sizes, name) for name in "KVRP"} | {"dtype": sizes.dtype.name}
    default = default_blocks(kernel, tokens=sizes.T, **key)
    fixed = residual == jnp.int16 and sizes.R > 0
    blocks = tuned.look_up(KERNELS[kernel], key, sizes.T, default, fixed=fixed)
    return blocks._replace(programs=min(blocks.programs, sizes.T))


def _refused(kernel: str, key: dict[str, tuned.Value], tokens: int, blocks: Blocks) -> str | None:
    if not (is_power_of_2(blocks.keys) and 16 <= blocks.keys <= padded(key["K"])):
        return f"tiles of {blocks.keys} keys (legal: powers of 2 from 16 to {padded(key['K'])})"
    if not is_power_of_2(blocks.warps) or blocks.warps > 32 or blocks.stages > 8:
        return (
            f"{blocks.warps} warps and {blocks.stages} stages (legal: a power of 2 up to 32, and "
            "at most 8)"
        )
    return None


KERNELS = tuned.register(
    "cuda",
    (
        "key_vector_store",
        "key_vector_read",
        "key_vector_forward",
        "key_vector_backward",
        "key_vector_backward_sums",
    ),
    Blocks,
    ("K", "V", "R", "P", "dtype"),
    _refused,
)
