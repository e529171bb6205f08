"""The interface that every implementation of depth attention provides.

An implementation is a module with the functions below. Arrays have one token axis, T. Arrays of
residual matrices have two token axes, B and T, and K x V entries in place of D. The public ops
reshape their arguments to this form, multiply the queries by the gains, select an implementation
and define the derivatives. `matrices` adapts an implementation for vectors to matrices.

Symbols: there are N rows of sources of size D (the *bank*), and S sites with a query each. For a
source v, converted to float32:

    rstd(v) = 1 / sqrt(mean(v^2) + epsilon)             logit = rstd(v) * <query, v>
    log_sum = log sum exp(logit)                        weight = exp(logit - log_sum)

The first `count` rows of the bank are active. The others are empty: their weights and gradients are
0, even if they contain NaN.

    partial(Partial, *, epsilon)
        -> (mixed [S, T, D] in the sources' dtype, log_sums [S, T] float32)

        mixed = sum_i weight_i v_i over the active rows. `prior` is None or a pair (mixed, log_sums)
        that was computed over other sources. It acts as one more source with value mixed and logit
        log_sum: log_sum' = log(exp(log_sum) + exp(prior log_sum)). Without any source, mixed is 0
        and log_sum is -inf. With one source, mixed is exactly that source.

    partial_backward(Partial without its prior, PartialCotangents, *, epsilon)
        -> (d_queries [S, D] float32, d_sources [N, T, D])

        With q the query and `log_sums [S, T]` as `partial` returned them (prior included):

            g_i = <d_mixed, v_i>        d_logit_i = weight_i * (g_i - sum_j weight_j g_j - delta)
            d_queries = sum_i,t d_logit_i rstd_i v_i
            d_v_i = sum_s weight_i d_mixed + d_logit_i (rstd_i q - logit_i rstd_i^2 v_i / D)

        The sum over j is over the active rows. It uses the same g, so that d_logit is exactly 0 if
        there is a single source. `delta [S, T]`, in float32, is the prior's term of that sum minus
        the cotangent of log_sums. None means 0. d_sources has the dtype of the sources. If
        `accumulate [N, T, D]` is not None, d_sources is added to it, and empty rows keep their
        values. Kernels overwrite `accumulate`; if a caller still uses it, it is copied first. The
        sum over T in d_queries is computed in a fixed order.

    merge(Merge, *, norm, epsilon, norm_epsilon) -> z [T, D]

        Phase two of one site. Row `site` of `mixed` is the mix of all sealed sources, and the
        running sum `current` is one more source. Its weight is p = sigmoid(logit(current) -
        log_sum), or 0 if `active` is False. Then h = mixed + p * (current - mixed) and z =
        norm_gain * norm(h), in the dtype of `current`. If `norm_gain` and `norm` are None, z = h.

    merge_backward(Merge, MergeCotangents, *, norm, epsilon, norm_epsilon) -> MergeGradients

        In the cotangent of `mixed` [S, T, D], row `site` is replaced by this site's gradient, and
        the other rows do not change. This site's gradient of `current` is added to the cotangent of
        `current`. Let h' be the cotangent of h. The gradient of `mixed` is (1 - p) h'. The gradient
        of `current` is p h' + d_logit d logit / d current, with
        d_logit = p (1 - p) <h', current - mixed>. Kernels overwrite both cotangents.

    merge_at(MergeAt, *, norm, epsilon, norm_epsilon) -> z [T, D]

        `merge` for a few tokens, without a gradient. A kernel reads the query and the gain directly
        from the stacked parameters, and log_sum from row `site` of the log_sums of all sites.

    merge_read(MergeRead, *, norm, epsilon, norm_epsilon, dtype)
        -> (z [B, T, P, V] in `dtype`, Statistics)

        For matrices: z = norm_retrieve(h) of the key-vector ops, where h is the result of `merge`
        without a norm, rounded to the dtype of `current`.

    merge_read_backward(MergeRead, Statistics, MergeCotangents, *, norm, epsilon)
        -> (MergeGradients with a norm_gain of [K, V], d_read_keys [P, K] float32)

    unsupported(op, *operands) -> a one-line reason why the implementation does not support these
        operands, or None; it is called before the other functions

In plain JAX, `partial` and `partial_backward` also accept a `key_axis`, the mesh axis over which D
is sharded. Arrays with an axis D are then this device's slices along D, and `delta` is this
device's term of a sum over devices. d_logit is computed from the whole sources.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# The type of `prior`: the mixes and log-sum-exps of S sites over other sources. In annotations, *D
# is D for vectors or K V for matrices, and *T is the token axes.
Prior = tuple[Float[Array, "S *T_D"], Float[Array, "S *T"]]


class Partial(NamedTuple):
    """The operands of `partial`, which mixes the same sources for each of S sites.

    Attributes:
      queries: the queries in float32, already multiplied by the gains.
      sources: the bank, an array of N rows with one source per row.
      count: the number of active rows.
      prior: the mixes and log-sum-exps of the same sites over other sources, or None.
    """

    queries: Float[Array, "S *D"]
    sources: Float[Array, "N *T_D"]
    count: Int[Array, ""]
    prior: Prior | None = None


class PartialCotangents(NamedTuple):
    """The operands of `partial_backward` in addition to `Partial`.

    Attributes:
      log_sums: the log-sum-exps that `partial` returned.
      delta: the `delta` in the equations of the module's docstring; None means 0.
      d_mixed: the cotangents of the mixes.
      accumulate: gradients to which the sources' gradients are added, or None.
    """

    log_sums: Float[Array, "S *T"]
    delta: Float[Array, "S *T"] | None
    d_mixed: Float[Array, "S *T_D"]
    accumulate: Float[Array, "N *T_D"] | None


class Merge(NamedTuple):
    """The operands of `merge`, which adds the running sum of a block to the mix of one site.

    Attributes:
      query: the site's query in float32, already multiplied by the gain of the keys' norm.
      mixed: the mixes of all S sites over the sealed sources, the outputs of completed blocks.
      log_sums: the log-sum-exps of this site.
      site: the index of this site.
      current: the running sum of the current block.
      active: whether there is a running sum.
      norm_gain: the gain of the output's norm in float32, or None for no norm.
    """

    query: Float[Array, "*D"]
    mixed: Float[Array, "S *T_D"]
    log_sums: Float[Array, "*T"]
    site: Int[Array, ""]
    current: Float[Array, "*T_D"]
    active: Bool[Array, ""]
    norm_gain: Float[Array, " D"] | None = None


class MergeAt(NamedTuple):
    """The operands of `merge_at`: a `Merge` for a few tokens, with stacked parameters.

    `parameters` contains the query and the gain of each of L layers, in float32, and `log_sums`
    contains the log-sum-exps of all sites.
    """

    parameters: Float[Array, "L 2 D"]
    layer: Int[Array, ""]
    mixed: Float[Array, "S T D"]
    log_sums: Float[Array, "S T"]
    site: Int[Array, ""]
    current: Float[Array, "T D"]
    active: Bool[Array, ""]


class MergeCotangents(NamedTuple):
    """The cotangents of the results of `merge`: z, `mixed` and `current`.

    The backward pass combines the cotangents of `mixed` and `current` with its own gradients.
    """

    z: Float[Array, "*T_D"]
    mixed: Float[Array, "S *T_D"]
    current: Float[Array, "*T_D"]


class MergeRead(NamedTuple):
    """The operands of `merge_read`: a merge without a norm, and the parameters of the read."""

    merge: Merge
    norm_gain: Float[Array, "K V"]
    read_keys: Float[Array, "P K"]


class MergeGradients(NamedTuple):
    """The cotangents of the inputs of `merge`.

    The cotangents of `query` and `norm_gain` are float32 and summed over tokens. `mixed` contains
    the cotangents of the mixes of all sites.
    """

    query: Float[Array, "*D"]
    mixed: Float[Array, "S *T_D"]
    log_sums: Float[Array, "*T"]
    current: Float[Array, "*T_D"]
    norm_gain: Float[Array, "*D"] | None


def wide(x: Array) -> Array:
    """Convert x to float32, unless it has a wider dtype."""
    return x.astype(jnp.result_type(jnp.float32, x))
