"""Parameters that keep their values, for the first steps of a run or for the whole run.

`train.freeze` lists patterns of parameter paths, such as `stacks/0/1/core/*`, and
`train.freeze_steps` is the number of steps F for which they apply; with None they apply to the
whole run. In this way, a model that starts from trained weights but has a different residual can
first train only its new parameters.

While a parameter is frozen, its gradient is replaced by zero before the norm of all gradients is
clipped. Its update is replaced by zero after weight decay, so its value stays the same bit for bit.
After step F, its learning rate is the run's rate times `min(1, n / W)`. Here n is the number of
steps since step F, counted from 1, and W is the number of steps in the run's own warm-up. Adam's
moments of the parameter were zero at step F, so Adam corrects their bias as in step n:

    update = (mu / (1 - b1^n)) / sqrt(nu / (1 - b2^n))

Without this correction, the first updates would be up to `(1 - b1) / sqrt(1 - b2)` times as large
as usual. Steps count if they change parameters: skipped steps do not. The optimizer's state has the
same arrays as without frozen parameters, so both config fields may change when a run resumes.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rmt_tpu.config import STATISTIC_ROLES, AdamW, TrainConfig
from rmt_tpu.errors import UsageError

_FIELD = "train.freeze"


class Freeze(NamedTuple):
    """The parameters of a run that are frozen.

    Attributes:
      frozen: tree that is True for the frozen parameters.
      steps: number of steps for which they are frozen; None for the whole run.
      warmup: number of steps, after the freeze, in which their learning rate warms up.
    """

    frozen: Any
    steps: int | None
    warmup: int

    def gradients(self, gradients: Any, step: jax.Array) -> Any:
        """Return the gradients, with zeros for the parameters that are frozen at this step."""
        return self._replace_frozen(gradients, step, 0.0)

    def warmed_up(self, updates: Any, step: jax.Array) -> Any:
        """Return the updates, scaled by the warm-up of parameters that are no longer frozen."""
        if self.steps is None:
            return updates
        ramp = jnp.minimum(1.0, self._steps_since(step) / self.warmup)
        scaled = lambda update, frozen: ramp * update if frozen else update
        return jax.tree.map(scaled, updates, self.frozen)

    def updates(self, updates: Any, step: jax.Array) -> Any:
        """Return the updates, with -0.0 for the parameters that are frozen at this step.

        Adding -0.0 changes no bit of a number. Adding 0.0 would change -0.0 to 0.0.
        """
        return self._replace_frozen(updates, step, -0.0)

    def own_bias_correction(
        self, adam: optax.GradientTransformation, config: AdamW, by_adam: Any
    ) -> optax.GradientTransformationExtraArgs:
        """Return `adam` with a bias correction that counts steps from the end of a freeze.

        Args:
          adam: a rule that corrects the bias of moments by the number of all steps.
          config: the optimizer's hyperparameters.
          by_adam: tree that is True for the parameters that Adam trains.
        """
        inner = optax.with_extra_args_support(adam)

        def update(
            gradients: Any, state: Any, params: Any = None, *, step: jax.Array, **more: Any
        ) -> tuple[Any, Any]:
            updates, state = inner.update(gradients, state, params, step=step, **more)
            if self.steps is None:
                return updates, state
            all_steps, since = step + 1, jnp.maximum(1, self._steps_since(step))
            ratio = lambda decay: (1 - decay**all_steps) / (1 - decay**since)
            factor = ratio(config.b1) / jnp.sqrt(ratio(config.b2))
            scaled = lambda update, frozen, own: factor * update if frozen and own else update
            return jax.tree.map(scaled, updates, self.frozen, by_adam), state

        return optax.GradientTransformationExtraArgs(adam.init, update)

    def _steps_since(self, step: jax.Array) -> jax.Array:
        return step + 1 - self.steps

    def _replace_frozen(self, tree: Any, step: jax.Array, value: float) -> Any:
        def replace(x: jax.Array, frozen: bool) -> jax.Array:
            if not frozen:
                return x
            if self.steps is None:
                # Return a constant, so that the compiler drops the products that compute the
                # gradients.
                return jnp.full_like(x, value)
            return jnp.where(step < self.steps, jnp.asarray(value, x.dtype), x)

        return jax.tree.map(replace, tree, self.frozen)


def freeze_of(config: TrainConfig, roles: Any) -> Freeze | None:
    """Return the parameters that `train.freeze` freezes, or None if the field is empty.

    Args:
      config: the config of training.
      roles: tree of the parameters' roles, in the structure of the parameters.

    Raises:
      UsageError: a pattern matches no parameter, or no parameter is left to train.
    """
    if not config.freeze:
        return None
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(roles)]
    for pattern in config.freeze:
        if not any(fnmatchcase(path, pattern.removeprefix("!")) for path in paths):
            raise UsageError(
                f"{_FIELD}={','.join(config.freeze)}: {pattern} matches no parameter of this "
                f"model; legal: a pattern of paths such as {', '.join(_examples(paths))}"
            )
    frozen = jax.tree_util.tree_map_with_path(
        lambda path, _: is_frozen(path_of(path), config.freeze), roles
    )
    learns = lambda frozen, role: not frozen and role not in STATISTIC_ROLES
    if not any(jax.tree.leaves(jax.tree.map(learns, frozen, roles))):
        raise UsageError(
            f"{_FIELD}={','.join(config.freeze)} leaves no parameter to train; legal: patterns "
            "that leave some, such as *,!*/mix/*"
        )
    warmup = max(1, round(config.optimizer.warmup_fraction * config.steps))
    return Freeze(frozen, config.freeze_steps, warmup)


def check_change(config: TrainConfig, changes: Sequence[str], updates: int) -> None:
    """Check that a change of `freeze` or `freeze_steps` freezes something from now on.

    Frozen parameters may be set free at once, with `freeze_steps` equal to `updates`.

    Args:
      config: the config of training.
      changes: a line for each field that differs from the config that the run had so far.
      updates: number of steps that have changed parameters so far.

    Raises:
      UsageError: the steps in which the parameters are frozen are over.
    """
    fields = [change.partition(" ")[0] for change in changes]
    has_other_patterns = any(f"{field}.".startswith(f"{_FIELD}.") for field in fields)
    if config.freeze_steps is None or not (has_other_patterns or f"{_FIELD}_steps" in fields):
        return
    first = updates + 1 if has_other_patterns else updates
    if config.freeze_steps < first:
        raise UsageError(
            f"{_FIELD}_steps={config.freeze_steps} counts from the first step of the run, which "
            f"has done {updates}, so that nothing would be frozen; legal: {first} or more, or null"
        )


def is_frozen(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether patterns match the path of a parameter.

    A pattern with a leading `!` excludes the paths that it matches. If all patterns begin with `!`,
    all other paths match. As in `fnmatch`, `*` also matches `/`.
    """
    excepted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    included = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
    matches = lambda patterns: any(fnmatchcase(path, pattern) for pattern in patterns)
    return matches(included) and not matches(excepted)


