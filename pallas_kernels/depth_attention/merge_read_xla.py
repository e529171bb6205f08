"""`merge_read` in plain JAX: the two ops that it joins, one after the other."""

from typing import Any

from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.depth_attention import xla
from pallas_kernels.depth_attention.interface import (
    MergeCotangents,
    MergeRead,
    MergeReadGradients,
)
from pallas_kernels.depth_attention.matrices import OfVectors
from pallas_kernels.key_vector import xla as key_vector
from pallas_kernels.key_vector.interface import Norm, Site, Statistics

_MERGE = OfVectors(xla)
_NO_NORM = {"norm": None, "norm_epsilon": 0.0}


def merge_read(
    given: MergeRead,
    *,
    norm: Norm,
    epsilon: int | float,
    norm_epsilon: int | float,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B T P V"], Statistics]:
    """See `interface`."""
    h = _MERGE.merge(given.merge, epsilon=epsilon, **_NO_NORM)
    options = {"norm": norm, "epsilon": norm_epsilon, "dtype": dtype}
    out = key_vector.forward(Site(h, None, None, *given[1:]), **options)
    return out.retrieved, out.statistics


def merge_read_backward(
    given: MergeRead,
    statistics: Statistics,
    cotangents: MergeCotangents,
    *,
    norm: Norm,
    epsilon: int | float,
) -> MergeReadGradients:
    """See `interface`; h is mixed again."""
    options = {"epsilon": epsilon} | _NO_NORM
    h = _MERGE.merge(given.merge, **options)
    of_read = (Site(h, None, None, *given[1:]), statistics, None, cotangents.z)
    d_read = key_vector.backward(*of_read, norm=norm)
    g = _MERGE.merge_backward(given.merge, cotangents._replace(z=d_read.residual), **options)
    return MergeReadGradients(*g[:4], d_read.gain, d_read.read_keys)


def unsupported(op: str, *operands: Any) -> str | None:
    """Nothing is, wherever it is lowered for."""
    return None


def wins(op: str, *operands: Any) -> bool:
    """Over itself it does not."""
    return False
