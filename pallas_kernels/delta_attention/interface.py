"""The functions, operands and results of every implementation of the gated delta rule.

An implementation is a module with these functions, which process the tokens in chunks of C:

    forward(DeltaOperands, state, *, scale) -> (read, state', states)
    backward(DeltaOperands, states, d_read, d_state', *, scale) -> DeltaGradients

    read [B, T, H, V]: the output, that is, what each token reads from the state, in v's dtype
    state, state' [B, H, K, V]: the states before the first and after the last token, at least
        float32
    states [N, B, H, V, K]: the transposed state before each of N chunks, for the backward pass
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class DeltaOperands(NamedTuple):
    """The operands of the gated delta rule, for at least one token.

    Attributes:
      q, k, v: queries, keys and values.
      log_decay: the log decay of each row of the state at each token, at most 0, at least float32.
      beta: the fraction of the difference `v - k^T S` that a token writes, at least float32.
      documents: the document of each token, counted from 0 in each row. A token reads only what
        tokens of its own document have written. The initial state belongs to document 0.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H K"]
    beta: Float[Array, "B T H"]
    documents: Int[Array, "B T"]


class DeltaGradients(NamedTuple):
    """The cotangents of the operands and, as `state`, of the initial state.

    Each cotangent has the shape and the dtype of its primal.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H K"]
    beta: Float[Array, "B T H"]
    state: Float[Array, "B H K V"]


def chunk_size(keys: int) -> int:
    """Return the number of tokens per chunk, for keys of a given size.

    With larger chunks, fewer states are saved and fewer chunks are processed in sequence. But the
    work per token and head grows with the chunk size C, by about `2 C (K + V)` FLOPs. For keys of
    size 128 or more, larger chunks are faster.
    """
    return 128 if keys >= 128 else 64
