"""GPU kernels of the key-vector ops, in Pallas Mosaic GPU, for compute capabilities 9.0 and 10.0.

A program is one warpgroup. It processes a sequence of tokens, one at a time. Meanwhile the copy
engine fetches the next tokens to shared memory and writes the previous token's results. A residual
is read from memory once and written once. All products run on tensor cores, with operands in the
data's dtype, bfloat16, and sums in float32. The costs for T tokens, apart from the statistics, are:

    pass       FLOPs               elements moved to or from memory
    forward    2 T (R + P) K V     T (2 K V + R V + P V)
    backward   4 T (R + P) K V     T (3 K V + 2 R V + P V), and T K V more to rebuild the residual

The backward pass sums parameter gradients on chip in each program, and then sums over programs in a
fixed order. It uses no atomics, so results are bitwise reproducible. The backward passes of a store
alone and of a read alone are plain JAX.

A matrix instruction has 64 rows, so residuals of K < 64 rows are padded with zeros on chip.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike

from pallas_kernels.arguments import Norm, read_slices
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
from pallas_kernels.key_vector.mosaic_gpu_kernels import (
    ROWS,
    Sizes,
    backward_kernel,
    backward_scratch,
    forward_kernel,
    forward_scratch,
)
from pallas_kernels.mosaic_gpu import (
    mosaic_gpu_call,
    multiprocessors,
    no_mosaic_gpu,
    resident_programs,
)
from pallas_kernels.platform import UnsupportedImplementation

_MOST = 64  # The maximum number of key vectors per store or read.
_COLUMNS = (32, 64)


class Blocks(NamedTuple):
    """The launch parameters of a key-vector GPU kernel.

    Attributes:
      programs: the number of programs. Each processes every `programs`-th token.
      stages: the number of tokens whose operands a program keeps in shared memory at a time, at
        least 2.
    """

    programs: int
    stages: int


def unsupported(
    op: str, operands: SiteOperands | SiteBackward, *others, dtype: DTypeLike | None = None
) -> str | None:
    """Return a one-line reason why the kernels do not support these operands, or None.

    `dtype` is the dtype of the vectors that a site without a store retrieves; None means bfloat16.
    """
    whole = isinstance(operands, SiteBackward)
    site = operands.site if whole else operands
    if why := no_mosaic_gpu(90, 100):
        return why
    if is_plain(op, site):
        return None
    residual = site.residual
    if residual.dtype not in (jnp.bfloat16, jnp.int16):
        return f"the residual is {residual.dtype}, not bfloat16 or int16"
    arrays = [site.data] * site.stores
    arrays += [operands.d_residual, operands.d_retrieved] if whole else []
    for array in arrays:
        if array.dtype != jnp.bfloat16:
            return f"the data are {array.dtype}, not bfloat16"
    if dtype is not None and dtype != jnp.bfloat16:
        return f"retrieved vectors of {jnp.dtype(dtype)}, not bfloat16"
    if 0 in residual.shape:
        return f"the residual of shape {residual.shape} is empty"
    K, V = residual.shape[2:]
    if V not in _COLUMNS:
        return f"vectors of {V} entries (legal: {' or '.join(map(str, _COLUMNS))})"
    if K > ROWS or K % 8:
        return f"keys of {K} entries (legal: multiples of 8 up to {ROWS})"
    for keys in (site.store_keys, site.read_keys):
        if keys is not None and not _is_legal(count := keys.shape[0]):
            return f"the number of key vectors is {count} (legal: multiples of 8 up to {_MOST})"
    return None


def _is_legal(count: int) -> bool:
    return 0 < count <= _MOST and count % 8 == 0


def default_blocks(sizes: Sizes, kernel: str) -> Blocks:
    """Return launch parameters with which all programs run at once.

    All programs run at once if compiled with jax 0.11.2. With jax 0.10.2, the forward kernel for
    int16 uses more registers, so a multiprocessor cannot run three of its programs.
    """
    # A multiprocessor has enough registers for this many programs.
    most, scratch = (2, backward_scratch) if "backward" in kernel else (3, forward_scratch)
    resident = lambda stages: min(most, resident_programs(scratch(sizes, stages)))
    stages = 3 if resident(3) == resident(2) else 2
    return Blocks(min(multiprocessors() * resident(stages), sizes.T), stages)


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
      UnsupportedImplementation: a read without a store has a `dtype` other than bfloat16.
    """
    if not site.stores and dtype != jnp.bfloat16:
        raise UnsupportedImplementation(
            f"dtype={dtype} is not supported for a read without a store; legal: bfloat16"
        )
    residual, store_keys, data, gain, read_keys = read_slices(site)
    if empty is not False:
        residual = jnp.where(empty, 0, residual)
    sizes = Sizes.of(site, norm, fraction_bits)
    B, N, K, V, R, P = sizes[:6]
    T = sizes.T
    inputs = {"residual": residual.reshape(T, K, V)}
    outputs = {}
    if site.stores:
        keys = _padded(store_keys, sizes.padded(R), jnp.bfloat16)
        inputs |= {"store_keys": keys, "data": data.reshape(T, R, V)}
        outputs["stored"] = jax.ShapeDtypeStruct((T, K, V), residual.dtype)
    if site.reads:
        inputs |= {"gain": _gain(gain), "read_keys": _padded(read_keys, ROWS, jnp.bfloat16)}
        outputs["retrieved"] = jax.ShapeDtypeStruct((T, P, V), jnp.bfloat16)
        outputs["statistics"] = jax.ShapeDtypeStruct((B, 2, N), jnp.float32)
    name = forward_name(site)
    blocks = blocks or default_blocks(sizes, name)
    out = mosaic_gpu_call(
        functools.partial(forward_kernel, sizes, blocks.stages, float(epsilon), scale),
        name,
        inputs,
        outputs,
        forward_scratch(sizes, blocks.stages),
        programs=min(blocks.programs, T),
        interpret=interpret,
    )
    stored = out["stored"].reshape(residual.shape) if site.stores else None
    if not site.reads:
        return SiteResults(stored)
    found = Statistics(out["statistics"]) if statistics is None else None
    return SiteResults(stored, out["retrieved"].reshape(B, N, P, V), found)


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
    rebuilt residual is a separate kernel. It is plain JAX if the kernel does not support its number
    of vectors.
    """
    if is_plain("backward", operands.site):
        return xla.backward(operands, norm=norm, fraction_bits=fraction_bits)
    site, statistics, d_residual, d_retrieved, means, again, _ = read_slices(operands)
    residual, store_keys, data, gain, read_keys = site
    sizes = Sizes.of(site, norm, fraction_bits)
    B, N, K, V, R, P = sizes[:6]
    T = sizes.T
    inputs = {
        "stored": residual.reshape(T, K, V),
        "d_stored": d_residual.reshape(T, K, V),
        "statistics": statistics.both.astype(jnp.float32),
        "store_keys": _padded(store_keys, ROWS, jnp.bfloat16),
        "data": data.reshape(T, R, V),
        "gain": _gain(gain),
        "read_keys": _padded(read_keys, sizes.padded(P), jnp.bfloat16),
        "d_retrieved": d_retrieved.reshape(T, P, V),
    }
    if means is not None:
        inputs["mean_an"] = means.an.reshape(T)
        inputs |= {"mean_a": means.a.reshape(T)} if norm == "layernorm" else {}
    blocks = blocks or default_blocks(sizes, "key_vector_backward")
    programs = min(blocks.programs, T)
    dw, dr = sizes.sums["dw"], sizes.sums["dr"]
    outputs = {
        "d_residual": jax.ShapeDtypeStruct((T, K, V), d_residual.dtype),
        "d_data": jax.ShapeDtypeStruct((T, R, V), data.dtype),
        "sums": jax.ShapeDtypeStruct((programs, ROWS, V + dw + dr), jnp.float32),
    }
    if rebuild:
        outputs["rebuilt"] = jax.ShapeDtypeStruct((T, K, V), residual.dtype)
    out = mosaic_gpu_call(
        functools.partial(backward_kernel, sizes, blocks.stages, rebuild),
        "key_vector_backward",
        inputs,
        outputs,
        backward_scratch(sizes, blocks.stages),
        programs=programs,
        interpret=interpret,
    )
    d_gain, d_store_keys, d_read_keys = jnp.split(
        jnp.sum(out["sums"], axis=0)[:K], [V, V + dw], axis=1
    )
    rebuilt = out["rebuilt"].reshape(residual.shape) if rebuild else None
    options = {"norm": norm, "fraction_bits": fraction_bits, "interpret": interpret}
    return Gradients(
        residual=out["d_residual"].reshape(d_residual.shape),
        data=out["d_data"].reshape(data.shape),
        store_keys=d_store_keys.T[:R],
        gain=d_gain,
        read_keys=d_read_keys.T[:P],
        rebuilt=rebuilt,
        retrieved=None if again is None else _reread(rebuilt, again, **options),
    )


def _reread(rebuilt, again: Reread, *, norm, fraction_bits, interpret):
    """Read from the rebuilt residual, by the kernel if it supports the number of vectors."""
    options = {"norm": norm, "dtype": jnp.bfloat16, "fraction_bits": fraction_bits}
    if _is_legal(again.read_keys.shape[0]):
        return reread(forward, rebuilt, again, interpret=interpret, **options)
    site = SiteOperands(rebuilt, gain=again.gain, read_keys=again.read_keys)
    return xla.forward(site, again.statistics, **options).retrieved


def _padded(keys, rows: int, dtype):
    """Return `keys` [n, K] in `dtype`, padded with zeros to [rows, ROWS]."""
    n, K = keys.shape
    return jnp.pad(keys.astype(dtype), ((0, rows - n), (0, ROWS - K)))


def _gain(gain):
    return jnp.pad(gain.astype(jnp.float32), ((0, ROWS - gain.shape[0]), (0, 0)))
