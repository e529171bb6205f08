"""Bodies of the GPU kernels of depth attention. `triton_gpu` describes the algorithm."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton import plgpu


class GpuCall(NamedTuple):
    """The static parameters of a depth-attention GPU kernel, constant during tracing.

    The kernel processes N sources of D entries for S sites and T tokens.
    """

    N: int
    S: int
    T: int
    D: int
    epsilon: float
    norm: str = "rmsnorm"
    norm_epsilon: float = 0.0


class Columns(NamedTuple):
    """A range of entries of a vector.

    Attributes:
      first: the index of the first entry, a multiple of `width`.
      width: the number of entries, a power of two.
      size: the number of entries of the whole vector. The range may extend beyond it.
    """

    first: jax.Array | int
    width: int
    size: int

    @property
    def index(self):
        """The indices of the entries [width]."""
        return self.first + jnp.arange(self.width)

    @property
    def inside(self):
        """A mask of the entries within the vector; None if no range extends beyond the vector."""
        return self.index < self.size if self.size % self.width else None

    def only(self, values):
        """Return `values` with 0 at entries beyond the end of the vector."""
        return values if self.inside is None else jnp.where(self.inside, values, 0)


def padded(size: int) -> int:
    """Round `size` up to a block size for Triton: a power of two, at least 32.

    A smaller block saves nothing, because some threads of a warp would be idle.
    """
    return max(32, pl.next_power_of_2(size))


def _load(ref, lead, columns):
    """Load the vector `ref[*lead, columns]` in float32, with 0 beyond the end of the vector."""
    mask = columns.inside
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return plgpu.load(ref.at[(*lead, columns.index)], mask=mask, other=other).astype(jnp.float32)


def _save(ref, lead, columns, values):
    index = (*lead, columns.index)
    plgpu.store(ref.at[index], values.astype(ref.dtype), mask=columns.inside)


def _at(ref, rows, most, t, columns):
    """Return a reference to the entries `columns` of the sources `rows` for token t, and a mask.

    The mask is True for sources whose index is less than `most` and for entries that exist.
    """
    mask = (rows < most)[:, None]
    if columns.inside is not None:
        mask = mask & columns.inside[None, :]
    return ref.at[rows[:, None], t, columns.index[None, :]], mask


def _load_rows(ref, rows, most, t, columns):
    """Load the sources `rows` of token t in their own dtype: [rows, columns].

    Sources with an index of `most` or more are not read; they are 0 in the result.
    """
    source, mask = _at(ref, rows, most, t, columns)
    mask = jnp.broadcast_to(mask, (rows.shape[0], columns.width))
    return plgpu.load(source, mask=mask, other=jnp.zeros((), ref.dtype))


def _count(call, ref):
    return jnp.minimum(ref.count[0], call.N)


def _each_tile(blocks, rows, load, body, carry):
    """Run `carry = body(rows, tile, carry)` for each tile of the first `rows` sources.

    The next tiles are loaded before a tile is processed. Otherwise every tile would wait for
    memory, because the sums over a source synchronise the threads.
    """
    size, ahead = blocks.rows, blocks.ahead
    tile_rows = lambda i: i * size + jnp.arange(size)

    def step(i, carry):
        (tile, *coming), carry = carry
        coming.append(load(tile_rows(i + ahead)))
        return coming, body(tile_rows(i), tile.astype(jnp.float32), carry)

    tiles = jax.lax.div(jnp.asarray(rows + size - 1, jnp.int32), jnp.int32(size))
    first = [load(tile_rows(i)) for i in range(ahead)]
    return jax.lax.fori_loop(0, tiles, step, (first, carry))[1]


def _rstd(call, values):
    """Return `1 / sqrt(mean square + epsilon)` of each row; entries beyond D must be 0."""
    return jax.lax.rsqrt(jnp.sum(jnp.square(values), axis=-1) / call.D + call.epsilon)


# Online softmax over sources -------------------------------------------------------------------


class OnlineSoftmax(NamedTuple):
    """The state of an online softmax over the sources that have been added so far.

    Attributes:
      largest: the largest logit.
      total: `sum exp(logit - largest)` over sources.
      values: `sum exp(logit - largest) * value` over sources.
    """

    largest: jax.Array
    total: jax.Array
    values: jax.Array

    def add(self, logits, values):
        """Return the state after adding sources with logits [rows] and values [rows, ...].

        A source with a logit of -inf has no effect.
        """
        largest = jnp.maximum(self.largest, jnp.max(logits))
        shift = jnp.where(largest == -jnp.inf, 0.0, largest)
        weights, rescale = jnp.exp(logits - shift), jnp.exp(self.largest - shift)
        total = rescale * self.total + jnp.sum(weights)
        each = weights if values.ndim == 1 else weights[:, None]
        values = rescale * self.values + jnp.sum(each * values, axis=0)
        return OnlineSoftmax(largest, total, values)

    @property
    def mean(self):
        """The weighted mean of the values; 0 if no source has been added."""
        return self.values / jnp.where(self.total == 0, 1.0, self.total)

    @property
    def log_sum(self):
        """The log-sum-exp of the logits."""
        return self.largest + jnp.log(self.total)


def _empty_softmax(shape):
    return OnlineSoftmax(jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros(shape, jnp.float32))


def _mixed(call, blocks, count, sources, t, columns, queries, mixes):
    """Add all sources of token t to `mixes`, one online softmax per query, and return `mixes`."""
    load = functools.partial(_load_rows, sources, most=count, t=t, columns=columns)

    def tile(rows, values, mixes):
        rstd = _rstd(call, values)
        added = []
        for query, mix in zip(queries(), mixes, strict=True):
            logits = jnp.sum(values * query[None, :], axis=1) * rstd
            added.append(mix.add(jnp.where(rows < count, logits, -jnp.inf), values))
        return added

    return _each_tile(blocks, count, load, tile, mixes)


def _token_and_sites(call, blocks):
    """Return the index of the token and the indices of the sites that this program processes."""
    groups = pl.cdiv(call.S, blocks.sites)
    # Consecutive programs process the same token for different groups of sites. They run at the
    # same time, so only the first has to load the token's sources from memory. The others hit the
    # cache.
    t = jax.lax.div(pl.program_id(0), jnp.int32(groups))
    first = (pl.program_id(0) - t * groups) * blocks.sites
    # If S is not a multiple of the group size, the last group computes and writes the last site
    # more than once, with the same result.
    return t, [jnp.minimum(first + s, call.S - 1) for s in range(blocks.sites)]


def partial_kernel(call, blocks, ref):
    """Compute the mixes (weighted sums of sources) and log-sum-exps of some sites for one token."""
    t, sites = _token_and_sites(call, blocks)
    columns = Columns(0, blocks.columns, call.D)
    mixes = []
    for s in sites:
        if hasattr(ref, "prior_mixed"):
            largest = ref.prior_log_sums[s, t]
            empty = largest == -jnp.inf
            values = jnp.where(empty, 0.0, _load(ref.prior_mixed, (s, t), columns))
            mixes.append(
                OnlineSoftmax(largest, jnp.where(empty, jnp.float32(0), jnp.float32(1)), values)
            )
        else:
            mixes.append(_empty_softmax((columns.width,)))
    queries = _queries(ref, sites, columns)
    mixes = _mixed(call, blocks, _count(call, ref), ref.sources, t, columns, queries, mixes)
    for s, mix in zip(sites, mixes, strict=True):
        _save(ref.mixed, (s, t), columns, mix.mean)
        ref.log_sums[s, t] = mix.log_sum


def _queries(ref, sites, columns):
    """Return a function that takes no arguments and returns the queries of `sites`.

    A single query is kept in registers. Several queries are loaded again (from the cache) at each
    call. A kernel calls the function once per tile.
    """
    load = lambda: (_load(ref.queries, (s,), columns) for s in sites)
    if len(sites) > 1:
        return load
    queries = tuple(load())
    return lambda: queries


# Backward pass of `partial` -------------------------------------------------------------------


def _each_token(call, blocks, group, body, carry):
    """Run `carry = body(token, carry)` for each token of a group, and return the carry."""
    first = group * blocks.tokens
    count = jnp.minimum(blocks.tokens, call.T - first)
    return jax.lax.fori_loop(0, count, lambda k, carry: body(first + k, carry), carry)


def _scores(call, blocks, ref, count, t, sites, columns, queries, d_mixed):
    """Write rstd, the logits and the products `<d_mixed, v>` of all sources of token t.

    Returns:
      For each site, `sum_i weight_i <d_mixed, v_i>`, plus the input `delta` if there is one.
    """
    load = functools.partial(_load_rows, ref.sources, most=count, t=t, columns=columns)

    def tile(rows, values, mixes):
        active, added = rows < count, []
        rstd = _rstd(call, values)
        plgpu.store(ref.rstd.at[t, rows], rstd, mask=active)
        for s, query, d, mix in zip(sites, queries(), d_mixed(), mixes, strict=True):
            logits = jnp.sum(values * query[None, :], axis=1) * rstd
            products = jnp.sum(values * d[None, :], axis=1)
            plgpu.store(ref.logits.at[s, t, rows], logits, mask=active)
            plgpu.store(ref.products.at[s, t, rows], products, mask=active)
            added.append(mix.add(jnp.where(active, logits, -jnp.inf), products))
        return added

    mixes = [_empty_softmax(())] * len(sites)
    mixes = _each_tile(blocks, count, load, tile, mixes)
    totals = [mix.mean for mix in mixes]
    if not hasattr(ref, "delta"):
        # Without `delta` there is no prior (a mix of other sources), so the weights sum to 1.
        return totals
    for k, (s, mix) in enumerate(zip(sites, mixes, strict=True)):
        share = jnp.where(mix.total == 0, 0.0, jnp.exp(mix.log_sum - ref.log_sums[s, t]))
        totals[k] = share * totals[k] + ref.delta[s, t]
    return totals


def _gradients(call, blocks, ref, count, t, columns, queries, d_mixed, totals, d_queries):
    """Write the gradients of token t's sources, and return `d_queries` with its terms added.

    The gradient of a source v is
    `dv = sum_s weight_s d_mixed_s + d_logit_s (rstd q_s - logit_s rstd^2 v / D)`, with q_s the
    query of site s.
    """
    # If gradients are accumulated, the empty rows keep their values. Otherwise zeros are written to
    # these rows.
    accumulates = hasattr(ref, "accumulate")
    most = count if accumulates else call.N
    load = functools.partial(_load_rows, ref.sources, most=count, t=t, columns=columns)

    def tile(rows, values, d_queries):
        active = rows < count
        read = lambda ref, *lead: plgpu.load(ref.at[(*lead, rows)], mask=active, other=0.0)
        rstd = read(ref.rstd, t)
        target, mask = _at(ref.d_sources, rows, most, t, columns)
        mask = jnp.broadcast_to(mask, values.shape)
        dv, shrink = jnp.zeros_like(values), jnp.zeros_like(rstd)
        if accumulates:
            accumulated = plgpu.load(target, mask=mask, other=jnp.zeros((), ref.d_sources.dtype))
            dv = accumulated.astype(jnp.float32)
        added = []
        for s, (query, d, total, d_query) in enumerate(
            zip(queries, d_mixed, totals, d_queries, strict=True)
        ):
            logits = read(ref.logits, s, t)
            weights = jnp.where(active, jnp.exp(logits - ref.log_sums[s, t]), 0.0)
            d_logits = weights * (read(ref.products, s, t) - total)
            scaled = (d_logits * rstd)[:, None]
            dv += weights[:, None] * d[None, :] + scaled * query[None, :]
            shrink += d_logits * logits
            added.append(d_query + jnp.sum(scaled * values, axis=0))
        dv -= (shrink * jnp.square(rstd) / call.D)[:, None] * values
        plgpu.store(target, dv.astype(ref.d_sources.dtype), mask=mask)
        return added

    return _each_tile(blocks, most, load, tile, d_queries)


def backward_kernel(call, blocks, ref):
    """Compute the backward pass of `partial` for some tokens, with whole sources in registers."""
    group, columns = pl.program_id(0), Columns(0, blocks.columns, call.D)
    count, sites = _count(call, ref), range(call.S)
    queries = [_load(ref.queries, (s,), columns) for s in sites]

    def token(t, d_queries):
        d_mixed = [_load(ref.d_mixed, (s, t), columns) for s in sites]
        always = lambda vectors: lambda: vectors
        totals = _scores(
            call, blocks, ref, count, t, sites, columns, always(queries), always(d_mixed)
        )
        ref.barrier()  # Each thread next reads values that other threads have stored.
        return _gradients(call, blocks, ref, count, t, columns, queries, d_mixed, totals, d_queries)

    zeros = [jnp.zeros(columns.width, jnp.float32)] * call.S
    for s, d_query in enumerate(_each_token(call, blocks, group, token, zeros)):
        _save(ref.d_queries, (group, s), columns, d_query)


def scores_kernel(call, blocks, ref):
    """Compute the part of the backward pass of `partial` that needs whole sources.

    A program processes one token and a group of sites.
    """
    t, sites = _token_and_sites(call, blocks)
    columns = Columns(0, blocks.columns, call.D)
    d_mixed = lambda: (_load(ref.d_mixed, (s, t), columns) for s in sites)
    queries = lambda: (_load(ref.queries, (s,), columns) for s in sites)
    count = _count(call, ref)
    totals = _scores(call, blocks, ref, count, t, sites, columns, queries, d_mixed)
    for s, total in zip(sites, totals, strict=True):
        ref.totals[s, t] = total


def gradients_kernel(call, blocks, ref):
    """Compute the gradients of queries and sources from the results of `scores_kernel`.

    A program processes a group of tokens and a part of the entries along D.
    """
    parts = pl.cdiv(call.D, blocks.columns)
    group = jax.lax.div(pl.program_id(0), jnp.int32(parts))
    first = (pl.program_id(0) - group * parts) * blocks.columns
    columns, count, sites = Columns(first, blocks.columns, call.D), _count(call, ref), range(call.S)
    queries = [_load(ref.queries, (s,), columns) for s in sites]

    def token(t, d_queries):
        d_mixed = [_load(ref.d_mixed, (s, t), columns) for s in sites]
        totals = [ref.totals[s, t] for s in sites]
        return _gradients(call, blocks, ref, count, t, columns, queries, d_mixed, totals, d_queries)

    zeros = [jnp.zeros(columns.width, jnp.float32)] * call.S
    for s, d_query in enumerate(_each_token(call, blocks, group, token, zeros)):
        _save(ref.d_queries, (group, s), columns, d_query)


# Phase two: `merge`, which adds the running sum -----------------------------------------------


def _normed(call, columns, h):
    """Return `norm(h)` without the gain, and the rstd that h was multiplied by."""
    if call.norm == "layernorm":
        h = columns.only(h - jnp.sum(h) / call.D)
    rstd = jax.lax.rsqrt(jnp.sum(jnp.square(h)) / call.D + call.norm_epsilon)
    return h * rstd, rstd


def _load_merged(ref, t, columns):
    return _load(ref.mixed, (ref.site[0], t), columns), _load(ref.current, (t,), columns)


def _merged(call, ref, t, columns, query):
    """Load the operands of `merge` for token t, and compute the weight of the running sum.

    Returns:
      The mix of the sealed sources, the running sum (`current`), and its rstd, logit and weight p.
    """
    mixed, current = _load_merged(ref, t, columns)
    rstd = _rstd(call, current)
    logit = jnp.sum(query * current) * rstd
    p = jnp.where(ref.active[0] != 0, 1 / (1 + jnp.exp(ref.log_sums[t] - logit)), 0.0)
    return mixed, current, rstd, logit, p


def merge_kernel(call, blocks, ref):
    """Add the running sum to one site's mix and normalise the result, for a group of tokens."""
    columns = Columns(0, blocks.columns, call.D)
    query, gain = _load(ref.query, (), columns), _load(ref.norm_gain, (), columns)

    def token(t, _):
        mixed, current, _, _, p = _merged(call, ref, t, columns, query)
        normed, _ = _normed(call, columns, mixed + p * (current - mixed))
        _save(ref.z, (t,), columns, gain * normed)

    _each_token(call, blocks, pl.program_id(0), token, None)


