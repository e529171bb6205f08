"""Errors that a person is told in one line, and what such lines say. Imports nothing."""

import math


class RmtError(Exception):
    """An error whose message is all that a person needs: what, which value, what is legal.

    `exit_code` is that of a program which it ends.
    """

    exit_code = 1


class MeshError(RmtError):
    """A mesh, or a size on it, that cannot be; the message names the flag and what is legal."""

    exit_code = 2


def nearest_multiples(value: int, divisor: int) -> str:
    """The legal sizes just below and above `value`."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"


def divisors(value: int) -> str:
    """All legal sizes of what has to divide `value`."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    large = [value // n for n in reversed(small) if n * n != value]
    return ", ".join(map(str, small + large))
