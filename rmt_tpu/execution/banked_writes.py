"""The ways in which a core's output is added to the running sum of a banked layer.

Each way is a `Write`. `Anew` runs the core. Where the backward pass starts from what cores wrote,
`AndKeep` runs the core and keeps its output in a stack, and `FromKept` takes it out again: the core
is then run neither for the sum nor for its gradients, which its `pull_back` computes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from pallas_kernels import Slot
from rmt_tpu.cores import Aux, Context, Core
from rmt_tpu.cores.core import Index
from rmt_tpu.execution.kernels import as_here
from rmt_tpu.execution.layer import add_aux, run_core
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import At, Keeping, Row, Store, Writer

# The arguments are a sublayer's number k, its core, what the core reads, the place, the running
# sum, the writer of the site after the core, and the sums of scalars. The result is the running sum
# with the core's output in it, and the sums with the core's scalars.
Write = Callable[[int, Core, Read, At, Row, Writer, Aux], tuple[Row, Aux]]


class Anew:
    """A write that runs the core.

    `caches` are those of a period, when decoding. The caches of its cores after their step are
    appended to `new`.
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
        cache = None if self.caches is None else self.caches[k]
        given = (z, self.context, place.sublayer, cache, self.layer, aux)
        y, cache, aux = run_core(core, *given)
        self.new.append(cache)
        return self.store.write(current, y, writer), aux


class AndKeep:
    """A write that runs the core and keeps its output.

    `written` gets what the cores write, and `saved` what `pull_back` needs besides.
    """

    def __init__(self, store: Keeping, context: Context, written: Sequence[Array], index: Index):
        self.store, self.context, self.index = store, context, index
        self.written, self.saved = list(written), []

    def __call__(
        self, k: int, core: Core, z: Read, place: At, current: Row, writer: Writer, aux: Aux
    ) -> tuple[Row, Aux]:
        to = Slot(self.written[k], self.index)
        with jax.named_scope(core.name):
            self.written[k], of_core, saved = core.forward(z, self.context, place.sublayer, to)
        self.saved.append(saved)
        y = Slot(self.written[k], self.index)
        return write_kept(self.store, current, y, writer, place), add_aux(aux, of_core)


class FromKept:
    """A write of kept outputs; it adds no scalars, but passes gradients to them."""

    def __init__(
        self,
        store: Keeping,
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
        graphdef, parameters = nnx.split(core, nnx.Param)
        kept = (Slot(self.written[k], self.index), self.saved[k], self.context, place)

        @jax.custom_vjp
        def write(parameters, z, current, writer, aux, kept):
            y, _, _, place = kept
            # The write is not in place, because the backward pass of the site before reads the sum
            # again.
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
    store: Keeping, current: Row, y: Slot, writer: Writer, place: At, *, in_place: bool = True
) -> Row:
    """Return the running sum of a closed group with y in it.

    The sum is empty before the first write of the group.
    """
    empty = place.sublayer == place.group
    return store.write_kept(current, y, writer[...], empty=empty, in_place=in_place)
