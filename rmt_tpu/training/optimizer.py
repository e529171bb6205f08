"""AdamW with roles: which parameters decay, and which learn at a rate scaled by width."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from rmt_tpu.config import AdamW


def learning_rate(config: AdamW, steps: int) -> optax.Schedule:
    """Linear warmup, of which the last step has the peak, then a cosine to the last step of all.

    The last step has `final_fraction` of the peak. The rate of step 0 is not 0: every update
    changes something.
    """
    warmup = max(1, round(config.warmup_fraction * steps))

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        progress = jnp.clip((step + 1 - warmup) / max(1, steps - warmup), 0.0, 1.0)
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        decayed = config.final_fraction + (1 - config.final_fraction) * cosine
        return config.learning_rate * jnp.minimum((step + 1) / warmup, decayed)

    return schedule


def make_optimizer(
    config: AdamW, *, steps: int, roles: Any, width_ratio: float
) -> optax.GradientTransformation:
    """Clip, Adam, weight decay, learning rate.

    Args:
      config: the numbers.
      steps: of the whole run, for the schedule.
      roles: tree of the parameters' roles.
      width_ratio: "hidden" parameters learn at `1 / width_ratio` of the rate (muP).
    """
    decays = jax.tree.map(lambda role: role not in config.decay_exclude, roles)
    scales = jax.tree.map(lambda role: 1 / width_ratio if role == "hidden" else 1.0, roles)
    scale_by_role = optax.stateless(
        lambda updates, params: jax.tree.map(jnp.multiply, updates, scales)
    )
    adam = [
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.b1, config.b2, config.epsilon),
    ]
    rate = [optax.scale_by_learning_rate(learning_rate(config, steps)), scale_by_role]
    if config.independent_weight_decay:
        return optax.chain(*adam, *rate, optax.add_decayed_weights(-config.weight_decay, decays))
    return optax.chain(*adam, optax.add_decayed_weights(config.weight_decay, decays), *rate)
