"""The feed-forward layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import concatenate, separate
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import gain, parameter


class FeedForward(nnx.Module):
    """`W_2 gelu(W_1 z)` over the concatenated data vectors (equations 10, 23 to 25).

    Args:
      config: of the model; width, hidden size, activation.
      rngs: draws the weights.
      output_scale: of W_2 at the start.
      input_width: of z, if it is not what the layer writes.
      norm_hidden: whether `W_1 z` is normed, with the model's norm and a gain.
    """

    def __init__(
        self,
        config: cfg.ModelConfig,
        rngs: nnx.Rngs,
        *,
        output_scale: float,
        input_width: int | None = None,
        norm_hidden: bool = False,
    ):
        # A norm needs all of `W_1 z`: it is then not divided.
        hidden = "width" if norm_hidden else "ff"
        width, hidden_dim = config.width, config.feed_forward.hidden_dim
        input_width = width if input_width is None else input_width
        self.activation = config.feed_forward.activation
        self.norm, self.epsilon = config.norm, config.norm_epsilon
        self.w_1 = parameter(
            rngs,
            (input_width, hidden_dim),
            std=config.init_std * input_width**-0.5,
            role="hidden",
            axes=("embed", hidden),
        )
        self.hidden_gain = gain((hidden_dim,), axes=(hidden,)) if norm_hidden else None
        self.w_2 = parameter(
            rngs,
            (hidden_dim, width),
            std=output_scale * config.init_std * hidden_dim**-0.5,
            role="hidden",
            axes=(hidden, "embed"),
        )

    def __call__(
        self, z: Float[Array, "*tokens vectors read_size"]
    ) -> Float[Array, "*tokens vectors size"]:
        w_1 = sharding.gather(self.w_1.astype(z.dtype), "fsdp", axis=0)
        w_2 = sharding.gather(self.w_2.astype(z.dtype), "fsdp", axis=1)
        x, seq = concatenate(z), z.ndim - 3
        if self.hidden_gain is None:
            # Own columns of `W_1 z` for the tokens of all devices of `tensor`, and back.
            hidden = self._activated(jnp.dot(sharding.gather(x, "tensor", axis=seq), w_1))
            y = sharding.scatter_sum(jnp.dot(hidden, w_2), "tensor", axis=seq)
        else:
            norm = {"norm": self.norm, "epsilon": self.epsilon}
            hidden = normalize(jnp.dot(x, w_1), self.hidden_gain[...], **norm, dtype=z.dtype)
            y = jnp.dot(self._activated(hidden), w_2)
        return separate(y, z.shape[-2])

    def _activated(self, hidden):
        return jax.nn.gelu(hidden, approximate=self.activation == "gelu_tanh")
