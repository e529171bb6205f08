"""What every implementation of the key-vector ops gives and takes.

An implementation is a module with these functions over arrays with exactly two token axes, a batch
B and a sequence N; the public ops reshape to that, choose, and differentiate:

    forward(Site, Statistics | None = None, empty=False, *, norm, epsilon, dtype, scale=True,
            fraction_bits, in_place) -> Outcome
    backward(Backward, *, norm, rebuild, fraction_bits) -> Gradients
    unsupported(op, *operands) -> why these cannot be served, in a line, or None: asked first

The residual given to `backward` is the stored one. With n = norm(X') and a = gain * r^T dz:

    dX = dX' + rstd (a - mean(a) - n mean(a n))     dy = w dX         dw = sum y dX^T
    dgain = sum (r^T dz) n                          dr = sum dz (gain n)^T

With R stored and P retrieved vectors a site is both halves; without keys to store or to read with
it is the other half alone, and what the missing one would give, or needs, is None. Of a store alone
the backward pass needs no residual. Statistics are given to a read alone that had them before, and
need not be taken again; so is a read of what a backward pass rebuilds, `again`. What a site has
`retrieved` gives the means too.

A kernel may write the new residual over the old one (`in_place`); XLA does what is best. Where a
store alone is told that the old one is `empty`, a scalar, it counts as zeros whatever it holds.

Where these are a slice of longer keys: without `scale`, what is retrieved lacks the factor rstd,
and then sums of that are taken over slices; `backward` is given the statistics and the `Means` of
the whole, where else it takes the means itself.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments import Slot

# An int16 residual holds X * 2^fraction_bits rounded: with 9 in steps of 1/512, up to 64. So writes
# are sums of integers, which can be taken back without error.
FRACTION_BITS = 9
# A token's spread in steps, below which what it reads is mostly what rounding made of it.
LEAST_STEPS = 2.0


class Site(NamedTuple):
    """What is written to a residual, and what it is read with."""

    residual: Shaped[Array, "B N K V"] | None
    store_keys: Float[Array, "R K"] | Slot | None = None
    data: Float[Array, "B N R V"] | Slot | None = None
    gain: Float[Array, "K V"] | Slot | None = None
    read_keys: Float[Array, "P K"] | Slot | None = None

    @property
    def stores(self) -> bool:
        return self.store_keys is not None

    @property
    def reads(self) -> bool:
        return self.read_keys is not None


class Statistics(NamedTuple):
    """Of each token's stored residual, in its own units: all that the backward pass needs saved.

    `mean` is 0 for rmsnorm. `rstd` is `1 / sqrt(variance + epsilon)`, or NaN for a token whose
    int16 residual has left its range, or (with `scale`) spreads over less than LEAST_STEPS steps.
    Kernels write and read them side by side, so that is how they are kept.
    """

    both: Float[Array, "B 2 N"] | Slot

    @classmethod
    def of(cls, mean: Float[Array, "B N"], rstd: Float[Array, "B N"]) -> "Statistics":
        return cls(jnp.stack([mean, rstd], axis=1))

    @property
    def mean(self) -> Float[Array, "B N"]:
        return self.both[:, 0]

    @property
    def rstd(self) -> Float[Array, "B N"]:
        return self.both[:, 1]


class Outcome(NamedTuple):
    """The stored residual in its dtype; what was retrieved, in `dtype` or else the data's.

    And its statistics, unless they were given.
    """

    residual: Shaped[Array, "B N K V"] | None
    retrieved: Float[Array, "B N P V"] | None = None
    statistics: Statistics | None = None


class Means(NamedTuple):
    """Over the entries of a token's residual, with `a = gain * r^T dz` and `n = norm(X)`.

    Of a, which is None for rmsnorm, and of a n: `dX = dX' + rstd (a - mean(a) - n mean(a n))`.
    """

    a: Float[Array, "B N"] | None
    an: Float[Array, "B N"]


class Again(NamedTuple):
    """A read of the residual that a backward pass rebuilds, with the statistics that it had."""

    gain: Float[Array, "K V"] | Slot
    read_keys: Float[Array, "A K"] | Slot
    statistics: Statistics


class Backward(NamedTuple):
    """What a backward pass is given: see above of what is None, or may be.

    The site has the stored residual, of which the `statistics` are; `d_residual` is the cotangent
    of that residual. What was `retrieved` of it may serve for its means.
    """

    site: Site
    statistics: Statistics | None
    d_residual: Float[Array, "B N K V"] | None
    d_retrieved: Float[Array, "B N P V"] | None
    means: Means | None = None
    again: Again | None = None
    retrieved: Float[Array, "B N P V"] | None = None


class Gradients(NamedTuple):
    """Cotangents of a site.

    `residual` has the dtype of the cotangent given (of a read alone, of the residual), `data` the
    data's, those of parameters are at least float32. `rebuilt` is the residual before the store, if
    asked for: exact for int16, up to rounding for floats. `retrieved` is what it was read as
    `again`, in the data's dtype; of a slice of longer keys its share.
    """

    residual: Float[Array, "B N K V"]
    data: Float[Array, "B N R V"] | None
    store_keys: Float[Array, "R K"] | None
    gain: Float[Array, "K V"] | None
    read_keys: Float[Array, "P K"] | None
    rebuilt: Shaped[Array, "B N K V"] | None = None
    retrieved: Float[Array, "B N A V"] | None = None
