"""The functions, operands and results of every implementation of the gated delta rule.

An implementation is a module with these functions, which go through the tokens in chunks of C:

    forward(Operands, state, *, scale) -> (read, state', states)
    backward(Operands, states, d_read, d_state', *, scale) -> Gradients

    read [B, T, H, V]: the vectors that tokens read, in v's dtype
    state, state' [B, H, K, V]: before the first token and after the last, at least float32
    states [N, B, H, V, K]: before each chunk, transposed: all that the backward pass needs in
        addition to the operands
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Operands(NamedTuple):
    """The operands of the gated delta rule for at least one token.

    Attributes:
      q, k, v: queries, keys and values.
      log_decay: log decays of the state's rows at each token, at least float32, at most 0.
      beta: the share of the missing part that a token writes, at least float32.
      documents: the document of each token, counted from 0 in each row; a token sees only its own
        document. The state before the first token belongs to document 0.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H K"]
    beta: Float[Array, "B T H"]
    documents: Int[Array, "B T"]


class Gradients(NamedTuple):
    """Cotangents in the operands' shapes and dtypes; `state` is that of the initial state."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H K"]
    beta: Float[Array, "B T H"]
    state: Float[Array, "B H K V"]


def chunk_size(keys: int) -> int:
    """Return the tokens in a chunk; a chunk keeps one state, and chunks are computed in sequence.

    Half of the work between tokens grows with the chunk. From 128 keys on, fewer states are worth
    it.
    """
    return 128 if keys >= 128 else 64
