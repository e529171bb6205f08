"""Bodies of the Mosaic GPU kernels of depth attention; `mosaic_gpu` describes the algorithm."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.call import round_up
from pallas_kernels.mosaic_gpu import PROGRAMS, each_token, load, plgpu

# The number of threads of a warpgroup.
THREADS = 128
# The number of 32-bit registers of a thread that a loop may use for sums of vectors.
REGISTERS = 64


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
    def sites_at_once(self) -> int:
        """The number of sites for which a loop over the sources sums vectors."""
        return max(1, min(self.S, REGISTERS // self.entries))


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


def _zero_padding(sizes, values):
    """Return a vector whose padding is 0, even if all other entries are NaN."""
    if sizes.shape[0] == sizes.rows:
        return values
    rows = plgpu.broadcasted_iota(jnp.int32, sizes.shape, 0, layout=sizes.layout)
    return jnp.where(rows < sizes.rows, values, 0.0)


def _write(sizes, vector, values, target):
    """Write `values` to a vector in shared memory, and start to copy it to global memory."""
    vector[...] = _zero_padding(sizes, values).astype(vector.dtype)
    plgpu.commit_smem()
    _send(sizes, vector, target)


def _rstd(sizes, values, epsilon):
    """Return `1 / sqrt(mean square + epsilon)`."""
    return jax.lax.rsqrt(jnp.sum(values * values) * (1 / sizes.D) + epsilon)


# Numbers per site: thread s has the number of site s --------------------------------------------


def _row_layout():
    return plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


def _per_site(row):
    """Load a row [THREADS] from shared memory, in which entry s belongs to site s.

    The entries that belong to no site have arbitrary values.
    """
    return load(row, _row_layout())


def _constant_per_site(number):
    return plgpu.layout_cast(jnp.full((THREADS,), number, jnp.float32), _row_layout())


def _store_per_site(row, numbers):
    row[...] = numbers
    plgpu.commit_smem()


def _fill_per_site(sizes, row, number_of):
    """Return a row with `number_of(s)` for each site s, by way of a row in shared memory."""
    plgpu.commit_smem()  # Other threads may still read the previous numbers of the row.
    for s in range(sizes.S):
        row[s] = number_of(s)
    plgpu.commit_smem()
    return _per_site(row)


def _largest(logits, count, initial):
    """Return each site's largest logit, or 0 if there is none but -inf."""
    larger = lambda i, largest: jnp.maximum(largest, _per_site(logits.at[i]))
    largest = jax.lax.fori_loop(0, count, larger, initial)
    return jnp.where(largest == -jnp.inf, 0.0, largest)


# `partial`, the mixes of sources ----------------------------------------------------------------


def _scratch(sizes, stages, dtype, *, arrivals, rows):
    """Return the buffers that the kernels of `partial` have in common.

    A token has `arrivals` vectors in addition to its sources. `rows` are the names of buffers with
    a number for each source and site.
    """
    return {
        "v": plgpu.SMEM((stages, sizes.N, *sizes.shape), dtype),
        **dict.fromkeys(rows, plgpu.SMEM((sizes.N, THREADS), jnp.float32)),
        "row": plgpu.SMEM((THREADS,), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=sizes.N + arrivals, num_barriers=stages),
    }


def partial_scratch(sizes, stages, dtype):
    """Return the scratch buffers of `partial_kernel`."""
    return _scratch(sizes, stages, dtype, arrivals=0, rows=("weights",)) | {
        "mix": plgpu.SMEM((sizes.sites_at_once, *sizes.shape), dtype),
        "prior_ready": plgpu.Barrier(num_arrivals=1),
    }


def _count(sizes, ref):
    return jnp.clip(ref.count[0], 0, sizes.N)


def _fetch_sources(sizes, ref, count, slot, t):
    """Start to copy the active sources of token t to a slot of `ref.v`."""
    ready = ref.ready.at[slot]
    copy = lambda i, _: _fetch(sizes, ref.sources.at[i, t], ref.v.at[slot, i], ready)
    jax.lax.fori_loop(0, count, copy, None)
    # The barrier waits for N arrivals.
    jax.lax.fori_loop(count, sizes.N, lambda i, _: plgpu.barrier_arrive(ready), None)


def _groups(sizes):
    """Divide the sites into groups whose sums of vectors fit in registers."""
    return [
        range(sizes.S)[i : i + sizes.sites_at_once] for i in range(0, sizes.S, sizes.sites_at_once)
    ]


def _weighted_sums(sizes, sources, count, weights, sites, sums):
    """Add `sum_i weights[i, s] * sources[i]` to the sum of each site s."""

    def add(i, sums):
        values = _vector(sizes, sources.at[i])
        return [total + weights[i, s] * values for s, total in zip(sites, sums, strict=True)]

    return jax.lax.fori_loop(0, count, add, sums)


