"""What every implementation of the gated delta rule gives and takes.

An implementation is a module with these functions over operands in chunks of C tokens:

    forward(Operands, state, *, scale) -> (read, state', states)
    backward(Operands, states, d_read, d_state', *, scale) -> (d Operands, d_state)

    read [N, B, H, C, V]: what tokens read, in v's dtype
    state, state' [B, H, K, V]: before the first token and behind the last, at least float32
    states [N, B, H, K, V]: before each chunk: all that the backward pass needs beside operands
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Operands(NamedTuple):
    """Of N chunks of C tokens; past the last token everything is 0, and the document the last one.

    Attributes:
      q, k, v: queries, keys and values.
      log_decay: of the state's rows at each token, at least float32, at most 0.
      beta: how much of what is missing a token writes, at least float32.
      documents: counted from 0 in each row; a token sees only its own. The state before the first
        token is of document 0.
      before: the document of the token before each chunk.
    """

    q: Float[Array, "N B H C K"]
    k: Float[Array, "N B H C K"]
    v: Float[Array, "N B H C V"]
    log_decay: Float[Array, "N B H C K"]
    beta: Float[Array, "N B H C"]
    documents: Int[Array, "N B C"]
    before: Int[Array, "N B"]
