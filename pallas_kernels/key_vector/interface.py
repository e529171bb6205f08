"""The interface that every implementation of the key-vector ops provides.

An implementation is a module with the functions below. Their arrays have exactly two token axes, a
batch B and a sequence N. The public ops reshape their arguments to these axes, select an
implementation and define the derivatives.

    forward(SiteOperands, Statistics | None = None, empty=False, *, norm, epsilon, dtype,
            scale=True, fraction_bits, in_place) -> SiteResults
    backward(SiteBackward, *, norm, rebuild, fraction_bits) -> Gradients
    unsupported(op, *operands, dtype=None) -> a one-line reason why the implementation does not
            support these operands, or None; it is called before the other functions, and has the
            `dtype` of a `forward` that has one

Symbols are as in `store_norm_retrieve`: X and X' are the residual before and after the store, w and
r the store keys and read keys, y the data, z the retrieved vectors, and dX is the cotangent of X.
`backward` receives X'. With n = norm(X'), rstd its scale factor and a = gain * r^T dz:

    dX = dX' + rstd (a - mean(a) - n mean(a n))     dy = w dX         dw = sum y dX^T
    dgain = sum (r^T dz) n                          dr = sum dz (gain n)^T

Parts: a site (a place between two sublayers) consists of a store of R vectors and a read of P
vectors. If the store keys are None, the site is a read alone; if the read keys are None, it is a
store alone. The operands and results of the part that is missing are None. The backward pass of a
store alone needs no residual.

Statistics: a read without a store accepts the statistics of an earlier read of the same residual,
and then does not compute them again. So does a `Reread`, which reads the residual that a backward
pass has rebuilt. A backward pass may get the `retrieved` vectors of its site, and can then compute
its means from them.

Memory: with `in_place`, a kernel may write the new residual over the old one. Plain JAX ignores
`in_place`, because XLA makes this decision itself. A store alone accepts a scalar `empty`. If it is
true, the old residual is treated as zeros, whatever it contains.

Sharded keys: the keys, gain and residual may be one device's slices along K. The read is then
computed with `scale=False`, which omits the factor rstd, and the caller combines the results of all
devices. `backward` then gets the statistics and the `Means` over all of K. Otherwise it computes
the means itself.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments import StackSlice

# The default number of fraction bits of an int16 residual. The residual X is stored as the integers
# X * 2^fraction_bits, rounded. With 9 bits, the fixed-point step is 1/512, and the range is from
# -64 to 64. A write adds integers, so it can be undone without error.
FRACTION_BITS = 9
# The smallest legal standard deviation of a token's int16 residual, in fixed-point steps. If it is
# smaller, rounding errors would dominate the retrieved vectors, so they are set to NaN.
LEAST_STEPS = 2.0


class SiteOperands(NamedTuple):
    """The operands of a site, which writes to ("stores") and then reads from a residual matrix.

    A site may lack either the store or the read. The operands of the missing part are then None.
    """

    residual: Shaped[Array, "B N K V"] | None
    store_keys: Float[Array, "R K"] | StackSlice | None = None
    data: Float[Array, "B N R V"] | StackSlice | None = None
    gain: Float[Array, "K V"] | StackSlice | None = None
    read_keys: Float[Array, "P K"] | StackSlice | None = None

    @property
    def stores(self) -> bool:
        """Whether the site has a store."""
        return self.store_keys is not None

    @property
    def reads(self) -> bool:
        """Whether the site has a read."""
        return self.read_keys is not None


class Statistics(NamedTuple):
    """The mean and the reciprocal standard deviation of each token's stored residual.

    `mean` is 0 for rmsnorm. `rstd` is `1 / sqrt(variance + epsilon)`. For an int16 residual, the
    fixed-point scale is removed from both. `rstd` is NaN for a token whose int16 residual has
    overflowed. With `scale`, it is also NaN if the standard deviation is less than LEAST_STEPS
    fixed-point steps. Kernels write and read the two together, so they are stored in one array.
    """

    both: Float[Array, "B 2 N"] | StackSlice

    @classmethod
    def of(cls, mean: Float[Array, "B N"], rstd: Float[Array, "B N"]) -> "Statistics":
        """Return the statistics with these means and reciprocal standard deviations."""
        return cls(jnp.stack([mean, rstd], axis=1))

    @property
    def mean(self) -> Float[Array, "B N"]:
        """The mean of each token's residual; 0 for rmsnorm."""
        return self.both[:, 0]

    @property
    def rstd(self) -> Float[Array, "B N"]:
        """The reciprocal standard deviation of each token's residual."""
        return self.both[:, 1]


class SiteResults(NamedTuple):
    """The results of a site's forward pass.

    Attributes:
      residual: the stored residual, in the dtype of the residual operand.
      retrieved: the retrieved vectors, in `dtype`, or in the data's dtype if `dtype` is None.
      statistics: the statistics of the stored residual, or None if they were passed in.
    """

    residual: Shaped[Array, "B N K V"] | None
    retrieved: Float[Array, "B N P V"] | None = None
    statistics: Statistics | None = None


class Means(NamedTuple):
    """The two means in the gradient of a norm, each over a token's `K * V` entries.

    With `a = gain * r^T dz` and `n = norm(X')`, the gradient is
    `dX = dX' + rstd (a - mean(a) - n mean(a n))`.

    Attributes:
      a: mean(a), or None for rmsnorm, whose gradient lacks this term.
      an: mean(a n).
    """

    a: Float[Array, "B N"] | None
    an: Float[Array, "B N"]


class Reread(NamedTuple):
    """The operands of an additional read of the residual that a backward pass rebuilds.

    `statistics` are the statistics of the rebuilt residual.
    """

    gain: Float[Array, "K V"] | StackSlice
    read_keys: Float[Array, "A K"] | StackSlice
    statistics: Statistics


class SiteBackward(NamedTuple):
    """The operands of a site's backward pass. The module's docstring states which may be None.

    Attributes:
      site: the site's operands, with the stored residual X' as residual.
      statistics: the statistics of the stored residual.
      d_residual: the cotangent of the stored residual.
      d_retrieved: the cotangent of the retrieved vectors.
      means: the means over all of K, if the keys are sharded.
      again: the operands of a read from the rebuilt residual, or None.
      retrieved: the vectors that the forward pass retrieved, or None. With them, an implementation
        can compute the means.
    """

    site: SiteOperands
    statistics: Statistics | None
    d_residual: Float[Array, "B N K V"] | None
    d_retrieved: Float[Array, "B N P V"] | None
    means: Means | None = None
    again: Reread | None = None
    retrieved: Float[Array, "B N P V"] | None = None


class Gradients(NamedTuple):
    """The cotangents of a site's operands, and the results of rebuilding the residual.

    Attributes:
      residual: the cotangent of the residual before the store. It has the dtype of the stored
        residual's cotangent, or, for a read alone, the residual's dtype.
      data: the data's cotangent, in the data's dtype.
      store_keys, gain, read_keys: the parameters' cotangents, in at least float32.
      rebuilt: the residual before the store, if requested. It is exact for an int16 residual, and
        has rounding errors for a floating-point one.
      retrieved: the vectors that `again` reads from `rebuilt`, in the data's dtype. If the keys are
        sharded, the caller must add up these vectors over the devices.
    """

    residual: Float[Array, "B N K V"]
    data: Float[Array, "B N R V"] | None
    store_keys: Float[Array, "R K"] | None
    gain: Float[Array, "K V"] | None
    read_keys: Float[Array, "P K"] | None
    rebuilt: Shaped[Array, "B N K V"] | None = None
    retrieved: Float[Array, "B N A V"] | None = None