def partial_kernel(sizes, stages, ref):
    """Compute the mixes (weighted sums of sources) and log-sum-exps of all sites for each token."""
    count, has_prior = _count(sizes, ref), hasattr(ref, "prior_mixed")
    _clear(sizes, ref.v, ref.mix)

    def token(slot, t, prefetch, _):
        prefetch()
        plgpu.barrier_wait(ref.ready.at[slot])

        def score(i, _):
            values = _vector(sizes, ref.v.at[slot, i])
            rstd = _rstd(sizes, values, sizes.epsilon)
            for s in range(sizes.S):
                logit = jnp.sum(values * _vector(sizes, ref.queries.at[s])) * rstd
                ref.weights[i, s] = logit

        jax.lax.fori_loop(0, count, score, None)
        plgpu.commit_smem()
        prior_logits = _constant_per_site(-jnp.inf)
        if has_prior:
            prior_logits = _fill_per_site(sizes, ref.row, lambda s: ref.prior_log_sums[s, t])
        largest = _largest(ref.weights, count, prior_logits)
        exponential = lambda i: jnp.exp(_per_site(ref.weights.at[i]) - largest)
        prior_weights = jnp.exp(prior_logits - largest)
        add = lambda i, total: total + exponential(i)
        total = jax.lax.fori_loop(0, count, add, prior_weights)
        inverse = 1 / jnp.where(total == 0, 1.0, total)
        # The weights take the place of the logits.
        weigh = lambda i, _: _store_per_site(ref.weights.at[i], exponential(i) * inverse)
        jax.lax.fori_loop(0, count, weigh, None)
        _store_per_site(ref.row, prior_weights * inverse)
        for sites in _groups(sizes):
            mix(slot, t, sites)
        _store_per_site(ref.row, largest + jnp.log(total))
        for s in range(sizes.S):
            ref.log_sums[s, t] = ref.row[s]

    def mix(slot, t, sites):
        # The buffers can be reused once the previous mixes have been copied from them.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = [prior_term(t, s, ref.mix.at[k]) for k, s in enumerate(sites)]
        sums = _weighted_sums(sizes, ref.v.at[slot], count, ref.weights, sites, sums)
        for k, s in enumerate(sites):
            _write(sizes, ref.mix.at[k], sums[k], ref.mixed.at[s, t])

    def prior_term(t, s, vector):
        if not has_prior:
            return _zeros(sizes)
        _fetch(sizes, ref.prior_mixed.at[s, t], vector, ref.prior_ready)
        plgpu.barrier_wait(ref.prior_ready)
        # An empty prior may contain NaN.
        weight = ref.row[s] + _zeros(sizes)
        return jnp.where(weight == 0, _zeros(sizes), weight * _vector(sizes, vector))

    start = lambda slot, t: _fetch_sources(sizes, ref, count, slot, t)
    each_token(sizes.T, stages, start, token)
    plgpu.wait_smem_to_gmem(0)


# Backward pass of `partial` ---------------------------------------------------------------------


def backward_scratch(sizes, stages, dtype, accumulates):
    """Return the scratch buffers of `partial_backward_kernel`."""
    vectors = lambda count: plgpu.SMEM((stages, count, *sizes.shape), dtype)
    arrivals = sizes.S + sizes.N * accumulates
    rows = "logits", "weights", "slopes"
    return _scratch(sizes, stages, dtype, arrivals=arrivals, rows=rows) | {
        "d": vectors(sizes.S),
        **({"sums": vectors(sizes.N)} if accumulates else {}),
        "d_query": plgpu.SMEM((sizes.S, *sizes.shape), jnp.float32),
        "rstd": plgpu.SMEM((sizes.N,), jnp.float32),
    }


def _score(sizes, ref, slot, i):
    """Write a source's rstd, its logits, and the products `<d_mixed, v>` in place of slopes."""
    values = _vector(sizes, ref.v.at[slot, i])
    rstd = _rstd(sizes, values, sizes.epsilon)
    ref.rstd[i] = rstd
    for s in range(sizes.S):
        ref.logits[i, s] = jnp.sum(values * _vector(sizes, ref.queries.at[s])) * rstd
        ref.slopes[i, s] = jnp.sum(values * _vector(sizes, ref.d.at[slot, s]))


