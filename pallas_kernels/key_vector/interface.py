"""The functions, operands and results of every implementation of the key-vector ops.

An implementation is a module with these functions over arrays with exactly two token axes, a batch
B and a sequence N. The public ops reshape to that, choose an implementation and differentiate:

    forward(Site, Statistics | None = None, empty=False, *, norm, epsilon, dtype, scale=True,
            fraction_bits, in_place) -> Outcome
    backward(Backward, *, norm, rebuild, fraction_bits) -> Gradients
    unsupported(op, *operands) -> why these cannot be served, in a line, or None: called first

The residual given to `backward` is the stored one. With n = norm(X') and a = gain * r^T dz:

    dX = dX' + rstd (a - mean(a) - n mean(a n))     dy = w dX         dw = sum y dX^T
    dgain = sum (r^T dz) n                          dr = sum dz (gain n)^T

A site with R stored and P retrieved vectors has two halves, a store and a read. Without keys to
store with, or without keys to read with, it is only the other half; operands and results of the
missing half are None. The backward pass of a store alone needs no residual. A read alone may be
given statistics from an earlier read, which are then not computed again; the read of a residual
that a backward pass rebuilds, `again`, has them too. The vectors that a site has `retrieved` also
give the means.

A kernel may write the new residual over the old one (`in_place`); XLA decides this itself. If a
store alone gets `empty`, a scalar that is true, the old residual counts as zeros whatever it holds.

If keys, gain and residual are a slice of longer keys, the read is done without `scale`: the
retrieved vectors then lack the factor rstd, and the caller sums them over slices. `backward` is
then given the statistics and the `Means` of the whole; otherwise it computes the means itself.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments import Slot

# An int16 residual holds X * 2^fraction_bits rounded: with 9 bits the step is 1/512 and the range
# 64. Writes are then sums of integers, which can be undone without error.
FRACTION_BITS = 9
# The least spread of a token, in steps. Below it, rounding dominates what the token reads.
LEAST_STEPS = 2.0


class Site(NamedTuple):
    """The residual of a site, the operands of its write and the operands of its read."""

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
    """Each token's statistics of the stored residual.

    A backward pass needs nothing else saved in addition to its operands. The numbers are in the
    units of X. `mean` is 0 for rmsnorm. `rstd` is `1 / sqrt(variance + epsilon)`,
    or NaN for a token whose int16 residual has left its range or (with `scale`) spreads over less
    than LEAST_STEPS steps. Both are one array because kernels write and read them together.
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
    """The results of a forward pass.

    Attributes:
      residual: the stored residual in its dtype.
      retrieved: the retrieved vectors, in `dtype` or else the data's dtype.
      statistics: the statistics of the residual, or None if they were given.
    """

    residual: Shaped[Array, "B N K V"] | None
    retrieved: Float[Array, "B N P V"] | None = None
    statistics: Statistics | None = None


class Means(NamedTuple):
    """Means over the entries of a token's residual, with `a = gain * r^T dz` and `n = norm(X)`.

    `a` is mean(a), or None for rmsnorm; `an` is mean(a n). They enter the gradient as
    `dX = dX' + rstd (a - mean(a) - n mean(a n))`.
    """

    a: Float[Array, "B N"] | None
    an: Float[Array, "B N"]


class Again(NamedTuple):
    """A read of the residual that a backward pass rebuilds, with that residual's statistics."""

    gain: Float[Array, "K V"] | Slot
    read_keys: Float[Array, "A K"] | Slot
    statistics: Statistics


class Backward(NamedTuple):
    """The operands of a backward pass; the module's docstring says which may be None.

    The site holds the stored residual, to which `statistics` belong, and `d_residual` is that
    residual's cotangent. The vectors that were `retrieved` from it can be used for its means.
    """

    site: Site
    statistics: Statistics | None
    d_residual: Float[Array, "B N K V"] | None
    d_retrieved: Float[Array, "B N P V"] | None
    means: Means | None = None
    again: Again | None = None
    retrieved: Float[Array, "B N P V"] | None = None


class Gradients(NamedTuple):
    """The cotangents of a site.

    Attributes:
      residual: the residual's cotangent, in the dtype of the cotangent that was given (for a read
        alone, of the residual).
      data: the data's cotangent, in the data's dtype.
      store_keys, gain, read_keys: the parameters' cotangents, at least float32.
      rebuilt: the residual before the store, if requested: exact for int16, up to rounding for
        floats.
      retrieved: the vectors that `again` reads from it, in the data's dtype; for a slice of longer
        keys only the slice's share.
    """

    residual: Float[Array, "B N K V"]
    data: Float[Array, "B N R V"] | None
    store_keys: Float[Array, "R K"] | None
    gain: Float[Array, "K V"] | None
    read_keys: Float[Array, "P K"] | None
    rebuilt: Shaped[Array, "B N K V"] | None = None
    retrieved: Float[Array, "B N A V"] | None = None
