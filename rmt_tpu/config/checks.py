"""Types of numbers with a legal range, and a base class that checks the ranges.

    @dataclass(frozen=True)
    class Rope(Checked):
        base: Positive = 10_000.0

Every range has two ends, which exclude NaN, infinity and numbers that are too large for jax.
"""

import dataclasses
import functools
import typing
from typing import Annotated, Any

from rmt_tpu.errors import UsageError, shown


@dataclasses.dataclass(frozen=True)
class Range:
    """An interval of legal numbers from `low` to `high`.

    Both ends are included, unless `open_low` or `open_high` excludes them. `words` describes the
    interval in error messages.
    """

    words: str
    low: int | float
    high: int | float
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: int | float) -> bool:
        above = self.low < value if self.open_low else self.low <= value
        below = value < self.high if self.open_high else value <= self.high
        return above and below  # NaN is in no interval, because its comparisons are False


LARGEST_SIZE = 2**31 - 1  # the largest axis size and the largest count, because JAX uses int32
LARGEST_SEED = 2**32 - 1  # the largest seed, because JAX uses only 32 bits of it
_LARGEST_FLOAT = 3.4e38  # approximately the largest float32

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
# Log decays below -100 are not needed, because the decay factor exp(-100) is practically 0.
LogDecay = Annotated[float, Range("at least -100, below 0, like -5", -100, 0, open_high=True)]


class Checked:
    """A base class of dataclasses whose numbers must be in the Range of their annotation.

    None is accepted for every field. The types of the fields are not checked here.

    Raises:
      UsageError: a number is out of range; the message has its name, its value and the legal range.
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
    """Return a dict from the field names of a dataclass to the Ranges in their annotations."""
    ranges_by_name: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        # The Range may belong to the annotation itself, or to a part of it, as in `Size | None`.
        for option in (field.type, *typing.get_args(field.type)):
            for note in getattr(option, "__metadata__", ()):
                ranges_by_name[field.name] = note
    return ranges_by_name
