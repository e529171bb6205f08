"""A mixture of experts: each token uses a few out of many gated feed-forward layers.

For one token, with x its concatenated data vectors (DeepSeek-AI 2024, "DeepSeek-V3", section
2.1.2):

    s = sigmoid(W_r x)                  C = the experts with the k largest s + b
    w_e = scale s_e / sum_(C) s         y = sum_(e of C) w_e W_2e (silu(G_e x) * U_e x) + shared(x)

With SiTU, `silu(G_e x) * U_e x` is replaced by SiTU (see `rmt_tpu.layers.activations`). Latent
experts (Kimi Team 2026, Kimi K3, equation 11) work on a smaller vector and have an optional norm:

    y = W_up norm(sum_(e of C) w_e W_2e (silu(G_e l) * U_e l)) + shared(x)      l = W_down x

Options replace the sigmoid by a softmax over experts, omit the division by the sum of the scores,
and restrict C to a few groups of experts. Scores and weights are at least float32. An expert's bias
b affects only the choice C. It has no gradient and is not trained. It is computed from the experts'
loads (the numbers of tokens per expert), according to `config.Balance`. Loads are returned as
gradients: the loss contains the term `load_e (b_e - b_e)`, which is 0 but has the derivative
load_e. Every schedule and mesh thus sums loads in the same way as gradients.

The mesh axis `expert` shards the experts and, outside this core, the sequences. In this core, the
devices along that axis gather each other's tokens, and compute the outputs of their own experts for
the tokens that chose these experts. The results are then summed on the devices that own the tokens.
The mesh axis `tensor` shards the hidden neurons.
"""

import functools
import math
from dataclasses import replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import pallas_kernels
import sharding
from rmt_tpu import config as cfg
from rmt_tpu.cores.core import Aux, Context, Core, Index
from rmt_tpu.cores.feed_forward import FeedForward
from rmt_tpu.layers import activations
from rmt_tpu.layers.data_vectors import Read, concatenate, separate
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Seed, gain, parameter

# Added to the sum of the chosen experts' scores, to avoid a division by zero.
_EPSILON = 1e-20
# Histograms cover margins from -_SPAN to _SPAN (see `Experts.seen`).
_SPAN = 2.0
# A margin x is in the bin of `(x / _SPAN)^(1 / power)`, with the power for the kind of scores. A
# softmax over E experts gives scores of order 1 / E. Equal bins would be as wide as such scores.
_POWERS = {"sigmoid": 1, "softmax": 3}


class Routing(NamedTuple):
    """The experts chosen for each token, and the weights of their outputs."""

    chosen: Int[Array, "... top_k"]
    weights: Float[Array, "... top_k"]


class Rows(NamedTuple):
    """The assignment of tokens to R rows of this device, sorted by expert.

    A *choice* is a pair of a token and one of its k chosen experts. The number R of rows is fixed,
    so some rows may be unused, or some choices may not fit. On TPUs, unused rows also fill up each
    expert's rows to a multiple of `pallas_kernels.row_alignment`.

    Attributes:
      order: the index of the choice in each row; choices are numbered token by token, k per token.
        An unused row has the number of choices.
      places: the row of each choice, or R if the choice has no row.
      sizes: the number of rows per expert, with those that fill up; rows after these are unused.
      alignment: a number of which all sizes are multiples.
      dropped: the number of choices that did not fit.
    """

    order: Int[Array, " rows"]
    places: Int[Array, " choices"]
    sizes: Int[Array, " own_experts"]
    alignment: int
    dropped: Int[Array, ""]


