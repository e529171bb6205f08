"""The layers of a mixer that reads rows of a bank: the bank is its own checkpoint.

Rows are written once, so what a layer saw is still there when the backward pass comes to it. The
forward pass keeps the bank and the running sum before each layer (with `remat="blocks"` the bank
alone), and the backward pass walks down the layers, computing each again from its rows.

Layers go in *groups*. Before a group, one pass over the rows that are there gives all its sites
their share of them (phase one); what the group itself adds is read at each site (phase two). The
gradients of a group's sites are so added to those of the bank once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu.layers import attention as attn
from rmt_tpu.layers import stacks


class Sublayers:
    """The two sublayers of one layer, and what decoding keeps of its attention."""

    def __init__(self, config, layer, index, context, cache):
        self.layer, self.index, self.cache = layer, index, cache
        self._attention = attn.Attention(config, context, index)

    @jax.named_scope("attention")
    def attention(
        self, z: Float[Array, "batch seq vectors head_dim"]
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Heads, and the cache with z's keys and values in it if there is one."""
        if self.cache is None:
            return self._attention(z)
        y, self.cache = self._attention.with_cache(z, self.cache)
        return y

    @jax.named_scope("feed_forward")
    def feed_forward(
        self, z: Float[Array, "batch seq vectors size"]
    ) -> Float[Array, "batch seq vectors size"]:
        """`W_2 gelu(W_1 z)`."""
        return self.layer.feed_forward(z)


class Stacked(NamedTuple):
    """What each layer has, stacked over layers.

    Attributes:
      layers: parameters, as a pure dict.
      shared: what its sites score with; see the mixers' `shared`.
      after: how its second sublayer's output is written; None where that needs nothing.
    """

    layers: Any
    shared: Array
    after: Array | None


def run_layers(
    decoder: nnx.Module,
    state: Array,
    y: Float[Array, "batch seq vectors size"],
    context: attn.Context,
    cache: attn.Cache | None,
) -> tuple[Float[Array, "batch seq vectors size"], attn.Cache | None]:
    """All layers of a decoder, and the read for the unembedding."""
    store, layers, final_site = decoder.store, decoder.layers, decoder.final_site
    run = Groups(decoder, nnx.graphdef(layers))
    first = store.write(store.hold(state), y, _first(layers.attention_site.writer))
    stacked = Stacked(
        nnx.to_pure_dict(nnx.state(layers, nnx.Param)),
        decoder.mixer.shared(layers),
        _after(layers.attention_site.writer, final_site.writer),
    )
    if cache is None:

        @jax.custom_vjp
        def differentiable(stacked, first, context):
            return run.forward(stacked, first, context, None, keep=False)[0]

        differentiable.defvjp(run.save, run.backward)
        bank = differentiable(stacked, first, context)
    else:
        bank, cache, _ = run.forward(stacked, first, context, cache, keep=False)
    return decoder.mixer.final(store, bank, final_site), cache


def _first(writers):
    return None if writers is None else writers[...][0]


def _after(writers, final_writer):
    """The writer of each layer's last output is the one of the site that follows."""
    if writers is None:
        return None
    return jnp.concatenate([writers[...][1:], final_writer[...][None]])


