"""The functions, operands and results of every implementation of depth attention.

An implementation is a module with these functions over arrays with exactly one token axis T. The
public ops reshape to that, fold gains into queries, choose an implementation and differentiate.
Residual matrices have two token axes, B and T, and D is K x V; `matrices` passes them to
implementations that know only vectors. Symbols: N sources (rows of a bank) of size D, S sites
(queries). For a source v, with the float32 values of the stored numbers:

    rstd(v) = 1 / sqrt(mean(v^2) + epsilon)             logit = rstd(v) * <query, v>
    log_sum = log sum exp(logit)                        weight = exp(logit - log_sum)

Rows from `count` on are empty: they have no weight, whatever they hold, NaN included, and their
gradient is 0.

    partial(Partial, *, epsilon)
        -> (mixed [S, T, D] in the sources' dtype, log_sums [S, T] float32)

        mixed = sum_i weight_i v_i over the active rows. `prior` is None or a pair (mixed, log_sums)
        over other sources. These are then included as one more source with a given logit:
        log_sum' = log(exp(log_sum) + exp(prior log_sum)). With no source at all, mixed is 0 and
        log_sum -inf. A single source is returned bit for bit.

    partial_backward(Partial without its prior, Scored, *, epsilon)
        -> (d_queries [S, D] float32, d_sources [N, T, D])

        From `log_sums [S, T]` as returned (prior included):

            g_i = <d_mixed, v_i>        d_logit_i = weight_i * (g_i - sum_j weight_j g_j - delta)
            d_queries = sum_i,t d_logit_i rstd_i v_i
            d_v_i = sum_s weight_i d_mixed + d_logit_i (rstd_i q - logit_i rstd_i^2 v_i / D)

        with the sum over the active rows, computed from the very same g, so that a single source
        gives a d_logit of exactly 0. `delta [S, T]` float32 is subtracted in addition, None means
        0: it is the prior's share of the sum, less the cotangent of log_sums. d_sources is in the
        dtype of the sources, and is added to `accumulate [N, T, D]` if that is not None (empty rows
        then keep their values); the sum over T in d_queries has a fixed order. Kernels write over
        `accumulate`, which costs a copy if a caller still needs it.

    merge(Merge, *, norm, epsilon, norm_epsilon) -> z [T, D]

        The second phase of one site: the running partial sum `current` is one more source in
        addition to row `site` of `mixed`, which stands for all the sealed ones.
        p = sigmoid(logit(current) - log_sum), or 0 where `active` is False;
        h = mixed + p * (current - mixed); z = norm_gain * norm(h), in the dtype of `current`. The
        row is read in place, because a slice would be copied. With `norm_gain` and `norm` None,
        z = h.

    merge_backward(Merge, MergeCotangents, *, norm, epsilon, norm_epsilon) -> MergeGradients

        Row `site` of d_mixed [S, T, D] is replaced by this site's gradient, in place; the other
        rows do not change. The gradient of this use of `current` is added to `d_current`. With h'
        the cotangent of h, d_mixed = (1 - p) h', d_logit = p (1 - p) <h', current - mixed> and
        d_current = p h' + d_logit d logit / d current. Kernels write over both.

    merge_at(MergeAt, *, norm, epsilon, norm_epsilon) -> z [T, D]

        `merge` for a few tokens, without a gradient: the query and the gain are read where they
        lie, and the log sum is row `site` of the log sums of all sites.

    merge_read(MergeRead, *, norm, epsilon, norm_epsilon, dtype)
        -> (z [B, T, P, V] in `dtype`, Statistics)

        For matrices: z = norm_retrieve(h) of the key-vector ops, where h is the result of `merge`
        without a norm, rounded to the dtype of `current`.

    merge_read_backward(MergeRead, Statistics, MergeCotangents, *, norm, epsilon)
        -> (MergeGradients with a norm_gain of [K, V], d_read_keys [P, K] float32)

    unsupported(op, *operands) -> why these cannot be served, in a line, or None: called first

`partial` and `partial_backward` of plain JAX also take a `key_axis` over which D is divided. Arrays
with a D are then own slices, `delta` is the device's own part of a sum, and d_logit belongs to the
whole.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Mixes and log sums of S sites over other sources. In these types *D is D, or K V for a matrix, and
# *T the token axes.
Prior = tuple[Float[Array, "S *T_D"], Float[Array, "S *T"]]


class Partial(NamedTuple):
    """S sites over the same sources; queries are float32 and include the gains."""

    queries: Float[Array, "S *D"]
    sources: Float[Array, "N *T_D"]
    count: Int[Array, ""]
    prior: Prior | None = None


class Scored(NamedTuple):
    """The operands that the backward pass of `partial` needs in addition to `Partial`."""

    log_sums: Float[Array, "S *T"]
    delta: Float[Array, "S *T"] | None
    d_mixed: Float[Array, "S *T_D"]
    accumulate: Float[Array, "N *T_D"] | None


class Merge(NamedTuple):
    """The mixed sealed sources and the running sum of one site; query and gain are float32."""

    query: Float[Array, "*D"]
    mixed: Float[Array, "S *T_D"]
    log_sums: Float[Array, "*T"]
    site: Int[Array, ""]
    current: Float[Array, "*T_D"]
    active: Bool[Array, ""]
    norm_gain: Float[Array, " D"] | None = None


class MergeAt(NamedTuple):
    """A `Merge` of a few tokens, with the parameters (float32) of L layers and all sites' sums."""

    parameters: Float[Array, "L 2 D"]
    layer: Int[Array, ""]
    mixed: Float[Array, "S T D"]
    log_sums: Float[Array, "S T"]
    site: Int[Array, ""]
    current: Float[Array, "T D"]
    active: Bool[Array, ""]


class MergeCotangents(NamedTuple):
    """The cotangents of z, and of later uses of `mixed` and `current`, which take the gradients."""

    z: Float[Array, "*T_D"]
    mixed: Float[Array, "S *T_D"]
    current: Float[Array, "*T_D"]


class MergeRead(NamedTuple):
    """A merge of matrices without a norm, and the parameters of the read that follows."""

    merge: Merge
    norm_gain: Float[Array, "K V"]
    read_keys: Float[Array, "P K"]


class MergeGradients(NamedTuple):
    """The cotangents of the inputs of `merge`; for parameters they are float32 sums over tokens.

    `mixed` holds the rows of all sites.
    """

    query: Float[Array, "*D"]
    mixed: Float[Array, "S *T_D"]
    log_sums: Float[Array, "*T"]
    current: Float[Array, "*T_D"]
    norm_gain: Float[Array, "*D"] | None


def wide(x: Array) -> Array:
    """Return x in at least float32."""
    return x.astype(jnp.result_type(jnp.float32, x))
