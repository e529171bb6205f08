"""Sizes of the ops, sizes of models by name, and the shapes of operands at a size.

Reports, the search for block sizes and the tests use these shapes. A caller that needs operands on
a device passes its own `array(dtype, *shape)`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels.depth_attention.interface import Merge, MergeCotangents, Partial, Scored
from pallas_kernels.key_vector.interface import Again, Backward, Site, Statistics

Array = Callable[..., jax.ShapeDtypeStruct]
# Tokens of a step: 8192, in sequences as long as in the RMT paper.
TOKENS = (16, 512)


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class KeyVector(NamedTuple):
    """A residual of K x V with R stored and P retrieved vectors; R or P may be 0."""

    K: int
    V: int
    R: int
    P: int

    @property
    def before_feed_forward(self) -> "KeyVector":
        return self._replace(P=self.R)

    def site(self, tokens, data="bfloat16", residual=None, array: Array = array) -> Site:
        K, V, R, P = self
        stored = (array("float32", R, K), array(data, *tokens, R, V)) if R else (None, None)
        read = (array("float32", K, V), array("float32", P, K)) if P else (None, None)
        return Site(array(residual or data, *tokens, K, V), *stored, *read)

    def backward(self, tokens, data="bfloat16", residual=None, array: Array = array) -> Backward:
        """Return the operands of the backward pass; a half that is missing has none."""
        K, V, R, P = self
        site = self.site(tokens, data, residual, array)
        dtype = data if residual in (None, "int16") else residual
        d_residual = array(dtype, *tokens, K, V) if R else None
        if not P:
            return Backward(site._replace(residual=None), None, d_residual, None)
        d_retrieved = array(data, *tokens, P, V)
        return Backward(site, _statistics(tokens, array), d_residual, d_retrieved)

    def again(self, tokens, array: Array = array) -> Again:
        """Return the operands of a read of P vectors from a residual that is rebuilt."""
        read = array("float32", self.K, self.V), array("float32", self.P, self.K)
        return Again(*read, _statistics(tokens, array))


def _statistics(tokens, array: Array) -> Statistics:
    batch, seq = tokens
    return Statistics(array("float32", batch, 2, seq))


class Heads(NamedTuple):
    """The number and size of heads of attention or linear attention."""

    heads: int
    size: int


class Depth(NamedTuple):
    """S sites that read N sources with D numbers per token."""

    S: int
    N: int
    D: int

    def partial(self, tokens, dtype="bfloat16", *, prior=False, array: Array = array) -> Partial:
        S, N, D = self
        sources = array("float32", S, D), array(dtype, N, *tokens, D), array("int32")
        mixed = array(dtype, S, *tokens, D), array("float32", S, *tokens)
        return Partial(*sources, mixed if prior else None)

    def scored(self, tokens, dtype="bfloat16", *, array: Array = array) -> Scored:
        """Return backward operands, with gradients that the sources' gradients are added to."""
        sums, sources = array("float32", self.S, *tokens), array(dtype, self.N, *tokens, self.D)
        return Scored(sums, sums, array(dtype, self.S, *tokens, self.D), sources)

    def merge(self, tokens, dtype="bfloat16", *, array: Array = array) -> Merge:
        """Return the operands of a merge at one of the sites."""
        parameter, token = array("float32", self.D), array(dtype, *tokens, self.D)
        mixed, sums = array(dtype, self.S, *tokens, self.D), array("float32", *tokens)
        site, active = array("int32"), array("bool")
        return Merge(parameter, mixed, sums, site, token, active, parameter)

    def merge_backward(self, tokens, dtype="bfloat16", *, array: Array = array):
        given = self.merge(tokens, dtype, array=array)
        return given, MergeCotangents(given.current, given.mixed, given.current)


# Sites before attention: the sizes of the RMT paper's Table 9, and one with four times the keys.
RMT_46M = KeyVector(32, 32, 12, 36)
RMT_134M = KeyVector(32, 64, 12, 36)
RMT_206M = KeyVector(48, 64, 14, 42)
RMT_305M = KeyVector(64, 64, 16, 48)
RMT_LARGE = KeyVector(256, 64, 16, 48)

GPT2_160M, GPT2_405M, KIMI_48B = Heads(12, 64), Heads(16, 64), Heads(32, 128)

# One site over all blocks (of two widths) or over all sublayers, and all sites of a block at once.
OVER_BLOCKS, OVER_WIDE, OVER_SUBLAYERS = Depth(1, 9, 2048), Depth(1, 9, 7168), Depth(1, 33, 1024)
ONE_SITE = OVER_BLOCKS, OVER_WIDE, OVER_SUBLAYERS
ALL_SITES = Depth(8, 9, 2048)
