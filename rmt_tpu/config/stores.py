"""Configs of stores, which define the shape and dtype of one token's residual."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Checked, FractionBits, Size
from rmt_tpu.config.cores import Port
from rmt_tpu.config.plain_start import PlainStart
from rmt_tpu.config.resume import changeable

DType = Literal["auto", "float32", "bfloat16", "float64"]
StateDType = Literal["auto", "float32", "bfloat16", "float64", "int16"]


@dataclass(frozen=True)
class VectorStore(Checked):
    """A residual that is a vector of size `dim` (D) per token, as in the Transformer.

    Attributes:
      note: properties of models with this store that do not follow from its equations, such as
        their initial values; shown in reports.
      has_keys: whether the residual has an axis of size D_k, which can be sharded along the mesh
        axis `key`.
      dim: size of the vector.
      dtype: dtype of the residual; "auto" is the compute dtype.
    """

    kind: ClassVar[str] = "vector"
    note: ClassVar[str] = "W_O and W_2 start smaller by sqrt(2L)"
    has_keys: ClassVar[bool] = False
    dim: Size
    dtype: DType = changeable("auto")

    def plain_start(self, source: "Store") -> PlainStart:
        """Return whether a new model with this store equals a model with the store `source`.

        Two models are equal if they compute the same function. Weights that both have are equal.
        """
        if source.kind != self.kind:
            return PlainStart(False, "the matrices that read and write the residual are random")
        return PlainStart(True, "the residual is the same vector")

    def parameters(self, port: Port, data_shape: tuple[int, int]) -> int:
        """Return the number of parameters in the matrices that read or write the vectors of a port.

        A port describes the vectors that a core reads or writes.

        Data vectors, which represent the whole residual, are read and written without a matrix.
        """
        return sum(port.heads) * port.head_dim * self.dim

    def flops(self, port: Port, data_shape: tuple[int, int]) -> int:
        """Return the FLOPs per token of reading or writing the vectors of a port."""
        return 2 * self.parameters(port, data_shape)


@dataclass(frozen=True)
class MatrixStore(Checked):
    """A residual that is a matrix `key_dim x vector_dim` per token, as in the RMT (D_k x D_v).

    Sublayers write outer products of a key vector and a data vector into the matrix, and read it
    with key vectors. Attention has one key vector per head; other cores have `vectors` (R). If
    `vectors` and `vector_dim` are None, they equal the number and the size of the heads of the
    first core that has heads. The number is `num_heads`, as in the paper, or the number of key
    heads for `Kda`.

    The `dtype` "auto" is the compute dtype, with one exception. For bfloat16 with a remat policy
    that rebuilds the residual, it is int16. It is float32 instead if the initial residual is too
    small for int16 (see `residual.fixed_point`), or if the residual grows too large for int16 in
    training.

    The `dtype` "int16" is for fixed-point numbers with a step of `2^-fraction_bits` and a range of
    2^15 steps. If `fraction_bits` is None, it is derived from the expected size of the residual. It
    is 7 for weights of order 1; the fixed-point step is then 1/128, and the range is 256. The loss
    becomes NaN if a token's residual exceeds the range, or spreads over less than two fixed-point
    steps.
    """

    kind: ClassVar[str] = "matrix"
    has_keys: ClassVar[bool] = True
    note: ClassVar[str] = (
        "keys have a separate scale, smaller by sqrt(2L) where they write; keys decay"
    )
    key_dim: Size = changeable()
    dtype: StateDType = changeable("auto")
    fraction_bits: FractionBits | None = changeable(None)
    vectors: Size | None = None
    vector_dim: Size | None = None

    def plain_start(self, source: "Store") -> PlainStart:
        """Return whether a new model with this store equals a model with the store `source`.

        Two models are equal if they compute the same function. Weights that both have are equal.
        """
        if source.kind != self.kind:
            return PlainStart(False, "the key vectors that read and write the residual are random")
        return PlainStart(True, "the residual is the same matrix")

    def parameters(self, port: Port, data_shape: tuple[int, int]) -> int:
        """Return the number of entries in the key vectors that read or write the vectors of a port.

        Args:
          port: the port.
          data_shape: number and size of the data vectors, (R, D_v).
        """
        return port.vectors(data_shape[0]) * self.key_dim

    def flops(self, port: Port, data_shape: tuple[int, int]) -> int:
        """Return the FLOPs per token of reading or writing a port: `2 D_k D_v` per vector."""
        return port.vectors(data_shape[0]) * 2 * self.key_dim * data_shape[1]


Store = VectorStore | MatrixStore
