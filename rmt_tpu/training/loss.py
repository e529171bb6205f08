"""Cross-entropy of the next token, and the z-loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Loss(NamedTuple):
    """Sums over the tokens that count, in nats; divide by the sum of their weights."""

    cross_entropy: Float[Array, ""]
    z: Float[Array, ""]


def next_token_loss(
    logits: Float[Array, "batch seq vocab"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
) -> Loss:
    """`-log softmax(logits)[target]` and `logsumexp(logits)^2`, each weighted and summed."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return Loss(jnp.sum((log_z - chosen) * weights), jnp.sum(jnp.square(log_z) * weights))