class Experts(Core):
    """A mixture of experts, as described by a `config.Experts`.

    Attributes:
      w_router: W_r, [D, E].
      load: [E], a parameter whose gradient is the number of tokens that chose each expert. With
        `SignRule`, its value is the number of steps in which the bias rose, minus the number of
        steps in which it fell. The bias is this value times the rule's rate.
      seen: [E, bins], each expert's histogram of the tokens of the last batch; None unless the rule
        is `Quantiles`. A bin contains the share of tokens whose margin falls into it. The margin is
        the expert's score minus the highest biased score that the token did not choose. Bins are
        equally wide for sigmoid scores, and narrower near 0 for softmax scores.
      w_1: G and U of each expert, [E, D, 2, F], or [E, L, 2, F] for latent experts.
      w_2: W_2 of each expert, [E, F, D] or [E, F, L].
      w_down, w_up: W_down [D, L] and W_up [L, D] with latent experts, or else None.
      latent_gain: the gain of the norm before W_up, [L]; None without the norm.
      shared: the shared experts, as one feed-forward layer; None without shared experts.
      w_shared_gate: the weights of the gate for that layer's output, [D, 1]; None without a gate.
    """

    name: ClassVar[str] = "experts"

    def __init__(
        self,
        config: cfg.ModelConfig,
        core: cfg.Experts,
        seed: Seed,
        *,
        output_scale: float,
        input_width: int,
    ):
        self.core, self.vectors = core, config.data_shape[0]
        width, hidden, count = config.width, core.hidden_dim, core.num_experts
        draw = functools.partial(parameter, role="hidden")
        std = config.init_std * input_width**-0.5
        axes = ("embed", "choices")
        self.w_router = draw(
            seed / "w_router", (input_width, count), std=std, axes=axes, exact=True
        )
        by_sign = isinstance(core.balance, cfg.SignRule)
        role, axes = "balance_steps" if by_sign else "load", ("choices",)
        self.load = nnx.Param(jnp.zeros(count), role=role, axes=axes)
        shape = (count, cfg.HISTOGRAM_BINS)
        seen = nnx.Param(jnp.zeros(shape), role="histogram", axes=("choices", "bins"))
        self.seen = seen if isinstance(core.balance, cfg.Quantiles) else None
        latent, self.epsilon = core.latent_dim, config.norm_epsilon
        reads, writes, scale = input_width, width, output_scale
        down = up = None
        if latent is not None:
            down = draw(seed / "w_down", (input_width, latent), std=std, axes=("embed", "rank"))
            std = output_scale * config.init_std * latent**-0.5
            up = draw(seed / "w_up", (latent, width), std=std, axes=("rank", "embed"))
            reads, writes, scale = latent, latent, 1.0
        self.w_down, self.w_up = down, up
        self.latent_gain = gain((latent,), axes=("rank",)) if core.latent_norm else None
        std, axes = config.init_std * reads**-0.5, ("expert", "embed", "projection", "ff")
        self.w_1 = draw(seed / "w_1", (count, reads, 2, hidden), std=std, axes=axes)
        std, axes = scale * config.init_std * hidden**-0.5, ("expert", "ff", "embed")
        self.w_2 = draw(seed / "w_2", (count, hidden, writes), std=std, axes=axes)
        situ = {name: getattr(core, name) for name in ("situ_beta", "situ_linear_beta")}
        shared = cfg.FeedForward(max(core.shared, 1) * hidden, core.activation, **situ)
        sizes = {"output_scale": output_scale, "input_width": input_width}
        self.shared = FeedForward(config, shared, seed / "shared", **sizes) if core.shared else None
        std, axes = config.init_std * input_width**-0.5, ("embed", "coefficient")
        of_shared = draw(seed / "w_shared_gate", (input_width, 1), std=std, axes=axes)
        self.w_shared_gate = of_shared if core.shared_gate else None

    def __call__(
        self, z: Read, context: Context, index: Index
    ) -> Float[Array, "batch seq vectors size"]:
        """Run the chosen experts on each token independently."""
        return self.with_aux(z, context, index)[0]

    def with_aux(
        self, z: Read, context: Context, index: Index
    ) -> tuple[Float[Array, "batch seq vectors size"], Aux]:
        """Run the experts; return their output and a dict of scalars.

        "loss" is the balance loss plus terms that are always 0. The gradients of these terms are
        the experts' loads and, with `Quantiles`, the histograms `seen`. With a capacity, "dropped"
        is the number of token-expert choices that did not fit.
        """
        x = concatenate(z.residual)
        scores = self._scores(x)
        biased = scores + self._bias().astype(scores.dtype)
        routing = self._route(scores, biased)
        if self.w_down is None:
            y, dropped = self._mix(x, routing)
        else:
            y, dropped = self._mix(jnp.dot(x, self._gather(self.w_down, x.dtype)), routing)
            y = self._project_up(y)
        y = separate(y, self.vectors)
        if self.shared is not None:
            y = y + self._gate(x) * self.shared(z, context, index)
        aux = {"loss": self._balance_loss(scores, biased, routing)}
        if self.core.capacity is not None:
            aux["dropped"] = dropped.astype(scores.dtype)
        return y, aux

    def _gate(self, x):
        """Return the gate of the shared experts' output for each token, or 1 without a gate."""
        if self.w_shared_gate is None:
            return 1
        weights = self._gather(self.w_shared_gate, x.dtype)
        logits = jnp.dot(x, weights, preferred_element_type=jnp.result_type(x, jnp.float32))
        return jax.nn.sigmoid(logits).astype(x.dtype)[..., None]

    def _project_up(self, y):
        """Project the latent experts' output to the full width, after its norm if there is one."""
        if self.latent_gain is not None:
            norm = {"norm": "rmsnorm", "epsilon": self.epsilon, "dtype": y.dtype}
            y = normalize(y, self.latent_gain[...], **norm)
        return jnp.dot(y, self._gather(self.w_up, y.dtype, axis=1))

    def _gather(self, weights, dtype, axis=0):
        return sharding.gather(weights.astype(dtype), "fsdp", axis=axis)

    # Choosing experts ---------------------------------------------------------------------------

    def _scores(self, x):
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        w_router = self._gather(self.w_router, dtype)
        highest = jax.lax.Precision.HIGHEST
        logits = jnp.dot(x.astype(dtype), w_router, precision=highest)
        softmax = self.core.scores == "softmax"
        return jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)

    def _bias(self):
        match self.core.balance:
            case cfg.SignRule(rate=rate):
                bias = rate * self.load[...]
            case cfg.Quantiles():
                share = self.core.top_k / self.core.num_experts
                bias = _balancing_bias(self.seen[...], share, self.core.scores)
            case cfg.BalanceLoss():
                bias = jnp.zeros(self.core.num_experts)
        return jax.lax.stop_gradient(bias)

    def _route(self, scores, biased) -> Routing:
        if self.core.groups > 1:
            biased = _in_best_groups(biased, self.core.groups, self.core.top_groups)
        _, chosen = jax.lax.top_k(biased, self.core.top_k)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if not self.core.normalized:
            return Routing(chosen, self.core.scale * weights)
        total = jnp.sum(weights, axis=-1, keepdims=True) + _EPSILON
        return Routing(chosen, self.core.scale * weights / total)

    def _balance_loss(self, scores, biased, routing):
        """Return the balance loss for this device's tokens.

        The result includes terms that are always 0, whose gradients are the experts' loads and,
        with `Quantiles`, the histograms `seen`. Without a balance loss in the config, the result is
        0 and has only these gradients.
        """
        count, top_k = self.core.num_experts, self.core.top_k
        row_loads = _loads(routing.chosen, count, scores.dtype)
        loss = _zero_with_gradient(self.load, jnp.sum(row_loads, axis=0))
        match self.core.balance:
            case cfg.Quantiles():
                just_not = jax.lax.top_k(biased, min(top_k + 1, count))[0][..., -1:]
                above = jax.lax.stop_gradient(scores - just_not).reshape(-1, count)
                loss += _zero_with_gradient(self.seen, _histogram(above, self.core.scores))
            case cfg.BalanceLoss(weight=weight):
                # Loads are needed for whole sequences, but the tokens of a sequence may be sharded.
                shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
                loads = sharding.total(row_loads, sharding.token_axes())
                loads = loads / jnp.sum(loads, axis=-1, keepdims=True)
                loss += weight * count * jnp.sum(loads[:, None] * shares)
        return loss.astype(scores.dtype)

    # Computing the chosen experts' outputs ------------------------------------------------------

    def _mix(self, x, routing: Routing):
        """Return each token's weighted sum of expert outputs, and the number of dropped choices.

        The sum has the dtype of x.
        """
        x, *routing = (sharding.gather(a, "tensor", axis=1) for a in (x, *routing))
        batch, seq = x.shape[:2]
        flat = (a.reshape(batch * seq, -1) for a in (x, *routing))
        x, chosen, weights = (sharding.gather(a, "expert", axis=0) for a in flat)
        rows = self._rows(chosen)

        to_rows = functools.partial(
            pallas_kernels.rows_of_tokens, order=rows.order, places=rows.places
        )
        gathered = to_rows(x)
        # Unused rows have a weight of 0, so that they add 0 to all gradients.
        used = (rows.order < chosen.size)[:, None]
        weights = jnp.where(used, to_rows(weights.reshape(-1, 1)), 0)
        multiply = functools.partial(
            pallas_kernels.grouped_matmul, sizes=rows.sizes, alignment=rows.alignment
        )
        # On TPUs, this reshape copies its operand. Before the gather, that is only a part.
        w_1 = self.w_1[...].reshape(*self.w_1.shape[:2], -1)
        w_1, w_2 = self._gather(w_1, x.dtype, axis=1), self._gather(self.w_2, x.dtype, axis=2)
        product = checkpoint_name(multiply(gathered, w_1), "product")
        gate, up = jnp.split(product, 2, axis=-1)
        # Apply the weights before the second product: hidden vectors are smaller than outputs.
        hidden = (activations.gated(self.core, gate, up) * weights).astype(x.dtype)
        y = multiply(hidden, w_2)
        y = pallas_kernels.sums_of_rows(y, rows.order, rows.places, each=self.core.top_k)
        y = sharding.scatter_sum(y, "expert", axis=0).reshape(batch, seq, -1)
        # All devices along `tensor` drop the same choices. Each reports an equal share of them, so
        # that the sum over devices is correct.
        dropped = rows.dropped / sharding.axis_size("tensor")
        return sharding.scatter_sum(y, "tensor", axis=1), dropped

    def _rows(self, chosen: Int[Array, "tokens top_k"]) -> Rows:
        devices = sharding.axis_size("expert")
        local_experts = self.core.num_experts // devices
        # Without a capacity, there are enough rows for all possible choices of this device's
        # experts. With a capacity, there are rows for `capacity` times the choices that a device
        # gets under even load, which are `chosen.size / devices`.
        row_limit = len(chosen) * min(self.core.top_k, local_experts)
        if self.core.capacity is not None and devices > 1:
            row_limit = min(row_limit, math.ceil(self.core.capacity * chosen.size / devices))
        alignment = pallas_kernels.row_alignment(chosen.size // devices, local_experts)
        row_count = row_limit + min(local_experts, row_limit) * (alignment - 1)
        if alignment > 1:
            # The kernel that sums tokens' rows takes 256 rows at a time. For an odd number of tiles
            # of 128 rows, it would copy all rows.
            row_count += -row_count % (2 * alignment)
        own = jnp.arange(local_experts)
        expert = chosen.reshape(-1) - local_experts * sharding.axis_index("expert")
        expert = jnp.where((expert >= 0) & (expert < local_experts), expert, local_experts)
        counts = jnp.sum(expert[:, None] == own, axis=0, dtype=jnp.int32)
        missing = -counts % alignment
        # Rows that fill up are sorted like choices, whose numbers come before theirs.
        fills = jnp.arange(alignment - 1) < missing[:, None]
        fillers = jnp.where(fills, own[:, None], local_experts).reshape(-1)
        spare = row_count - len(expert) - len(fillers)
        fillers = jnp.pad(fillers, (0, max(0, spare)), constant_values=local_experts)
        order = jnp.argsort(jnp.concatenate([expert, fillers]))
        ends = jnp.minimum(jnp.cumsum(counts + missing), row_count)
        places = jnp.argsort(order)[: chosen.size]
        has_row = places < ends[-1]
        used = (jnp.arange(row_count) < ends[-1]) & (order[:row_count] < chosen.size)
        return Rows(
            order=jnp.where(used, order[:row_count], chosen.size),
            places=jnp.where(has_row, places, row_count),
            sizes=jnp.diff(ends, prepend=0),
            alignment=alignment,
            dropped=jnp.sum(counts) - jnp.sum(has_row, dtype=counts.dtype),
        )


def dropless(model: cfg.ModelConfig) -> cfg.ModelConfig:
    """Return the model's config for use without training, without a limit on tokens per expert.

    Experts then drop no tokens, and the outputs for a row do not depend on the other rows.
    """

    def free(core: cfg.Core) -> cfg.Core:
        return core if getattr(core, "capacity", None) is None else replace(core, capacity=None)

    stacks = (replace(stack, cores=tuple(map(free, stack.cores))) for stack in model.stacks)
    return replace(model, stacks=tuple(stacks))


def _in_best_groups(biased, groups, top_groups):
    """Set each token's biased scores to -inf outside its `top_groups` best groups of experts.

    A group's score is the sum of its two highest biased scores.
    """
    by_group = biased.reshape(*biased.shape[:-1], groups, -1)
    of_group = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
    _, best = jax.lax.top_k(of_group, top_groups)
    kept = jnp.any(best[..., None] == jnp.arange(groups), axis=-2)
    return jnp.where(kept[..., None], by_group, -jnp.inf).reshape(biased.shape)


def _loads(chosen, count, dtype):
    """Return, for each batch row, the number of tokens that chose each expert."""
    choice_counts = jnp.sum(chosen[..., None] == jnp.arange(count), axis=2)
    return jnp.sum(choice_counts, axis=1, dtype=dtype)


def _zero_with_gradient(parameter, gradient):
    """Return a 0 whose derivative with respect to `parameter` is `gradient`."""
    return jnp.sum(gradient * (parameter[...] - jax.lax.stop_gradient(parameter[...])))


def _histogram(
    above: Float[Array, "tokens experts"], scores: str = "sigmoid"
) -> Float[Array, "experts bins"]:
    """Count the tokens in each bin, for each expert; `scores` is the kind of the scores.

    A bin's number is split into two digits, whose one-hot encodings are multiplied. On TPUs, this
    matrix product is faster than a scatter.
    """
    bins = cfg.HISTOGRAM_BINS
    digit = math.isqrt(bins)
    if _POWERS[scores] == 3:
        above = _SPAN * jnp.cbrt(above / _SPAN)
    at = jnp.clip((above + _SPAN) * (bins / (2 * _SPAN)), 0, bins - 1).astype(jnp.int32)
    one_hot = lambda x: jax.nn.one_hot(x, digit, dtype=jnp.bfloat16)
    counts = jnp.einsum(
        "teh,tel->ehl",
        one_hot(at // digit),
        one_hot(at % digit),
        preferred_element_type=jnp.float32,
    )
    return counts.reshape(-1, bins)


def _balancing_bias(
    seen: Float[Array, "experts bins"], share: float, scores: str = "sigmoid"
) -> Float[Array, " experts"]:
    """Return biases that make a fraction `share` of the tokens choose each expert.

    `seen` is the histogram described in `Experts`, of scores of the kind `scores`. The biases are
    shifted to mean 0, which does not affect the choice of experts.
    """
    bins = seen.shape[-1]
    # This is the share of tokens at or above the lower edge of each bin.
    above = jnp.cumsum(seen[:, ::-1], axis=1)[:, ::-1]
    target_share = share * above[:, :1]
    # The threshold is in the highest bin for which this share is at least the target. Its position
    # in the bin is interpolated.
    at = jnp.sum(above >= target_share, axis=1, keepdims=True) - 1
    at_bin = lambda x: jnp.take_along_axis(x, at, axis=1)
    within = (at_bin(above) - target_share) / jnp.maximum(at_bin(seen), jnp.finfo(seen.dtype).tiny)
    edge = (at + jnp.clip(within, 0, 1)) * (2 * _SPAN / bins) - _SPAN
    edge = _SPAN * (edge / _SPAN) ** _POWERS[scores]
    return -(edge - jnp.mean(edge))[:, 0]
