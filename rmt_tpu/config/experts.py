"""Configs of mixtures of experts, and of rules that balance the load of experts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Checked, Count, NonNegative, Positive, Size
from rmt_tpu.config.core import RESIDUAL_PORT, Computes, Port, check_situ
from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class SignRule(Checked):
    """A balance rule that changes a bias on each expert's routing scores by `rate` each step.

    A bias increases if its expert's load was below the mean load, and decreases otherwise. See
    Wang et al. (2024), "Auxiliary-loss-free load balancing".
    """

    kind: ClassVar[str] = "sign"
    rate: Positive = 1e-3


@dataclass(frozen=True)
class Quantiles:
    """A balance rule that sets a bias on each expert's routing scores from the last batch.

    With the new bias, the expert would have had the mean load in that batch. See Kimi Team (2026),
    "Quantile Balancing".
    """

    kind: ClassVar[str] = "quantiles"


@dataclass(frozen=True)
class BalanceLoss(Checked):
    """A balance rule that adds an auxiliary loss for each sequence, without biases.

    The loss is `weight` (alpha) times `sum_e (E / k) f_e P_e`, where f_e is expert e's load per
    token and P_e its mean normalised score (DeepSeek-AI 2024). The sum is 1 if all loads are equal.
    """

    kind: ClassVar[str] = "loss"
    weight: NonNegative = 1e-3


Balance = SignRule | Quantiles | BalanceLoss


@dataclass(frozen=True)
class Experts(Computes):
    """A mixture of `num_experts` (E) gated feed-forward layers.

    Attributes:
      num_experts: number of routed experts, from which each token chooses.
      top_k: number of routed experts that each token uses (k).
      hidden_dim: number of hidden neurons in each expert (F).
      shared: number of additional experts that every token uses. They are computed as one layer
        with `shared * hidden_dim` hidden neurons.
      shared_gate: whether a gate scales the shared experts' output. The gate is one number per
        token, the sigmoid of a linear function of the token.
      scale: factor by which the weighted sum of the chosen experts' outputs is multiplied.
      scores: how router logits become scores: by a "sigmoid" of each logit, or a "softmax" over all
        experts.
      normalized: whether the chosen experts' scores are divided by their sum.
      groups, top_groups: number of groups of adjacent experts, and number of groups from which a
        token may choose. A token chooses from the groups with the highest scores. A group's score
        is the sum of its two highest biased scores (DeepSeek-V3).
      balance: rule that balances the load among experts.
      capacity: on a mesh that shards experts, the maximum number of choices per device, as a
        multiple of the number under even load. A choice is a pair of a token and an expert. Choices
        above the maximum are dropped and counted. None means no maximum.
      activation: the activation of all experts: `silu(gate) * up` ("swiglu"), or SiTU ("situ", see
        `rmt_tpu.layers.activations`).
      situ_beta: SiTU's bound b on the gate factor.
      situ_linear_beta: SiTU's bound c on the up factor; None means no bound.
      latent_dim: size of the vectors that routed experts read and write (L). One matrix projects
        each token down to this size, and another projects the weighted sum of outputs back up. The
        router and the shared experts read the token itself. None means no projections.
      latent_norm: whether the weighted sum of outputs is RMS-normalised, with a gain and the
        model's `norm_epsilon`, before it is projected up.
    """

    kind: ClassVar[str] = "experts"
    letter: ClassVar[str] = "E"
    gated: ClassVar[bool] = True
    num_experts: Size
    top_k: Size
    hidden_dim: Size
    shared: Count = 1
    shared_gate: bool = False
    scale: Positive = 1.0
    scores: Literal["sigmoid", "softmax"] = "sigmoid"
    normalized: bool = True
    balance: Balance = SignRule()
    capacity: Positive | None = None
    groups: Size = 1
    top_groups: Size = 1
    activation: Literal["swiglu", "situ"] = "swiglu"
    situ_beta: Positive = 4.0
    situ_linear_beta: Positive | None = 25.0
    latent_dim: Size | None = None
    latent_norm: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_situ(self)
        if self.latent_norm and self.latent_dim is None:
            raise UsageError(
                "Experts.latent_norm=True requires latent_dim; set latent_dim, or set "
                "latent_norm=false"
            )
        if self.shared_gate and not self.shared:
            raise UsageError(
                "Experts.shared_gate=True requires shared experts; set shared to at least 1, or "
                "set shared_gate=false"
            )
        if self.top_k > self.num_experts:
            raise UsageError(
                f"Experts.top_k={self.top_k} must be at most num_experts={self.num_experts}"
            )
        if self.top_groups > self.groups:
            raise UsageError(
                f"Experts.top_groups={self.top_groups} must be at most groups={self.groups}"
            )
        if self.groups > 1:
            self._check_groups()

    def _check_groups(self):
        """Raise UsageError unless `groups` fits `num_experts`, `top_k` and `balance`."""
        size, left = divmod(self.num_experts, self.groups)
        if left or size < 2:
            raise UsageError(
                f"Experts.groups={self.groups} must divide num_experts={self.num_experts} into "
                "groups of at least 2"
            )
        if self.top_k > self.top_groups * size:
            raise UsageError(
                f"Experts.top_k={self.top_k} must be at most the {self.top_groups * size} experts "
                f"of top_groups={self.top_groups} groups"
            )
        if isinstance(self.balance, Quantiles):
            raise UsageError(
                f"Experts.groups={self.groups} cannot be balanced by quantiles, which compare an "
                "expert with all others; legal: groups=1, or another kind of balance"
            )

    @property
    def aux(self) -> tuple[str, ...]:
        """Names of the scalars that the core returns in addition to its output.

        They are the balance loss and the number of dropped choices. The gradient of "loss" with
        respect to the parameter `load` is the experts' loads.
        """
        return ("loss", "dropped") if self.capacity is not None else ("loss",)

    @property
    def reads(self) -> Port:
        """The vectors that the core reads: all data vectors, which represent the whole residual."""
        return RESIDUAL_PORT

    @property
    def writes(self) -> Port:
        """The vectors that the core writes: all data vectors (see `ModelConfig.data_shape`)."""
        return RESIDUAL_PORT

    @property
    def divided_heads(self) -> dict[str, int]:
        """An empty dict, because the core has no heads to shard."""
        return {}

    def parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters, including the router's loads and histograms."""
        bins = HISTOGRAM_BINS if isinstance(self.balance, Quantiles) else 0
        router = (read_width + 1 + bins) * self.num_experts + self.shared_gate * read_width
        gain = self.latent_dim if self.latent_norm else 0
        routed = self.num_experts * self._expert_parameters(*self._routed_sizes(width, read_width))
        return routed + self._fixed_parameters(width, read_width) + gain + router

    def active_parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters that one token uses.

        These are all parameters except the experts that the token does not choose.
        """
        each = self._expert_parameters(*self._routed_sizes(width, read_width))
        return self.parameters(width, read_width) - (self.num_experts - self.top_k) * each

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs per token for the products with all matrices that the token uses."""
        routed = self.top_k * self._expert_parameters(*self._routed_sizes(width, read_width))
        router = read_width * (self.num_experts + self.shared_gate)
        return 2 * (routed + self._fixed_parameters(width, read_width) + router)

    def _routed_sizes(self, width: int, read_width: int) -> tuple[int, int]:
        """Return the output size and the input size of a routed expert."""
        latent = self.latent_dim
        return (width, read_width) if latent is None else (latent, latent)

    def _fixed_parameters(self, width: int, read_width: int) -> int:
        """Return the number of entries in matrices that every token uses, without the router."""
        projections = (self.latent_dim or 0) * (width + read_width)
        return self.shared * self._expert_parameters(width, read_width) + projections

    def _expert_parameters(self, width: int, read_width: int) -> int:
        return (2 * read_width + width) * self.hidden_dim


# Number of bins in the histogram that `Quantiles` keeps for each expert.
HISTOGRAM_BINS = 1024
