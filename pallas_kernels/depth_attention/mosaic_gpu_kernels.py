"""Bodies of the Mosaic GPU kernels of depth attention; `mosaic_gpu` describes the algorithm."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.call import round_up
from pallas_kernels.mosaic_gpu import PROGRAMS, WARPGROUPS, each_token, load, plgpu

# The number of threads of a warpgroup.
THREADS = 128
# The number of 32-bit registers of a thread that a loop may use for sums of vectors.
_REGISTERS = 64


class Sizes(NamedTuple):
    """The static parameters of a call: N sources of D entries, for S sites and T tokens."""

    N: int
    S: int
    T: int
    D: int
    epsilon: float
    norm: str | None = None
    norm_epsilon: float = 0.0

    @property
    def columns(self) -> int:
        """The number of columns of a vector in the form of a matrix, as it is copied."""
        return math.gcd(self.D, 64)

    @property
    def rows(self) -> int:
        """The number of rows of a vector in global memory."""
        return self.D // self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a vector on chip; its last rows may be padding, which is always 0."""
        return round_up(self.D, THREADS) // self.columns, self.columns

    @property
    def entries(self) -> int:
        """The number of entries of a vector that each thread has."""
        return math.prod(self.shape) // THREADS

    @property
    def layout(self):
        """The layout of a vector in registers.

        The forward and the backward pass use the same layout, and therefore sum the terms of a
        logit in the same order.
        """
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=math.gcd(self.entries, 8))

    @property
    def at_once(self) -> int:
        """The number of sites for which a loop over the sources sums vectors."""
        return max(1, min(self.S, _REGISTERS // self.entries))


# Helpers for several kernels ------------------------------------------------------------------


def _vector(sizes, ref):
    """Load a vector in float32."""
    return load(ref, sizes.layout).astype(jnp.float32)


def _zeros(sizes, dtype=jnp.float32):
    return plgpu.layout_cast(jnp.zeros(sizes.shape, dtype), sizes.layout)


def _clear(sizes, *buffers):
    """Fill buffers of vectors in shared memory with zeros."""
    for buffer in buffers:
        lead = buffer.shape[:-2]
        fill = functools.partial(_fill, buffer, lead, _zeros(sizes, buffer.dtype))
        jax.lax.fori_loop(0, math.prod(lead), fill, None)
    plgpu.commit_smem()


def _fill(buffer, lead, values, i, _):
    """Write `values` to the i-th vector of a buffer whose leading axes have the sizes `lead`."""
    index = ()
    for size in reversed(lead):
        index = (jax.lax.rem(i, size), *index)
        i = i // size
    buffer[index] = values


def _without_padding(sizes, vector):
    return vector.at[pl.ds(0, sizes.rows)]


def _fetch(sizes, source, vector, barrier):
    """Start to copy a vector from global memory to shared memory."""
    plgpu.copy_gmem_to_smem(source, _without_padding(sizes, vector), barrier)


def _send(sizes, vector, target):
    """Start to copy a vector from shared memory to global memory."""
    plgpu.copy_smem_to_gmem(_without_padding(sizes, vector), target)


def _write(sizes, vector, values, target):
    """Write `values` to a vector in shared memory, and start to copy it to global memory."""
    vector[...] = values.astype(vector.dtype)
    plgpu.commit_smem()
    _send(sizes, vector, target)


def _rstd(sizes, values, epsilon):
    """Return `1 / sqrt(mean square + epsilon)`."""
    return jax.lax.rsqrt(jnp.sum(values * values) * (1 / sizes.D) + epsilon)


# Numbers per site: each thread has the number of one site ---------------------------------------


def _row_layout():
    return plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


def _lanes(row):
    """Load a row [THREADS] from shared memory, in which entry s belongs to site s.

    The entries that belong to no site have arbitrary values.
    """
    return load(row, _row_layout())


def _same(number):
    """Return a row with the same number for every site."""
    return plgpu.layout_cast(jnp.full((THREADS,), number, jnp.float32), _row_layout())


def _store_lanes(row, lanes):
    row[...] = lanes
    plgpu.commit_smem()


def _as_lanes(sizes, row, number_of):
    """Return a row with `number_of(s)` for each site s, by way of a row in shared memory."""
    for s in range(sizes.S):
        row[s] = number_of(s)
    plgpu.commit_smem()
    return _lanes(row)


def _largest(logits, count, initial):
    """Return each site's largest logit, or 0 if there is none but -inf."""
    larger = lambda i, largest: jnp.maximum(largest, _lanes(logits.at[i]))
    largest = jax.lax.fori_loop(0, count, larger, initial)
    return jnp.where(largest == -jnp.inf, 0.0, largest)


# `partial`, the mixes of sources ----------------------------------------------------------------


class Team(NamedTuple):
    """The warpgroups of a program, which divide the sites, or the sources, of a token.

    Attributes:
      size: the number of warpgroups.
      barrier: a barrier for all of them; None if there is only one.
    """

    size: int
    barrier: Any

    @property
    def index(self):
        """The index of this warpgroup."""
        return jax.lax.axis_index(WARPGROUPS) if self.size > 1 else jnp.int32(0)

    def wait(self):
        """Wait until all warpgroups are here, and see what they have written."""
        plgpu.commit_smem()
        if self.size > 1:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)

    def first(self, action):
        """Run `action()` in the first warpgroup only."""
        if self.size == 1:
            return action()
        return pl.when(self.index == 0)(action)

    def sites(self, sizes):
        """Return the indices of this warpgroup's sites."""
        share = sizes.S // self.size
        return [self.index * share + k for k in range(share)]

    def each_source(self, count, body):
        """Run `body(i)` for each of this warpgroup's sources: every `size`-th of the first ones."""
        mine = (count - self.index + self.size - 1) // self.size
        jax.lax.fori_loop(0, mine, lambda k, _: body(self.index + k * self.size), None)


def warpgroups(sizes):
    """Return the number of warpgroups that share a token: up to 4, each with as many sites."""
    return next(size for size in (4, 3, 2, 1) if sizes.S % size == 0)


def _scratch(sizes, stages, dtype, *, arrivals, rows):
    """Return the buffers that the kernels of `partial` have in common.

    A token has `arrivals` vectors in addition to its sources. `rows` are the names of buffers with
    a number for each source and site.
    """
    team, row = warpgroups(sizes), plgpu.SMEM((sizes.N, THREADS), jnp.float32)
    return {
        "v": plgpu.SMEM((stages, sizes.N, *sizes.shape), dtype),
        **dict.fromkeys(rows, row),
        "row": plgpu.SMEM((team, THREADS), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=sizes.N + arrivals, num_barriers=stages),
        **({"team": plgpu.Barrier(num_arrivals=team)} if team > 1 else {}),
    }


def partial_scratch(sizes, stages, dtype):
    """Return the scratch buffers of `partial_kernel`."""
    return _scratch(sizes, stages, dtype, arrivals=0, rows=("logits", "weights")) | {
        "mix": plgpu.SMEM((warpgroups(sizes), sizes.at_once, *sizes.shape), dtype),
        "prior_ready": plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups(sizes)),
    }


