"""Shapes of the ops' operands for given sizes, and the sizes of well-known models."""

from typing import NamedTuple

import jax

from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeCotangents,
    Partial,
    PartialCotangents,
)
from pallas_kernels.key_vector.interface import Reread, SiteBackward, SiteOperands, Statistics

# The batch size of one training step, and the sequence length in the RMT (Residual Matrix
# Transformer) paper.
TOKENS = (16, 512)


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """Return a `jax.ShapeDtypeStruct`, the shape and dtype of an array without values."""
    return jax.ShapeDtypeStruct(shape, dtype)


class KeyVector(NamedTuple):
    """The sizes of a key-vector op: K x V residual matrices, R stored and P retrieved vectors.

    R or P may be 0.
    """

    K: int
    V: int
    R: int
    P: int

    @property
    def before_feed_forward(self) -> "KeyVector":
        """The sizes of an op that reads R vectors, as the input of a feed-forward layer."""
        return self._replace(P=self.R)

    def site(self, tokens, data="bfloat16", residual=None) -> SiteOperands:
        """Return the operands of the forward pass for `tokens` = (batch size, sequence length).

        The residual has the data's dtype if `residual` is None. The store's operands are None if R
        is 0, and the read's operands are None if P is 0.
        """
        K, V, R, P = self
        stored = (array("float32", R, K), array(data, *tokens, R, V)) if R else (None, None)
        read = (array("float32", K, V), array("float32", P, K)) if P else (None, None)
        return SiteOperands(array(residual or data, *tokens, K, V), *stored, *read)

    def backward(self, tokens, data="bfloat16", residual=None) -> SiteBackward:
        """Return the operands of the backward pass of a key-vector op.

        The store's operands are None if R is 0, and the read's operands are None if P is 0.
        """
        K, V, R, P = self
        site = self.site(tokens, data, residual)
        dtype = data if residual in (None, "int16") else residual
        d_residual = array(dtype, *tokens, K, V) if R else None
        if not P:
            return SiteBackward(site._replace(residual=None), None, d_residual, None)
        d_retrieved = array(data, *tokens, P, V)
        return SiteBackward(site, _statistics(tokens), d_residual, d_retrieved)

    def reread(self, tokens) -> Reread:
        """Return the operands of a read of P vectors from the residual that `undo` rebuilds."""
        read = array("float32", self.K, self.V), array("float32", self.P, self.K)
        return Reread(*read, _statistics(tokens))


def _statistics(tokens) -> Statistics:
    batch, seq = tokens
    return Statistics(array("float32", batch, 2, seq))


class Heads(NamedTuple):
    """The number of heads, and the size of a head, in attention or linear attention."""

    heads: int
    size: int


class Depth(NamedTuple):
    """The sizes of depth attention: S sites read N sources with D entries per token.

    A site is a place in a network that reads a weighted sum of earlier outputs, the sources.
    """

    S: int
    N: int
    D: int

    def partial(self, tokens, dtype="bfloat16", *, prior=False) -> Partial:
        """Return the operands of phase one; with `prior`, they include mixes of earlier sources."""
        S, N, D = self
        sources = array("float32", S, D), array(dtype, N, *tokens, D), array("int32")
        mixed = array(dtype, S, *tokens, D), array("float32", S, *tokens)
        return Partial(*sources, mixed if prior else None)

    def partial_cotangents(self, tokens, dtype="bfloat16") -> PartialCotangents:
        """Return the operands of phase one's backward pass, in addition to those of `partial`.

        The operands include an array to which the gradients of the sources are added.
        """
        sums, sources = array("float32", self.S, *tokens), array(dtype, self.N, *tokens, self.D)
        return PartialCotangents(sums, sums, array(dtype, self.S, *tokens, self.D), sources)

    def merge(self, tokens, dtype="bfloat16") -> Merge:
        """Return the operands of phase two (`merge`) for one of the S sites."""
        parameter, token = array("float32", self.D), array(dtype, *tokens, self.D)
        mixed, sums = array(dtype, self.S, *tokens, self.D), array("float32", *tokens)
        site, active = array("int32"), array("bool")
        return Merge(parameter, mixed, sums, site, token, active, parameter)

    def merge_backward(self, tokens, dtype="bfloat16"):
        """Return the operands of the backward pass of `merge`: a `Merge` and the cotangents."""
        merge = self.merge(tokens, dtype)
        return merge, MergeCotangents(merge.current, merge.mixed, merge.current)


# The sizes of the reads and writes before attention layers, for the models in Table 9 of the RMT
# paper. RMT_LARGE has four times the K (the number of entries per key) of the largest model.
RMT_134M = KeyVector(32, 64, 12, 36)
RMT_305M = KeyVector(64, 64, 16, 48)
RMT_LARGE = KeyVector(256, 64, 16, 48)

GPT2_160M, GPT2_405M, KIMI_48B = Heads(12, 64), Heads(16, 64), Heads(32, 128)
GEMMA2_2B = Heads(8, 256)  # It has four key heads, windows of 4096 and logits capped at 50.

# The first three sizes are for a single site (a place that attends over earlier outputs). Two of
# them attend over all blocks, at two widths, and one attends over all sublayers. The last size is
# for all sites of one block, which are computed together.
OVER_BLOCKS, OVER_WIDE, OVER_SUBLAYERS = Depth(1, 9, 2048), Depth(1, 9, 7168), Depth(1, 33, 1024)
ONE_SITE = OVER_BLOCKS, OVER_WIDE, OVER_SUBLAYERS
ALL_SITES = Depth(8, 9, 2048)