def merge_backward_kernel(call, blocks, ref):
    """Compute the gradients of `merge_kernel` for a group of tokens.

    The gradients of the query and of the norm's gain are partial sums, one per program.
    """
    group, columns = pl.program_id(0), Columns(0, blocks.columns, call.D)

    def token(t, sums):
        d_query, d_gain = sums
        # The parameters are loaded again (from the cache) for every token, because they do not fit
        # in registers. So are the values that are needed after d_mixed is written.
        load_query = lambda: _load(ref.query, (), columns)
        mixed, current, rstd, logit, p = _merged(call, ref, t, columns, load_query())
        normed, norm_rstd = _normed(call, columns, mixed + p * (current - mixed))
        d_z = _load(ref.d_z, (t,), columns)
        d_gain += d_z * normed
        d_z *= _load(ref.norm_gain, (), columns)
        dh = d_z - normed * (jnp.sum(d_z * normed) / call.D)
        if call.norm == "layernorm":
            dh = columns.only(dh - jnp.sum(d_z) / call.D)
        dh *= norm_rstd
        _save(ref.new_d_mixed, (ref.site[0], t), columns, (1 - p) * dh)
        mixed, current = _load_merged(ref, t, columns)
        d_logit = p * (1 - p) * jnp.sum(dh * (current - mixed))
        ref.d_log_sums[t] = -d_logit
        scaled = d_logit * rstd
        d_current = p * dh - (scaled * rstd * logit / call.D) * current + scaled * load_query()
        d_current += _load(ref.new_d_current, (t,), columns)
        _save(ref.new_d_current, (t,), columns, d_current)
        return d_query + scaled * current, d_gain

    zero = jnp.zeros(columns.width, jnp.float32)
    d_query, d_gain = _each_token(call, blocks, group, token, (zero, zero))
    _save(ref.d_query, (group,), columns, d_query)
    _save(ref.d_norm_gain, (group,), columns, d_gain)
