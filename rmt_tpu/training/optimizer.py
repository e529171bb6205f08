"""The optimizers AdamW and Muon, whose rules depend on the role of each parameter.

Parameters with a role in `config.STATISTIC_ROLES` are statistics and not weights. Their "gradients"
are the shares of tokens that experts received, and are used to balance the experts. They are
excluded from gradient norms, and each role has its own update rule.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from rmt_tpu.config import STATISTIC_ROLES, AdamW, Muon
from rmt_tpu.layers.parameters import OF_MANY
from rmt_tpu.training.freeze import Freeze

_QUINTIC = 3.4445, -4.7750, 2.0315


def learning_rate(config: AdamW, steps: int) -> optax.Schedule:
    """Return the learning rate schedule `config.schedule`, with a linear warmup and a decay.

    The schedule counts updates, so that a skipped step does not advance it. The last warmup step
    has the peak rate, and the last step of a run without skipped steps has `final_fraction` of it.
    The rate at step 0 is not 0, so that the first update has an effect. The schedule "wsd" has the
    peak rate up to the last `decay_fraction` of the steps.
    """
    warmup = max(1, round(config.warmup_fraction * steps))
    decay = round(config.decay_fraction * steps)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        if config.schedule == "wsd":
            left = jnp.clip(steps - (step + 1), 0, decay)
            share = left / max(1, decay) if decay else 1.0
        else:
            progress = jnp.clip((step + 1 - warmup) / max(1, steps - warmup), 0.0, 1.0)
            share = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        decayed = config.final_fraction + (1 - config.final_fraction) * share
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
    freeze: Freeze | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that applies clipping, Adam or Muon, weight decay and learning rates.

    Its function `update` accepts the argument `step`, the number of updates before this one, and
    needs it if parameters are frozen.

    Args:
      config: the optimizer's hyperparameters.
      steps: number of steps of the whole run, for the schedule.
      roles: tree of the parameters' roles.
      axes: tree of the names of the parameters' axes.
      rates: tree of factors that multiply each parameter's learning rate (see `MuP`). They do not
        multiply the weight decay, because the decay of a wide model would become too small.
      over_depth: tree that is True for parameters that weigh sources over depth, which have no
        weight decay; None if there are no such parameters.
      freeze: the parameters that are frozen; None if there are none.
    """
    excluded = (*config.decay_exclude, *STATISTIC_ROLES)
    decays = jax.tree.map(lambda role: role not in excluded, roles)
    if over_depth is not None:
        decays = jax.tree.map(lambda decays, over: decays and not over, decays, over_depth)
    scale = optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, rates))
    adam = optax.scale_by_adam(config.b1, config.b2, config.epsilon)
    adam = _store_moment(adam, "mu", config.moment_dtype)
    by_adam = jax.tree.map(lambda _: True, roles)
    if isinstance(config, Muon):
        rules = jax.tree.map(_rule, roles, axes)
        by_adam = jax.tree.map(lambda rule: rule == _ADAM, rules)
        muon_rules = {*jax.tree.leaves(rules)} - {_ADAM}
        muon = {rule: _scale_by_muon(config, rule) for rule in muon_rules}
        adam = optax.partition({_ADAM: adam, **muon}, rules)
    if freeze is not None:
        adam = freeze.own_bias_correction(adam, config, by_adam)
    adam = [optax.clip_by_global_norm(config.clip_norm), adam]
    rate = optax.scale_by_learning_rate(learning_rate(config, steps))
    if config.independent_weight_decay:
        decay = optax.add_decayed_weights(-config.weight_decay, decays)
        return _with_statistics(optax.chain(*adam, rate, scale, decay), roles, freeze)
    # Divide the weight decay by `rates` here, because `scale` later multiplies it by `rates`.
    weights = jax.tree.map(lambda decays, rate: decays * config.weight_decay / rate, decays, rates)
    decay = optax.stateless(
        lambda updates, params: jax.tree.map(_add_decay, updates, params, weights)
    )
    return _with_statistics(optax.chain(*adam, decay, rate, scale), roles, freeze)


def _store_moment(
    rule: optax.GradientTransformation, field: str, dtype: str
) -> optax.GradientTransformation:
    """Return a rule that stores one field of its state in `dtype`, and computes it in float32.

    The dtype arguments of optax are not enough: `scale_by_adam(mu_dtype="bfloat16")` also rounds
    the product of the moment and b1.
    """
    if dtype == "float32":
        return rule

    def cast(state: Any, dtype: str) -> Any:
        return state._replace(**{field: optax.tree.cast(getattr(state, field), dtype)})

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = rule.update(gradients, cast(state, "float32"), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(rule.init(params), dtype), update)


def _add_decay(update: jax.Array, param: jax.Array, weight: float) -> jax.Array:
    return update + weight * param if weight else update


# Names of axes. A parameter with such an axis is small or is used as vectors, so it is trained by
# Adam and not by Muon.
_SMALL = ("coefficient", "taps")


_ADAM = "adam"


