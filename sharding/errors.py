"""Errors that users see as a single line, and helpers that write legal values into such lines.

The module imports the standard library only.
"""

import math


class RmtError(Exception):
    """An error whose message tells the user what is wrong, the offending value and legal values.

    Attributes:
      exit_code: the exit code of a program that stops with this error.
    """

    exit_code = 1


class MeshError(RmtError):
    """An error about a mesh that is impossible, or about a size that does not fit a mesh.

    The message names the flag and the legal values.
    """

    exit_code = 2


def nearest_multiples(value: int, divisor: int) -> str:
    """Return the multiples of `divisor` just below and just above `value`, as text."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"


def divisors(value: int) -> str:
    """Return all divisors of `value`, as text."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    large = [value // n for n in reversed(small) if n * n != value]
    return ", ".join(map(str, small + large))
