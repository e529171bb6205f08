"""Preparation of keys and the norm's gain as operands of the key-vector TPU kernels.

For each index v along V, a read multiplies by `G[v] = r * gain[:, v]`, rounded once to the data's
dtype, where r are the read keys. The kernels compute `G[v]` from r and the gain where it is used,
because the vector unit has time for this while the matrix units work. If XLA computed such arrays
before each kernel, this would take a tenth of the kernel's time.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels import operand
from pallas_kernels.arguments import StackSlice, read_slices
from pallas_kernels.call import Blocked
from pallas_kernels.key_vector.mosaic_tpu_call import KeyVectorKernelCall


def store_operand(
    call: KeyVectorKernelCall, store_keys: Array | StackSlice
) -> tuple[Array | StackSlice, pl.BlockSpec]:
    """Return the store keys as a kernel input [R, K]; R is padded to fill register tiles."""
    return operand.constant(_padded_rows(store_keys, call.sizes.R_padded))


def store_rows(call: KeyVectorKernelCall, store_keys):
    """Return the store keys [R, K] in the data's dtype, for use in matrix products."""
    return store_keys[...].astype(call.sizes.data_dtype)


def store_columns(call: KeyVectorKernelCall, store_keys):
    """Return the transposed store keys [K, R], for int16 divided by the fixed-point step."""
    columns = store_rows(call, store_keys).astype(jnp.float32).T / call.unit
    return columns.astype(call.sizes.data_dtype)


def read_operands(call: KeyVectorKernelCall, gain, read_keys):
    """Return the inputs and the scratch shapes that a kernel needs for a read."""
    s = call.sizes
    inputs = {
        "gain": operand.constant(_padded_rows(gain, s.K)),
        "read_keys": operand.constant(_padded_rows(read_keys, s.padded(read_keys.shape[0]))),
    }
    return inputs, {"gain_rows": pltpu.VMEM((s.V, s.K), jnp.float32)}


class ReadKeys:
    """The read keys and the gain in a kernel, for one slab (a range of indices along V).

    `first` is the first index of the slab.
    """

    def __init__(self, call: KeyVectorKernelCall, inputs, scratch, first):
        self.call, self.read_keys, self.gain = call, inputs["read_keys"], scratch["gain_rows"]
        self.first = first
        self.gain[...] = inputs["gain"][...].T

    def of_gain(self, v):
        """Return the gain [1, K] at index v of the slab."""
        return self.gain[pl.ds(self.first + v, 1)]

    def folded(self, v):
        """Return `G[v]` [P, K], the read keys times the gain, in the data's dtype.

        v is an index within the slab.
        """
        return (self.read_keys[...] * self.of_gain(v)).astype(self.call.sizes.data_dtype)

    def sums(self, v):
        """Return the sums over K of `G[v]`, the read keys times the gain at index v: [P, 1]."""
        return jnp.sum(self.folded(v).astype(jnp.float32), axis=1, keepdims=True)

    def add_gradients(self, outputs, v, d_folded):
        """Accumulate the gradients of the read keys r and of the gain from `d_folded`.

        `d_folded` is the gradient dG[v] of the read keys times the gain. The update is
        `dr += dG[v] * gain[:, v]` and `dgain[:, v] += sum_p dG[v] * r`, with dG[v] in units of X.
        """
        d = d_folded * self.call.unit
        outputs["d_read_keys"][0] += d * self.of_gain(v)
        d_gain = jnp.sum(d * self.read_keys[...], axis=0, keepdims=True)
        outputs["d_gain"][0, pl.ds(self.first + v, 1)] += d_gain


def gradient_outputs(call: KeyVectorKernelCall, cores: int) -> Blocked:
    """Return the kernel's outputs for the gradients of the gain and of the read keys.

    Each core writes its own sum. The gain's gradient is transposed: [cores, V, K].
    """
    s = call.sizes
    shapes = {"d_gain": (cores, s.V, s.K), "d_read_keys": (cores, s.P_padded, s.K)}
    return {
        name: (
            jax.ShapeDtypeStruct(shape, jnp.float32),
            pl.BlockSpec((1, *shape[1:]), lambda c, *_: (c, 0, 0)),
        )
        for name, shape in shapes.items()
    }


def read_gradients(call: KeyVectorKernelCall, out: Mapping[str, jax.Array]):
    """Return the gradients of the gain and of the read keys, each summed over the cores."""
    return jnp.sum(out["d_gain"], axis=0).T, jnp.sum(out["d_read_keys"], axis=0)[: call.sizes.P]


def _padded_rows(x: Array | StackSlice, rows: int) -> Array | StackSlice:
    """Return x in float32, padded with zeros to `rows` rows.

    If x already has that dtype and size, it is returned unchanged and may be a `StackSlice`.
    """
    if x.dtype == jnp.float32 and x.shape[0] == rows:
        return x
    x = read_slices(x).astype(jnp.float32)
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))