class Groups:
    """Both passes. Loops carry whole stacks and change a slice: nothing is copied to stack it."""

    def __init__(self, decoder, graphdef):
        self.config, self.store, self.mixer = decoder.config, decoder.store, decoder.mixer
        self.graphdef, self.num_layers = graphdef, decoder.config.num_layers
        self.group = min(self.mixer.group_layers, self.num_layers)

    def forward(self, stacked, first, context, cache, *, keep):
        """The bank, the cache, and the running sums before each layer if they are to be kept."""
        bank = jax.lax.empty((self.mixer.num_rows, *first.shape), first.dtype)
        keep = keep and self.mixer.keeps_sum
        sums = jax.lax.empty((self.num_layers, *first.shape), first.dtype) if keep else None

        def run(carry, start, layers):
            return self.group_forward(stacked, context, carry, start, layers)

        return self.over_groups(run, (stacks.put(bank, first, 0), cache, sums))

    def over_groups(self, run, carry, *, reverse=False):
        """`carry = run(carry, first layer, layers)` for each group; the last may be smaller."""
        full, left = divmod(self.num_layers, self.group)

        def scanned(carry, index):
            return run(carry, index * self.group, self.group), None

        if left and reverse:
            carry = run(carry, full * self.group, left)
        if full == 1:  # the first row is then known, and is 0 for a mixer without groups
            carry = run(carry, 0, self.group)
        else:
            carry, _ = jax.lax.scan(scanned, carry, jnp.arange(full), reverse=reverse)
        if left and not reverse:
            carry = run(carry, full * self.group, left)
        return carry

    def group_forward(self, stacked, context, carry, start, layers):
        bank, cache, sums = carry
        first_row, inside = self.mixer.first_row(start), self.mixer.completes_inside
        prior = self.mixer.prior(stacks.run_of(stacked.shared, start, layers), bank, first_row)
        rows = stacks.run_of(bank, first_row, self.mixer.group_rows(layers)) if inside else None

        def run_layer(carry, offset):
            rows, current, cache, sums = carry
            index = start + offset
            if sums is not None:
                sums = stacks.put(sums, current, index)
            _, rows, current, of_layer = self._layer(
                stacks.at(stacked, index),
                (index, offset),
                context,
                prior,
                rows,
                current,
                stacks.at(cache, index),
            )
            return (rows, current, stacks.put(cache, of_layer, index), sums), None

        carry = (rows, jnp.zeros(bank.shape[1:], bank.dtype), cache, sums)
        (rows, current, cache, sums), _ = jax.lax.scan(run_layer, carry, jnp.arange(layers))
        complete = rows if inside else current[None]
        return stacks.put_run(bank, complete, first_row), cache, sums

    def _layer(self, of_layer, place, context, prior, rows, current, cache):
        """`place` is the layer's index, and that within its group."""
        layer = nnx.merge(self.graphdef, of_layer.layers)
        index, offset = place
        sublayers = Sublayers(self.config, layer, index, context, cache)
        prior, rows, current = self.mixer.layer(
            self.store, sublayers, of_layer, prior, offset, rows, current
        )
        return prior, rows, current, sublayers.cache

    def save(self, stacked, first, context):
        """The forward pass where it is differentiated."""
        keep = self.config.remat == "full"
        bank, _, sums = self.forward(stacked, first, context, None, keep=keep)
        return bank, (stacked, context, bank, sums)

    def backward(self, saved, d_bank):
        """Cotangents of the stacked parameters and of the first row."""
        stacked, context, bank, sums = saved

        def run(carry, start, layers):
            return self.group_backward(stacked, context, bank, sums, carry, start, layers)

        carry = (d_bank, stacks.empty_like(stacked))
        d_bank, gradients = self.over_groups(run, carry, reverse=True)
        return gradients, d_bank[0], None

    def group_backward(self, stacked, context, bank, sums, carry, start, layers):
        d_bank, gradients = carry
        first_row, inside = self.mixer.first_row(start), self.mixer.completes_inside
        count, keeps_sum = self.mixer.group_rows(layers), self.mixer.keeps_sum
        shared = stacks.run_of(stacked.shared, start, layers)
        prior = self.mixer.prior(shared, bank, first_row)
        rows = stacks.run_of(bank, first_row, count) if inside else None
        nothing = jnp.zeros(bank.shape[1:], bank.dtype)
        first_sum = start
        if sums is None and keeps_sum:
            sums = self._sums_again(stacked, context, prior, rows, nothing, start, layers)
            first_sum = 0

        def undo_layer(carry, offset):
            d_prior, d_rows, d_current, gradients = carry
            index = start + offset
            current = stacks.at(sums, first_sum + offset) if keeps_sum else nothing

            def forward(of_layer, prior, rows, current):
                place = (index, offset)
                return self._layer(of_layer, place, context, prior, rows, current, None)[:3]

            _, pullback = jax.vjp(forward, stacks.at(stacked, index), prior, rows, current)
            gradient, *cotangents = pullback((d_prior, d_rows, d_current))
            return (*cotangents, stacks.put(gradients, gradient, index)), None

        d_rows = stacks.run_of(d_bank, first_row, count)
        # The group's end: its one row is the running sum, or all rows are complete and it is empty.
        ends = (d_rows, nothing) if inside else (None, d_rows[0])
        carry = (stacks.empty_like(prior), *ends, gradients)
        (d_prior, d_rows, _, gradients), _ = jax.lax.scan(
            undo_layer, carry, jnp.arange(layers), reverse=True
        )
        if isinstance(first_row, int) and first_row == 0:
            d_bank = d_rows  # the only group; its rows begin with the one that it did not complete
        d_shared, d_bank = self.mixer.prior_backward(
            shared, bank, first_row, prior, d_prior, d_bank
        )
        d_shared = d_shared + stacks.run_of(gradients.shared, start, layers)
        return d_bank, gradients._replace(shared=stacks.put_run(gradients.shared, d_shared, start))

    def _sums_again(self, stacked, context, prior, rows, nothing, start, layers):
        """The running sums before each layer of a group, by a second forward pass."""

        def run_layer(carry, offset):
            rows, current = carry
            index = start + offset
            _, rows, after, _ = self._layer(
                stacks.at(stacked, index), (index, offset), context, prior, rows, current, None
            )
            return (rows, after), current

        return jax.lax.scan(run_layer, (rows, nothing), jnp.arange(layers))[1]
