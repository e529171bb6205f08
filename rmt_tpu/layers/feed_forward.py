"""The feed-forward layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import concatenate, separate
from rmt_tpu.layers.parameters import parameter


class FeedForward(nnx.Module):
    """`W_2 gelu(W_1 z)` over the concatenated data vectors (equations 10, 23 to 25)."""

    def __init__(self, config: cfg.ModelConfig, rngs: nnx.Rngs, *, output_scale: float):
        width, hidden_dim = config.width, config.feed_forward.hidden_dim
        self.activation = config.feed_forward.activation
        self.w_1 = parameter(
            rngs,
            (width, hidden_dim),
            std=config.init_std * width**-0.5,
            role="hidden",
            axes=("embed", "ff"),
        )
        self.w_2 = parameter(
            rngs,
            (hidden_dim, width),
            std=output_scale * config.init_std * hidden_dim**-0.5,
            role="hidden",
            axes=("ff", "embed"),
        )

    def __call__(
        self, z: Float[Array, "*tokens vectors size"]
    ) -> Float[Array, "*tokens vectors size"]:
        hidden = jnp.dot(concatenate(z), self.w_1.astype(z.dtype))
        hidden = jax.nn.gelu(hidden, approximate=self.activation == "gelu_tanh")
        return separate(jnp.dot(hidden, self.w_2.astype(z.dtype)), z.shape[-2])
