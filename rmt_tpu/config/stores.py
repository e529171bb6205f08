"""Stores: what one token's residual is."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Checked, Size
from rmt_tpu.config.resume import changeable

DType = Literal["auto", "float32", "bfloat16", "float64"]
StateDType = Literal["auto", "float32", "bfloat16", "float64", "int16"]


@dataclass(frozen=True)
class VectorStore(Checked):
    """A vector of size `dim` (D): the Transformer. `dtype` "auto" is the compute dtype."""

    kind: ClassVar[str] = "vector"
    dim: Size
    dtype: DType = changeable("auto")


@dataclass(frozen=True)
class MatrixStore(Checked):
    """A matrix `key_dim x head_dim` (D_k x D_v): the Residual Matrix Transformer.

    Sublayers write `num_heads` (R) outer products into it and read it with key vectors.
    `dtype` "auto" is the compute dtype, or int16 for bfloat16 with `remat="reversible"`. "int16" is
    fixed point in steps of 1/512 up to 64; a token whose residual goes beyond makes the loss NaN.
    """

    kind: ClassVar[str] = "matrix"
    key_dim: Size = changeable()
    dtype: StateDType = changeable("auto")


Store = VectorStore | MatrixStore
