"""GPU kernels of the key-vector ops, in Pallas through Triton, for compute capability 8.0 and up.

A program serves one token after another. It keeps a token's residual in registers between store and
read, so that the residual crosses memory once in and once out; one too big for that is handled in
chunks of keys, which it reads again from the cache right after writing them. The parameters stay on
chip. For T tokens

    forward    2 T (R + P) K V FLOPs       T (2 K V + R V + P V) elements
    backward   4 T (R + P) K V FLOPs       T (3 K V + 2 R V + P V) elements, one K V more to rebuild

and the statistics. The backward pass sums parameter gradients in each program's registers, and
those of the programs in a fixed order: no atomics, so the same bits every time. A residual too big
for that takes a second pass over X' and dX (5 K V in all). The backward passes of a store or a read
alone are plain JAX.

Products are of the data's dtype with float32 sums: bfloat16 on tensor cores, or float32 in full.
Triton multiplies blocks whose sides are powers of two, 16 at least: others are padded on chip.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float, Shaped

from pallas_kernels import tuned
from pallas_kernels.call import gpu_call, is_power_of_2
from pallas_kernels.key_vector.interface import (
    FRACTION_BITS,
    Gradients,
    Means,
    Norm,
    Statistics,
    UnsupportedImplementation,
)
from pallas_kernels.key_vector.triton_gpu_kernels import (
    Site,
    backward_kernel,
    backward_sums_kernel,
    backward_tokens_kernel,
    forward_kernel,
    padded,
)
from pallas_kernels.key_vector.xla import read_backward, store_backward
from pallas_kernels.triton import no_triton

__all__ = [
    "Blocks",
    "backward",
    "default_blocks",
    "norm_retrieve",
    "read_backward",
    "store",
    "store_backward",
    "store_norm_retrieve",
    "unsupported",
]

# Of a token's data and retrieved vectors: what still compiles with 99 KiB of shared memory.
_MOST_BYTES = 128 * 1024
_DATA = (jnp.bfloat16, jnp.float32)
# Of these there is no kernel.
_PLAIN = ("read_backward", "store_backward")
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


def unsupported(op: str, *args) -> str | None:
    """Why these kernels cannot serve the op named, called with `args`; None if they can."""
    if why := no_triton():
        return why
    if op in _PLAIN:
        return None
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
        size = sum(map(padded, counts)) * padded(V) * width
        if size > _MOST_BYTES:
            return f"a token's vectors, padded, take {size} bytes on chip, more than {_MOST_BYTES}"
    return None


def wins(op: str, *args) -> bool:
    """Whether a table says that the kernel of the op named is the fastest, called with `args`."""
    if op in _PLAIN or unsupported(op, *args) is not None:
        return False
    B, N, K, V = args[0].shape
    names = {"store": "store", "norm_retrieve": "read", "store_norm_retrieve": "forward"}
    stored = {"store": 1, "store_norm_retrieve": 1, "backward": 2}.get(op)
    read = {"norm_retrieve": 2, "store_norm_retrieve": 4, "backward": 5}.get(op)
    data = args[0] if op == "norm_retrieve" else args[stored + 1]
    key = {
        "K": K,
        "V": V,
        "R": 0 if stored is None else args[stored].shape[0],
        "P": 0 if read is None else args[read].shape[0],
        "dtype": data.dtype.name,
    }
    kernel = KERNELS[f"key_vector_{names.get(op, op)}"]
    return tuned.winner(kernel, key, B * N) == "triton"


def default_blocks(
    kernel: str, *, K: int, V: int, R: int, P: int, dtype: DTypeLike, tokens: int
) -> Blocks:
    """Blocks that compile without spilled registers, by rule.

    32 values of a tile a thread in the forward kernels, 16 in the backward ones, which hold sums
    and cotangents too. The grid fills every multiprocessor of today's largest GPUs (about 150)
    twice over and more; the backward one is smaller, as each program writes sums of its own.
    """
    columns, narrow = padded(V), jnp.dtype(dtype) == jnp.bfloat16
    backward_ = kernel.startswith("key_vector_backward")
    # Each thread's share of a tile; a float32 takes three registers' worth of tensor core operands.
    largest, wide = (4096 if narrow else 1024), columns
    if kernel == "key_vector_backward_sums":
        largest, wide = largest // 2, columns + padded(R) + padded(P)
    keys = max(16, min(padded(K), pl.next_power_of_2(largest // wide + 1) // 2))
    warps = 4 if narrow and not backward_ else 8
    # The next token's vectors are fetched ahead where shared memory can hold two tokens'.
    vectors = (padded(R) + padded(P)) * columns * (2 if narrow else 6)
    stages = 2 if vectors <= 80 * 1024 else 1
    return Blocks(keys, warps, stages, min(264 if backward_ else 1056, tokens))


# The ops ---------------------------------------------------------------------------------------


def store(
    residual: Shaped[Array, "B N K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "B N R V"],
    *,
    in_place: bool = True,
    fraction_bits: int = FRACTION_BITS,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Shaped[Array, "B N K V"]:
    """`X + sum_r w_r (x) y_r`, in the residual's dtype.

    Raises:
      UnsupportedImplementation: for what `unsupported` names.
    """
    _refuse("store", residual, store_keys, data)
    options = {"fraction_bits": fraction_bits, "blocks": blocks, "interpret": interpret}
    stored, *_ = _forward(residual, store_keys, data, **options)
    return stored


def norm_retrieve(
    residual: Shaped[Array, "B N K V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm,
    epsilon: int | float,
    dtype: DTypeLike,
    scale: bool = True,
    fraction_bits: int = FRACTION_BITS,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N P V"], Statistics]:
    """`r_p . (gain * norm(X))` in `dtype`, and the statistics of X; over rstd without `scale`.

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
        scale=scale,
        fraction_bits=fraction_bits,
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
    scale: bool = True,
    in_place: bool = True,
    fraction_bits: int = FRACTION_BITS,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[Shaped[Array, "B N K V"], Float[Array, "B N P V"], Statistics]:
    """`store`, then `norm_retrieve` of what it stored, in the data's dtype.

    Without `scale`, what is retrieved lacks the factor rstd.

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
        scale=scale,
        fraction_bits=fraction_bits,
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
    means: Means | None = None,
    *,
    norm: Norm,
    rebuild: bool = False,
    fraction_bits: int = FRACTION_BITS,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Gradients:
    """Cotangents of `store_norm_retrieve`, from the residual that it stored.

    With n = norm(X') and a = gain * r^T dz: `dX = dX' + rstd (a - mean(a) - n mean(a n))`, and
    `dy = w dX`, `dw = y dX^T`, `dr = dz (gain n)^T`, `dgain = (r^T dz) n`. The means are taken here
    unless `means` gives them.

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
    site = Site.of(residual, store_keys, read_keys, data.dtype, norm, fraction_bits)
    name = "key_vector_backward"
    blocks = blocks or _blocks_of(site, name)
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

    run = functools.partial(_run, interpret=interpret)
    inputs_and_cotangent = inputs | {"d_stored": d_residual.reshape(T, K, V)}
    if means is not None:
        given = {"mean_an": means.an} | ({"mean_a": means.a} if norm == "layernorm" else {})
        inputs_and_cotangent |= {k: mean.reshape(T) for k, mean in given.items()}
    flops = 2 * T * (site.R + site.P) * K * V
    if whole:
        kernel = functools.partial(backward_kernel, site, blocks)
        outputs = token_outputs | sums(blocks.programs)
        out = run(name, kernel, inputs_and_cotangent, outputs, blocks, 2 * flops)
    else:
        kernel = functools.partial(backward_tokens_kernel, site, blocks)
        out = run(name, kernel, inputs_and_cotangent, token_outputs, blocks, 2 * flops)
        name = "key_vector_backward_sums"
        sum_blocks = _blocks_of(site, name)._replace(programs=min(T, 64))
        kernel = functools.partial(backward_sums_kernel, site, sum_blocks)
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
    scale=True,
    fraction_bits,
    blocks,
    interpret,
):
    """Any of the three forward ops: with what to store, with what to read, or both."""
    dtype = dtype or data.dtype
    site = Site.of(residual, store_keys, read_keys, dtype, norm, fraction_bits)
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
    blocks = blocks or _blocks_of(site, name)
    kernel = functools.partial(forward_kernel, site, blocks, float(epsilon), scale)
    flops = 2 * T * (site.R + site.P) * K * V
    out = _run(name, kernel, inputs, outputs, blocks, flops, interpret=interpret)
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


def _blocks_of(site: Site, kernel: str) -> Blocks:
    key = {"K": site.K, "V": site.V, "R": site.R, "P": site.P, "dtype": jnp.dtype(site.dtype).name}
    default = default_blocks(kernel, tokens=site.T, **key)
    blocks = tuned.look_up(KERNELS[kernel], key, site.T, default)
    return blocks._replace(programs=min(blocks.programs, site.T))


def _refused(kernel: str, key: dict[str, tuned.Value], tokens: int, blocks: Blocks) -> str | None:
    if not (is_power_of_2(blocks.keys) and 16 <= blocks.keys <= padded(key["K"])):
        return f"tiles of {blocks.keys} keys, of {key['K']}"
    if not is_power_of_2(blocks.warps) or blocks.warps > 32 or blocks.stages > 8:
        return f"{blocks.warps} warps, {blocks.stages} stages"
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
