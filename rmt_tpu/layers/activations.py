"""Activation functions of feed-forward layers and experts.

SiTU (Sigmoid Tanh Unit; Kimi Team 2026, Kimi K3, equation 12) is a variant of `silu(gate) * up`
that bounds both factors. With the bounds b = `situ_beta` and c = `situ_linear_beta`:

    situ(gate, up) = b tanh(gate / b) sigmoid(gate) * c tanh(up / c)

If c is None, the second factor is `up`.
"""

import functools

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


def _bounded(x, bound):
    return bound * jnp.tanh(x / bound)


_ACTIVATIONS = {
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=True),
}
