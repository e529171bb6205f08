"""A pseudo-random permutation whose elements can be computed one at a time, without storing it.

The order of the training data must not change with the version of a library. Therefore the
permutation uses only 64-bit arithmetic and no random generator from a library.
"""

import numpy as np
from jaxtyping import Int64, UInt64

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # the constant that the generator SplitMix64 adds at each step
_ROUNDS = 8


def permute(
    index: Int64[np.ndarray, " B"],
    *,
    size: int,
    seed: int,
    epoch: Int64[np.ndarray, " B"],
) -> Int64[np.ndarray, " B"]:
    """Permute each index by the permutation of `range(size)` that a seed and an epoch determine.

    A Feistel network permutes `range(4^k)` for the smallest sufficient k. An image of `size` or
    more is permuted again until it is below `size`. The result is a permutation of `range(size)`.

    Args:
      index: the indices, int64 from 0 to `size - 1`.
      size: size of the range.
      seed: any integer, taken modulo 2^64.
      epoch: the epoch for each index, int64 from 0.

    Returns:
      The image of each index, int64 from 0 to `size - 1`.
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
    """Permute each word of `2 * half` bits by the permutation that its key determines."""
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = words >> shift, words & mask
    for number in range(_ROUNDS):
        step = np.uint64((number + 1) * _GOLDEN & _WORD)
        left, right = right, left ^ (_mix(_mix(keys ^ step) ^ right) & mask)
    return left << shift | right


def _mix(words: UInt64[np.ndarray, " B"]) -> UInt64[np.ndarray, " B"]:
    """Apply SplitMix64's output function, in which each output bit depends on all input bits."""
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