def _count(sizes, ref):
    return jnp.minimum(ref.count[0], sizes.N)


def _team(sizes, ref):
    return Team(warpgroups(sizes), getattr(ref, "team", None))


def _fetch_sources(sizes, ref, count, slot, t):
    """Start to copy the active sources of token t to a slot of `ref.v`."""
    ready = ref.ready.at[slot]
    copy = lambda i, _: _fetch(sizes, ref.sources.at[i, t], ref.v.at[slot, i], ready)
    jax.lax.fori_loop(0, count, copy, None)
    # The barrier waits for N arrivals.
    jax.lax.fori_loop(count, sizes.N, lambda i, _: plgpu.barrier_arrive(ready), None)


def _weighted_sums(sizes, sources, count, weights, sites, sums):
    """Add `sum_i weights[i, s] * sources[i]` to the sum of each site s."""

    def add(i, sums):
        values = _vector(sizes, sources.at[i])
        return [total + weights[i, s] * values for s, total in zip(sites, sums, strict=True)]

    return jax.lax.fori_loop(0, count, add, sums)


def partial_kernel(sizes, stages, ref):
    """Compute the mixes (weighted sums of sources) and log-sum-exps of all sites for each token."""
    count, has_prior = _count(sizes, ref), hasattr(ref, "prior_mixed")
    team = _team(sizes, ref)
    sites = team.sites(sizes)
    row, mixes = ref.row.at[team.index], ref.mix.at[team.index]
    team.first(lambda: _clear(sizes, ref.v, ref.mix))
    team.wait()

    def token(slot, t, ahead, _):
        team.wait()  # for the slot that `ahead` fills
        ahead()
        plgpu.barrier_wait(ref.ready.at[slot])

        def score(i, _):
            values = _vector(sizes, ref.v.at[slot, i])
            rstd = _rstd(sizes, values, sizes.epsilon)
            for s in sites:
                ref.logits[i, s] = jnp.sum(values * _vector(sizes, ref.queries.at[s])) * rstd

        jax.lax.fori_loop(0, count, score, None)
        team.wait()
        of_prior = _same(-jnp.inf)
        if has_prior:
            of_prior = _as_lanes(sizes, row, lambda s: ref.prior_log_sums[s, t])
        largest = _largest(ref.logits, count, of_prior)
        exponential = lambda i: jnp.exp(_lanes(ref.logits.at[i]) - largest)
        of_prior = jnp.exp(of_prior - largest)
        add = lambda i, total: total + exponential(i)
        total = jax.lax.fori_loop(0, count, add, of_prior)
        inverse = 1 / jnp.where(total == 0, 1.0, total)
        weigh = lambda i: _store_lanes(ref.weights.at[i], exponential(i) * inverse)
        team.each_source(count, weigh)
        _store_lanes(row, of_prior * inverse)
        team.wait()
        for first in range(0, len(sites), sizes.at_once):
            mix(slot, t, sites[first : first + sizes.at_once])
        _store_lanes(row, largest + jnp.log(total))
        for s in sites:
            ref.log_sums[s, t] = row[s]

    def mix(slot, t, sites):
        # The buffers can be reused once the previous mixes have been copied from them.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = [of_prior(t, s, mixes.at[k]) for k, s in enumerate(sites)]
        sums = _weighted_sums(sizes, ref.v.at[slot], count, ref.weights, sites, sums)
        for k, s in enumerate(sites):
            _write(sizes, mixes.at[k], sums[k], ref.mixed.at[s, t])

    def of_prior(t, s, vector):
        if not has_prior:
            return _zeros(sizes)
        ready = ref.prior_ready.at[team.index]
        _fetch(sizes, ref.prior_mixed.at[s, t], vector, ready)
        plgpu.barrier_wait(ready)
        # An empty prior may contain NaN.
        weight = row[s] + _zeros(sizes)
        return jnp.where(weight == 0, _zeros(sizes), weight * _vector(sizes, vector))

    def start(slot, t):
        team.first(lambda: _fetch_sources(sizes, ref, count, slot, t))

    each_token(sizes.T, stages, start, token)
    plgpu.wait_smem_to_gmem(0)


