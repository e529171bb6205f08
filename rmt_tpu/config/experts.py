"""A mixture of experts as a config, and how tokens are spread over them."""

from dataclasses import dataclass
from typing import ClassVar

from rmt_tpu.config.checks import Checked, Count, Positive, Size
from rmt_tpu.config.core import WHOLE, Computes, Port
from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class SignRule(Checked):
    """After each step the bias of a choice moves by `rate`, up if its load was below the mean.

    Wang et al. (2024), "Auxiliary-loss-free load balancing".
    """

    kind: ClassVar[str] = "sign"
    rate: Positive = 1e-3


@dataclass(frozen=True)
class Quantiles:
    """Biases are those with which each expert would have had the mean load of the last batch.

    Kimi Team (2026), "Quantile Balancing".
    """

    kind: ClassVar[str] = "quantiles"


@dataclass(frozen=True)
class BalanceLoss(Checked):
    """No bias: of every sequence, load times mean score of each expert is added to the loss.

    DeepSeek-AI (2024): `weight` (alpha) times `sum_e (E / k) f_e P_e`, which is 1 where it is even.
    """

    kind: ClassVar[str] = "loss"
    weight: Positive = 1e-3


Balance = SignRule | Quantiles | BalanceLoss


@dataclass(frozen=True)
class Experts(Computes):
    """A mixture of `num_experts` (E) gated feed-forward layers, `top_k` (k) of them for a token.

    Attributes:
      hidden_dim: hidden neurons of each (F).
      shared: experts that every token has beside them, as one layer of `shared * hidden_dim`.
      scale: of the sum over chosen experts.
      balance: how tokens are spread over experts.
      capacity: on a mesh that divides experts, rows of a device over those that it has if load is
        even; choices beyond are dropped, and counted. None drops nothing: room for all.
    """

    kind: ClassVar[str] = "experts"
    letter: ClassVar[str] = "E"
    gated: ClassVar[bool] = True
    num_experts: Size
    top_k: Size
    hidden_dim: Size
    shared: Count = 1
    scale: Positive = 1.0
    balance: Balance = SignRule()
    capacity: Positive | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.top_k > self.num_experts:
            raise UsageError(
                f"Experts.top_k={self.top_k} must be at most num_experts={self.num_experts}"
            )

    @property
    def aux(self) -> tuple[str, ...]:
        """The loss, by which loads are made known too; and choices that had no room."""
        return ("loss", "dropped") if self.capacity is not None else ("loss",)

    @property
    def reads(self) -> Port:
        """All of the store's data vectors."""
        return WHOLE

    @property
    def writes(self) -> Port:
        """As it reads."""
        return WHOLE

    @property
    def divided_heads(self) -> dict[str, int]:
        """None: tokens come back to where they were."""
        return {}

    def parameters(self, width: int, read_width: int) -> int:
        """Of all experts and the router, a bias or a count of each."""
        seen = HISTOGRAM_BINS if isinstance(self.balance, Quantiles) else 0
        of_router = (read_width + 1 + seen) * self.num_experts
        return (self.num_experts + self.shared) * self._of_one(width, read_width) + of_router

    def active_parameters(self, width: int, read_width: int) -> int:
        """Of them, those that a token meets: its own experts, and all of the router."""
        idle = (self.num_experts - self.top_k) * self._of_one(width, read_width)
        return self.parameters(width, read_width) - idle

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Of one token: products with the matrices of its experts, and the router's."""
        experts = (self.top_k + self.shared) * self._of_one(width, read_width)
        return 2 * (experts + read_width * self.num_experts)

    def _of_one(self, width: int, read_width: int) -> int:
        return (2 * read_width + width) * self.hidden_dim


# Of what Quantiles keep of each expert.
HISTOGRAM_BINS = 1024
