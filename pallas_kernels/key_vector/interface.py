"""What every implementation of the key-vector ops gives and takes.

An implementation is a module with these functions over arrays with exactly two token axes, a batch
B and a sequence N; the public ops reshape to that, choose, and differentiate:

    store(residual, store_keys, data, *, fraction_bits, in_place) -> residual'
    norm_retrieve(residual, gain, read_keys, *, norm, epsilon, dtype, scale=True, fraction_bits)
        -> (retrieved, Statistics)
    store_norm_retrieve(residual, store_keys, data, gain, read_keys, *, norm, epsilon, scale=True,
                        fraction_bits, in_place) -> (residual', retrieved, Statistics)
    backward(residual', statistics, store_keys, data, gain, read_keys, d_residual', d_retrieved,
             means=None, *, norm, rebuild, fraction_bits) -> Gradients
    read_backward(residual, statistics, gain, read_keys, d_retrieved, means=None, *, norm)
        -> (d_residual, d_gain, d_read_keys)
    store_backward(d_stored, store_keys, data) -> (d_store_keys, d_data)

    residual [B, N, K, V]   store_keys [R, K]   data [B, N, R, V]
    gain [K, V]   read_keys [P, K]   retrieved [B, N, P, V]

A kernel may write the new residual over the old one (`in_place`); XLA does what is best.

Where these are a slice of longer keys: without `scale`, what is retrieved lacks the factor rstd,
and then sums of that are taken over slices; `backward` is given the statistics and the `Means` of
the whole, where else it takes the means itself.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments import Norm
from pallas_kernels.platform import UnsupportedImplementation

__all__ = [
    "FRACTION_BITS",
    "LEAST_STEPS",
    "Gradients",
    "Means",
    "Norm",
    "Statistics",
    "UnsupportedImplementation",
]

# An int16 residual holds X * 2^fraction_bits rounded: with 9 in steps of 1/512, up to 64. So writes
# are sums of integers, which can be taken back without error.
FRACTION_BITS = 9
# A token's spread in steps, below which what it reads is mostly what rounding made of it.
LEAST_STEPS = 2.0


class Statistics(NamedTuple):
    """Of each token's stored residual, in its own units: all that the backward pass needs saved.

    `mean` is 0 for rmsnorm. `rstd` is `1 / sqrt(variance + epsilon)`, or NaN for a token whose
    int16 residual has left its range, or (with `scale`) spreads over less than LEAST_STEPS steps.
    """

    mean: Float[Array, "B N"]
    rstd: Float[Array, "B N"]


class Means(NamedTuple):
    """Over the entries of a token's residual, with `a = gain * r^T dz` and `n = norm(X)`.

    Of a, which is None for rmsnorm, and of a n: `dX = dX' + rstd (a - mean(a) - n mean(a n))`.
    """

    a: Float[Array, "B N"] | None
    an: Float[Array, "B N"]


class Gradients(NamedTuple):
    """Cotangents of the inputs of `store_norm_retrieve`.

    `residual` has the dtype of the cotangent given, `data` the data's, those of parameters are at
    least float32. `rebuilt` is the residual before the store, if asked for: exact for int16, up to
    rounding for floats.
    """

    residual: Float[Array, "B N K V"]
    data: Float[Array, "B N R V"]
    store_keys: Float[Array, "R K"]
    gain: Float[Array, "K V"]
    read_keys: Float[Array, "P K"]
    rebuilt: Shaped[Array, "B N K V"] | None
