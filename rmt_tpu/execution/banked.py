"""The schedule for models whose sublayers read rows of a bank, such as attention over depth.

A *bank* is a stack of rows. A row is the output of one sublayer, or the sum of the outputs of a
block of sublayers. No row changes after it is complete, so the backward pass can read the same bank
as the forward pass.

The *running sum* is the row in progress. The forward pass keeps the bank, and the running sum
before each layer. With `remat="blocks"`, it keeps the running sum only before each group of layers.
The backward pass visits the layers from last to first and recomputes each layer. With a matrix
residual, the running sum is larger than the outputs that are added to it. The forward pass then
keeps the outputs, and the backward pass rebuilds the running sums of a block from them. It need not
run any sublayer's core (its attention or MLP) again.

A layer is one period of its stack's cores. Layers are divided into *groups*. A *site* is the place
before a sublayer, where the sublayer's input is read. Before each group, phase one reads all
existing rows in one pass, and computes what they contribute to every site of the group. At each
site, phase two adds the rows that the group itself has written. The backward pass also needs one
pass per group, in which it adds the gradients from all sites to the gradient of the earlier rows. A
row may extend over several groups, because the running sum is passed from group to group.

`execution.banked_stack` has the forward and backward passes of one stack of layers. This module
runs the stacks one after the other, and defines the gradient of the whole.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.platform import vary_alike
from rmt_tpu.cores import Aux, Context
from rmt_tpu.execution.banked_stack import StackRunner
from rmt_tpu.execution.banked_state import StackArrays
from rmt_tpu.execution.kernels import at_current_precision
from rmt_tpu.execution.layer import DecoderParts, no_aux
from rmt_tpu.layers import stacks
from rmt_tpu.layers.choices import few_tokens
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import BankMixer, StackedScores, Store
from rmt_tpu.residual.whole_tiles import without_padding


def run_layers(
    decoder: DecoderParts,
    state: Array,
    y: Float[Array, "batch seq vectors size"],
    context: Context,
    caches: tuple | None,
) -> tuple[Read, tuple | None, Aux]:
    """Run all layers of a decoder, and read the input of the unembedding.

    Args:
      decoder: the decoder's parts.
      state, y: the residual before the first write, and the embedding, which is written first.
      context: the rule that determines which tokens may attend to which.
      caches: for each stack, the caches of its cores; None unless decoding.

    Returns:
      The input of the unembedding, the caches with the new tokens added, and the sums of the cores'
      scalars.
    """
    store, mixer = decoder.store, decoder.mixer
    decodes = caches is not None and few_tokens(state.shape[1])
    if decodes:
        store, mixer = without_padding(store), without_padding(mixer)
    runners, arrays = _runners(decoder, store, mixer)
    first = store.write(store.hold(state), y, _first(decoder.stacks[0][0].site.writer))
    first = mixer.embedding(first)
    if decodes and isinstance(mixer, StackedScores):
        arrays = [
            of_stack._replace(decode_params=mixer.decode_params(store, of_stack.scores, stack))
            for stack, of_stack in zip(decoder.stacks, arrays, strict=True)
        ]
    num_rows = max([mixer.num_rows, *(runner.end_row for runner in runners)])

    def forward(arrays, first, context, caches, *, keep=False):
        bank = jax.lax.empty((num_rows, *first.shape), first.dtype)
        bank = stacks.update_at(bank, first, mixer.embedding_row)
        carry = (bank, jnp.zeros_like(first), no_aux(decoder.config, y.dtype))
        (carry, _), new, saved = vary_alike((carry, arrays)), [], []
        for runner, of_stack, stack_caches in zip(runners, arrays, caches, strict=True):
            carry, stack_caches, saved_stack = runner.forward(
                of_stack, carry, context, stack_caches, keep=keep
            )
            new.append(stack_caches)
            saved.append(saved_stack)
        bank, _, aux = carry
        return (bank, aux), tuple(new), saved

    if caches is not None:
        (bank, aux), caches, _ = forward(arrays, first, context, caches)
        return mixer.final(store, bank, decoder.final_site), caches, aux
    no_caches = [None] * len(runners)

    @jax.custom_vjp
    def differentiable(arrays, first, context):
        return forward(arrays, first, context, no_caches)[0]

    def save(arrays, first, context):
        (bank, aux), _, saved_stacks = forward(arrays, first, context, no_caches, keep=True)
        return (bank, aux), (arrays, context, bank, saved_stacks)

    def backward(saved, cotangents):
        (arrays, context, bank, saved_stacks), (d_bank, d_aux) = saved, cotangents
        carry, gradients = (d_bank, jnp.zeros(bank.shape[1:], bank.dtype)), []
        stacks_backwards = reversed(list(zip(runners, arrays, saved_stacks, strict=True)))
        for runner, of_stack, saved_stack in stacks_backwards:
            carry, gradient = runner.backward(of_stack, saved_stack, bank, carry, context, d_aux)
            gradients.insert(0, gradient)
        return gradients, carry[0][mixer.embedding_row], None

    differentiable.defvjp(save, at_current_precision(backward))
    bank, aux = differentiable(*vary_alike((arrays, first)), context)
    return mixer.final(store, bank, decoder.final_site), None, aux


def _runners(
    decoder: DecoderParts, store: Store, mixer: BankMixer
) -> tuple[list[StackRunner], list[StackArrays]]:
    """Return, for each stack of layers, a `StackRunner` and the arrays that its methods need."""
    runners, arrays, before = [], [], 0
    scores = mixer.scores([[sublayer.site for sublayer in stack] for stack in decoder.stacks])
    writers = [stack[0].site.writer for stack in decoder.stacks]
    for number, (stack, stack_config) in enumerate(
        zip(decoder.stacks, decoder.config.stacks, strict=True)
    ):
        last = number + 1 == len(writers)
        next_writer = decoder.final_site.writer if last else _first(writers[number + 1])
        layers = nnx.to_pure_dict(nnx.state(stack, nnx.Param))
        own_scores = scores[before : before + stack_config.num_sublayers]
        own_scores = own_scores.reshape(stack_config.repeat, -1, *scores.shape[1:])
        next_writers = _next_writers(writers[number], next_writer)
        arrays.append(StackArrays(layers, own_scores, next_writers))
        runners.append(
            StackRunner(
                decoder.config,
                store,
                mixer,
                nnx.graphdef(stack),
                first=before,
                repeat=stack_config.repeat,
                cores=stack_config.cores,
            )
        )
        before += stack_config.num_sublayers
    return runners, arrays


def _first(writers: nnx.Param | None) -> Array | None:
    return None if writers is None else writers[...][0]


def _next_writers(writers: nnx.Param | None, next_writer: nnx.Param | Array | None) -> Array | None:
    """Return, for each layer, the parameters that write its last output.

    The first site of the next layer writes this output. `writers` has the parameters of the first
    sites of all layers, and `next_writer` those of the site after the last layer. A stack with a
    single layer may begin with a site that writes another shape, or without parameters.
    """
    if next_writer is None:
        return None
    last = next_writer[...][None]
    if writers is None or len(writers[...]) == 1:
        return last
    return jnp.concatenate([writers[...][1:], last])
