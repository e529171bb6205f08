"""Legal ranges of a config's numbers: types for annotations, and a class that checks them.

    @dataclass(frozen=True)
    class Rope(Checked):
        base: Positive = 10_000.0

All ranges have two ends: no number may be NaN, infinite, or larger than arrays and jax can count.
"""

import dataclasses
import functools
import typing
from typing import Annotated, Any

from rmt_tpu.errors import UsageError, shown


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, including ends that are not `open_low` or `open_high`."""

    words: str
    low: int | float
    high: int | float
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: int | float) -> bool:
        above = self.low < value if self.open_low else self.low <= value
        below = value < self.high if self.open_high else value <= self.high
        return above and below  # both are False for NaN


LARGEST_SIZE = 2**31 - 1  # largest axis, and largest count that jax keeps in int32
LARGEST_SEED = 2**32 - 1  # jax drops the higher bits, so larger seeds would not differ
_LARGEST_FLOAT = 3.4e38  # about the largest float32

Size = Annotated[int, Range(f"positive, at most {LARGEST_SIZE}", 1, LARGEST_SIZE)]
Count = Annotated[int, Range(f"at least 0, at most {LARGEST_SIZE}", 0, LARGEST_SIZE)]
Seed = Annotated[int, Range(f"at least 0, at most {LARGEST_SEED}", 0, LARGEST_SEED)]
FractionBits = Annotated[int, Range("from 0 to 20", 0, 20)]

_FINITE = f"at most {_LARGEST_FLOAT}"
Positive = Annotated[float, Range(f"positive, {_FINITE}", 0, _LARGEST_FLOAT, open_low=True)]
NonNegative = Annotated[float, Range(f"at least 0, {_FINITE}", 0, _LARGEST_FLOAT)]
Finite = Annotated[float, Range("finite", -_LARGEST_FLOAT, _LARGEST_FLOAT)]
Share = Annotated[float, Range("at least 0, at most 1", 0, 1)]
NonZeroShare = Annotated[float, Range("above 0, at most 1", 0, 1, open_low=True)]
Decay = Annotated[float, Range("at least 0, below 1", 0, 1, open_high=True)]
# A log decay further below would leave nothing of a state in float32.
LogDecay = Annotated[float, Range("at least -100, below 0, like -5", -100, 0, open_high=True)]


class Checked:
    """A dataclass whose numbers are in the Range of their annotations, or None where that is legal.

    Raises:
      UsageError: a number is not; the message has its name, its value and what is legal.
    """

    def __post_init__(self):
        for name, legal in ranges(type(self)).items():
            value = getattr(self, name)
            if value is not None and value not in legal:
                raise UsageError(
                    f"{type(self).__name__}.{name}={shown(value)} must be {legal.words}"
                )


@functools.cache
def ranges(cls: type) -> dict[str, Range]:
    """Return the Range of each field of a dataclass that has one."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        # The annotation itself, or `Size` of `Size | None`.
        for option in (field.type, *typing.get_args(field.type)):
            for note in getattr(option, "__metadata__", ()):
                found[field.name] = note
    return found
