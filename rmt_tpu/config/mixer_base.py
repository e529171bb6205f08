"""The base classes of the configs of mixers.

A mixer forms a sublayer's input from the outputs of earlier sublayers. A model of `L` layers has
`2L` sublayers.
"""

from collections.abc import Iterator
from typing import ClassVar, Protocol, runtime_checkable

from rmt_tpu.config.checks import Checked
from rmt_tpu.config.core import Computes
from rmt_tpu.config.plain_start import PlainStart


@runtime_checkable
class Sizes(Protocol):
    """The properties of a `ModelConfig` from which a mixer counts parameters and FLOPs."""

    num_sublayers: int
    num_layers: int
    residual_size: int
    sublayers: Iterator[Computes]


class System(Checked):
    """The base class for the configs of mixers.

    Attributes:
      note: a text for reports. It states differences from the plain model (which sums all outputs)
        that are not in the mixer's equations, such as other initial values.
      on_matrix: whether the mixer is defined for a matrix store.
      remats: legal values of `ModelConfig.remat` with this mixer.
      by_layers: whether the mixer treats two consecutive sublayers as one layer.
      banked: whether the mixer keeps earlier outputs, or sums of them, as the rows of an array
        called the bank.
      one_residual: whether a token has a single residual to which outputs are written.
      kept_residuals: the largest number of residual vectors per token that the forward pass keeps
        for each sublayer, if it does not rebuild them; None if this is not known.
      adds_up: whether outputs are summed over depth. If so, weights that write to the residual
        start smaller in deeper models, and the input of each sublayer is normalised.
      decode_kernels: whether the mixer has kernels for decode steps with a vector store.
      second_input: input width of the second sublayer in a layer, as a multiple of the model's
        width. If it is above 1, the hidden layer of that sublayer is normalised.
      undivided: the option that needs a token's whole residual on one device, with its legal value,
        like "num_heads=2; legal: num_heads=1". A mesh then cannot divide D_k. None if the mixer has
        no such option.
    """

    note: ClassVar[str] = ""
    on_matrix: ClassVar[bool] = False
    remats: ClassVar[tuple[str, ...]] = ("none", "dots", "offload", "full")
    by_layers: ClassVar[bool] = False
    banked: ClassVar[bool] = False
    one_residual: ClassVar[bool] = True
    kept_residuals: ClassVar[int | None] = None
    adds_up: ClassVar[bool] = True
    second_input: ClassVar[int] = 1
    decode_kernels: ClassVar[bool] = False
    undivided: ClassVar[str | None] = None

    def check(self, model: Sizes) -> None:
        """Raise UsageError if the mixer's options do not fit the model's sizes or cores."""

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return whether a new model equals the plain model with the same weights.

        The plain model sums all outputs. The result is "not known" for a mixer that does not
        override this method.
        """
        return PlainStart(None, f"how the mixer {self.kind} starts is not stated")

    def parameters(self, model: Sizes) -> int:
        """Return the number of parameters that the mixer adds to a model."""
        return 0

    def flops(self, model: Sizes) -> int:
        """Return the mixer's forward FLOPs per token; see `rmt_tpu.cost`."""
        return 0

    def logit_terms(self, model: Sizes) -> dict[str, int]:
        """Return a dict from parameter name to the number of terms summed in a logit over depth.

        The terms are of order 1. A logit over depth is the score of an earlier output, from which a
        sublayer reads. If a mixer has learned factors of the residual, the logarithm of a factor
        counts as a logit. The result is empty for a mixer without such logits.
        """
        return {}

    def chunk_multiple(self, num_sublayers: int) -> int:
        """Return a number that must divide the number of sublayers per pipeline chunk."""
        return 2 if self.by_layers else 1


class BankedSystem(System):
    """A base class for mixers that keep earlier outputs in a bank."""

    on_matrix: ClassVar[bool] = True
    remats: ClassVar[tuple[str, ...]] = ("dots", "offload", "full", "blocks")
    banked: ClassVar[bool] = True
    # A bank has at most one row per sublayer, a gradient of each, and running sums.
    kept_residuals: ClassVar[int | None] = 3

    def sublayers_a_block(self, num_sublayers: int) -> int:
        """Return the number of sublayers whose outputs one row of the bank sums up."""
        return 1