def _differentiate_softmax(sizes, ref, count, t):
    """Write the weights, and replace the products by the slopes `d_logit rstd`."""
    largest = _largest(ref.logits, count, _constant_per_site(-jnp.inf))

    def add(i, sums):
        total, weighted = sums
        e = jnp.exp(_per_site(ref.logits.at[i]) - largest)
        return total + e, weighted + e * _per_site(ref.slopes.at[i])

    zeros = _constant_per_site(0), _constant_per_site(0)
    total, weighted = jax.lax.fori_loop(0, count, add, zeros)
    subtracted = weighted / jnp.where(total == 0, 1.0, total)
    log_sums = _fill_per_site(sizes, ref.row, lambda s: ref.log_sums[s, t])
    if hasattr(ref, "delta"):
        # There may be a prior (a mix of other sources), so the weights may not sum to 1.
        share = jnp.where(total == 0, 0.0, total * jnp.exp(largest - log_sums))
        delta = _fill_per_site(sizes, ref.row, lambda s: ref.delta[s, t])
        subtracted = share * subtracted + delta

    def source(i, _):
        weights = jnp.exp(_per_site(ref.logits.at[i]) - log_sums)
        d_logits = weights * (_per_site(ref.slopes.at[i]) - subtracted)
        _store_per_site(ref.weights.at[i], weights)
        _store_per_site(ref.slopes.at[i], d_logits * ref.rstd[i])

    jax.lax.fori_loop(0, count, source, None)


def _add_to_d_queries(sizes, ref, count, slot):
    """Add a token's terms to the gradients of the queries."""
    for sites in _groups(sizes):
        sums = [_vector(sizes, ref.d_query.at[s]) for s in sites]
        sums = _weighted_sums(sizes, ref.v.at[slot], count, ref.slopes, sites, sums)
        for s, total in zip(sites, sums, strict=True):
            ref.d_query[s] = total


def _write_gradient(sizes, ref, slot, t, i, target):
    """Write the gradient of source i of token t; with `accumulate`, add it to the target."""

    def add(s, sums):
        gradient, radial = sums
        slope = ref.slopes[i, s]
        gradient += ref.weights[i, s] * _vector(sizes, ref.d.at[slot, s])
        gradient += slope * _vector(sizes, ref.queries.at[s])
        return gradient, radial + slope * ref.logits[i, s]

    gradient = _vector(sizes, target) if hasattr(ref, "accumulate") else _zeros(sizes)
    gradient, radial = jax.lax.fori_loop(0, sizes.S, add, (gradient, jnp.float32(0)))
    # The part along v is from the derivative of rstd.
    gradient -= (radial * ref.rstd[i] * (1 / sizes.D)) * _vector(sizes, ref.v.at[slot, i])
    _write(sizes, target, gradient, ref.d_sources.at[i, t])


def partial_backward_kernel(sizes, stages, ref):
    """Compute the gradients of the sources and, summed over a program's tokens, of the queries.

    The gradient of a source v is
    `dv = sum_s weight_s d_mixed_s + d_logit_s (rstd q_s - logit_s rstd^2 v / D)`, with q_s the
    query of site s.
    """
    count, accumulates = _count(sizes, ref), hasattr(ref, "accumulate")
    _clear(sizes, ref.v, ref.d, ref.d_query, *([ref.sums] if accumulates else []))

    def start(slot, t):
        ready = ref.ready.at[slot]
        _fetch_sources(sizes, ref, count, slot, t)
        for s in range(sizes.S):
            _fetch(sizes, ref.d_mixed.at[s, t], ref.d.at[slot, s], ready)
        if accumulates:
            copy = lambda i, _: _fetch(sizes, ref.accumulate.at[i, t], ref.sums.at[slot, i], ready)
            jax.lax.fori_loop(0, sizes.N, copy, None)

    def token(slot, t, prefetch, _):
        # The slots can be reused once the previous gradients have been copied from them.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        prefetch()
        plgpu.barrier_wait(ref.ready.at[slot])
        jax.lax.fori_loop(0, count, lambda i, _: _score(sizes, ref, slot, i), None)
        plgpu.commit_smem()
        _differentiate_softmax(sizes, ref, count, t)
        _add_to_d_queries(sizes, ref, count, slot)
        # Without `accumulate`, the gradients overwrite the sources. The empty rows are zeros.
        target = (ref.sums if accumulates else ref.v).at[slot]
        write = lambda i, _: _write_gradient(sizes, ref, slot, t, i, target.at[i])
        jax.lax.fori_loop(0, count, write, None)
        keep = lambda i, _: _send(sizes, target.at[i], ref.d_sources.at[i, t])
        jax.lax.fori_loop(count, sizes.N, keep, None)

    each_token(sizes.T, stages, start, token)
    for s in range(sizes.S):
        ref.d_queries[jax.lax.axis_index(PROGRAMS), s] = _vector(sizes, ref.d_query.at[s])
    plgpu.wait_smem_to_gmem(0)


# Phase two: `merge`, which adds the running sum ---------------------------------------------------


