"""What the classes of the config ask of their numbers."""

from typing import Any

from rmt_tpu.errors import UsageError


def positive(config: Any, *names: str) -> None:
    """Raises UsageError if a field is neither above 0 nor None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:  # NaN is not
            raise UsageError(f"{type(config).__name__}.{name}={value} must be positive")


def nearest_multiples(value: int, divisor: int) -> str:
    """The legal sizes just below and above `value`, for an error message."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
