"""The layers of an RMT whose backward pass rebuilds the residual instead of keeping it.

A write only adds, so the residual before it is the residual after it less what was written:
`X_l = X_{l+1} - w^T y`. The forward pass keeps what every sublayer wrote (y, of size `R * D_v`) and
the last residual; the backward pass walks down from there. So the memory of activations does not
grow with `D_k`. In int16 fixed point the walk is exact; in float32 it drifts by about 1e-7.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu import config as cfg
from rmt_tpu.layers import attention as attn
from rmt_tpu.residual.matrix import Store


def run_layers(
    config: cfg.ModelConfig,
    store: Store,
    layers: nnx.Module,
    final_site: nnx.Module,
    residual: Float[Array, "group seq own_D_k D_v"],
    y: Float[Array, "batch seq R D_v"],
    context: attn.Context,
) -> Float[Array, "batch seq R D_v"]:
    """All layers and the read for the unembedding.

    Args:
      config: of the model.
      store: holds the residual in its own dtype in between.
      layers: stacked, from `Decoder`.
      final_site: before the unembedding.
      residual: the state before the first write, in a float dtype.
      y: what is written first.
      context: who may see whom.
    """
    run = _Layers(config, store, nnx.graphdef(layers), nnx.graphdef(final_site), y.dtype)

    @jax.custom_vjp
    def differentiable(layers, final_site, residual, y, context):
        return run.forward(layers, final_site, residual, y, context)[0]

    differentiable.defvjp(run.forward, run.backward)
    return differentiable(_parameters(layers), _parameters(final_site), residual, y, context)


class _Layers:
    """Both passes; parameters are pure dicts, those of the layers stacked."""

    def __init__(self, config, store, layer_graph, site_graph, dtype):
        self.config, self.store, self.dtype = config, store, dtype
        self.layer_graph, self.site_graph = layer_graph, site_graph
        self.indices = jnp.arange(config.num_layers)

    def forward(self, layers, final_site, residual, y, context):
        def run_layer(carry, scanned):
            residual, y = carry
            layer, attention = self._layer(*scanned, context)
            residual, z = self.store.add_and_read(residual, y, layer.attention_site)
            with jax.named_scope("attention"):
                heads, log_sums = attention.forward(z)
            residual, z = self.store.add_and_read(residual, heads, layer.feed_forward_site)
            with jax.named_scope("feed_forward"):
                next_y = layer.feed_forward(z)
            return (residual, next_y), (y, heads, log_sums)

        start = (self.store.hold(residual), y)
        (held, last_y), written = jax.lax.scan(run_layer, start, (layers, self.indices))
        site = nnx.merge(self.site_graph, final_site)
        held, z = self.store.add_and_read(held, last_y, site)
        like = jnp.zeros((0,), residual.dtype)
        return z, (layers, final_site, held, last_y, written, context, like)

    def backward(self, saved, d_z):
        layers, final_site, residual, y, written, context, like = saved
        site = nnx.merge(self.site_graph, final_site)
        d_residual = jnp.zeros(residual.shape, self.dtype)
        z, statistics = self.store.read_with_statistics(residual, site, self.dtype)
        residual, d_residual, d_y, d_final_site = self.store.undo(
            residual, y, site, z, statistics, d_residual, d_z
        )

        def undo_layer(carry, scanned):
            residual, d_residual, d_y = carry
            layer, index, (y, heads, log_sums) = scanned
            layer, attention = self._layer(layer, index, context)
            gradient = {}

            z, statistics = self.store.read_with_statistics(
                residual, layer.feed_forward_site, self.dtype
            )
            with jax.named_scope("feed_forward"):
                gradient["feed_forward"], d_z = _vjp(layer.feed_forward, z, d_y)
            residual, d_residual, d_y, gradient["feed_forward_site"] = self.store.undo(
                residual, heads, layer.feed_forward_site, z, statistics, d_residual, d_z
            )
            z, statistics = self.store.read_with_statistics(
                residual, layer.attention_site, self.dtype
            )
            with jax.named_scope("attention"):
                d_z = attention.backward(z, heads, log_sums, d_y)
            residual, d_residual, d_y, gradient["attention_site"] = self.store.undo(
                residual, y, layer.attention_site, z, statistics, d_residual, d_z
            )
            return (residual, d_residual, d_y), gradient

        (_, d_residual, d_y), d_layers = jax.lax.scan(
            undo_layer,
            (residual, d_residual, d_y),
            (layers, self.indices, written),
            reverse=True,
        )
        return d_layers, d_final_site, d_residual.astype(like.dtype), d_y, None

    def _layer(self, layer, index, context):
        layer = nnx.merge(self.layer_graph, layer)
        return layer, attn.Attention(self.config, context, index)


def _parameters(module: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _vjp(module: nnx.Module, z: Array, d_y: Array) -> tuple[Any, Array]:
    """Cotangents of a module's parameters and of its input."""
    graphdef = nnx.graphdef(module)
    apply = lambda parameters, z: nnx.merge(graphdef, parameters)(z)
    return jax.vjp(apply, _parameters(module), z)[1](d_y)
