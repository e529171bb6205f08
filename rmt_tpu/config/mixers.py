"""The config of the plain mixer, which sums all outputs, and the type of all mixers.

A mixer forms a sublayer's input from the outputs of earlier sublayers. `rmt_tpu.config` re-exports
the configs of all mixers.
"""

from dataclasses import dataclass
from typing import ClassVar

from rmt_tpu.config.depth_mixers import (
    BlockAttention,
    DeltaAttention,
    Dense,
    FullAttention,
    Hierarchical,
    Mudd,
)
from rmt_tpu.config.mixer_base import Sizes, System
from rmt_tpu.config.plain_start import PlainStart
from rmt_tpu.config.stream_mixers import (
    DepthLstm,
    Highway,
    HyperConnections,
    Mhc,
    MhcLite,
    ResidualScalars,
    WideStreams,
)


@dataclass(frozen=True)
class Sum(System):
    """The standard residual stream, the sum of all outputs."""

    kind: ClassVar[str] = "sum"
    on_matrix: ClassVar[bool] = True
    kept_residuals: ClassVar[int | None] = 1
    remats: ClassVar[tuple[str, ...]] = (
        "none",
        "dots",
        "offload",
        "full",
        "reversible",
        "reversible_dots",
    )

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return True: the plain model, which sums all outputs, has this mixer."""
        return PlainStart(True, "the residual is the plain sum")


Mixer = (
    Sum
    | FullAttention
    | BlockAttention
    | DeltaAttention
    | Dense
    | Mudd
    | HyperConnections
    | Mhc
    | MhcLite
    | WideStreams
    | ResidualScalars
    | Highway
    | DepthLstm
    | Hierarchical
)
