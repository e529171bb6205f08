"""Ways to add a sublayer's output to the running sum, which is the bank's row in progress.

A *core* is the attention or MLP of a sublayer.

Each way is a `Write` function. `RunCore` runs the core. `RunAndSaveCore` runs the core and saves
its output in a stack. In the backward pass, `UseSavedOutput` then reads the output from the stack,
and the core's `pull_back` computes gradients without running the core again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from pallas_kernels import StackSlice
from rmt_tpu.cores import Aux, Context, Core
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.kernels import at_current_precision
from rmt_tpu.execution.layer import add_aux, run_core
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.kept import Kept
from rmt_tpu.residual.protocols import DepthIndex, ReversibleStore, Row, Store, Writer

# A `Write` adds the output of sublayer k of a layer to the running sum. Its other arguments are the
# sublayer's core, the core's input, the position in depth, the running sum, the parameters that
# write the core's output, and the sums of the cores' scalars. It returns the new running sum, and
# the sums with the core's scalars added.
Write = Callable[[int, Core, Read, DepthIndex, Row, Writer, Aux], tuple[Row, Aux]]


class RunCore:
    """A write that runs the core.

    When decoding, `caches` has the caches of the layer's cores. Each core's updated cache is
    appended to the attribute `new`.
    """

    def __init__(
        self,
        store: Store,
        context: Context,
        caches: tuple | None = None,
        layer: Index | None = None,
    ):
        self.store, self.context, self.caches, self.layer = store, context, caches, layer
        self.new = []

    def __call__(
        self, k: int, core: Core, z: Read, place: DepthIndex, current: Row, writer: Writer, aux: Aux
    ) -> tuple[Row, Aux]:
        """Run the core, and add the core's output to the running sum; see `Write`."""
        cache = None if self.caches is None else self.caches[k]
        y, cache, aux = run_core(core, z, self.context, place.sublayer, cache, self.layer, aux)
        self.new.append(cache)
        return self.store.write(current, y, writer), aux


class RunAndSaveCore:
    """A write that runs the core and saves the core's output in a stack.

    The attribute `outputs` has the stacks, one per sublayer of a layer. The attribute `saved` has,
    for each core, what its `pull_back` needs besides its input and output.
    """

    def __init__(
        self,
        store: ReversibleStore,
        context: Context,
        outputs: Sequence[Array],
        index: Index,
        kept: Kept,
    ):
        self.store, self.context, self.index, self.kept = store, context, index, kept
        self.outputs, self.saved = list(outputs), []

    def __call__(
        self, k: int, core: Core, z: Read, place: DepthIndex, current: Row, writer: Writer, aux: Aux
    ) -> tuple[Row, Aux]:
        """Run the core, save its output, and add the output to the running sum; see `Write`."""
        to = StackSlice(self.outputs[k], self.index)
        with jax.named_scope(core.name):
            self.outputs[k], scalars, saved = core.forward(
                z, self.context, place.sublayer, to, self.kept
            )
        self.saved.append(saved)
        y = StackSlice(self.outputs[k], self.index)
        return write_saved(self.store, current, y, writer, place), add_aux(aux, scalars)


class UseSavedOutput:
    """A write that uses a saved output instead of running the core.

    The sums of the cores' scalars (such as balance losses) stay unchanged. The scalars still get
    gradients in the backward pass.
    """

    def __init__(
        self,
        store: ReversibleStore,
        context: Context,
        outputs: Sequence[Array],
        saved: Sequence[Any],
        index: Index,
    ):
        self.store, self.context, self.index = store, context, index
        self.outputs, self.saved = outputs, saved

    def __call__(
        self, k: int, core: Core, z: Read, place: DepthIndex, current: Row, writer: Writer, aux: Aux
    ) -> tuple[Row, Aux]:
        """Add the saved output of the core to the running sum; see `Write`."""
        graphdef, parameters = nnx.split(core, nnx.Param)
        saved_output = (StackSlice(self.outputs[k], self.index), self.saved[k], self.context, place)

        @jax.custom_vjp
        def write(parameters, z, current, writer, aux, saved_output):
            y, _, _, place = saved_output
            # Do not write in place, because the backward pass of the preceding site reads the
            # earlier sum.
            return write_saved(self.store, current, y, writer, place, in_place=False), aux

        def forward(parameters, z, current, writer, aux, saved_output):
            out = write(parameters, z, current, writer, aux, saved_output)
            return out, (parameters, z, writer, saved_output)

        def backward(residuals, cotangents):
            parameters, z, writer, (y, saved, context, place) = residuals
            d_current, d_aux = cotangents
            d_y, d_writer = self.store.write_saved_backward(y, writer, d_current)
            core = nnx.merge(graphdef, parameters)
            with jax.named_scope(core.name):
                d_parameters, d_z = core.pull_back(z, y, saved, context, place.sublayer, d_y, d_aux)
            return d_parameters, d_z, d_current, d_writer, d_aux, None

        write.defvjp(forward, at_current_precision(backward))
        return write(nnx.to_pure_dict(parameters), z, current, writer[...], aux, saved_output)


def write_saved(
    store: ReversibleStore,
    current: Row,
    y: StackSlice,
    writer: Writer,
    place: DepthIndex,
    *,
    in_place: bool = True,
) -> Row:
    """Return the running sum with the saved output y added, in a closed group of layers.

    A closed group is exactly one block of outputs, so the sum is zero before its first write.
    """
    empty = place.sublayer == place.group
    return store.write_saved(current, y, writer[...], empty=empty, in_place=in_place)
