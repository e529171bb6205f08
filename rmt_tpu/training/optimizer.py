"""AdamW and Muon by roles: what decays, what learns at a rate of its own, and what counts.

Parameters that count (`config.COUNTED`) are no weights. Their gradients are shares of tokens, by
which experts are balanced: they are in no norm, and have a rule of their own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from rmt_tpu.config import COUNTED, AdamW, Muon
from rmt_tpu.layers.parameters import OF_MANY

_QUINTIC = 3.4445, -4.7750, 2.0315


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
    config: AdamW | Muon,
    *,
    steps: int,
    roles: Any,
    axes: Any,
    rates: Any,
    over_depth: Any = None,
) -> optax.GradientTransformation:
    """Clip, Adam or Muon, weight decay, learning rate.

    Args:
      config: the numbers.
      steps: of the whole run, for the schedule.
      roles: tree of the parameters' roles.
      axes: tree of the names of their axes.
      rates: tree of what each parameter's rate is multiplied by (muP, see `MuP`). Weight decay
        is not: else a wide model would hardly decay.
      over_depth: tree of whether each weighs sources over depth, and so does not decay; None is
        that none does.
    """
    excluded = (*config.decay_exclude, *COUNTED)
    decays = jax.tree.map(lambda role: role not in excluded, roles)
    if over_depth is not None:
        decays = jax.tree.map(lambda decays, over: decays and not over, decays, over_depth)
    scale = optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, rates))
    adam = optax.scale_by_adam(config.b1, config.b2, config.epsilon)
    if isinstance(config, Muon):
        rules = jax.tree.map(_rule, roles, axes)
        of_muon = {*jax.tree.leaves(rules)} - {_ADAM}
        muon = {rule: _scale_by_muon(config, rule) for rule in of_muon}
        adam = optax.partition({_ADAM: adam, **muon}, rules)
    adam = [optax.clip_by_global_norm(config.clip_norm), adam]
    rate = optax.scale_by_learning_rate(learning_rate(config, steps))
    if config.independent_weight_decay:
        decay = optax.add_decayed_weights(-config.weight_decay, decays)
        return _counting(optax.chain(*adam, rate, scale, decay), roles)
    # Scaled after it: each decays by as much more.
    weights = jax.tree.map(lambda decays, rate: decays * config.weight_decay / rate, decays, rates)
    decay = optax.stateless(
        lambda updates, params: jax.tree.map(_decayed, updates, params, weights)
    )
    return _counting(optax.chain(*adam, decay, rate, scale), roles)


def _decayed(update: jax.Array, param: jax.Array, weight: float) -> jax.Array:
    return update + weight * param if weight else update


# Axes of weights that are small, or read as vectors are.
_SMALL = ("coefficient", "taps")


_ADAM = "adam"


def _rule(role: str, axes: tuple[str, ...]) -> str:
    """Whose a parameter is: "adam"; or "muon-2-1", with the axes of its matrices in the name."""
    of_matrix = [n - len(axes) for n, name in enumerate(axes) if name not in OF_MANY]
    if role != "hidden" or set(axes) & set(_SMALL) or len(of_matrix) != 2:
        return _ADAM
    return "muon{}{}".format(*of_matrix)


def _scale_by_muon(config: Muon, rule: str) -> optax.GradientTransformation:
    """Nesterov's momentum, made near orthogonal; see `Muon`."""
    axes = tuple(-int(place) for place in rule.split("-")[1:])

    def update(x: jax.Array) -> jax.Array:
        # Not one axis of all matrices: meshes divide those of layers and of experts.
        x = jnp.moveaxis(x, axes, (-2, -1))
        scale = config.update_rms * max(x.shape[-2:]) ** 0.5
        x = scale * near_orthogonal(x, config.iterations)
        return jnp.moveaxis(x, (-2, -1), axes)

    return optax.chain(
        optax.trace(config.momentum, nesterov=True),
        optax.stateless(lambda updates, params: jax.tree.map(update, updates)),
    )


def near_orthogonal(
    x: Float[Array, "*many rows columns"], iterations: int
) -> Float[Array, "*many rows columns"]:
    """`U S V^T` with singular values S about 0.7 to 1.2 for x of any, by Newton and Schulz.

    After Jordan (2024): `x <- (a + b x x^T + c (x x^T)^2) x`, from x of Frobenius norm 1.
    """
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    wide = wide / (jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True) + 1e-8)
    a, b, c = _QUINTIC
    for _ in range(iterations):
        square = wide @ wide.mT
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide if x.shape[-2] <= x.shape[-1] else wide.mT


def of_weights(gradients: Any, roles: Any) -> Any:
    """Gradients with zeros for parameters that count."""
    return jax.tree.map(lambda g, role: 0 * g if role in COUNTED else g, gradients, roles)


def _counting(optimizer: optax.GradientTransformation, roles: Any) -> optax.GradientTransformation:
    """`optimizer` of the weights, and the rules of what counts."""
    if not any(role in COUNTED for role in jax.tree.leaves(roles)):
        return optimizer

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(of_weights(gradients, roles), state, params)
        return jax.tree.map(_ruled, updates, gradients, params, roles), state

    return optax.GradientTransformation(optimizer.init, update)


def _ruled(update: jax.Array, shares: jax.Array, param: jax.Array, role: str) -> jax.Array:
    match role:
        case "balance_steps":  # a step up for who had less than the mean
            return jnp.sign(jnp.mean(shares, axis=-1, keepdims=True) - shares)
        case "histogram":  # of the last batch
            return shares - param
        case "load":
            return jnp.zeros_like(update)
    return update


def load_metrics(gradients: Any, roles: Any) -> dict[str, jax.Array]:
    """How experts were loaded, from the shares of a step: {} without experts.

    "max_load": of the fullest expert over the mean, the mean over layers; "worst_load": in the
    worst layer. "entropy": of the loads over that of even ones, the mean over layers.
    """
    told = zip(jax.tree.leaves(gradients), jax.tree.leaves(roles), strict=True)
    loads = [g.reshape(-1, g.shape[-1]) for g, role in told if role in ("load", "balance_steps")]
    if not loads:
        return {}
    most, entropies = [], []
    for load in loads:
        share = load / jnp.sum(load, axis=1, keepdims=True)
        count = share.shape[1]
        most.append(count * jnp.max(share, axis=1))
        entropies.append(-jnp.sum(jax.scipy.special.xlogy(share, share), axis=1) / jnp.log(count))
    most, entropies = jnp.concatenate(most), jnp.concatenate(entropies)
    return {
        "train/experts/max_load": jnp.mean(most),
        "train/experts/worst_load": jnp.max(most),
        "train/experts/entropy": jnp.mean(entropies),
    }
