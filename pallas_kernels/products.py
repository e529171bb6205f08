"""Matrix products of tiles and softmax constants, for the TPU kernels."""

import functools
import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def dot(a, b, over=(1, 0), of_each=()):
    """Contract one axis of each operand, accumulating in float32.

    Float32 operands are multiplied at full precision.

    Args:
      a, b: the operands.
      over: the contracted axis of `a` and the contracted axis of `b`.
      of_each: the batch axes, which have the same positions in `a` and `b`.
    """
    narrow = a.dtype == b.dtype == jnp.bfloat16
    return jax.lax.dot_general(
        a,
        b,
        (tuple((axis,) for axis in over), (of_each, of_each)),
        precision=jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


dot_rows = functools.partial(dot, over=(0, 0))  # The shapes are [k, m], [k, n] -> [m, n].
dot_columns = functools.partial(dot, over=(1, 1))  # The shapes are [m, k], [n, k] -> [m, n].