# Backward pass of `partial` ---------------------------------------------------------------------


def backward_scratch(sizes, stages, dtype, accumulates):
    """Return the scratch buffers of `partial_backward_kernel`."""
    vectors = lambda count: plgpu.SMEM((stages, count, *sizes.shape), dtype)
    arrivals = sizes.S + sizes.N * accumulates
    rows = "logits", "products", "weights", "slopes"
    return _scratch(sizes, stages, dtype, arrivals=arrivals, rows=rows) | {
        "d": vectors(sizes.S),
        **({"sums": vectors(sizes.N)} if accumulates else {}),
        "d_query": plgpu.SMEM((sizes.S, *sizes.shape), jnp.float32),
        "rstd": plgpu.SMEM((sizes.N,), jnp.float32),
    }


def _score(sizes, ref, team, slot, i):
    """Compute a source's rstd, and its logits and products for this warpgroup's sites."""
    values = _vector(sizes, ref.v.at[slot, i])
    rstd = _rstd(sizes, values, sizes.epsilon)

    def keep_rstd():
        ref.rstd[i] = rstd

    team.first(keep_rstd)
    for s in team.sites(sizes):
        ref.logits[i, s] = jnp.sum(values * _vector(sizes, ref.queries.at[s])) * rstd
        ref.products[i, s] = jnp.sum(values * _vector(sizes, ref.d.at[slot, s]))


