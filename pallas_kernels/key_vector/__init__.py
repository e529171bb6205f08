"""Key-vector ops: write outer products into a residual matrix, normalise it, read it with keys.

Mak and Flanigan (2025), "Residual Matrix Transformers", equations 12, 13 and 18 to 27. Between two
sublayers the residual matrix is written by the one and read by the next; `store_norm_retrieve` is
that whole span, so that an implementation can touch the big state once in and once out.
"""

from typing import Literal, get_args

from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.key_vector import reference
from pallas_kernels.key_vector.reference import Norm

Implementation = Literal["xla", "mosaic_tpu", "triton"]


class UnsupportedImplementation(ValueError):
    """A named implementation cannot serve this call; the message says why and what can."""


def store_norm_retrieve(
    residual: Float[Array, "*tokens K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "*tokens R V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm = "layernorm",
    epsilon: float = 1e-6,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*tokens K V"], Float[Array, "*tokens P V"]]:
    """`X' = X + sum_r w_r (x) y_r`, and `z_p = r_p . (gain * norm(X'))`: one site of an RMT.

    Args:
      residual: X, one `K x V` matrix a token, any leading token axes, any float dtype.
      store_keys: w, the key vectors of the R data vectors written.
      data: y, the R data vectors of each token.
      gain: the norm's gain; the norm runs over all `K * V` entries of a token together.
      read_keys: r, the key vectors of the P data vectors retrieved.
      norm: "layernorm" subtracts the mean first, "rmsnorm" does not.
      epsilon: added to the variance (layernorm) or mean square (rmsnorm).
      implementation: None picks what is best on the platform that the program is lowered for.

    Returns:
      `X'` in the residual's dtype, and z in the data's dtype. Statistics and sums are at least
      float32; z is read from X' as rounded to the residual's dtype.

    Raises:
      UnsupportedImplementation: a named implementation cannot serve this call.
      ValueError: the shapes do not fit, or the norm is unknown.
    """
    _check(residual, gain, read_keys, norm, store_keys, data)
    _select(implementation)
    return reference.store_norm_retrieve(
        residual, store_keys, data, gain, read_keys, norm=norm, epsilon=epsilon
    )


def store(
    residual: Float[Array, "*tokens K V"],
    store_keys: Float[Array, "R K"],
    data: Float[Array, "*tokens R V"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*tokens K V"]:
    """The writing half of `store_norm_retrieve`: `X + sum_r w_r (x) y_r` (equations 18 to 23)."""
    _check_store(residual, store_keys, data)
    _select(implementation)
    return reference.store(residual, store_keys, data)


def norm_retrieve(
    residual: Float[Array, "*tokens K V"],
    gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm = "layernorm",
    epsilon: float = 1e-6,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*tokens P V"]:
    """The reading half: `r_p . (gain * norm(X))` (equations 22, 25, 27), in `dtype` or X's."""
    _check(residual, gain, read_keys, norm)
    _select(implementation)
    return reference.norm_retrieve(
        residual, gain, read_keys, norm=norm, epsilon=epsilon, dtype=dtype or residual.dtype
    )


def _select(implementation: str | None) -> None:
    if implementation in (None, "xla"):
        return
    if implementation not in get_args(Implementation):
        legal = ", ".join(get_args(Implementation))
        raise UnsupportedImplementation(
            f"implementation={implementation!r} is unknown; legal: {legal}, or None to choose"
        )
    raise UnsupportedImplementation(
        f"implementation={implementation!r} is not built for the key-vector ops; "
        "use implementation='xla' or None"
    )


def _check(residual, gain, read_keys, norm, store_keys=None, data=None) -> None:
    if norm not in get_args(Norm):
        raise ValueError(f"norm={norm!r} is unknown; legal: {', '.join(get_args(Norm))}")
    if gain.shape != residual.shape[-2:] or read_keys.shape[-1] != gain.shape[0]:
        raise ValueError(
            "shapes do not fit: residual [..., K, V] is "
            f"{residual.shape}, gain [K, V] is {gain.shape}, read_keys [P, K] is {read_keys.shape}"
        )
    if store_keys is not None:
        _check_store(residual, store_keys, data)


def _check_store(residual, store_keys, data) -> None:
    R, K = store_keys.shape
    if residual.shape[-2] != K or data.shape != (*residual.shape[:-2], R, residual.shape[-1]):
        raise ValueError(
            "shapes do not fit: residual [..., K, V] is "
            f"{residual.shape}, store_keys [R, K] is {store_keys.shape}, "
            f"data [..., R, V] is {data.shape}"
        )
