"""Configs of position encodings, which tell a model the order of tokens.

`rmt_tpu.config` re-exports these classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from rmt_tpu.config.checks import Checked, Positive, Size
from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class Learned(Checked):
    """Learned position vectors, one for each of `max_length` (N) positions.

    They are written to the residual together with the embedding.
    """

    kind: ClassVar[str] = "learned"
    max_length: Size = 512


@dataclass(frozen=True)
class Alibi:
    """ALiBi: attention logits decrease linearly with the distance between tokens.

    The slope in head h is `2^(-8 (h + 1) / num_heads)`.
    """

    kind: ClassVar[str] = "alibi"


@dataclass(frozen=True)
class Llama3Scaling(Checked):
    """A reduction of RoPE's low frequencies for long texts, as in Llama 3.1.

    A frequency f that makes fewer than `low` turns within `original_length` tokens becomes `f /
    factor`. A frequency that makes more than `high` turns is unchanged. Frequencies in between are
    interpolated.
    """

    kind: ClassVar[str] = "llama3"
    factor: Positive = 8.0
    low: Positive = 1.0
    high: Positive = 4.0
    original_length: Size = 8192

    def __post_init__(self):
        super().__post_init__()
        if self.low >= self.high:
            raise UsageError(
                f"Llama3Scaling.low={self.low} must be below high={self.high}, like low=1 high=4"
            )


@dataclass(frozen=True)
class LinearScaling(Checked):
    """A division of all of RoPE's frequencies by one factor, as if positions were divided by it.

    Chen et al. 2023, Extending Context Window of Large Language Models via Positional
    Interpolation.
    """

    kind: ClassVar[str] = "linear"
    factor: Positive


@dataclass(frozen=True)
class YarnScaling(Checked):
    """A reduction of RoPE's low frequencies for long texts, and an increase of logits (YaRN).

    A frequency that makes fewer than `slow` turns within `original_length` tokens is divided by
    `factor`. A frequency that makes more than `fast` turns is unchanged. A frequency in between
    becomes a weighted mean of both values. The weights change linearly with the index of the
    frequency. Rotated queries and keys are multiplied by `magnitude`, and thus logits by its
    square. If no frequency makes `slow` turns, the original code leaves some or all frequencies
    unchanged, and so does this class.

    Peng et al. 2023, YaRN: Efficient Context Window Extension of Large Language Models.

    Attributes:
      factor: the number by which the lowest frequencies are divided.
      original_length: the length of the training texts.
      fast, slow: the numbers of turns between which a frequency becomes a weighted mean.
      magnitude: the factor by which rotated queries and keys are multiplied; None means `0.1
        log(factor) + 1`, or 1 if `factor` is below 1.
      whole: whether the two indices between which the weights change are rounded outwards to whole
        numbers.
    """

    kind: ClassVar[str] = "yarn"
    factor: Positive
    original_length: Size
    fast: Positive = 32.0
    slow: Positive = 1.0
    magnitude: Positive | None = None
    whole: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.slow >= self.fast:
            raise UsageError(
                f"YarnScaling.slow={self.slow} must be below fast={self.fast}, like slow=1 fast=32"
            )

    @property
    def multiplier(self) -> float:
        """The factor by which rotated queries and keys are multiplied."""
        if self.magnitude is not None:
            return self.magnitude
        return 0.1 * math.log(max(self.factor, 1.0)) + 1.0


Scaling = Llama3Scaling | LinearScaling | YarnScaling


@dataclass(frozen=True)
class Rope(Checked):
    """RoPE: rotation of queries and keys by angles proportional to position.

    The i-th pair of numbers is rotated at the frequency `base^(-2 i / dims)`.

    Attributes:
      base: base of the frequencies.
      dims: number of entries at the start of each head that are rotated; None rotates all entries.
      scaling: a change of frequencies for long texts, or None.
    """

    kind: ClassVar[str] = "rope"
    base: Positive = 10_000.0
    dims: Size | None = None
    scaling: Scaling | None = None

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.scaling, YarnScaling) and self.base <= 1:
            raise UsageError(
                f"Rope.base={self.base:g} must be above 1 with scaling=yarn, so that frequencies "
                "decrease"
            )


@dataclass(frozen=True)
class NoPositions:
    """No position information: only the causal mask tells the model the order of tokens."""

    kind: ClassVar[str] = "none"


Positions = Learned | Alibi | Rope | NoPositions
