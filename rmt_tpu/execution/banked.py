"""The schedule for mixers that read rows of a bank; the bank also serves as the checkpoint.

The bank holds the outputs of earlier sublayers or blocks, one per row. Each row is written only
once, so the backward pass still finds the rows that a layer has read. The forward pass keeps the
bank, and the running sum (the row in progress) before each layer; with `remat="blocks"`, it keeps
the sum only before each group of layers. The backward pass visits the layers from last to first and
recomputes each of them. If the running sum is larger than the outputs that are added to it, as with
a matrix store, the schedule keeps the outputs instead. It then rebuilds the sums of a block from
the outputs, and need not run any core again to obtain its output.

A layer is one period of its stack's cores. Layers are divided into *groups*. Before each group,
phase one reads all existing rows in one pass, and computes what they contribute to every site of
the group. Phase two adds, at each site, the rows that the group itself has written. The gradients
of a group's sites are therefore added to the gradient of the earlier rows only once. The running
sum is passed from group to group, so the number of passes over the bank does not depend on how
often a row is completed. `execution.banked_stack` has the passes of one stack; this module chains
the stacks, and defines the gradient of them all.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.platform import vary_alike
from rmt_tpu.cores import Aux, Context
from rmt_tpu.execution.banked_stack import StackArrays, StackRunner
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

    Arguments and results are the same as for `scanned.run_layers`.
    """
    store, mixer = decoder.store, decoder.mixer
    few = caches is not None and few_tokens(state.shape[1])
    if few:
        store, mixer = without_padding(store), without_padding(mixer)
    runs, of_stacks = _runs(decoder, store, mixer)
    first = store.write(store.hold(state), y, _first(decoder.stacks[0][0].site.writer))
    if few and isinstance(mixer, StackedScores):
        of_stacks = [
            one._replace(decode_params=mixer.decode_params(store, one.scores, stack))
            for stack, one in zip(decoder.stacks, of_stacks, strict=True)
        ]
    num_rows = max([mixer.num_rows, *(run.end_row for run in runs)])

    def forward(of_stacks, first, context, caches, *, keep=False):
        bank = jax.lax.empty((num_rows, *first.shape), first.dtype)
        aux = no_aux(decoder.config, y.dtype)
        carry = (stacks.update_at(bank, first, 0), jnp.zeros_like(first), aux)
        (carry, _), new, kept = vary_alike((carry, of_stacks)), [], []
        for run, of_stack, of_cores in zip(runs, of_stacks, caches, strict=True):
            carry, of_cores, sums = run.forward(of_stack, carry, context, of_cores, keep=keep)
            new.append(of_cores)
            kept.append(sums)
        bank, _, aux = carry
        return (bank, aux), tuple(new), kept

    if caches is not None:
        (bank, aux), caches, _ = forward(of_stacks, first, context, caches)
        return mixer.final(store, bank, decoder.final_site), caches, aux
    none = [None] * len(runs)

    @jax.custom_vjp
    def differentiable(of_stacks, first, context):
        return forward(of_stacks, first, context, none)[0]

    def save(of_stacks, first, context):
        (bank, aux), _, kept = forward(of_stacks, first, context, none, keep=True)
        return (bank, aux), (of_stacks, context, bank, kept)

    def backward(saved, cotangents):
        (of_stacks, context, bank, kept), (d_bank, d_aux) = saved, cotangents
        carry, gradients = (d_bank, jnp.zeros(bank.shape[1:], bank.dtype)), []
        for run, *of_stack in reversed(list(zip(runs, of_stacks, kept, strict=True))):
            carry, gradient = run.backward(*of_stack, bank, carry, context, d_aux)
            gradients.insert(0, gradient)
        return gradients, carry[0][0], None

    differentiable.defvjp(save, at_current_precision(backward))
    bank, aux = differentiable(*vary_alike((of_stacks, first)), context)
    return mixer.final(store, bank, decoder.final_site), None, aux


def _runs(
    decoder: DecoderParts, store: Store, mixer: BankMixer
) -> tuple[list[StackRunner], list[StackArrays]]:
    """Return a `StackRunner` for each stack, and the arrays of each stack that the runs take."""
    runs, of_stacks, before = [], [], 0
    scores = mixer.scores([[one.site for one in stack] for stack in decoder.stacks])
    writers = [stack[0].site.writer for stack in decoder.stacks]
    for number, (stack, of_stack) in enumerate(
        zip(decoder.stacks, decoder.config.stacks, strict=True)
    ):
        last = number + 1 == len(writers)
        next_writer = decoder.final_site.writer if last else _first(writers[number + 1])
        layers = nnx.to_pure_dict(nnx.state(stack, nnx.Param))
        of_layers = scores[before : before + of_stack.num_sublayers]
        of_layers = of_layers.reshape(of_stack.repeat, -1, *scores.shape[1:])
        of_stacks.append(StackArrays(layers, of_layers, _after(writers[number], next_writer)))
        given = decoder.config, store, mixer, nnx.graphdef(stack), before
        runs.append(StackRunner(*given, of_stack.repeat, of_stack.cores))
        before += of_stack.num_sublayers
    return runs, of_stacks


def _first(writers: nnx.Param | None) -> Array | None:
    return None if writers is None else writers[...][0]


def _after(writers: nnx.Param | None, next_writer: nnx.Param | Array | None) -> Array | None:
    """Return the writer of each layer's last output, which belongs to the site after the layer."""
    if next_writer is None:
        return None
    return jnp.concatenate([writers[...][1:], next_writer[...][None]])
