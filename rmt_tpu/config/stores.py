"""Stores: what one token's residual is."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Checked, FractionBits, Size
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
    `dtype` "auto" is the compute dtype; for bfloat16 with `remat="reversible"` it is int16, or
    float32 for a residual that starts too small for int16 (see `residual.fixed_point`). "int16" is
    fixed point in steps of `2^-fraction_bits`, up to 2^15 of them; None is from what the model's
    residual is expected to be: 9, steps of 1/512 up to 64, with weights of order 1. A token whose
    residual goes beyond, or spreads over less than two steps, makes the loss NaN.
    """

    kind: ClassVar[str] = "matrix"
    key_dim: Size = changeable()
    dtype: StateDType = changeable("auto")
    fraction_bits: FractionBits | None = changeable(None)


Store = VectorStore | MatrixStore
