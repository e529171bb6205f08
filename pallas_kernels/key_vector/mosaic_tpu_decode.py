"""A TPU kernel that computes `store_norm_retrieve` for a few tokens, for use in decoding.

The kernels of `mosaic_tpu` have tokens in the 128 lanes, so they would compute 128 tokens even if
there is only one. This kernel has V in the lanes, as in the model's layout [K, V]. It computes the
whole site (store, norm and read) while a token's matrix is in VMEM. The keys and gains of all
layers are passed as stacks, from which the kernel reads one layer's slice. If XLA sliced the
stacks, the copies would take as long as the kernel.

For T tokens with E bytes per entry, the kernel takes `2 T (R + P) K V` FLOPs and moves
`E T V (2 K + R + P)` bytes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import Norm
from pallas_kernels.call import LANES, largest_divisor, round_up, tpu_call
from pallas_kernels.key_vector.interface import SiteOperands
from pallas_kernels.products import dot, dot_rows
from pallas_kernels.target import target

# Maximum VMEM for the input and output matrices of a grid step, as an argument of
# `Target.vmem_part`.
LARGEST = 8
# Number of tokens per loop iteration. Several tokens hide each other's latency.
_TOGETHER = 8


@dataclasses.dataclass(frozen=True)
class _SiteDecodeCall:
    """The static parameters of the decoding kernel, constant during tracing.

    `rows` is the number of tokens per grid step.
    """

    norm: Norm
    epsilon: int | float
    size_major: tuple[bool, bool]
    rows: int


def unsupported(op: str, site: SiteOperands, layer: Int[Array, ""]) -> str | None:
    """Return a one-line reason why the kernel does not support these operands, or None."""
    if any(x.dtype not in (jnp.bfloat16, jnp.float32) for x in site):
        return "arrays that are neither bfloat16 nor float32"
    if _row_bytes(site.residual) > target().vmem_part(LARGEST):
        return f"a residual of shape {site.residual.shape[1:]} does not fit in VMEM"
    return None


def at_layer(
    site: SiteOperands,
    layer: Int[Array, ""],
    *,
    norm: Norm,
    epsilon: int | float,
    size_major: tuple[bool, bool] = (False, False),
    interpret: bool = False,
) -> tuple[Float[Array, "T K V"], Float[Array, "T P V"]]:
    """Compute `xla.at_layer` with the TPU kernel, and overwrite the residual.

    `xla.at_layer` computes a site (a store, a norm and a read) with one layer of stacked
    parameters.

    `size_major` is a pair of booleans, for the data and for the retrieved vectors. True means that
    the vectors are transposed in memory: [V, R] instead of [R, V], or [V, P] instead of [P, V]. The
    kernel transposes the vectors of a single token, because XLA would need more time for this than
    the whole kernel. XLA transposes the vectors of several tokens, because it copies them in either
    case.
    """
    size_major = size_major if len(site.residual) == 1 else (False, False)
    residual, store_keys, data, gain, read_keys = site
    T, K, V = residual.shape
    R, P = data.shape[1], read_keys.shape[1]
    rows = min(T, max(1, target().vmem_part(LARGEST) // _row_bytes(residual)))
    if rows > _TOGETHER:
        rows -= rows % _TOGETHER
    by_row = lambda *size: pl.BlockSpec((rows, *size), lambda i, layer: (i, 0, 0))
    of_data = (V, R) if size_major[0] else (R, V)
    of_read = (V, P) if size_major[1] else (P, V)
    of_layer = lambda x: (x, pl.BlockSpec((None, *x.shape[1:]), lambda i, layer: (layer[0], 0, 0)))
    out = tpu_call(
        functools.partial(_kernel, call=_SiteDecodeCall(norm, epsilon, size_major, rows)),
        "key_vector_decode",
        {
            "residual": (residual, by_row(K, V)),
            "data": (_transposed(data, size_major[0]), by_row(*of_data)),
            "store_keys": of_layer(store_keys),
            "gain": of_layer(gain),
            "read_keys": of_layer(read_keys),
        },
        {
            "residual": (residual, by_row(K, V)),
            "retrieved": (jax.ShapeDtypeStruct((T, *of_read), data.dtype), by_row(*of_read)),
        },
        {},
        grid=(-(-T // rows),),
        semantics=("parallel",),
        flops=2 * T * K * V * (R + P),
        moved=2 * residual.nbytes + (R + P) * data.nbytes // R,
        aliased={"residual": "residual"},
        prefetch={"layer": layer.reshape(1)},
        interpret=interpret,
    )
    return out["residual"], _transposed(out["retrieved"], size_major[1])


def _kernel(inputs, outputs, scratch, *, call: _SiteDecodeCall):
    dtype = outputs["retrieved"].dtype
    store_keys = inputs["store_keys"][...].astype(dtype)
    gain = inputs["gain"][...].astype(jnp.float32)
    read_keys = inputs["read_keys"][...].astype(dtype)

    def mean(x):
        return jnp.mean(x, axis=(-2, -1), keepdims=True)

    def run(row):
        data = _transposed(inputs["data"][row], call.size_major[0])
        x = inputs["residual"][row].astype(jnp.float32) + dot_rows(store_keys, data)
        x = x.astype(outputs["residual"].dtype)
        outputs["residual"][row] = x
        x = x.astype(jnp.float32)
        if call.norm == "layernorm":
            x = x - mean(x)
        x = x * jax.lax.rsqrt(mean(jnp.square(x)) + call.epsilon)
        retrieved = dot(read_keys, (x * gain).astype(dtype))
        outputs["retrieved"][row] = _transposed(retrieved.astype(dtype), call.size_major[1])

    together = largest_divisor(call.rows, _TOGETHER)

    def group(i, _):
        for row in range(together):
            run(i * together + row)

    if call.rows == together:
        group(0, None)
    else:
        jax.lax.fori_loop(0, call.rows // together, group, None)


def _transposed(x, size_major: bool):
    return jnp.swapaxes(x, -1, -2) if size_major else x


def _row_bytes(residual) -> int:
    K, V = residual.shape[1:]
    return 4 * K * round_up(V, LANES) * residual.dtype.itemsize