def _rule(role: str, axes: tuple[str, ...]) -> str:
    """Return the name of the rule that trains a parameter: "adam", or a name like "muon-2-1".

    The numbers in a Muon rule's name, such as -2 and -1, are the axes of the parameter's matrices.
    """
    matrix_axes = [n - len(axes) for n, name in enumerate(axes) if name not in OF_MANY]
    if role != "hidden" or set(axes) & set(_SMALL) or len(matrix_axes) != 2:
        return _ADAM
    return "muon{}{}".format(*matrix_axes)


def _scale_by_muon(config: Muon, rule: str) -> optax.GradientTransformation:
    """Return the Muon update: Nesterov momentum that is made nearly orthogonal (see `Muon`)."""
    axes = tuple(-int(place) for place in rule.split("-")[1:])

    def update(x: jax.Array) -> jax.Array:
        # Do not flatten the axes over layers and experts, because they may be sharded.
        x = jnp.moveaxis(x, axes, (-2, -1))
        scale = config.update_rms * max(x.shape[-2:]) ** 0.5
        x = scale * near_orthogonal(x, config.iterations)
        return jnp.moveaxis(x, (-2, -1), axes)

    trace = optax.trace(config.momentum, nesterov=True)
    return optax.chain(
        _store_moment(trace, "trace", config.moment_dtype),
        optax.stateless(lambda updates, params: jax.tree.map(update, updates)),
    )


def near_orthogonal(
    x: Float[Array, "*many rows columns"], iterations: int
) -> Float[Array, "*many rows columns"]:
    """Return each matrix with its singular values replaced by numbers of about 0.7 to 1.2.

    The singular vectors stay the same. This is the Newton-Schulz iteration of Jordan (2024), `x <-
    (a + b x x^T + c (x x^T)^2) x`, which starts from x divided by its Frobenius norm.
    """
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    wide = wide / (jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True) + 1e-8)
    a, b, c = _QUINTIC
    for _ in range(iterations):
        square = wide @ wide.mT
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide if x.shape[-2] <= x.shape[-1] else wide.mT


def zero_statistics(gradients: Any, roles: Any) -> Any:
    """Return the gradients, with zeros in place of the "gradients" of statistics."""
    return jax.tree.map(lambda g, role: 0 * g if role in STATISTIC_ROLES else g, gradients, roles)


def _with_statistics(
    optimizer: optax.GradientTransformationExtraArgs, roles: Any, freeze: Freeze | None
) -> optax.GradientTransformationExtraArgs:
    """Return `optimizer`, extended by rules for statistics and for frozen parameters."""

    def update(
        gradients: Any, state: Any, params: Any, *, step: jax.Array | None = None
    ) -> tuple[Any, Any]:
        given = zero_statistics(gradients, roles)
        if freeze is None:
            updates, state = optimizer.update(given, state, params)
            return jax.tree.map(_statistic_update, updates, gradients, params, roles), state
        given = freeze.gradients(given, step)
        updates, state = optimizer.update(given, state, params, step=step)
        updates = freeze.warmed_up(updates, step)
        updates = jax.tree.map(_statistic_update, updates, gradients, params, roles)
        return freeze.updates(updates, step), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _statistic_update(
    update: jax.Array, shares: jax.Array, param: jax.Array, role: str
) -> jax.Array:
    match role:
        case "balance_steps":  # +1 if an expert's load is below the mean, -1 if above.
            return jnp.sign(jnp.mean(shares, axis=-1, keepdims=True) - shares)
        case "histogram":  # The batch's histogram replaces the old one.
            return shares - param
        case "load":
            return jnp.zeros_like(update)
    return update


def load_metrics(gradients: Any, roles: Any) -> dict[str, jax.Array]:
    """Return metrics of the load on the experts in a step; {} if there are no experts.

    "max_load" is the maximum load on an expert divided by the mean load, averaged over layers, and
    "worst_load" is the maximum of this ratio over layers. "entropy" is the entropy of the loads
    divided by the entropy of equal loads, averaged over layers. It is 1 for a single expert, whose
    load is always equal.

    Args:
      gradients: the gradients of the step, which for statistics are shares of tokens.
      roles: the role of each parameter.
    """
    leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(roles), strict=True)
    loads = [g.reshape(-1, g.shape[-1]) for g, role in leaves if role in ("load", "balance_steps")]
    if not loads:
        return {}
    most, entropies = [], []
    for load in loads:
        share = load / jnp.sum(load, axis=1, keepdims=True)
        count = share.shape[1]
        most.append(count * jnp.max(share, axis=1))
        entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=1)
        # With a single expert, both entropies are 0.
        entropies.append(entropy / jnp.log(count) if count > 1 else jnp.ones_like(entropy))
    most, entropies = jnp.concatenate(most), jnp.concatenate(entropies)
    return {
        "train/experts/max_load": jnp.mean(most),
        "train/experts/worst_load": jnp.max(most),
        "train/experts/entropy": jnp.mean(entropies),
    }
