"""Activation functions of feed-forward layers and experts.

SiTU (Sigmoid Tanh Unit; Kimi Team 2026, Kimi K3, equation 12) is a variant of `silu(gate) * up`
that bounds both factors. With the bounds b = `situ_beta` and c = `situ_linear_beta`:

    situ(gate, up) = b tanh(gate / b) sigmoid(gate) * c tanh(up / c)

If c is None, the second factor is `up`.

The approximation of gelu by tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415), with the share
h of the argument that it passes, and its slope:

    h = 1/2 + 1/2 tanh(x (a + b x^2))        a = sqrt(2 / pi), b = 0.044715 a
    gelu(x) = x h                            gelu'(x) = h + x h (1 - h) (2 a + 6 b x^2)
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rmt_tpu import config as cfg


def plain(core: cfg.FeedForward, x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Apply the activation function of a layer without a gate, elementwise."""
    return _ACTIVATIONS[core.activation](x)


def gated(
    core: cfg.FeedForward | cfg.Experts, gate: Float[Array, "*any"], up: Float[Array, "*any"]
) -> Float[Array, "*any"]:
    """Apply the activation function of a layer with a gate: `f(gate) * up` or SiTU.

    The result has the dtype of the arguments. SiTU is computed in at least float32.
    """
    if core.activation != "situ":
        return _ACTIVATIONS[core.activation](gate) * up
    wide = jnp.result_type(gate, jnp.float32)
    g, u = gate.astype(wide), up.astype(wide)
    if core.situ_linear_beta is not None:
        u = _bounded(u, core.situ_linear_beta)
    return (_bounded(g, core.situ_beta) * jax.nn.sigmoid(g) * u).astype(gate.dtype)


@jax.custom_jvp
def gelu_tanh(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Apply gelu, approximated by tanh, elementwise, in the dtype of the argument.

    The slope is written out, because it takes 14 operations, and JAX's derivative of `jax.nn.gelu`
    takes 22. On v6e and tpu7x the vector unit, which computes them, is slower than the matrix unit
    in three of the six products of a feed-forward layer (an estimate; see docs/log.md).
    """
    return x * _passed(x)


@gelu_tanh.defjvp
def _gelu_tanh_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    h = _passed(x)
    value = x * h
    slope = h + value * (1 - h) * (2 * _LINEAR + 6 * _CUBIC * (x * x))
    return value, slope * dx


def _passed(x):
    return 0.5 * jnp.tanh(x * (_LINEAR + _CUBIC * (x * x))) + 0.5


def _bounded(x, bound):
    return bound * jnp.tanh(x / bound)


_LINEAR = math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR

_ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,
    "geglu": gelu_tanh,
}
