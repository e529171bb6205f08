"""Rows for the choices of tokens, and sums of each token's rows: the way to experts and back.

All tokens have the same number of choices, and a choice may have a row at any place, or none.
Implementations: "xla" (on any platform), "mosaic_tpu" (for sums) and "pallas" (the kernel where
there is one). The default, None, uses the kernel on TPUs if at most half of all choices can have a
row, as on a mesh that divides experts, because XLA reads and adds a row for every choice. The two
ops are each other's transposes, and so are their gradients, without a scatter.
"""

import functools
from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.platform import Implementations, reverse_mode
from pallas_kernels.token_rows import mosaic_tpu, xla

__all__ = ["rows_of_tokens", "sums_of_rows"]

Implementation = Literal["xla", "mosaic_tpu", "pallas"]
_IMPLEMENTATIONS = Implementations(
    xla, {"mosaic_tpu": mosaic_tpu}, by_default=(), name="token_rows"
)


@reverse_mode
def rows_of_tokens(
    x: Float[Array, "tokens width"],
    order: Int[Array, " rows"],
    places: Int[Array, " choices"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "rows width"]:
    """Return for each row the vector of its choice's token: `x[order // each]`.

    Args:
      x: a vector of every token.
      order: the choice of each row. Choices are numbered by token: the first token's are 0 to each
        - 1, and so on.
      places: the row of each choice, or `rows` if it has none. Entries of `order` after the rows of
        choices are not used, but they have to be the number of a choice.
      implementation: None picks the best one for the platform that the program is lowered for.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or cannot serve the gradient.
      TypeError: the op is differentiated in forward mode.
    """
    return _rows(implementation, len(places) // len(x), x, order, places)


@reverse_mode
def sums_of_rows(
    rows: Float[Array, "rows width"],
    order: Int[Array, " rows"],
    places: Int[Array, " choices"],
    *,
    each: int,
    implementation: Implementation | None = None,
) -> Float[Array, "tokens width"]:
    """Return the sum of every token's rows, in their dtype; sums are at least float32.

    Args:
      rows: the rows; a row of no choice may be anything, NaN included.
      order, places, implementation: as in `rows_of_tokens`.
      each: the number of choices of a token.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or cannot serve this call.
      TypeError: the op is differentiated in forward mode.
    """
    return _sums(implementation, each, rows, order, places)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(implementation, each, x, order, places):
    return x[order // each]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(implementation, each, rows, order, places):
    return _IMPLEMENTATIONS.run(implementation, "sums", rows, order, places, each=each)


_rows.defvjp(
    lambda *given: (_rows(*given), given[3:]),
    lambda *given: (_sums(*given[:2], given[3], *given[2]), None, None),
)
_sums.defvjp(
    lambda *given: (_sums(*given), given[3:]),
    lambda *given: (_rows(*given[:2], given[3], *given[2]), None, None),
)
