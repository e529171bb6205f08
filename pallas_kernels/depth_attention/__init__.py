"""Depth attention: each sublayer attends over the outputs of earlier sublayers or blocks.

Kimi Team (2026), "Attention Residuals", equations 2 to 6 and algorithm 1. The outputs that a
sublayer attends over are its *sources* v_i. The values are the sources, and the keys are the
normalised sources. The query is a learned parameter, the same for every token:

    logit_i = <gain * query, v_i> / sqrt(mean(v_i^2) + epsilon)
    h = sum_i softmax(logit)_i v_i

A place in the network that computes such a weighted sum is called a *site*, and the sum h is its
*mix*. `depth_attention` computes one site. The paper also has a *two-phase* schedule, in which
sublayers form blocks. The outputs of completed blocks do not change any more: they are *sealed*.
Phase one, `depth_attention_partial`, computes the mixes of all S sites of a block over the sealed
sources. It reads each source only once. Phase two, `depth_attention_merge`, adds the running sum of
the current block to a mix, as one more source.

Implementations have the same names as in `key_vector`. Every op except
`depth_attention_partial_backward` supports reverse-mode differentiation with respect to its
floating-point arrays. Second derivatives are supported only by "xla". Forward mode raises a
TypeError.

A source may be a residual matrix `K x V` instead of a vector. Queries are then [S, K, V], and
sources are [N, ..., K, V]. The result is the same as for matrices reshaped to vectors, but faster
on a TPU (see `mosaic_tpu_matrices`). `depth_attention_merge_read` also reads vectors from the mix
with keys, for Residual Matrix Transformers (RMTs).

Sharded sources: `depth_attention`, `depth_attention_partial` and its backward pass accept a
`key_axis`, a mesh axis of n devices over which D is sharded. The op then runs on each device within
`jax.shard_map(.., check_vma=False)`, in plain JAX. Every device has the same tokens. On each
device, sources, mixes, queries and gains, and their cotangents, are the device's slices [.., D /
n]. The gradients of queries and gains are complete for this slice. The log-sum-exps are the same on
all devices. The cotangents of the log-sum-exps are the sums of one term per device, and each device
passes and receives only its own term. The forward pass communicates one all-reduce of `(S + 1) N`
float32 numbers per token, and the backward pass one of `2 S N + N + S`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import Norm, check_array, check_shapes
from pallas_kernels.depth_attention import (
    mosaic_gpu,
    mosaic_tpu,
    mosaic_tpu_decode,
    mosaic_tpu_matrices,
    triton_gpu,
    xla,
)
from pallas_kernels.depth_attention.checks import (
    check_layers,
    check_mixed,
    check_site,
    check_sources,
)
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeAt,
    MergeCotangents,
    Partial,
    PartialCotangents,
    Prior,
    wide,
)
from pallas_kernels.depth_attention.matrices import MatricesAsVectors
from pallas_kernels.depth_attention.merge_read import depth_attention_merge_read
from pallas_kernels.platform import (
    Implementation,
    Implementations,
    UnsupportedImplementation,
    reverse_mode,
)

__all__ = [
    "PartialGradients",
    "UnsupportedImplementation",
    "depth_attention",
    "depth_attention_merge",
    "depth_attention_merge_at",
    "depth_attention_merge_read",
    "depth_attention_partial",
    "depth_attention_partial_backward",
]


class PartialGradients(NamedTuple):
    """The cotangents of the inputs of `depth_attention_partial`.

    Attributes:
      queries: the cotangents of the products `gain * query`. Multiplied by the gain, they are the
        cotangents of the queries; multiplied by the query, those of the gains.
      sources: the sources' cotangents.
      prior: the cotangents of `prior`, or None if there was no prior.
    """

    queries: Float[Array, "S *D"]
    sources: Float[Array, "N *tokens_D"]
    prior: Prior | None


@reverse_mode
def depth_attention(
    query: Float[Array, " D"],
    sources: Float[Array, "N *tokens_D"],
    *,
    gain: Float[Array, " D"] | None = None,
    count: int | Int[Array, ""] | None = None,
    prior: tuple[Float[Array, "*tokens D"], Float[Array, "*tokens"]] | None = None,
    epsilon: int | float = 1e-6,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*tokens D"]:
    """Compute the mix h of one site: its softmax-weighted sum of the sources.

    A site is a place in the network that attends over the outputs of earlier sublayers, its
    sources. The op is `depth_attention_partial` for a single query, and the arguments are the same.
    """
    check_array("query", query, "D")
    if gain is not None:
        check_array("gain", gain, "D")
        if gain.shape != query.shape:
            raise ValueError(
                f"shapes do not fit: query [D] has shape {query.shape}, but gain [D] has shape "
                f"{gain.shape}"
            )
    if prior is not None:
        check_array("prior[0]", prior[0], "... D")
        check_array("prior[1]", prior[1], "...")
        prior = (prior[0][None], prior[1][None])
    mixed, _ = depth_attention_partial(
        query[None],
        sources,
        gains=None if gain is None else gain[None],
        count=count,
        prior=prior,
        epsilon=epsilon,
        key_axis=key_axis,
        implementation=implementation,
    )
    return mixed[0]


@reverse_mode
def depth_attention_partial(
    queries: Float[Array, "S *D"],
    sources: Float[Array, "N *tokens_D"],
    *,
    gains: Float[Array, "S *D"] | None = None,
    count: int | Int[Array, ""] | None = None,
    prior: Prior | None = None,
    epsilon: int | float = 1e-6,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "S *tokens_D"], Float[Array, "S *tokens"]]:
    """Compute the mixes (softmax-weighted sums) of S sites over the same sources, in one pass.

    The module's docstring has the equations. A site is a place in the network that attends over the
    outputs of earlier sublayers, its sources.

    Args:
      queries: one query per site.
      sources: the sources, with any token axes and any float dtype.
      gains: the gain of the keys' norm for each site, or None for a gain of 1.
      count: the number of sources, or None if all N rows contain a source. Rows from `count`
        onwards are not read.
      prior: the mixes and log-sum-exps that another call returned for other sources. If given, the
        results also include those sources.
      epsilon: the number added to the mean square of a source; at least 0.
      key_axis: the mesh axis over which D is sharded, or None (see the module's docstring).
      implementation: None selects the fastest one for the platform that the program is lowered for.

    Returns:
      The mix of each site, in the sources' dtype, and the log-sum-exp of its logits, in at least
      float32. Logits and sums are computed in at least float32; a kernel that processes the sources
      in parts rounds the mix to the sources' dtype after each part. The mix of a single source is
      exactly that source.

    Raises:
      UnsupportedImplementation: the requested implementation does not support this call.
      ValueError: shapes or dtypes do not fit, count is not an integer or exceeds the number of
        sources, or epsilon is negative.
      TypeError: the op is differentiated in forward mode, or differentiated twice when a kernel may
        compute it.
      NameError: `key_axis` is not an axis of an enclosing `jax.shard_map`.
    """
    operands, *_ = _checked(queries, sources, gains, count, prior, epsilon)
    call = _DepthCall(epsilon, implementation, key_axis=_dividing(key_axis))
    mixed, log_sums = _partial(call, operands)
    shape = (queries.shape[0], *sources.shape[1:])
    return mixed.reshape(shape), log_sums.reshape(shape[: 1 - queries.ndim])


def depth_attention_partial_backward(
    queries: Float[Array, "S *D"],
    sources: Float[Array, "N *tokens_D"],
    mixed: Float[Array, "S *tokens_D"],
    log_sums: Float[Array, "S *tokens"],
    d_mixed: Float[Array, "S *tokens_D"],
    d_log_sums: Float[Array, "S *tokens"] | None,
    *,
    gains: Float[Array, "S *D"] | None = None,
    count: int | Int[Array, ""] | None = None,
    prior: Prior | None = None,
    accumulate: Float[Array, "N *tokens_D"] | None = None,
    epsilon: int | float = 1e-6,
    key_axis: str | None = None,
    implementation: Implementation | None = None,
) -> PartialGradients:
    """Compute the backward pass of `depth_attention_partial`.

    The op is for backward passes that are written by hand. It adds the sources' gradients from all
    S sites of a block to an accumulator once. JAX's own differentiation would add gradients once
    per site.

    Args:
      mixed, log_sums: the results of `depth_attention_partial`.
      d_mixed, d_log_sums: the cotangents of these results. If `d_log_sums` is None, it counts as 0.
      accumulate: gradients to which the sources' gradients are added, or None.
      queries, sources, gains, count, prior, epsilon, key_axis, implementation: as in
        `depth_attention_partial`.

    Raises:
      ValueError: as in `depth_attention_partial`, or a result or cotangent does not fit.
    """
    operands, rows, per_token = _checked(queries, sources, gains, count, prior, epsilon)
    of_sites = (queries.shape[0], *sources.shape[1:])
    sums = of_sites[: len(of_sites) - len(queries.shape[1:])]
    check_shapes(
        f"queries {list(queries.shape)} and sources {list(sources.shape)}",
        mixed=(mixed, of_sites),
        log_sums=(log_sums, sums),
        d_mixed=(d_mixed, of_sites),
        d_log_sums=(d_log_sums, sums),
        accumulate=(accumulate, sources.shape),
    )
    d_queries, d_sources, d_prior = _partial_backward(
        _DepthCall(epsilon, implementation, key_axis=_dividing(key_axis)),
        operands,
        rows(mixed),
        per_token(log_sums),
        rows(d_mixed),
        None if d_log_sums is None else per_token(d_log_sums),
        None if accumulate is None else rows(accumulate),
    )
    if d_prior is not None:
        d_prior = (d_prior[0].reshape(d_mixed.shape), d_prior[1].reshape(log_sums.shape))
    return PartialGradients(d_queries, d_sources.reshape(sources.shape), d_prior)


@reverse_mode
def depth_attention_merge(
    mixed: Float[Array, "S *tokens_D"],
    log_sums: Float[Array, "*tokens"],
    site: int | Int[Array, ""],
    current: Float[Array, "*tokens_D"],
    query: Float[Array, "*D"],
    norm_gain: Float[Array, " D"] | None,
    *,
    gain: Float[Array, "*D"] | None = None,
    active: bool | Bool[Array, ""] = True,
    norm: Norm | None = "layernorm",
    epsilon: int | float = 1e-6,
    norm_epsilon: int | float = 1e-6,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "S *tokens_D"], Float[Array, "*tokens_D"], Float[Array, "*tokens_D"]]:
    """Compute phase two for one site: add the running sum to its mix, and normalise the result.

    A site is a place in the network that attends over the outputs of earlier sublayers. Phase one,
    `depth_attention_partial`, has computed the mixes over the sealed sources (the outputs of
    completed blocks). Phase two adds the running sum of the current block as one more source.

    Args:
      mixed: the mixes of all S sites over the sealed sources.
      log_sums: the log-sum-exps of this site.
      site: the index of this site.
      current: the running sum of the current block, which is one more source.
      query: the query of this site.
      gain: the gain of the keys' norm, or None for a gain of 1.
      norm_gain: the gain of the output's norm; None if `norm` is None.
      active: whether there is a running sum; False before the first sublayer of a block.
      norm: the norm of the output, "layernorm" or "rmsnorm", or None for no norm. For matrices, no
        kernel supports a norm.
      epsilon, norm_epsilon: the epsilons of the keys' norm and of the output's norm.
      implementation: None selects the fastest one for the platform that the program is lowered for.

    Returns:
      `mixed`, `current`, and `z = norm_gain * norm(h)` in the dtype of `current`, where h is the
      mix of this site over all sources; without a norm, z is h. The caller must use the
      returned `mixed` and `current` in place of the arguments, so that the gradients of later uses
      pass through this op. Merge each site only once, because the backward pass overwrites this
      site's row in the gradient of `mixed`.
    """
    check_site(query, gain, current, norm_gain, norm, epsilon, norm_epsilon)
    axes = query.ndim
    check_mixed(mixed, log_sums, current, "...", axes)
    call = _DepthCall(epsilon, implementation, norm, norm_epsilon)
    dtype = jnp.result_type(jnp.float32, current)
    tokens = _tokens(current.shape[:-axes], axes)
    operands = Merge(
        _folded(query, gain, current),
        mixed.reshape(mixed.shape[0], *tokens, *query.shape),
        wide(log_sums.reshape(tokens)),
        jnp.asarray(site, jnp.int32),
        current.reshape(*tokens, *query.shape),
        jnp.asarray(active),
        None if norm_gain is None else norm_gain.astype(dtype),
    )
    rows, passed, z = _merge(call, operands)
    return rows.reshape(mixed.shape), passed.reshape(current.shape), z.reshape(current.shape)


def depth_attention_merge_at(
    layer: int | Int[Array, ""],
    parameters: Float[Array, "L 2 D"],
    mixed: Float[Array, "S *tokens D"],
    log_sums: Float[Array, "S *tokens"],
    site: int | Int[Array, ""],
    current: Float[Array, "*tokens D"],
    *,
    active: bool | Bool[Array, ""] = True,
    norm: Norm = "layernorm",
    epsilon: int | float = 1e-6,
    norm_epsilon: int | float = 1e-6,
    implementation: Implementation | None = None,
) -> Float[Array, "*tokens D"]:
    """Compute the z of `depth_attention_merge` for a few tokens, with stacked layer parameters.

    This op is for decoding: the TPU kernel reads its parameters directly from the stacks. It is
    differentiable only with "xla".

    Args:
      layer: the index of the layer, from 0 to L - 1.
      parameters: two rows for each of the L layers: the query times the gain of the keys' norm, and
        the gain of the output's norm.
      mixed, log_sums: the mixes and log-sum-exps of all sites, from `depth_attention_partial`.
      site, current, active, norm, epsilon, norm_epsilon: as in `depth_attention_merge`.
      implementation: as in `depth_attention_merge`, but this op has no "triton".

    Raises:
      UnsupportedImplementation: the requested implementation does not support this call.
      ValueError: shapes or dtypes do not fit, the norm is unknown, or an epsilon is negative.
      TypeError: the op is differentiated when a kernel may compute it.
    """
    check_layers(parameters, current)
    *tokens, D = current.shape
    check_site(parameters[0, 0], None, current, parameters[0, 1], norm, epsilon, norm_epsilon)
    check_mixed(mixed, log_sums, current, "S ...", 1)
    S, T = len(mixed), math.prod(tokens)
    operands = MergeAt(
        parameters.astype(jnp.result_type(jnp.float32, current)),
        jnp.asarray(layer, jnp.int32),
        mixed.reshape(S, T, D),
        wide(log_sums.reshape(S, T)),
        jnp.asarray(site, jnp.int32),
        current.reshape(T, D),
        jnp.asarray(active),
    )
    options = {"norm": norm, "epsilon": epsilon, "norm_epsilon": norm_epsilon}
    z = _MERGE_AT.run(implementation, "merge_at", operands, **options)
    return z.reshape(current.shape)


class _DepthCall(NamedTuple):
    """The static parameters of a depth-attention call, constant during tracing."""

    epsilon: int | float
    implementation: str | None
    norm: Norm | None = "layernorm"
    norm_epsilon: int | float = 0.0
    key_axis: str | None = None

    @property
    def scores(self):
        options = {"epsilon": self.epsilon}
        return options if self.key_axis is None else options | {"key_axis": self.key_axis}

    @property
    def norms(self):
        return {"norm": self.norm, "epsilon": self.epsilon, "norm_epsilon": self.norm_epsilon}


# The ops and their gradients, for arrays with one token axis ----------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _partial(call, operands):
    return _run(call, "partial", operands, **call.scores)


def _partial_forward(call, operands):
    mixed, log_sums = _partial(call, operands)
    return (mixed, log_sums), (operands, None if operands.prior is None else mixed, log_sums)


def _partial_vjp(call, saved, cotangents):
    d_queries, d_sources, d_prior = _partial_backward(call, *saved, *cotangents, None)
    return (Partial(d_queries, d_sources, None, d_prior),)


def _partial_backward(call, operands, mixed, log_sums, d_mixed, d_log_sums, accumulate):
    delta = None if d_log_sums is None else -d_log_sums
    prior, d_prior = operands.prior, None
    if prior is not None:
        # The prior, a mix of other sources, acts as one more source. Its logit is its log-sum-exp.
        weight = xla.prior_weights(prior[1], log_sums)
        entries = tuple(range(1 - operands.queries.ndim, 0))
        g = jnp.sum(wide(d_mixed) * wide(prior[0]), axis=entries)
        delta = weight * g + (0 if delta is None else delta)
    # JAX may return the saved `count` as a NumPy array, so it is converted to a JAX array.
    of_sources = operands._replace(count=jnp.asarray(operands.count), prior=None)
    cotangents = PartialCotangents(log_sums, delta, d_mixed, accumulate)
    d_queries, d_sources = _run(call, "partial_backward", of_sources, cotangents, **call.scores)
    if prior is not None:
        # `total` is the softmax-weighted sum of <d_mixed, v> over all sources v. It equals
        # <d_mixed, mixed>, which needs no sources.
        total = jnp.sum(wide(d_mixed) * wide(mixed), axis=entries)
        d_log = weight * (g - total + (0 if d_log_sums is None else d_log_sums))
        d_prior_mixed = jnp.expand_dims(weight, entries) * wide(d_mixed)
        d_prior = (d_prior_mixed.astype(prior[0].dtype), d_log)
    return d_queries, d_sources, d_prior


_partial.defvjp(_partial_forward, _partial_vjp)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merge(call, operands):
    return operands.mixed, operands.current, _run(call, "merge", operands, **call.norms)


def _merge_forward(call, operands):
    return _merge(call, operands), operands


def _merge_backward(call, operands, cotangents):
    d_mixed, d_current, d_z = cotangents
    # JAX may return saved constants as NumPy arrays, which are converted to JAX arrays.
    operands = jax.tree.map(jnp.asarray, operands)
    cotangents = MergeCotangents(d_z, d_mixed, d_current)
    g = _run(call, "merge_backward", operands, cotangents, **call.norms)
    return (Merge(g.query, g.mixed, g.log_sums, None, g.current, None, g.norm_gain),)


_merge.defvjp(_merge_forward, _merge_backward)

_IMPLEMENTATIONS = Implementations(
    xla,
    {"mosaic_tpu": mosaic_tpu, "triton": triton_gpu},
    ("tpu",),
    name="depth_attention",
    on_request={"mosaic_gpu": mosaic_gpu},
)
_MERGE_AT = Implementations(
    xla, {"mosaic_tpu": mosaic_tpu_decode}, ("tpu",), name="depth_attention_at"
)
_OF_MATRICES = Implementations(
    MatricesAsVectors(xla),
    {"mosaic_tpu": mosaic_tpu_matrices, "triton": MatricesAsVectors(triton_gpu)},
    ("tpu",),
    name="depth_attention_matrices",
    on_request={"mosaic_gpu": MatricesAsVectors(mosaic_gpu)},
)


def _run(call: _DepthCall, op: str, *operands, **options):
    implementation = call.implementation
    if call.key_axis is not None:
        if implementation in ("mosaic_tpu", "mosaic_gpu", "triton"):
            raise UnsupportedImplementation(
                f"implementation={implementation!r} does not support this call: D is sharded over "
                f"the mesh axis {call.key_axis!r}; use 'xla' or None"
            )
        implementation = "xla" if implementation == "pallas" else implementation or "xla"
    query = operands[0][0]
    matrices = query.ndim == (3 if isinstance(operands[0], Partial) else 2)
    implementations = _OF_MATRICES if matrices else _IMPLEMENTATIONS
    return implementations.run(implementation, op, *operands, **options)


# Checks and reshaping of arguments ------------------------------------------------------------


def _dividing(key_axis: str | None) -> str | None:
    """Return `key_axis`, or None if that mesh axis has only one device."""
    return key_axis if key_axis is not None and jax.lax.axis_size(key_axis) > 1 else None


def _folded(queries, gains, sources):
    """Compute `gain * query` in at least float32.

    The normalised keys then need no multiplication by the gain.
    """
    dtype = jnp.result_type(jnp.float32, sources)
    return queries.astype(dtype) if gains is None else queries.astype(dtype) * gains.astype(dtype)


def _count(count, sources):
    return jnp.asarray(sources.shape[0] if count is None else count, jnp.int32)


def _tokens(lead, axes: int) -> tuple[Any, ...]:
    """Return the sizes of an implementation's token axes.

    Implementations have one token axis for vectors, and two for matrices.

    Args:
      lead: the sizes of the token axes that the caller passed.
      axes: the number of axes of a source: 1 for a vector, 2 for a matrix.
    """
    if axes == 1:
        return (math.prod(lead),)
    return math.prod(lead[:-1]), (lead[-1] if lead else 1)


def _checked(queries, sources, gains, count, prior, epsilon):
    """Check the arguments and convert them to an implementation's operands.

    Returns:
      The operands, and two functions that give other arrays the same token axes: one for arrays [n,
      *tokens, *size], and one for log-sum-exps [n, *tokens], which it converts to at least float32.
    """
    check_sources(queries, sources, gains, count, prior, epsilon)
    size = queries.shape[1:]
    tokens = _tokens(sources.shape[1 : -len(size)], len(size))
    rows = lambda x: x.reshape(x.shape[0], *tokens, *size)
    per_token = lambda x: wide(x.reshape(x.shape[0], *tokens))
    prior = None if prior is None else (rows(prior[0]), per_token(prior[1]))
    queries = _folded(queries, gains, sources)
    operands = Partial(queries, rows(sources), _count(count, sources), prior)
    return operands, rows, per_token
