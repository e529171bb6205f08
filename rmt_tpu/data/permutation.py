"""Random access to a shuffled order: the n-th element of a permutation, without storing it.

The order of the training data must not change with the version of a library. Therefore it is
computed with 64-bit arithmetic, without a library's random stream.
"""

import numpy as np
from jaxtyping import Int64, UInt64

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # the increment of SplitMix64
_ROUNDS = 8


def permute(
    index: Int64[np.ndarray, " B"],
    *,
    size: int,
    seed: int,
    epoch: Int64[np.ndarray, " B"],
) -> Int64[np.ndarray, " B"]:
    """Return the image of each index in the permutation of `range(size)` for (seed, epoch).

    A Feistel network permutes the smallest range of 4^k that holds `size`; an image outside of
    `size` is permuted again until it falls inside, which keeps the whole a permutation.

    Args:
      index: int64, from 0 to `size - 1`.
      size: size of the range.
      seed: any integer, taken modulo 2^64.
      epoch: int64, one for each index, from 0.

    Returns:
      int64, from 0 to `size - 1`.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _mix(_mix(np.array([seed & _WORD], np.uint64)) ^ epoch.astype(np.uint64))
    words = _feistel(index.astype(np.uint64), keys, half)
    while (outside := words >= size).any():
        words[outside] = _feistel(words[outside], keys[outside], half)
    return words.astype(np.int64)


def _feistel(
    words: UInt64[np.ndarray, " B"], keys: UInt64[np.ndarray, " B"], half: int
) -> UInt64[np.ndarray, " B"]:
    """Permute words of `2 * half` bits, with a permutation for each key."""
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = words >> shift, words & mask
    for number in range(_ROUNDS):
        step = np.uint64((number + 1) * _GOLDEN & _WORD)
        left, right = right, left ^ (_mix(_mix(keys ^ step) ^ right) & mask)
    return left << shift | right


def _mix(words: UInt64[np.ndarray, " B"]) -> UInt64[np.ndarray, " B"]:
    """Apply SplitMix64's output function: each bit out depends on each bit in."""
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
