"""The ops read plainly from their equations: float64 NumPy, with gradients derived by hand."""

import numpy as np

from pallas_kernels.key_vector.interface import FRACTION_BITS


def numbers(x, bits=FRACTION_BITS):
    """In float64: what an int16 residual stands for, or floats as they are."""
    x = np.asarray(x)
    return x / 2.0**bits if x.dtype == np.int16 else x.astype(np.float64)


def normed(x, axes, norm, epsilon):
    """Over these axes; and one over the root of the mean square, which it was multiplied by.

    Without a norm x as it is, and 1.
    """
    if norm is None:
        return x, 1.0
    if norm == "layernorm":
        x = x - x.mean(axes, keepdims=True)
    rstd = (np.mean(x**2, axes, keepdims=True) + epsilon) ** -0.5
    return x * rstd, rstd


def normed_gradient(n, rstd, d_n, axes, norm):
    """The cotangent of x, from what `normed` gave."""
    if norm is None:
        return d_n
    d_x = d_n - n * np.mean(d_n * n, axes, keepdims=True)
    if norm == "layernorm":
        d_x = d_x - d_n.mean(axes, keepdims=True)
    return rstd * d_x


# Key-vector ops -------------------------------------------------------------------------------


def store(X, w, y):
    return numbers(X) + np.einsum("rk,...rv->...kv", numbers(w), numbers(y))


def norm_retrieve(X, gain, r, *, norm, epsilon):
    n, _ = normed(numbers(X), (-2, -1), norm, epsilon)
    return np.einsum("pk,...kv->...pv", numbers(r), numbers(gain) * n)


def site(args, cotangents, *, norm, epsilon):
    """X' and z, and the cotangents of X, w, y, gain and r, from those of X' and z."""
    X, w, y, gain, r = map(numbers, args)
    d_stored, d_z = map(numbers, cotangents)
    # NumPy's einsum sums over no ellipsis.
    flat = lambda x: x.reshape(-1, *x.shape[-2:])
    summed = lambda text, a, b: np.einsum(text, flat(a), flat(b))
    stored = store(X, w, y)
    n, rstd = normed(stored, (-2, -1), norm, epsilon)
    z = np.einsum("pk,...kv->...pv", r, gain * n)
    d_n = np.einsum("pk,...pv->...kv", r, d_z)
    d_r = summed("tpv,tkv->pk", d_z, gain * n)
    d_gain = np.sum(d_n * n, tuple(range(n.ndim - 2)))
    d_X = d_stored + normed_gradient(n, rstd, d_n * gain, (-2, -1), norm)
    d_w = summed("trv,tkv->rk", y, d_X)
    d_y = np.einsum("rk,...kv->...rv", w, d_X)
    return (stored, z), (d_X, d_w, d_y, d_gain, d_r)


# Depth attention ------------------------------------------------------------------------------


def partial(queries, sources, prior, cotangents, *, epsilon):
    """Mixes and log sums, and the cotangents of queries, sources and prior (None if that is).

    Args:
      queries: [S, D].
      sources: [N, T, D], all of which count.
      prior: None, or a mix [S, T, D] and a log sum [S, T] of other sources.
      cotangents: of the mixes and of the log sums.
      epsilon: added to the mean square of a source.
    """
    q, v, (d_mixed, d_log_sums) = numbers(queries), numbers(sources), map(numbers, cotangents)
    rstd = (np.mean(v**2, -1) + epsilon) ** -0.5
    logits = np.einsum("sd,ntd->snt", q, v) * rstd
    values = np.broadcast_to(v, (len(q), *v.shape))
    if prior is not None:
        logits = np.concatenate([logits, numbers(prior[1])[:, None]], 1)
        values = np.concatenate([values, numbers(prior[0])[:, None]], 1)
    largest = logits.max(1, keepdims=True)
    log_sums = largest[:, 0] + np.log(np.exp(logits - largest).sum(1))
    weights = np.exp(logits - log_sums[:, None])
    mixed = np.einsum("snt,sntd->std", weights, values)

    g = np.einsum("std,sntd->snt", d_mixed, values)
    d_logits = weights * (g - np.sum(weights * g, 1, keepdims=True) + d_log_sums[:, None])
    d_values = weights[..., None] * d_mixed[:, None]
    d_prior = None if prior is None else (d_values[:, -1], d_logits[:, -1])
    N = len(v)
    d_own, d_logits, logits = d_values[:, :N], d_logits[:, :N], logits[:, :N]
    d_queries = np.einsum("snt,nt,ntd->sd", d_logits, rstd, v)
    d_sources = d_own.sum(0) + np.einsum("snt,nt,sd->ntd", d_logits, rstd, q)
    d_sources -= (np.sum(d_logits * logits, 0) * rstd**2)[..., None] * v / v.shape[-1]
    return (mixed, log_sums), (d_queries, d_sources, d_prior)


def merge(query, mixed, log_sums, current, gain, d_z, *, active, norm, epsilon, norm_epsilon):
    """z, and the cotangents of query, mixed, log_sums, current and gain.

    `mixed` [T, D] and `log_sums` [T] stand for the sealed sources.
    """
    q, mixed, log_sums, c, gain = map(numbers, (query, mixed, log_sums, current, gain))
    d_z = numbers(d_z)
    rstd = (np.mean(c**2, -1) + epsilon) ** -0.5
    logits = c @ q * rstd
    # Of both signs without an overflow; and of a log sum of -inf.
    p = 0.5 + 0.5 * np.tanh((logits - log_sums) / 2) if active else np.zeros_like(logits)
    h = mixed + p[:, None] * (c - mixed)
    n, of_norm = normed(h, -1, norm, norm_epsilon)
    d_h = normed_gradient(n, of_norm, d_z * gain, -1, norm)
    d_logits = np.sum(d_h * (c - mixed), -1) * p * (1 - p)
    d_query = (d_logits * rstd) @ c
    d_c = p[:, None] * d_h + (d_logits * rstd)[:, None] * q
    d_c -= (d_logits * logits * rstd**2 / len(q))[:, None] * c
    return gain * n, (d_query, (1 - p)[:, None] * d_h, -d_logits, d_c, np.sum(d_z * n, 0))
