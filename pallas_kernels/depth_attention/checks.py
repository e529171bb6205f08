"""Checks of the arguments of depth-attention ops, which run before an op is traced."""

import numbers

import jax.numpy as jnp

from pallas_kernels.arguments import check_array, check_epsilon, check_norm


def check_sources(queries, sources, gains, count, prior, epsilon) -> None:
    """Check the arguments of `depth_attention_partial` and of its backward pass.

    Raises:
      ValueError: shapes or dtypes do not fit, there are no sources, `count` is not an integer from
        0 to the number of sources, or epsilon is negative or not finite.
    """
    check_epsilon("epsilon", epsilon)
    size = _size(queries, 1)
    check_array("queries", queries, f"S {size}")
    check_array("sources", sources, f"N ... {size}")
    (S, *shape), N, axes = queries.shape, sources.shape[0], len(size.split())
    if N == 0 or list(sources.shape[-axes:]) != shape:
        names = size.replace(" ", ", ")
        raise ValueError(
            f"shapes do not fit: queries [S, {names}] have shape {queries.shape}, and sources "
            f"[N, ..., {names}] have shape {sources.shape}; legal: N of at "
            f"least 1, and the same {names}"
        )
    if gains is not None:
        check_array("gains", gains, f"S {size}")
        if gains.shape != queries.shape:
            raise ValueError(
                f"shapes do not fit: queries [S, D] have shape {queries.shape}, but gains [S, D] "
                f"have shape {gains.shape}"
            )
    if prior is not None:
        mixed, log_sums = prior
        check_array("prior[0]", mixed, f"S ... {size}")
        check_array("prior[1]", log_sums, "S ...")
        wanted = (S, *sources.shape[1:])
        if mixed.shape != wanted or log_sums.shape != wanted[:-axes]:
            raise ValueError(
                f"shapes do not fit: the two arrays of prior have shapes {mixed.shape} and "
                f"{log_sums.shape}, but must have shapes {wanted} and {wanted[:-axes]}"
            )
    check_count(count, N)


def check_count(count, N: int) -> None:
    """Raise ValueError if `count` is not an integer from 0 to N; None is legal."""
    if count is None:
        return
    if jnp.shape(count) or not jnp.issubdtype(jnp.result_type(count), jnp.integer):
        raise ValueError(f"count={count!r} must be an integer from 0 to the number of sources, {N}")
    if isinstance(count, numbers.Integral) and not 0 <= count <= N:
        raise ValueError(f"count={count} must be from 0 to the number of sources, {N}")


def check_site(query, gain, current, norm_gain, norm, epsilon, norm_epsilon) -> None:
    """Check a site's parameters and the running sum `current`, the arguments of a merge.

    Raises:
      ValueError: shapes or dtypes do not fit, the norm is unknown, only one of `norm` and
        `norm_gain` is None, or an epsilon is negative or not finite.
    """
    check_epsilon("epsilon", epsilon)
    check_epsilon("norm_epsilon", norm_epsilon)
    if (norm is None) != (norm_gain is None):
        shape = None if norm_gain is None else norm_gain.shape
        raise ValueError(
            f"norm is {norm!r} and norm_gain has shape {shape}; legal: both given, or both None"
        )
    size = _size(query, 0)
    check_array("current", current, f"... {size}")
    arrays = {"query": query, "gain": gain, "norm_gain": norm_gain}
    arrays = {name: x for name, x in arrays.items() if x is not None or name == "query"}
    for name, x in arrays.items():
        check_array(name, x, size)
        if x.shape != current.shape[-x.ndim :]:
            names = size.replace(" ", ", ")
            raise ValueError(
                f"shapes do not fit: current [..., {names}] has shape {current.shape}, but {name} "
                f"[{names}] has shape {x.shape}"
            )
    if norm is not None:
        check_norm(norm)
        check_array("norm_gain", norm_gain, "D")


def check_layers(parameters, current) -> None:
    """Check the stacked parameters of `depth_attention_merge_at`.

    Raises:
      ValueError: the parameters of each layer are not two vectors of the size of `current`.
    """
    check_array("current", current, "... D")
    check_array("parameters", parameters, "L 2 D")
    if len(parameters) == 0 or parameters.shape[1:] != (2, current.shape[-1]):
        raise ValueError(
            f"shapes do not fit: current [..., D] has shape {current.shape}, but parameters "
            f"[L, 2, D] have shape {parameters.shape}; legal: L of at least 1, and the same D"
        )


def check_mixed(mixed, log_sums, current, axes: str, of_source: int) -> None:
    """Check that the shapes of the mixes and the log-sum-exps fit the running sum `current`.

    Args:
      mixed, log_sums, current: the arguments of the op.
      axes: the names of the axes of `log_sums`, such as "B T".
      of_source: the number of axes of a source, which are the last axes of `current`.
    """
    check_array("mixed", mixed, "S ... D")
    check_array("log_sums", log_sums, axes)
    per_site = mixed if axes.startswith("S") else current
    if mixed.shape[1:] != current.shape or log_sums.shape != per_site.shape[:-of_source]:
        raise ValueError(
            f"shapes do not fit: current [..., D] has shape {current.shape}, mixed [S, ..., D] has "
            f"shape {mixed.shape}, and log_sums [{', '.join(axes.split())}] has shape "
            f"{log_sums.shape}"
        )


def _size(queries, leading_axes: int) -> str:
    """Return the names of a source's axes: "D" for a vector, "K V" for a residual matrix.

    `queries` has `leading_axes` axes, followed by the axes of one query, which are those of a
    source.
    """
    return "K V" if getattr(queries, "ndim", 0) == leading_axes + 2 else "D"
