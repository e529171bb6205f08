"""Pure functions, to be jitted, for the loss of a batch, its gradients and an optimizer step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int, Key

import sharding
from rmt_tpu.config import RunConfig
from rmt_tpu.cores import causal
from rmt_tpu.data import Batch
from rmt_tpu.data.mixture import source_names
from rmt_tpu.execution import kernels, pipelined
from rmt_tpu.training import depth_rate
from rmt_tpu.training.copies import Copies, substitute_copies
from rmt_tpu.training.freeze import Freeze
from rmt_tpu.training.loss import Loss, next_token_loss
from rmt_tpu.training.optimizer import learning_rate, load_metrics, zero_statistics


class TrainState(NamedTuple):
    """The state of training. Checkpoints contain all of it except `copies`.

    Attributes:
      params: the decoder's parameters, as a pure dict.
      optimizer: the state of the optax optimizer.
      key: a random key made from the seed of the run; steps keep it unchanged.
      step: number of optimizer steps taken, including skipped steps.
      skipped: number of skipped steps, which changed no parameter because the loss or a gradient
        was not finite.
      skipped_in_a_row: number of skipped steps since the last step that was not skipped.
      copies: copies of weights in the compute dtype, which the next step reads in place of the
        weights; see `training.copies`.
    """

    params: Any
    optimizer: Any
    key: Key[Array, ""]
    step: Int[Array, ""]
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    copies: Copies = {}


def initial_state(
    params: Any, optimizer: optax.GradientTransformation, key: Key[Array, ""], copies: Copies
) -> TrainState:
    """Return the training state before the first step, for the given parameters."""
    zero = jnp.int32(0)
    return TrainState(params, optimizer.init(params), key, zero, zero, zero, copies)


def batch_loss(
    graphdef: nnx.GraphDef,
    params: Any,
    batch: Batch,
    *,
    z_loss: int | float = 0.0,
    schedule: sharding.Schedule | None = None,
    num_texts: int = 0,
) -> Loss:
    """Return the sums of losses over a batch, or in per-device code over this device's tokens.

    With a `schedule` of pipeline stages, each stage returns the loss of some of the tokens.
    Gradients are then computed together with the loss.

    With `num_texts`, the number of texts in a mixture, the losses of the texts are returned too,
    except with a `schedule`.
    """
    decoder = nnx.merge(graphdef, params)
    with kernels.preferred(decoder.config):
        return _batch_loss(decoder, batch, z_loss, schedule, num_texts)


def _batch_loss(decoder, batch, z_loss, schedule, num_texts):
    unembedding = decoder.unembedding
    kernel = unembedding.matrix
    of_logits = {"multiplier": unembedding.multiplier, "cap": unembedding.cap, "z_loss": z_loss}

    @jax.named_scope("loss")
    def loss(z: Any, kernel: Any, targets: Any, weights: Any, **more: Any) -> Loss:
        return next_token_loss(z, kernel, targets, weights, **of_logits, **more)

    if schedule is None:
        z, aux = decoder.features(batch.inputs, segment_ids=batch.segment_ids)
        own = lambda x: sharding.own_part(x, sharding.token_axes(), axis=1)
        more = {"aux": aux}
        if num_texts and batch.texts is not None:
            more |= {"texts": own(batch.texts), "num_texts": num_texts}
        return loss(z, kernel, own(batch.targets), own(batch.weights), **more)
    context = causal(batch.inputs.shape[1], None, batch.segment_ids)
    weights = Loss(1.0, 0.0, 0.0), {name: float(name == "loss") for name in decoder.config.aux}
    objective, (sums, aux) = pipelined.loss(
        decoder,
        batch.inputs,
        context,
        (batch.targets, batch.weights),
        loss,
        weights,
        schedule,
    )
    return sums._replace(objective=objective, aux=aux)


def add_up_parts(compute: Callable[[Batch], Any], batch: Batch, parts: int) -> Any:
    """Return the sum of `compute(part)` over `parts` equal parts of the rows of a batch.

    The parts are computed one after the other, so that the memory for activations is that of one
    part.

    Args:
      compute: a function that returns a tree of arrays.
      batch: arrays [batch, ...]; `parts` divides the number of rows.
      parts: number of parts.
    """
    if parts == 1:
        return compute(batch)
    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    like = jax.eval_shape(compute, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    add = lambda total, part: (jax.tree.map(jnp.add, total, compute(part)), None)
    return jax.lax.scan(add, zeros, split)[0]


def make_gradients(
    config: RunConfig,
    graphdef: nnx.GraphDef,
    specs: Any,
    schedule: sharding.Schedule | None = None,
) -> Callable[[Any, Batch], tuple[Any, Loss]]:
    """Return the per-device function `(params, batch) -> (gradients, mean losses)`.

    If a batch is accumulated in parts, the gradients of the parts are weighted by their numbers of
    tokens, so that the sum equals the gradient of the whole batch. Gradients are summed over
    devices only once, after the last part. They are converted to at least float32 before they are
    summed, even if the parameters are copies with fewer bits.

    Args:
      config: the run's config.
      graphdef: graph definition of the decoder.
      specs: partition spec of each parameter.
      schedule: schedule of the pipeline stages, or None without a pipeline.
    """
    options = {"z_loss": config.train.z_loss, "schedule": schedule}
    options |= {"num_texts": len(config.data.mixture)}

    def gradients(params: Any, batch: Batch) -> tuple[Any, Loss]:
        with kernels.preferred(config.model):
            return added_up(params, batch)

    def added_up(params: Any, batch: Batch) -> tuple[Any, Loss]:
        dtype = jnp.promote_types(kernels.compute_dtype(config.model.compute_dtype), jnp.float32)
        weights = batch.weights.astype(dtype)
        total = sharding.total(jnp.sum(weights), sharding.RULES["batch"])
        total = jnp.maximum(total, 1)  # A batch of conversations may have no token with a loss.
        # Make the mean weight 1, because the cores' scalars are sums over all tokens.
        tokens = weights.size * sharding.axis_size(sharding.RULES["batch"])
        batch = batch._replace(weights=weights * (tokens / total))

        def part_loss(params: Any, part: Batch) -> tuple[jax.Array, Loss]:
            loss = batch_loss(graphdef, params, part, **options)
            loss = jax.tree.map(lambda summed: summed / tokens, loss)
            return loss.objective, loss

        def part_gradients(params: Any, part: Batch) -> tuple[Any, Loss]:
            grads, loss = jax.grad(part_loss, has_aux=True)(params, part)
            wide = lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32))
            return jax.tree.map(wide, grads), loss

        grads, loss = add_up_parts(
            lambda part: part_gradients(params, part), batch, config.train.parts
        )
        return sharding.add_up(grads, specs), sharding.add_up(loss)

    return gradients


def make_train_step(
    config: RunConfig,
    gradients: Callable[[Any, Batch], tuple[Any, Loss]],
    optimizer: optax.GradientTransformation,
    roles: Any,
    copies: Callable[[Any], Copies],
    freeze: Freeze | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Return the train step `(state, batch) -> (state, metrics)`; metrics maps names to scalars.

    Args:
      config: the run's config.
      gradients: the function that computes gradients and mean losses.
      optimizer: the optimizer.
      roles: tree of the parameters' roles.
      copies: a function that computes the copies of weights that the next step reads.
      freeze: the parameters that are frozen, whose gradients are left out of the gradient norm;
        None if there are none.
    """
    schedule = learning_rate(config.train.optimizer, config.train.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        with kernels.preferred(config.model):
            return stepped(state, batch)

    def stepped(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, loss = gradients(substitute_copies(state.params, state.copies), batch)
        with jax.named_scope("optimizer"):
            # Count updates and not steps, because skipped steps make no update.
            updates_made = state.step - state.skipped
            learning = zero_statistics(grads, roles)
            if freeze is not None:
                learning = freeze.gradients(learning, updates_made)
            grad_norm = optax.tree.norm(learning)
            updates, optimizer_state = optimizer.update(
                grads, state.optimizer, state.params, step=updates_made
            )
            params = optax.apply_updates(state.params, updates)
            finite = jnp.isfinite(loss.cross_entropy) & jnp.isfinite(grad_norm)
            keep = lambda new, old: jnp.where(finite, new, old)
            params = jax.tree.map(keep, params, state.params)
            optimizer_state = jax.tree.map(keep, optimizer_state, state.optimizer)
            own_copies = copies(params)
        new = TrainState(
            params=params,
            optimizer=optimizer_state,
            key=state.key,
            step=state.step + 1,
            skipped=state.skipped + ~finite,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
            copies=own_copies,
        )
        metrics = {
            "train/loss": loss.cross_entropy,
            "train/z_loss": config.train.z_loss * loss.z,
            "train/skipped_steps": new.skipped,
            "train/skipped_in_a_row": new.skipped_in_a_row,
            "optim/learning_rate": schedule(updates_made),
            "optim/grad_norm": grad_norm,
            **{f"train/aux/{name}": value for name, value in loss.aux.items()},
            **_losses_of_texts(config, loss),
            **load_metrics(grads, roles),
            **depth_rate.metrics(config, params),
        }
        return new, metrics

    return train_step


def _losses_of_texts(config: RunConfig, loss: Loss) -> dict[str, jax.Array]:
    """Return the mean loss of each text of a mixture; NaN for a text with no tokens in the batch.

    Without a mixture, and in a pipeline, the result is {}.
    """
    if isinstance(loss.texts, tuple):
        return {}
    names = source_names([each.source for each in config.data.mixture])
    losses, weights = loss.texts
    return {f"train/loss/{name}": losses[n] / weights[n] for n, name in enumerate(names)}