def _differentiate_softmax(sizes, ref, team, count, t):
    """Write the weights and the slopes of this warpgroup's sources, for all sites."""
    row = ref.row.at[team.index]
    largest = _largest(ref.logits, count, _same(-jnp.inf))

    def add(i, sums):
        total, weighted = sums
        e = jnp.exp(_lanes(ref.logits.at[i]) - largest)
        return total + e, weighted + e * _lanes(ref.products.at[i])

    total, weighted = jax.lax.fori_loop(0, count, add, (_same(0), _same(0)))
    mean = weighted / jnp.where(total == 0, 1.0, total)
    log_sums = _as_lanes(sizes, row, lambda s: ref.log_sums[s, t])
    if hasattr(ref, "delta"):
        # There may be a prior (a mix of other sources), so the weights may not sum to 1.
        share = jnp.where(total == 0, 0.0, total * jnp.exp(largest - log_sums))
        mean = share * mean + _as_lanes(sizes, row, lambda s: ref.delta[s, t])

    def source(i):
        weights = jnp.exp(_lanes(ref.logits.at[i]) - log_sums)
        d_logits = weights * (_lanes(ref.products.at[i]) - mean)
        _store_lanes(ref.weights.at[i], weights)
        _store_lanes(ref.slopes.at[i], d_logits * ref.rstd[i])

    team.each_source(count, source)


def _add_to_d_queries(sizes, ref, team, count, slot):
    """Add a token's terms to the gradients of the queries of this warpgroup's sites."""
    sites = team.sites(sizes)
    for first in range(0, len(sites), sizes.at_once):
        part = sites[first : first + sizes.at_once]
        sums = [_vector(sizes, ref.d_query.at[s]) for s in part]
        sums = _weighted_sums(sizes, ref.v.at[slot], count, ref.slopes, part, sums)
        for s, total in zip(part, sums, strict=True):
            ref.d_query[s] = total


def _write_gradient(sizes, ref, slot, t, i, target):
    """Write the gradient of source i of token t; with `accumulate`, add it to the target."""

    def add(s, sums):
        gradient, turn = sums
        slope = ref.slopes[i, s]
        gradient += ref.weights[i, s] * _vector(sizes, ref.d.at[slot, s])
        gradient += slope * _vector(sizes, ref.queries.at[s])
        return gradient, turn + slope * ref.logits[i, s]

    gradient = _vector(sizes, target) if hasattr(ref, "accumulate") else _zeros(sizes)
    gradient, turn = jax.lax.fori_loop(0, sizes.S, add, (gradient, jnp.float32(0)))
    values = _vector(sizes, ref.v.at[slot, i])
    gradient -= (turn * ref.rstd[i] * (1 / sizes.D)) * values
    _write(sizes, target, gradient, ref.d_sources.at[i, t])


