"""Gathering of the rows of routed experts, and sums of each token's rows.

Each token chooses the same number of experts. A choice is assigned to a row of the experts' input,
or to none. `rows_of_tokens` gathers these rows. `sums_of_rows` adds up each token's rows of the
experts' output.

Implementations: "xla" (plain JAX, on any platform), "mosaic_tpu" (a TPU kernel for the sums) and
"pallas" (the kernel if there is one for the platform, else plain JAX). The default, None, uses the
kernel on TPUs if there are at most 0.6 rows per choice, for example on a mesh that shards experts.
XLA is slower there, because it reads one row for every choice. Each op computes the other's
gradient, because each is the other's transpose.
"""

import functools
import numbers
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_array, check_shapes
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
    """Gather, for each row, the vector of the token that the row belongs to: `x[order // each]`.

    `each` is the number of choices per token, `choices / tokens`.

    Args:
      x: one vector per token.
      order: for each row, the number of the choice that is assigned to it. Choices are numbered by
        token: the first token's are 0 to each - 1, and so on. An unused row, which may be between
        used ones, has the number of choices or a larger number. It gets the last token's vector.
      places: for each choice, the index of its row, or `rows` (the number of rows) if the choice
        has no row.
      implementation: None chooses the fastest one for the platform that the program is lowered for.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or does not support the gradient.
      ValueError: the number of choices is 0 or no multiple of the number of tokens, or an array has
        another number of axes.
      TypeError: the op is differentiated in forward mode.
    """
    check_array("x", x, "tokens width")
    _check(order, places)
    if not len(x) or not len(places) or len(places) % len(x):
        raise ValueError(
            f"places has {len(places)} choices of {len(x)} tokens; legal: the same number for each "
            "token, at least 1"
        )
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
    """Return the sum of each token's rows in the rows' dtype, accumulated in float32 or wider.

    Args:
      rows: the rows. Rows to which no choice is assigned may have any values, including NaN.
      order, places, implementation: as in `rows_of_tokens`.
      each: the number of choices per token.

    Raises:
      UnsupportedImplementation: a named implementation is unknown or does not support this call.
      ValueError: `each` is not an integer of at least 1, the number of choices is no multiple of
        it, `order` has not a number for each row, or an array has another number of axes.
      TypeError: the op is differentiated in forward mode.
    """
    check_array("rows", rows, "rows width")
    _check(order, places)
    check_shapes(f"rows {list(rows.shape)}", integers=True, order=(order, rows.shape[:1]))
    if not isinstance(each, numbers.Integral) or isinstance(each, bool) or each < 1:
        raise ValueError(f"each={each!r} must be an integer, at least 1")
    if len(places) % each:
        raise ValueError(f"places has {len(places)} choices; legal: a multiple of each={each}")
    return _sums(implementation, each, rows, order, places)


def _check(order, places) -> None:
    for name, x in {"order": order, "places": places}.items():
        if x.ndim != 1 or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} is {x.dtype}{list(x.shape)}; legal: one axis of integers")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(implementation, each, x, order, places):
    return jnp.take(x, order // each, axis=0, mode="clip")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(implementation, each, rows, order, places):
    if not len(rows):
        return jnp.zeros((len(places) // each, rows.shape[1]), rows.dtype)
    return _IMPLEMENTATIONS.run(implementation, "sums", rows, order, places, each=each)


def _rows_forward(implementation, each, x, order, places):
    return _rows(implementation, each, x, order, places), (order, places)


def _rows_backward(implementation, each, saved, d_rows):
    return _sums(implementation, each, d_rows, *saved), None, None


def _sums_forward(implementation, each, rows, order, places):
    return _sums(implementation, each, rows, order, places), (order, places)


def _sums_backward(implementation, each, saved, d_sums):
    return _rows(implementation, each, d_sums, *saved), None, None


_rows.defvjp(_rows_forward, _rows_backward)
_sums.defvjp(_sums_forward, _sums_backward)