def merge_scratch(sizes, stages, dtype, names=("mixed", "current")):
    """Return the scratch buffers of the merge kernels, with buffers for the named operands."""
    vectors = plgpu.SMEM((stages, *sizes.shape), dtype)
    ready = plgpu.Barrier(num_arrivals=len(names), num_barriers=stages)
    return {f"{name}_slots": vectors for name in names} | {"ready": ready}


def backward_merge_scratch(sizes, stages, dtype):
    """Return the scratch buffers of `merge_backward_kernel`."""
    sums = plgpu.SMEM(sizes.shape, jnp.float32)
    return merge_scratch(sizes, stages, dtype, ("mixed", "current", "d_z", "d_current")) | {
        "sum_of_query": sums,
        **({} if sizes.norm is None else {"sum_of_gain": sums}),
    }


def _gain(sizes, ref):
    """Return the gain of the output's norm, or 1 if there is no norm."""
    return 1.0 if sizes.norm is None else _vector(sizes, ref.norm_gain)


def _load_merged(sizes, ref, slot):
    return _vector(sizes, ref.mixed_slots.at[slot]), _vector(sizes, ref.current_slots.at[slot])


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
    return _zero_padding(sizes, values - jnp.sum(values) * (1 / sizes.D))


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
    _clear(sizes, ref.mixed_slots, ref.current_slots)
    query, gain = _vector(sizes, ref.query), _gain(sizes, ref)

    def start(slot, t):
        ready = ref.ready.at[slot]
        _fetch(sizes, ref.mixed.at[site, t], ref.mixed_slots.at[slot], ready)
        _fetch(sizes, ref.current.at[t], ref.current_slots.at[slot], ready)

    def token(slot, t, prefetch, _):
        # The result overwrites the running sum on chip.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        prefetch()
        plgpu.barrier_wait(ref.ready.at[slot])
        mixed, current, _, _, p = _merged(sizes, ref, slot, t, query)
        normalised, _ = _normalised(sizes, mixed + p * (current - mixed))
        _write(sizes, ref.current_slots.at[slot], gain * normalised, ref.z.at[t])

    each_token(sizes.T, stages, start, token)
    plgpu.wait_smem_to_gmem(0)


def merge_backward_kernel(sizes, stages, ref):
    """Compute the gradients of `merge_kernel`.

    The gradients of the query and of the norm's gain are summed over a program's tokens.
    """
    site = ref.site[0]
    sums = [ref.sum_of_query] + ([] if sizes.norm is None else [ref.sum_of_gain])
    _clear(sizes, ref.mixed_slots, ref.current_slots, ref.d_z_slots, ref.d_current_slots, *sums)

    def start(slot, t):
        ready = ref.ready.at[slot]
        _fetch(sizes, ref.mixed.at[site, t], ref.mixed_slots.at[slot], ready)
        for name in ("current", "d_z", "d_current"):
            _fetch(sizes, getattr(ref, name).at[t], getattr(ref, f"{name}_slots").at[slot], ready)

    def token(slot, t, prefetch, _):
        # The gradients overwrite the operands on chip.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        prefetch()
        plgpu.barrier_wait(ref.ready.at[slot])
        # The parameters are loaded again (from the cache) for every token, because they do not fit
        # in registers. So are operands that are needed a second time.
        mixed, current, rstd, logit, p = _merged(sizes, ref, slot, t, _vector(sizes, ref.query))
        normalised, norm_rstd = _normalised(sizes, mixed + p * (current - mixed))
        d_z = _vector(sizes, ref.d_z_slots.at[slot])
        if sizes.norm is not None:
            ref.sum_of_gain[...] = _vector(sizes, ref.sum_of_gain) + d_z * normalised
        dh = _through_norm(sizes, _gain(sizes, ref) * d_z, normalised) * norm_rstd
        mixed, current = _load_merged(sizes, ref, slot)
        d_logit = p * (1 - p) * jnp.sum(dh * (current - mixed))
        ref.d_log_sums[t] = -d_logit
        scaled = d_logit * rstd
        d_current = p * dh - (scaled * rstd * logit * (1 / sizes.D)) * current
        d_current += scaled * _vector(sizes, ref.query) + _vector(
            sizes, ref.d_current_slots.at[slot]
        )
        _write(sizes, ref.mixed_slots.at[slot], (1 - p) * dh, ref.new_d_mixed.at[t])
        ref.sum_of_query[...] = _vector(sizes, ref.sum_of_query) + scaled * current
        _write(sizes, ref.current_slots.at[slot], d_current, ref.new_d_current.at[t])

    each_token(sizes.T, stages, start, token)
    program = jax.lax.axis_index(PROGRAMS)
    ref.d_query[program] = _vector(sizes, ref.sum_of_query)
    if sizes.norm is not None:
        ref.d_norm_gain[program] = _vector(sizes, ref.sum_of_gain)
    plgpu.wait_smem_to_gmem(0)
