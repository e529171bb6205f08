"""What every implementation of the gated delta rule gives and takes.

An implementation is a module with these functions, which go through the tokens in chunks of C:

    forward(Operands, state, *, scale) -> (read, state', states)
    backward(Operands, states, d_read, d_state', *, scale) -> Gradients

    read [B, T, H, V]: what tokens read, in v's dtype
    state, state' [B, H, K, V]: before the first token and behind the last, at least float32
    states [N, B, H, V, K]: before each chunk, transposed: all that the backward pass needs beside
        operands
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Operands(NamedTuple):
    """Of at least one token.

    Attributes:
      q, k, v: queries, keys and values.
      log_decay: of the state's rows at each token, at least float32, at most 0.
      beta: how much of what is missing a token writes, at least float32.
      documents: counted from 0 in each row; a token sees only its own. The state before the first
        token is of document 0.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H K"]
    beta: Float[Array, "B T H"]
    documents: Int[Array, "B T"]


class Gradients(NamedTuple):
    """Cotangents, of the operands' shapes and dtypes; `state` is of that before the first token."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H K"]
    beta: Float[Array, "B T H"]
    state: Float[Array, "B H K V"]


def chunk_size(keys: int) -> int:
    """Tokens in a chunk: states are kept, and products run one after the other, for each.

    Half of what is computed between tokens grows with it; a state is worth it from 128 keys on.
    """
    return 128 if keys >= 128 else 64
