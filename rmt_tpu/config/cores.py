"""What sublayers compute, and how tokens know their positions."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Checked, Positive, Size
from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class Learned(Checked):
    """A learned vector for each of `max_length` (N) positions, written with the embedding."""

    kind: ClassVar[str] = "learned"
    max_length: Size = 512


@dataclass(frozen=True)
class Alibi:
    """Attention logits fall with distance, by slope `2^(-8 (h + 1) / num_heads)` in head h."""

    kind: ClassVar[str] = "alibi"


@dataclass(frozen=True)
class Rope(Checked):
    """Queries and keys are rotated by their position, at frequencies `base^(-2 i / head_dim)`."""

    kind: ClassVar[str] = "rope"
    base: Positive = 10_000.0


@dataclass(frozen=True)
class NoPositions:
    """Order is known from the causal mask alone."""

    kind: ClassVar[str] = "none"


Positions = Learned | Alibi | Rope | NoPositions


@dataclass(frozen=True)
class Attention(Checked):
    """`num_heads` (H, or R in an RMT) heads of size `head_dim` (D_h, or D_v in an RMT).

    `inverse_layer_scaling` divides the logits of layer l by l + 1.
    """

    num_heads: Size
    head_dim: Size
    positions: Positions = Learned()
    inverse_layer_scaling: bool = True

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.positions, Rope) and self.head_dim % 2:
            raise UsageError(
                f"Attention.head_dim={self.head_dim} must be even for rope positions, "
                f"like {self.head_dim + 1}"
            )


@dataclass(frozen=True)
class FeedForward(Checked):
    """`W_2 gelu(W_1 z)` with `hidden_dim` (D_FF) hidden neurons."""

    hidden_dim: Size
    activation: Literal["gelu_tanh", "gelu_exact"] = "gelu_tanh"
