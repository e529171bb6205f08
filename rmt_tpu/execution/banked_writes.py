"""The ways to add a core's output to the running sum in a banked layer.

Each way is a `Write` function. `Anew` runs the core. The two other ways are used if the backward
pass starts from the cores' outputs: `AndKeep` runs the core and keeps its output in a stack, and
`FromKept` takes the output from the stack. With `FromKept`, the core runs neither for the sum nor
for its gradients, which its `pull_back` computes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from pallas_kernels import StackSlice
from rmt_tpu.cores import Aux, Context, Core
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.kernels import as_here
from rmt_tpu.execution.layer import add_aux, run_core
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import At, ReversibleStore, Row, Store, Writer

# The arguments are the sublayer's index k, its core, the core's input, the place in depth, the
# running sum, the writer in the site after the core, and the cores' summed scalars. The result is
# the running sum with the core's output added, and the sums with the core's scalars added.
Write = Callable[[int, Core, Read, At, Row, Writer, Aux], tuple[Row, Aux]]


class Anew:
    """A write that runs the core.

    When decoding, `caches` holds the caches for one period's cores. Each core's updated cache is
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
        self, k: int, core: Core, z: Read, place: At, current: Row, writer: Writer, aux: Aux
    ) -> tuple[Row, Aux]:
        """Run the core and write its output; see `Write`."""
        cache = None if self.caches is None else self.caches[k]
        given = (z, self.context, place.sublayer, cache, self.layer, aux)
        y, cache, aux = run_core(core, *given)
        self.new.append(cache)
        return self.store.write(current, y, writer), aux


class AndKeep:
    """A write that runs the core and keeps its output.

    The attribute `written` collects the cores' outputs, and `saved` collects what `pull_back` needs
    in addition.
    """

    def __init__(
        self, store: ReversibleStore, context: Context, written: Sequence[Array], index: Index
    ):
        self.store, self.context, self.index = store, context, index
        self.written, self.saved = list(written), []

    def __call__(
        self, k: int, core: Core, z: Read, place: At, current: Row, writer: Writer, aux: Aux
    ) -> tuple[Row, Aux]:
        """Run the core, keep its output, and write it; see `Write`."""
        to = StackSlice(self.written[k], self.index)
        with jax.named_scope(core.name):
            self.written[k], of_core, saved = core.forward(z, self.context, place.sublayer, to)
        self.saved.append(saved)
        y = StackSlice(self.written[k], self.index)
        return write_kept(self.store, current, y, writer, place), add_aux(aux, of_core)


class FromKept:
    """A write that uses a kept output instead of running the core.

    It adds no scalars to the sums, but passes gradients to the core's scalars.
    """

    def __init__(
        self,
        store: ReversibleStore,
        context: Context,
        written: Sequence[Array],
        saved: Sequence[Any],
        index: Index,
    ):
        self.store, self.context, self.index = store, context, index
        self.written, self.saved = written, saved

    def __call__(
        self, k: int, core: Core, z: Read, place: At, current: Row, writer: Writer, aux: Aux
    ) -> tuple[Row, Aux]:
        """Write the kept output of the core; see `Write`."""
        graphdef, parameters = nnx.split(core, nnx.Param)
        kept = (StackSlice(self.written[k], self.index), self.saved[k], self.context, place)

        @jax.custom_vjp
        def write(parameters, z, current, writer, aux, kept):
            y, _, _, place = kept
            # The write is not in place, because the backward pass of the preceding site reads the
            # sum again.
            return write_kept(self.store, current, y, writer, place, in_place=False), aux

        def forward(parameters, z, current, writer, aux, kept):
            out = write(parameters, z, current, writer, aux, kept)
            return out, (parameters, z, writer, kept)

        def backward(given, cotangents):
            parameters, z, writer, (y, saved, context, place) = given
            d_current, d_aux = cotangents
            d_y, d_writer = self.store.write_kept_backward(y, writer, d_current)
            core = nnx.merge(graphdef, parameters)
            with jax.named_scope(core.name):
                of_core = (z, y, saved, context, place.sublayer, d_y, d_aux)
                d_parameters, d_z = core.pull_back(*of_core)
            return d_parameters, d_z, d_current, d_writer, d_aux, None

        write.defvjp(forward, as_here(backward))
        return write(nnx.to_pure_dict(parameters), z, current, writer[...], aux, kept)


def write_kept(
    store: ReversibleStore,
    current: Row,
    y: StackSlice,
    writer: Writer,
    place: At,
    *,
    in_place: bool = True,
) -> Row:
    """Return the running sum of a closed group with the kept output y added.

    Before the group's first write, the sum is empty and counts as zero.
    """
    empty = place.sublayer == place.group
    return store.write_kept(current, y, writer[...], empty=empty, in_place=in_place)