def learned(config: TrainConfig, tree: Any) -> dict[str, Any]:
    """Return a dict from path to leaf, for the parameters that learn in at least one step.

    Args:
      config: the config of training.
      tree: tree in the structure of the parameters.
    """
    leaves = {path_of(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    if not config.freeze or config.freeze_steps is not None:
        return leaves
    return {path: x for path, x in leaves.items() if not is_frozen(path, config.freeze)}


def path_of(path: tuple) -> str:
    """Return the path of a parameter as runs print it, such as `stacks/0/1/core/w_1`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def describe(config: TrainConfig, params: Any) -> str:
    """Return a text that lists frozen and learning parameters, or "" if `train.freeze` is empty.

    Args:
      config: the config of training.
      params: tree of the parameters or their shapes.
    """
    if not config.freeze:
        return ""
    leaves = [(path_of(path), x) for path, x in jax.tree_util.tree_leaves_with_path(params)]
    free = [(path, x) for path, x in leaves if not is_frozen(path, config.freeze)]
    count = sum(x.size for _, x in leaves) - sum(x.size for _, x in free)
    names, more = [path for path, _ in free[:8]], len(free) - 8
    when = "" if config.freeze_steps is None else f" for the first {config.freeze_steps:,} steps"
    return (
        f"{len(leaves) - len(free)} of {len(leaves)} arrays, {count:,} parameters, are "
        f"frozen{when}; these learn: {', '.join(names)}{f' and {more} more' if more > 0 else ''}"
    )


def _examples(paths: list[str]) -> list[str]:
    return [paths[0], next((path for path in paths if "/mix/" in path), paths[-1])]
