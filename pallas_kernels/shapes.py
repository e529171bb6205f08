"""Sizes of the ops, those of models by name, and the shapes of operands at a size.

Reports, the search for block sizes and tests take them from here; to place operands on a device
they give an `array(dtype, *shape)` of their own.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels.depth_attention.interface import Merge, MergeCotangents, Partial, Scored
from pallas_kernels.key_vector.interface import Again, Backward, Site, Statistics

Array = Callable[..., jax.ShapeDtypeStruct]
# Of a step: 8192, in sequences as the RMT paper's.
TOKENS = (16, 512)


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class KeyVector(NamedTuple):
    """A residual of K x V; R vectors are stored and P retrieved, or none."""

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
        """Of the whole site, or of what there is of it."""
        K, V, R, P = self
        site = self.site(tokens, data, residual, array)
        dtype = data if residual in (None, "int16") else residual
        d_residual = array(dtype, *tokens, K, V) if R else None
        if not P:
            return Backward(site._replace(residual=None), None, d_residual, None)
        d_retrieved = array(data, *tokens, P, V)
        return Backward(site, _statistics(tokens, array), d_residual, d_retrieved)

    def again(self, tokens, array: Array = array) -> Again:
        """A read of what is rebuilt, of P vectors."""
        read = array("float32", self.K, self.V), array("float32", self.P, self.K)
        return Again(*read, _statistics(tokens, array))


def _statistics(tokens, array: Array) -> Statistics:
    batch, seq = tokens
    return Statistics(array("float32", batch, 2, seq))


class Heads(NamedTuple):
    """Of attention, or of linear attention."""

    heads: int
    size: int


class Depth(NamedTuple):
    """S sites over N sources of D numbers a token."""

    S: int
    N: int
    D: int

    def partial(self, tokens, dtype="bfloat16", *, prior=False, array: Array = array) -> Partial:
        S, N, D = self
        sources = array("float32", S, D), array(dtype, N, *tokens, D), array("int32")
        mixed = array(dtype, S, *tokens, D), array("float32", S, *tokens)
        return Partial(*sources, mixed if prior else None)

    def scored(self, tokens, dtype="bfloat16", *, array: Array = array) -> Scored:
        """With the gradients that those of the sources are added to."""
        sums, sources = array("float32", self.S, *tokens), array(dtype, self.N, *tokens, self.D)
        return Scored(sums, sums, array(dtype, self.S, *tokens, self.D), sources)

    def merge(self, tokens, dtype="bfloat16", *, array: Array = array) -> Merge:
        """Of one of the sites."""
        parameter, token = array("float32", self.D), array(dtype, *tokens, self.D)
        mixed, sums = array(dtype, self.S, *tokens, self.D), array("float32", *tokens)
        site, active = array("int32"), array("bool")
        return Merge(parameter, mixed, sums, site, token, active, parameter)

    def merge_backward(self, tokens, dtype="bfloat16", *, array: Array = array):
        given = self.merge(tokens, dtype, array=array)
        return given, MergeCotangents(given.current, given.mixed, given.current)


# Before attention; of the RMT paper's Table 9, and with four times the keys.
RMT_46M = KeyVector(32, 32, 12, 36)
RMT_134M = KeyVector(32, 64, 12, 36)
RMT_206M = KeyVector(48, 64, 14, 42)
RMT_305M = KeyVector(64, 64, 16, 48)
RMT_LARGE = KeyVector(256, 64, 16, 48)

GPT2_160M, GPT2_405M, KIMI_48B = Heads(12, 64), Heads(16, 64), Heads(32, 128)

# Over all blocks, of two widths, or over all sublayers; and all sites of a block.
OVER_BLOCKS, OVER_WIDE, OVER_SUBLAYERS = Depth(1, 9, 2048), Depth(1, 9, 7168), Depth(1, 33, 1024)
ONE_SITE = OVER_BLOCKS, OVER_WIDE, OVER_SUBLAYERS
ALL_SITES = Depth(8, 9, 2048)
