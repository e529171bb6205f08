"""Depth attention: a sublayer reads a softmax over the outputs of earlier sublayers or blocks.

Kimi Team (2026), "Attention Residuals", equations 2 to 6 and algorithm 1. Keys are the normalised
sources, values are the sources themselves, and the query is learned and the same for every token:

    logit_i = <gain * query, v_i> / sqrt(mean(v_i^2) + epsilon)
    h = sum_i softmax(logit)_i v_i

`depth_attention` is one site. In the *two-phase* schedule, `depth_attention_partial` computes all S
sites of a block over the sealed sources in one pass that reads them once, and
`depth_attention_merge` adds the running partial sum at each site.

Implementations have the same names as in `key_vector`. Every op except
`depth_attention_partial_backward` has gradients of its arrays of floats in reverse mode, once.
Differentiating twice works only with "xla" and forward mode never; a TypeError says so.

A source may be a residual matrix `K x V` instead of a vector: queries are then [S, K, V] and
sources [N, ..., K, V]. Mean and product are over all its entries. This differs from a reshape only
on a TPU, where matrices lie with tokens in the lanes (see `mosaic_tpu_matrices`).
`depth_attention_merge_read` also reads the mix with keys, as an RMT does.

`depth_attention_partial`, its backward pass and `depth_attention` take a `key_axis`: the mesh axis
over whose n devices D is divided, with the same tokens on all of them. The op is then the work of
one device in `jax.shard_map(.., check_vma=False)`. Sources, mixes, queries and gains, and their
cotangents, are own slices [.., D / n], and gradients of queries and gains are complete for the own
slice. Logarithms of sums are the same on all devices. Their cotangents, both those given and those
returned, are each device's own part of a sum over the axis. JAX's transposes give the same where
each device differentiates its own share of a loss. Plain JAX serves these ops, with one all-reduce
of `(S + 1) N` float32 per token in the forward pass and one of `2 S N + N + S` in the backward
pass.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import Norm, check_array
from pallas_kernels.depth_attention import (
    mosaic_tpu,
    mosaic_tpu_decode,
    mosaic_tpu_matrices,
    triton_gpu,
    xla,
)
from pallas_kernels.depth_attention.checks import check_mixed, check_site, check_sources
from pallas_kernels.depth_attention.interface import (
    Merge,
    MergeAt,
    MergeCotangents,
    Partial,
    Prior,
    Scored,
    wide,
)
from pallas_kernels.depth_attention.matrices import OfVectors
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

    `queries` holds the cotangents of `gain * query`: multiply them by the gain for the query's
    cotangent and by the query for the gain's. `prior` is None if there was no prior.
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
    """Return the mix h that one site reads: `depth_attention_partial` with one query."""
    check_array("query", query, "D")
    if gain is not None:
        check_array("gain", gain, "D")
        if gain.shape != query.shape:
            raise ValueError(f"shapes do not fit: query [D] is {query.shape}, gain {gain.shape}")
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
    """Compute all S sites over the same sources, in one pass over them.

    Args:
      queries: w, one query for each site.
      sources: v, with any token axes and any float dtype.
      gains: the gains of the keys' norm, which are folded into the queries.
      count: the number of sources; rows from there on are empty and are not read.
      prior: the results of another call over other sources, to be included.
      epsilon: the number added to the mean square of a source; at least 0.
      key_axis: the mesh axis over which D is divided, or None (see the module's docstring).
      implementation: None picks the best one for the platform that the program is lowered for.

    Returns:
      The mix of each site in the sources' dtype, and the logarithm of its softmax's sum, at least
      float32. Scores and sums are at least float32. A single source is returned bit for bit.

    Raises:
      UnsupportedImplementation: a named implementation cannot serve this call.
      ValueError: shapes or dtypes do not fit, count is not an integer or exceeds the number of
        sources, or epsilon is negative.
      TypeError: the op is differentiated in forward mode, or twice where it may be a kernel.
      NameError: `key_axis` is not an axis of an enclosing `jax.shard_map`.
    """
    given, *_ = _checked(queries, sources, gains, count, prior, epsilon)
    call = _Call(epsilon, implementation, key_axis=_dividing(key_axis))
    mixed, log_sums = _partial(call, given)
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
    """Return the gradients of `depth_attention_partial`; the sources' are added to `accumulate`.

    The gradients that a block's S sites give to the sources are thus added once, whereas
    differentiating with JAX would add them once per site.
    """
    given, rows, per_token = _checked(queries, sources, gains, count, prior, epsilon)
    d_queries, d_sources, d_prior = _partial_backward(
        _Call(epsilon, implementation, key_axis=_dividing(key_axis)),
        given,
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
    """Run the second phase: mix the running partial sum with the sealed sources, and normalise.

    Args:
      mixed: the mixes of all sites, from `depth_attention_partial`.
      log_sums: the logarithms of sums of this site.
      site: the index of this site.
      current: the running partial sum, one more source.
      query, gain: w and the gain of the keys' norm.
      norm_gain: the gain of the output's norm; None if there is no norm.
      active: whether there is a partial sum; before a block's first sublayer there is none.
      norm: the norm of the output, "layernorm" or "rmsnorm", or None: z is then h. No kernel has a
        norm for matrices, because the read with keys that follows has one.
      epsilon, norm_epsilon: the epsilons of the keys' norm and of the output's norm.
      implementation: None picks the best one for the platform that the program is lowered for.

    Returns:
      `mixed` and `current`, to be used from here on, and `z = norm_gain * norm(h)` in the dtype of
      `current`. Through them the gradients of later uses reach this op, which adds its own gradient
      to that of `current` in the same pass and writes its own into its row of that of `mixed`. For
      this reason a site may be merged only once.
    """
    check_site(query, gain, current, norm_gain, norm, epsilon, norm_epsilon)
    axes = query.ndim
    check_mixed(mixed, log_sums, current, "...", axes)
    call = _Call(epsilon, implementation, norm, norm_epsilon)
    dtype = jnp.result_type(jnp.float32, current)
    tokens = _tokens(current.shape[:-axes], axes)
    given = Merge(
        _folded(query, gain, current),
        mixed.reshape(mixed.shape[0], *tokens, *query.shape),
        log_sums.reshape(tokens),
        jnp.asarray(site, jnp.int32),
        current.reshape(*tokens, *query.shape),
        jnp.asarray(active),
        None if norm_gain is None else norm_gain.astype(dtype),
    )
    rows, passed, z = _merge(call, given)
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
    """Return z of `depth_attention_merge` for a few tokens; the TPU kernel copies no operands.

    The op serves decoding. It is differentiable only with "xla".

    Args:
      layer: the index of the layer, below L.
      parameters: for every layer the query times the gain of the keys' norm, and the gain of the
        output's norm.
      mixed, log_sums: the mixes and logarithms of sums of all sites, from
        `depth_attention_partial`.
      site, current, active, norm, epsilon, norm_epsilon: as in `depth_attention_merge`.
      implementation: as in `depth_attention_merge`, but this op has no "triton".

    Raises:
      UnsupportedImplementation: a named implementation cannot serve this call.
      ValueError: shapes or dtypes do not fit, the norm is unknown, or an epsilon is negative.
      TypeError: the op is differentiated where it may be a kernel.
    """
    *tokens, D = current.shape
    check_site(parameters[0, 0], None, current, parameters[0, 1], norm, epsilon, norm_epsilon)
    check_mixed(mixed, log_sums, current, "S ...", 1)
    S, T = len(mixed), math.prod(tokens)
    given = MergeAt(
        parameters.astype(jnp.result_type(jnp.float32, current)),
        jnp.asarray(layer, jnp.int32),
        mixed.reshape(S, T, D),
        log_sums.reshape(S, T),
        jnp.asarray(site, jnp.int32),
        current.reshape(T, D),
        jnp.asarray(active),
    )
    options = {"norm": norm, "epsilon": epsilon, "norm_epsilon": norm_epsilon}
    z = _MERGE_AT.run(implementation, "merge_at", given, **options)
    return z.reshape(current.shape)


class _Call(NamedTuple):
    """The parameters of a call that are not arrays."""

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


# The ops over one token axis, with their gradients -------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _partial(call, given):
    return _run(call, "partial", given, **call.scores)


def _partial_forward(call, given):
    mixed, log_sums = _partial(call, given)
    return (mixed, log_sums), (given, None if given.prior is None else mixed, log_sums)


def _partial_vjp(call, saved, cotangents):
    d_queries, d_sources, d_prior = _partial_backward(call, *saved, *cotangents, None)
    return (Partial(d_queries, d_sources, None, d_prior),)


def _partial_backward(call, given, mixed, log_sums, d_mixed, d_log_sums, accumulate):
    delta = None if d_log_sums is None else -d_log_sums
    prior, d_prior = given.prior, None
    if prior is not None:
        # The prior is one more source, whose logit is given.
        weight = xla.prior_weights(prior[1], log_sums)
        entries = tuple(range(1 - given.queries.ndim, 0))
        g = jnp.sum(wide(d_mixed) * wide(prior[0]), axis=entries)
        delta = weight * g + (0 if delta is None else delta)
    # A saved constant may come back as a NumPy array.
    of_sources = given._replace(count=jnp.asarray(given.count), prior=None)
    scored = Scored(log_sums, delta, d_mixed, accumulate)
    d_queries, d_sources = _run(call, "partial_backward", of_sources, scored, **call.scores)
    if prior is not None:
        # The sum over all sources of weight * g is <d_mixed, mixed>.
        total = jnp.sum(wide(d_mixed) * wide(mixed), axis=entries)
        d_log = weight * (g - total + (0 if d_log_sums is None else d_log_sums))
        d_prior_mixed = jnp.expand_dims(weight, entries) * wide(d_mixed)
        d_prior = (d_prior_mixed.astype(prior[0].dtype), d_log)
    return d_queries, d_sources, d_prior


_partial.defvjp(_partial_forward, _partial_vjp)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merge(call, given):
    return given.mixed, given.current, _run(call, "merge", given, **call.norms)


def _merge_forward(call, given):
    return _merge(call, given), given


def _merge_backward(call, given, cotangents):
    d_mixed, d_current, d_z = cotangents
    given = jax.tree.map(jnp.asarray, given)  # A saved constant may come back as a NumPy array.
    cotangents = MergeCotangents(d_z, d_mixed, d_current)
    g = _run(call, "merge_backward", given, cotangents, **call.norms)
    return (Merge(g.query, g.mixed, g.log_sums, None, g.current, None, g.norm_gain),)


_merge.defvjp(_merge_forward, _merge_backward)

_IMPLEMENTATIONS = Implementations(
    xla, {"mosaic_tpu": mosaic_tpu, "triton": triton_gpu}, ("tpu",), name="depth_attention"
)
_MERGE_AT = Implementations(
    xla, {"mosaic_tpu": mosaic_tpu_decode}, ("tpu",), name="depth_attention_at"
)
_OF_MATRICES = Implementations(
    OfVectors(xla),
    {"mosaic_tpu": mosaic_tpu_matrices, "triton": OfVectors(triton_gpu)},
    ("tpu",),
    name="depth_attention_matrices",
)


def _run(call: _Call, op: str, *operands, **options):
    implementation = call.implementation
    if call.key_axis is not None:
        if implementation in ("mosaic_tpu", "triton"):
            raise UnsupportedImplementation(
                f"implementation={implementation!r} cannot serve this call: D is divided over the "
                f"mesh axis {call.key_axis!r}; use 'xla' or None"
            )
        implementation = "xla" if implementation == "pallas" else implementation or "xla"
    given = operands[0]
    matrices = given[0].ndim == (3 if isinstance(given, Partial) else 2)
    implementations = _OF_MATRICES if matrices else _IMPLEMENTATIONS
    return implementations.run(implementation, op, *operands, **options)


# Arguments -----------------------------------------------------------------------------------


def _dividing(key_axis: str | None) -> str | None:
    """Return the axis, or None if it has only one device."""
    return key_axis if key_axis is not None and jax.lax.axis_size(key_axis) > 1 else None


def _folded(queries, gains, sources):
    """Compute `gain * query`, at least float32, so that no normalised key is ever computed."""
    dtype = jnp.result_type(jnp.float32, sources)
    return queries.astype(dtype) if gains is None else queries.astype(dtype) * gains.astype(dtype)


def _count(count, sources):
    return jnp.asarray(sources.shape[0] if count is None else count, jnp.int32)


def _tokens(lead, axes: int) -> tuple[Any, ...]:
    """Return the sizes of one token axis for vectors, or of two token axes for matrices."""
    if axes == 1:
        return (math.prod(lead),)
    return math.prod(lead[:-1]), (lead[-1] if lead else 1)


def _checked(queries, sources, gains, count, prior, epsilon):
    """Check the arguments and return the implementations' operands and two reshapes.

    The reshapes give arrays [n, *tokens, *size] and [n, *tokens] the token axes of `_tokens`.
    """
    check_sources(queries, sources, gains, count, prior, epsilon)
    size = queries.shape[1:]
    tokens = _tokens(sources.shape[1 : -len(size)], len(size))
    rows = lambda x: x.reshape(x.shape[0], *tokens, *size)
    per_token = lambda x: x.reshape(x.shape[0], *tokens)
    prior = None if prior is None else (rows(prior[0]), per_token(prior[1]))
    queries = _folded(queries, gains, sources)
    given = Partial(queries, rows(sources), _count(count, sources), prior)
    return given, rows, per_token
