"""The core of a feed-forward sublayer."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import sharding
from pallas_kernels.target import target
from rmt_tpu import config as cfg
from rmt_tpu.cores.core import Cache, Context, Core, Index
from rmt_tpu.layers import activations, choices
from rmt_tpu.layers.data_vectors import Read, concatenate, separate
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Seed, bias, gain, parameter
from rmt_tpu.layers.products import times, times_each
from rmt_tpu.layers.stacks import in_rows, isolate


class FeedForward(Core):
    """The layer `W_2 f(W_1 z)` on the concatenated data vectors z.

    These are equations 10 and 23 to 25 of the RMT paper (Mak and Flanigan 2025).

    In a gated layer, W_1 [2, D, D_FF] consists of the gate and the up projection, which are applied
    in one matrix product (Shazeer 2020).

    Args:
      config: the model's config, for the width and the norm.
      core: the config of this core, with its hidden size and activation.
      seed: the seed of the weights.
      output_scale: the factor that multiplies the initial standard deviation of W_2.
      input_width: the size of z, in numbers per token.
      norm_hidden: whether `W_1 z` is normalised, with the model's kind of norm and a gain.

    Attributes:
      b_1, b_2: the biases added to the products with W_1 and W_2; None without biases.
      output_gain: the gain of the norm of the output, [D]; None without this norm.
    """

    name: ClassVar[str] = "feed_forward"
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("w_1", "w_2")

    def __init__(
        self,
        config: cfg.ModelConfig,
        core: cfg.FeedForward,
        seed: Seed,
        *,
        output_scale: float,
        input_width: int,
        norm_hidden: bool = False,
    ):
        # If `W_1 z` is normalised, it is not sharded, because a norm needs all of its entries.
        hidden = "width" if norm_hidden else "ff"
        width, hidden_dim = config.width, core.hidden_dim
        self.vectors, self.core = config.data_shape[0], core
        self.norm, self.epsilon = config.norm, config.norm_epsilon
        shape, axes = (input_width, hidden_dim), ("embed", hidden)
        if core.gated:
            shape, axes = (2, *shape), ("projection", *axes)
        std = config.init_std * input_width**-0.5
        self.w_1 = parameter(seed / "w_1", shape, std=std, role="hidden", axes=axes)
        self.hidden_gain = gain((hidden_dim,), axes=(hidden,)) if norm_hidden else None
        b_1 = (*shape[:-2], hidden_dim), (*axes[:-2], hidden)
        self.b_1 = bias(*b_1) if core.bias else None
        self.b_2 = bias((width,), ("width",)) if core.bias else None
        normed = core.normed != "input"
        self.output_gain = gain((width,), axes=("width",)) if normed else None
        self.w_2 = parameter(
            seed / "w_2",
            (hidden_dim, width),
            std=output_scale * config.init_std * hidden_dim**-0.5,
            role="hidden",
            axes=(hidden, "embed"),
        )

    def __call__(
        self, z: Read, context: Context, index: Index
    ) -> Float[Array, "batch seq vectors size"]:
        """Run the layer on each token independently."""
        return separate(self._run(z.residual), self.vectors)

    def step(
        self, z: Read, context: Context, index: Index, cache: Cache, layer: Index
    ) -> tuple[Float[Array, "batch seq vectors size"], Cache]:
        """Run the layer on new tokens; the cache stays empty."""
        y = self._run(z.residual)
        if y.shape[1] == 1 < self.vectors:
            # Without the barrier, XLA reorders the columns of the large matrix W_2 at every decode
            # step, instead of the entries of y.
            y = jax.lax.optimization_barrier(y)
        return separate(y, self.vectors), cache

    def _run(self, z: Float[Array, "batch seq vectors size"]) -> Float[Array, "batch seq width"]:
        # Without this, XLA fuses the two matrix products and the slicing of their weights into one
        # instruction. With many tokens, this instruction takes a fifth longer than two products.
        sequential = choices.products_in_turn(target(), self.vectors, z.shape[1]).value
        rows = choices.kept_in_rows(target()).value
        first = functools.partial(times, gathered=-2, isolated=sequential, rows=rows)
        second = functools.partial(times, gathered=-1, isolated=sequential)
        x = concatenate(z)
        if self.hidden_gain is None:
            # Each device computes some hidden neurons for the tokens of all devices along the mesh
            # axis `tensor`. The partial results of W_2 are summed, and each device gets the sums
            # for its own tokens.
            x = sharding.gather(x, "tensor", axis=1)
            if rows and self.core.gated:
                parts = times_each(x, self.w_1, gathered=-2, isolated=sequential)
                biases = (None, None) if self.b_1 is None else self.b_1[...]
                hidden = activations.gated(self.core, *map(_plus_bias, parts, biases))
            else:
                hidden = self._activate(_plus_bias(first(x, self.w_1), self.b_1))
            hidden = in_rows(hidden) if rows else hidden
            hidden = isolate(hidden) if sequential else hidden
            return self._output(sharding.scatter_sum(second(hidden, self.w_2), "tensor", axis=1))
        norm = {"norm": self.norm, "epsilon": self.epsilon}
        product = _plus_bias(first(x, self.w_1), self.b_1)
        hidden = normalize(product, self.hidden_gain[...], **norm, dtype=z.dtype)
        return self._output(second(self._activate(hidden), self.w_2))

    def _output(self, y):
        """Return the output with its bias and its norm, for this device's tokens."""
        y = _plus_bias(y, self.b_2)
        if self.output_gain is None:
            return y
        norm = {"norm": self.norm, "epsilon": self.epsilon, "dtype": y.dtype}
        return normalize(y, self.output_gain[...], **norm)

    def _activate(self, hidden):
        if not self.core.gated:
            return activations.plain(self.core, hidden)
        gate, up = jnp.split(hidden, 2, axis=-1)
        return activations.gated(self.core, gate, up)


def _plus_bias(x, bias):
    return x if bias is None else x + bias[...].reshape(-1).astype(x.dtype)
