"""Errors that users see as one line, and texts for such lines; standard library only."""

import math


class RmtError(Exception):
    """An error whose message is all that a user needs: what, which value, what is legal.

    Attributes:
      exit_code: the exit code of a program that ends by this error.
    """

    exit_code = 1


class MeshError(RmtError):
    """A mesh, or a size on it, that is impossible; the message names the flag and legal values."""

    exit_code = 2


def nearest_multiples(value: int, divisor: int) -> str:
    """Return the legal sizes just below and above `value`, as text."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"


def divisors(value: int) -> str:
    """Return all divisors of `value`, as text."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    large = [value // n for n in reversed(small) if n * n != value]
    return ", ".join(map(str, small + large))