def partial_backward_kernel(sizes, stages, ref):
    """Compute the gradients of the sources and, summed over a program's tokens, of the queries.

    The gradient of a source v is
    `dv = sum_s weight_s d_mixed_s + d_logit_s (rstd q_s - logit_s rstd^2 v / D)`, with q_s the
    query of site s. The products are `<d_mixed, v>`, and the slopes are `d_logit rstd`.
    """
    count, accumulates = _count(sizes, ref), hasattr(ref, "accumulate")
    team = _team(sizes, ref)
    sums = [ref.sums] if accumulates else []
    team.first(lambda: _clear(sizes, ref.v, ref.d, ref.d_query, *sums))
    team.wait()

    def start(slot, t):
        team.first(lambda: fetch(slot, t))

    def fetch(slot, t):
        ready = ref.ready.at[slot]
        _fetch_sources(sizes, ref, count, slot, t)
        for s in range(sizes.S):
            _fetch(sizes, ref.d_mixed.at[s, t], ref.d.at[slot, s], ready)
        if accumulates:
            copy = lambda i, _: _fetch(sizes, ref.accumulate.at[i, t], ref.sums.at[slot, i], ready)
            jax.lax.fori_loop(0, sizes.N, copy, None)

    def token(slot, t, ahead, _):
        # The slots can be reused once the previous gradients have been copied from them.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        team.wait()
        ahead()
        plgpu.barrier_wait(ref.ready.at[slot])
        jax.lax.fori_loop(0, count, lambda i, _: _score(sizes, ref, team, slot, i), None)
        team.wait()
        _differentiate_softmax(sizes, ref, team, count, t)
        team.wait()
        _add_to_d_queries(sizes, ref, team, count, slot)
        team.wait()
        # Without `accumulate`, the gradients overwrite the sources. The empty rows are zeros.
        target = (ref.sums if accumulates else ref.v).at[slot]
        team.each_source(count, lambda i: _write_gradient(sizes, ref, slot, t, i, target.at[i]))
        keep = lambda i, _: _send(sizes, target.at[i], ref.d_sources.at[i, t])
        team.first(lambda: jax.lax.fori_loop(count, sizes.N, keep, None))

    each_token(sizes.T, stages, start, token)
    for s in team.sites(sizes):
        ref.d_queries[jax.lax.axis_index(PROGRAMS), s] = _vector(sizes, ref.d_query.at[s])
    plgpu.wait_smem_to_gmem(0)


# Phase two: `merge`, which adds the running sum ---------------------------------------------------


def merge_scratch(sizes, stages, dtype, names=("mixed", "current")):
    """Return the scratch buffers of the merge kernels, with buffers for the named operands."""
    vectors = plgpu.SMEM((stages, *sizes.shape), dtype)
    ready = plgpu.Barrier(num_arrivals=len(names), num_barriers=stages)
    return {f"{name}_of": vectors for name in names} | {"ready": ready}


def backward_merge_scratch(sizes, stages, dtype):
    """Return the scratch buffers of `merge_backward_kernel`."""
    sums = plgpu.SMEM(sizes.shape, jnp.float32)
    return merge_scratch(sizes, stages, dtype, ("mixed", "current", "d_z", "d_current")) | {
        "sum_of_query": sums,
        **({} if sizes.norm is None else {"sum_of_gain": sums}),
    }


def _query(sizes, ref):
    return _vector(sizes, ref.query)


def _gain(sizes, ref):
    """Return the gain of the output's norm, or 1 if there is no norm."""
    return 1.0 if sizes.norm is None else _vector(sizes, ref.norm_gain)


def _load_merged(sizes, ref, slot):
    return _vector(sizes, ref.mixed_of.at[slot]), _vector(sizes, ref.current_of.at[slot])


def _merged(sizes, ref, slot, t, query):
    """Load a token's mix and running sum (`current`).

    Returns:
      The two vectors, and the rstd, the logit and the weight p of the running sum.
    """
    mixed, current = _load_merged(sizes, ref, slot)
    rstd = _rstd(sizes, current, sizes.epsilon)
    logit = jnp.sum(query * current) * rstd
    p = jnp.where(ref.active[0] != 0, 1 / (1 + jnp.exp(ref.log_sums[t] - logit)), 0.0)
    return mixed, current, rstd, logit, p


def _centred(sizes, values):
    """Subtract the mean from the entries of a vector."""
    values = values - jnp.sum(values) * (1 / sizes.D)
    if sizes.shape[0] == sizes.rows:
        return values
    rows = plgpu.broadcasted_iota(jnp.int32, sizes.shape, 0, layout=sizes.layout)
    return jnp.where(rows < sizes.rows, values, 0.0)


def _normalised(sizes, h):
    """Return `norm(h)` without the gain, and the rstd that h was multiplied by."""
    if sizes.norm is None:
        return h, 1.0
    if sizes.norm == "layernorm":
        h = _centred(sizes, h)
    rstd = _rstd(sizes, h, sizes.norm_epsilon)
    return h * rstd, rstd


