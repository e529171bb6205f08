"""An implementation of `merge_read` that runs its two parts, the merge and the read, as two ops."""

from typing import Any

from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.arguments import Norm
from pallas_kernels.depth_attention import mosaic_gpu, xla
from pallas_kernels.depth_attention.interface import MergeCotangents, MergeGradients, MergeRead
from pallas_kernels.depth_attention.matrices import MatricesAsVectors
from pallas_kernels.key_vector import mosaic_gpu as key_vector_mosaic_gpu
from pallas_kernels.key_vector import xla as key_vector
from pallas_kernels.key_vector.interface import SiteBackward, SiteOperands, Statistics

_NO_NORM = {"norm": None, "norm_epsilon": 0.0}


class SeparateMergeRead:
    """An implementation of `merge_read` that combines two implementations.

    The first implementation provides `merge` for matrices, and the second provides the key-vector
    ops. The methods have the arguments and results of the functions in `interface` with the same
    names. They pass additional `options` to both implementations.
    """

    def __init__(self, merges: Any, key_vector: Any):
        self._merges, self._key_vector = merges, key_vector

    def merge_read(
        self,
        operands: MergeRead,
        *,
        norm: Norm,
        epsilon: int | float,
        norm_epsilon: int | float,
        dtype: DTypeLike,
        **options: Any,
    ) -> tuple[Float[Array, "B T P V"], Statistics]:
        """Merge without a norm, and then read the result with the keys."""
        h = self._merges.merge(operands.merge, epsilon=epsilon, **_NO_NORM, **options)
        options |= {"norm": norm, "epsilon": norm_epsilon, "dtype": dtype}
        out = self._key_vector.forward(SiteOperands(h, None, None, *operands[1:]), **options)
        return out.retrieved, out.statistics

    def merge_read_backward(
        self,
        operands: MergeRead,
        statistics: Statistics,
        cotangents: MergeCotangents,
        *,
        norm: Norm,
        epsilon: int | float,
        **options: Any,
    ) -> tuple[MergeGradients, Float[Array, "P K"]]:
        """Return the gradients of `merge_read`, after computing the mix h again."""
        of_merge = {"epsilon": epsilon} | _NO_NORM | options
        h = self._merges.merge(operands.merge, **of_merge)
        of_read = SiteBackward(
            SiteOperands(h, None, None, *operands[1:]), statistics, None, cotangents.z
        )
        d_read = self._key_vector.backward(of_read, norm=norm, **options)
        cotangents = cotangents._replace(z=d_read.residual)
        g = self._merges.merge_backward(operands.merge, cotangents, **of_merge)
        return g._replace(norm_gain=d_read.gain), d_read.read_keys

    def unsupported(self, op: str, *operands: Any, **options: Any) -> str | None:
        """Return None, because every call is supported on every platform."""
        return None

    def wins(self, op: str, *operands: Any, **options: Any) -> bool:
        """Return False, because this is already the portable implementation."""
        return False


class SeparateKernels(SeparateMergeRead):
    """An implementation of `merge_read` by two kernels, which support only some calls."""

    def unsupported(self, op: str, *operands: Any, **options: Any) -> str | None:
        """Return why one of the kernels does not support the call; None if both do."""
        merge, *parameters = operands[0]
        site = SiteOperands(merge.current, None, None, *parameters)
        return self._merges.unsupported("merge", merge) or self._key_vector.unsupported(
            "forward", site, **options
        )


XLA = SeparateMergeRead(MatricesAsVectors(xla), key_vector)
MOSAIC_GPU = SeparateKernels(MatricesAsVectors(mosaic_gpu), key_vector_mosaic_gpu)
