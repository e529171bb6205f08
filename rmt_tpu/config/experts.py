"""The config of a mixture of experts, with the rules that balance tokens among experts."""

from dataclasses import dataclass
from typing import ClassVar

from rmt_tpu.config.checks import Checked, Count, Positive, Size
from rmt_tpu.config.core import WHOLE, Computes, Port
from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class SignRule(Checked):
    """A bias for choosing each expert, which moves by `rate` after each step.

    It moves up if the expert's load was below the mean, else down. Wang et al. (2024),
    "Auxiliary-loss-free load balancing".
    """

    kind: ClassVar[str] = "sign"
    rate: Positive = 1e-3


@dataclass(frozen=True)
class Quantiles:
    """Biases with which each expert would have had the mean load in the last batch.

    Kimi Team (2026), "Quantile Balancing".
    """

    kind: ClassVar[str] = "quantiles"


@dataclass(frozen=True)
class BalanceLoss(Checked):
    """A loss in place of a bias: each expert's load times its mean score, for every sequence.

    DeepSeek-AI (2024): `weight` (alpha) times `sum_e (E / k) f_e P_e`; the sum is 1 if load is
    even.
    """

    kind: ClassVar[str] = "loss"
    weight: Positive = 1e-3


Balance = SignRule | Quantiles | BalanceLoss


@dataclass(frozen=True)
class Experts(Computes):
    """A mixture of `num_experts` (E) gated feed-forward layers, with `top_k` (k) for each token.

    Attributes:
      hidden_dim: number of hidden neurons in each expert (F).
      shared: number of additional experts that every token uses, computed as one layer with
        `shared * hidden_dim` hidden neurons.
      scale: factor of the sum over chosen experts.
      balance: rule that balances tokens among experts.
      capacity: on a mesh that divides experts, the rows that a device has room for, over the rows
        that it gets if load is even. Choices beyond that are dropped and counted. None has room for
        all, so that nothing is dropped.
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
        """Names of the loss, which also passes on the loads, and of the dropped choices."""
        return ("loss", "dropped") if self.capacity is not None else ("loss",)

    @property
    def reads(self) -> Port:
        """All of the store's data vectors."""
        return WHOLE

    @property
    def writes(self) -> Port:
        """All of the store's data vectors."""
        return WHOLE

    @property
    def divided_heads(self) -> dict[str, int]:
        """Empty: tokens return to the devices that they came from."""
        return {}

    def parameters(self, width: int, read_width: int) -> int:
        """Return the parameters of all experts and the router, with its biases or counts."""
        seen = HISTOGRAM_BINS if isinstance(self.balance, Quantiles) else 0
        of_router = (read_width + 1 + seen) * self.num_experts
        return (self.num_experts + self.shared) * self._of_one(width, read_width) + of_router

    def active_parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters that a token uses: its own experts and the router."""
        idle = (self.num_experts - self.top_k) * self._of_one(width, read_width)
        return self.parameters(width, read_width) - idle

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs of one token: products with its experts' and the router's matrices."""
        experts = (self.top_k + self.shared) * self._of_one(width, read_width)
        return 2 * (experts + read_width * self.num_experts)

    def _of_one(self, width: int, read_width: int) -> int:
        return (2 * read_width + width) * self.hidden_dim


# Number of bins in the histogram of each expert that Quantiles keep.
HISTOGRAM_BINS = 1024
