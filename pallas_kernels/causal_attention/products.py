"""Products of tiles whose tokens lie in the lanes, for the TPU kernels."""

import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def dot(a, b):
    """`[m, k] [k, n] -> [m, n]`."""
    return _product(a, b, 1, 0)


def dot_rows(a, b):
    """`[k, m] [k, n] -> [m, n]`."""
    return _product(a, b, 0, 0)


def dot_columns(a, b):
    """`[m, k] [n, k] -> [m, n]`."""
    return _product(a, b, 1, 1)


def _product(a, b, contract_a, contract_b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
