"""`merge_read` in plain JAX: the two ops that it joins, one after the other."""

from typing import Any

from jaxtyping import Array, Bool, DTypeLike, Float, Int

from pallas_kernels.depth_attention import xla
from pallas_kernels.depth_attention.interface import MergeReadGradients
from pallas_kernels.depth_attention.matrices import OfVectors
from pallas_kernels.key_vector import xla as key_vector
from pallas_kernels.key_vector.interface import Norm, Statistics

_MERGE = OfVectors(xla)
_NO_NORM = {"norm": None, "norm_epsilon": 0.0}


def merge_read(
    query: Float[Array, "K V"],
    mixed: Float[Array, "S B T K V"],
    log_sums: Float[Array, "B T"],
    site: Int[Array, ""],
    current: Float[Array, "B T K V"],
    active: Bool[Array, ""],
    norm_gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    *,
    norm: Norm,
    epsilon: int | float,
    norm_epsilon: int | float,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B T P V"], Statistics]:
    """See `interface`."""
    of_merge = (query, mixed, log_sums, site, current, active, None)
    h = _MERGE.merge(*of_merge, epsilon=epsilon, **_NO_NORM)
    options = {"norm": norm, "epsilon": norm_epsilon, "dtype": dtype}
    return key_vector.norm_retrieve(h, norm_gain, read_keys, **options)


def merge_read_backward(
    query: Float[Array, "K V"],
    mixed: Float[Array, "S B T K V"],
    log_sums: Float[Array, "B T"],
    site: Int[Array, ""],
    current: Float[Array, "B T K V"],
    active: Bool[Array, ""],
    norm_gain: Float[Array, "K V"],
    read_keys: Float[Array, "P K"],
    statistics: Statistics,
    d_retrieved: Float[Array, "B T P V"],
    d_mixed: Float[Array, "S B T K V"],
    d_current: Float[Array, "B T K V"],
    *,
    norm: Norm,
    epsilon: int | float,
) -> MergeReadGradients:
    """See `interface`; h is mixed again."""
    of_merge = (query, mixed, log_sums, site, current, active, None)
    options = {"epsilon": epsilon} | _NO_NORM
    h = _MERGE.merge(*of_merge, **options)
    given = (h, statistics, norm_gain, read_keys, d_retrieved)
    d_h, d_gain, d_keys = key_vector.read_backward(*given, norm=norm)
    g = _MERGE.merge_backward(*of_merge, d_h, d_mixed, d_current, **options)
    return MergeReadGradients(*g[:4], d_gain, d_keys)


def unsupported(op: str, *args: Any) -> str | None:
    """Nothing is, wherever it is lowered for."""
    return None


def wins(op: str, *args: Any) -> bool:
    """Over itself it does not."""
    return False
