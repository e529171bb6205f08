"""Hierarchical aggregation: after every few layers, a node combines the residuals of these layers.

Dou, Tu, Wang, Shi and Zhang (2018). H_k is the residual after layer k, and a node follows
every e-th layer. The output A_i of node i replaces the residual, so the next layers read it:

    A_1 = AGG_1(H_1, .., H_e)
    A_i = AGG_i(H_{(i-1)e+1}, .., H_{ie}, A_{i-1})
    AGG(x_1, .., x_k) = LN(s([x_1; ..; x_k] W_a) W_b + x_1 + .. + x_k)

Here s is the sigmoid, and there are no biases. The paper uses e = 2 and a hidden size of D_FF.
No node follows the layers that remain after the last node.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Seed, gain, parameter, stack
from rmt_tpu.residual.protocols import Index, Store


class HierarchicalState(NamedTuple):
    """The state that the mixer passes from site to site.

    Attributes:
      residual: the residual, which is the newest input of the next node.
      inputs: the output of the last node, then the residuals H of the layers since that node.
    """

    residual: Float[Array, "batch seq D"]
    inputs: Float[Array, "every batch seq D"]


class Node(nnx.Module):
    """A node, which computes one residual from the residuals of several layers.

    Attributes:
      w_a: the first weight matrix, [inputs * D, hidden_dim].
      w_b: the second weight matrix, [hidden_dim, D].
      gain: the gain of the norm, [D].
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed, *, inputs: int):
        dim, hidden_dim = config.store.dim, config.mixer.hidden_dim
        self.norm, self.epsilon = config.norm, config.norm_epsilon
        self.w_a = parameter(
            seed / "w_a",
            (inputs * dim, hidden_dim),
            std=config.init_std * (inputs * dim) ** -0.5,
            role="hidden",
            axes=("embed", "hidden"),
        )
        self.w_b = parameter(
            seed / "w_b",
            (hidden_dim, dim),
            std=config.init_std * hidden_dim**-0.5,
            role="hidden",
            axes=("hidden", "embed"),
        )
        self.gain = gain((dim,), axes=("width",))

    def __call__(self, inputs: list[Float[Array, "batch seq D"]]) -> Float[Array, "batch seq D"]:
        """Return AGG of the inputs in their dtype; sums are computed in at least float32."""
        x = jnp.concatenate(inputs, axis=-1)
        w_a = sharding.gather(self.w_a.astype(x.dtype), "fsdp", axis=0)
        w_b = sharding.gather(self.w_b.astype(x.dtype), "fsdp", axis=1)
        hidden = jax.nn.sigmoid(jnp.dot(x, w_a))
        accumulator = jnp.result_type(x, jnp.float32)
        total = jnp.dot(hidden, w_b, preferred_element_type=accumulator) + sum(
            x.astype(accumulator) for x in inputs
        )
        norm = {"norm": self.norm, "epsilon": self.epsilon}
        return normalize(total, self.gain[...], **norm, dtype=x.dtype)


class Hierarchical(nnx.Module):
    """The mixer for `config.Hierarchical`.

    Attributes:
      first: the first node, which has no preceding node as an input.
      others: the later nodes, stacked. If they share their parameters, this is a single node. It is
        None if there are no later nodes.
    """

    def __init__(self, config: cfg.ModelConfig, seed: Seed):
        every, shared = config.mixer.every, config.mixer.shared
        self.every, self.shared = every, shared
        self.first = Node(config, seed / "first", inputs=every)
        count = config.num_layers // every - 1
        make = lambda seed, index: Node(config, seed.numbered(index), inputs=every + 1)
        count = min(count, 1) if shared else count
        self.others = stack(make, seed / "others", count, axis="node") if count else None

    def start(
        self, store: Store, state: Float[Array, "batch seq D"], y: Array
    ) -> tuple[HierarchicalState, Array]:
        """Return the mixer's state before the first write, and y, the embedding."""
        residual = store.hold(state)
        inputs = jnp.zeros((self.every, *residual.shape), residual.dtype)
        return HierarchicalState(residual, inputs), y

    @jax.named_scope("residual")
    def advance(
        self,
        store: Store,
        state: HierarchicalState,
        y: Float[Array, "batch seq_or_gathered vectors size"],
        site: nnx.Module,
        index: Index,
    ) -> tuple[HierarchicalState, Read]:
        """Write y, replace the residual if a node follows here, and read the residual."""
        h, inputs = store.write(state.residual, y, site.write), state.inputs
        # At the start of a layer, the preceding layer's output (or the embedding) is complete.
        if site.begins_layer:
            done = index // 2
            h = self._aggregate(h, inputs, done, y.dtype)
            inputs = jax.lax.dynamic_update_index_in_dim(inputs, h, done % self.every, 0)
        return HierarchicalState(h, inputs), store.read(h, site, y.dtype)

    def _aggregate(self, h, inputs, done, dtype):
        """Return the output of the node after `done` layers, or h if no node follows them."""

        def gathered():
            return [x.astype(dtype) for x in (*inputs[1:], h)]

        def first():
            return self.first(gathered()).astype(h.dtype)

        def other():
            graphdef, nodes = nnx.split(self.others)
            at = 0 if self.shared else done // self.every - 2
            node = nnx.merge(graphdef, jax.tree.map(lambda w: w[at], nodes))
            return node([*gathered(), inputs[0].astype(dtype)]).astype(h.dtype)

        nodes = (lambda: h, first, *([other] if self.others is not None else []))
        number = done // self.every * (done % self.every == 0)
        if isinstance(number, int):
            return nodes[min(number, len(nodes) - 1)]()
        return jax.lax.switch(jnp.minimum(number, len(nodes) - 1), nodes)
