"""Configs of stores, which define the shape and dtype of one token's residual."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Checked, FractionBits, Size
from rmt_tpu.config.cores import Port
from rmt_tpu.config.resume import changeable

DType = Literal["auto", "float32", "bfloat16", "float64"]
StateDType = Literal["auto", "float32", "bfloat16", "float64", "int16"]


@dataclass(frozen=True)
class VectorStore(Checked):
    """A vector of size `dim` (D), as in the Transformer. `dtype` "auto" is the compute dtype.

    A store's `note` says what it changes in addition to its equations, and what therefore differs
    in a comparison. `has_keys` is whether it has a D_k, which the mesh's axis `key` divides.
    """

    kind: ClassVar[str] = "vector"
    note: ClassVar[str] = "W_O and W_2 start smaller by sqrt(2L)"
    has_keys: ClassVar[bool] = False
    dim: Size
    dtype: DType = changeable("auto")

    def parameters(self, port: Port, data_shape: tuple[int, int]) -> int:
        """Return the size of the matrices that read or write a port; a `whole` port needs none."""
        return sum(port.heads) * port.head_dim * self.dim

    def flops(self, port: Port, data_shape: tuple[int, int]) -> int:
        """Return the FLOPs of reading or writing a port for one token."""
        return 2 * self.parameters(port, data_shape)


@dataclass(frozen=True)
class MatrixStore(Checked):
    """A matrix `key_dim x vector_dim` (D_k x D_v), as in the Residual Matrix Transformer.

    Sublayers write outer products into it and read it with key vectors: attention has one for each
    head, other cores have `vectors` (R). If `vectors` and `vector_dim` are None, they are those of
    the model's attention, as in the paper: `num_heads` and `head_dim`.

    `dtype` "auto" is the compute dtype. For bfloat16 with `remat="reversible"` it is int16, or
    float32 for a residual that starts too small for int16 (see `residual.fixed_point`) or outgrows
    it in training. "int16" is fixed point in steps of `2^-fraction_bits`, up to 2^15 of them. If
    `fraction_bits` is None, it follows from the expected size of the model's residual: 7 with
    weights of order 1, which is steps of 1/128 up to 256. A token whose residual goes beyond, or
    spreads over less than two steps, makes the loss NaN.
    """

    kind: ClassVar[str] = "matrix"
    has_keys: ClassVar[bool] = True
    note: ClassVar[str] = (
        "keys have a scale of their own, smaller by sqrt(2L) where they write; keys decay"
    )
    key_dim: Size = changeable()
    dtype: StateDType = changeable("auto")
    fraction_bits: FractionBits | None = changeable(None)
    vectors: Size | None = None
    vector_dim: Size | None = None

    def parameters(self, port: Port, data_shape: tuple[int, int]) -> int:
        """Return the size of the key vectors of a port, given data vectors [R, D_v]."""
        return self._keys(port, data_shape) * self.key_dim

    def flops(self, port: Port, data_shape: tuple[int, int]) -> int:
        """Return the FLOPs of one token's read or write: `2 D_k D_v` for a key and data vector."""
        return self._keys(port, data_shape) * 2 * self.key_dim * data_shape[1]

    def _keys(self, port, data_shape):
        return sum(port.heads) + port.whole * data_shape[0]


Store = VectorStore | MatrixStore