def _through_norm(sizes, d_normalised, normalised):
    """Return the cotangent of h divided by the rstd of its norm."""
    if sizes.norm is None:
        return d_normalised
    of_scale = jnp.sum(d_normalised * normalised) * (1 / sizes.D)
    dh = d_normalised - normalised * of_scale
    # The entries of `normalised` have the sum 0 with layernorm.
    return _centred(sizes, dh) if sizes.norm == "layernorm" else dh


def merge_kernel(sizes, stages, ref):
    """Add the running sum to one site's mix, and normalise the result, for each token."""
    site = ref.site[0]
    _clear(sizes, ref.mixed_of, ref.current_of)
    query, gain = _query(sizes, ref), _gain(sizes, ref)

    def start(slot, t):
        ready = ref.ready.at[slot]
        _fetch(sizes, ref.mixed.at[site, t], ref.mixed_of.at[slot], ready)
        _fetch(sizes, ref.current.at[t], ref.current_of.at[slot], ready)

    def token(slot, t, ahead, _):
        # The result overwrites the running sum on chip.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ahead()
        plgpu.barrier_wait(ref.ready.at[slot])
        mixed, current, _, _, p = _merged(sizes, ref, slot, t, query)
        normalised, _ = _normalised(sizes, mixed + p * (current - mixed))
        _write(sizes, ref.current_of.at[slot], gain * normalised, ref.z.at[t])

    each_token(sizes.T, stages, start, token)
    plgpu.wait_smem_to_gmem(0)


def merge_backward_kernel(sizes, stages, ref):
    """Compute the gradients of `merge_kernel`.

    The gradients of the query and of the norm's gain are summed over a program's tokens.
    """
    site = ref.site[0]
    sums = [ref.sum_of_query] + ([] if sizes.norm is None else [ref.sum_of_gain])
    _clear(sizes, ref.mixed_of, ref.current_of, ref.d_z_of, ref.d_current_of, *sums)

    def start(slot, t):
        ready = ref.ready.at[slot]
        _fetch(sizes, ref.mixed.at[site, t], ref.mixed_of.at[slot], ready)
        for name in ("current", "d_z", "d_current"):
            _fetch(sizes, getattr(ref, name).at[t], getattr(ref, f"{name}_of").at[slot], ready)

    def token(slot, t, ahead, _):
        # The gradients overwrite the operands on chip.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ahead()
        plgpu.barrier_wait(ref.ready.at[slot])
        # The parameters are loaded again (from the cache) for every token, because they do not fit
        # in registers. So are operands that are needed a second time.
        mixed, current, rstd, logit, p = _merged(sizes, ref, slot, t, _query(sizes, ref))
        normalised, norm_rstd = _normalised(sizes, mixed + p * (current - mixed))
        d_z = _vector(sizes, ref.d_z_of.at[slot])
        if sizes.norm is not None:
            ref.sum_of_gain[...] = _vector(sizes, ref.sum_of_gain) + d_z * normalised
        dh = _through_norm(sizes, _gain(sizes, ref) * d_z, normalised) * norm_rstd
        mixed, current = _load_merged(sizes, ref, slot)
        d_logit = p * (1 - p) * jnp.sum(dh * (current - mixed))
        ref.d_log_sums[t] = -d_logit
        scaled = d_logit * rstd
        d_current = p * dh - (scaled * rstd * logit * (1 / sizes.D)) * current
        d_current += scaled * _query(sizes, ref) + _vector(sizes, ref.d_current_of.at[slot])
        _write(sizes, ref.mixed_of.at[slot], (1 - p) * dh, ref.new_d_mixed.at[t])
        ref.sum_of_query[...] = _vector(sizes, ref.sum_of_query) + scaled * current
        _write(sizes, ref.current_of.at[slot], d_current, ref.new_d_current.at[t])

    each_token(sizes.T, stages, start, token)
    program = jax.lax.axis_index(PROGRAMS)
    ref.d_query[program] = _vector(sizes, ref.sum_of_query)
    if sizes.norm is not None:
        ref.d_norm_gain[program] = _vector(sizes, ref.sum_of_gain)
    plgpu.wait_smem_to_gmem(0)
