"""The arrays of a stack of layers that reads rows of a bank, and the state of its passes.

`execution.banked_stack` has the passes.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from pallas_kernels import StackSlice
from rmt_tpu.cores import Aux
from rmt_tpu.cores.core import Index
from rmt_tpu.layers.stacks import slice_at
from rmt_tpu.residual.protocols import Bank, Row


class StackArrays(NamedTuple):
    """The arrays of a stack's layers, each with a leading axis over the stack's repeats.

    Attributes:
      layers: the parameters, as a pure dict.
      scores: the sites' parameters for scoring rows, [repeat, sublayers of the period, ...].
      next_writers: the parameters of the site after each layer, which write the layer's last
        output; None if a write needs no parameters.
      decode_params: the result of `StackedScores.decode_params`, one array for each site of a
        period; used in decoding only.
      in_stack: the parameters of all layers, and the index of this layer. If they are given, matrix
        products read this layer's weights directly from them.
    """

    layers: Any
    scores: Array
    next_writers: Array | None
    decode_params: tuple[Any, ...] = ()
    in_stack: StackSlice | None = None

    def of_layer(self, index: Index, *, in_stack: bool) -> "StackArrays":
        """Return the arrays of one layer; `in_stack` is whether to give the field of that name."""
        decode_params = tuple(StackSlice(x, index) for x in self.decode_params)
        return slice_at(self._replace(decode_params=()), index)._replace(
            decode_params=decode_params,
            in_stack=StackSlice(self.layers, index) if in_stack else None,
        )


class SavedStack(NamedTuple):
    """The arrays that a stack saves for its backward pass; fields that are not needed are None.

    Attributes:
      layer_sums: the running sum (the row in progress) before each layer.
      group_sums: the running sum before each group of layers, if it may be nonzero there.
      outputs: the output of each sublayer of a period in all repeats, saved instead of the sums.
      layers: what the backward pass of each layer needs in addition to the sums or outputs. It is
        the layer's own `pull_back`, or with `outputs` what the cores' `pull_back` needs. It is
        a dict from the number of layers in a group to a tree. All trees have the same leaves, whose
        leading axis is over all repeats. While the forward pass runs, it is a list of the leaves.
    """

    layer_sums: Float[Array, "repeat batch seq *shape"] | None = None
    group_sums: Float[Array, "groups batch seq *shape"] | None = None
    outputs: tuple[Float[Array, "repeat local_batch local_seq _ size"], ...] | None = None
    layers: dict[int, Any] | list[Array] | None = None


class ForwardCarry(NamedTuple):
    """The state that the forward pass carries from group to group.

    Attributes:
      bank: the bank, with the rows that are complete so far.
      current: the running sum; None if the sum is empty before and after every group.
      caches: the caches of the stack's cores; None unless decoding.
      saved: what the backward pass needs.
      aux: the sums of the cores' scalars.
    """

    bank: Bank
    current: Row | None
    caches: tuple | None
    saved: SavedStack
    aux: Aux


class BackwardCarry(NamedTuple):
    """The state that the backward pass carries from group to group.

    Attributes:
      bank: the cotangent of the bank.
      current: the cotangent of the running sum; None if the sum is empty before and after every
        group.
      stack: the cotangents of the stack's arrays, complete for the layers after the group.
      summed: memory in which the backward pass rebuilds running sums; None if no sum is rebuilt.
    """

    bank: Bank
    current: Row | None
    stack: StackArrays
    summed: Row | None


class Group(NamedTuple):
    """A group of layers, and what all sites (the places before sublayers) of the group use.

    Attributes:
      start: the index of the group's first layer in the stack.
      layers: the number of layers.
      at: the number of sublayers before the group.
      first_row: the index of the first row of the bank that belongs to the group.
      prior: the result of phase one (the read of earlier rows) for the group's sites.
      rows: the rows that the group itself completes; None for a closed group, whose only row is the
        running sum at its end.
    """

    start: Index
    layers: int
    at: Index
    first_row: Index
    prior: Any
    rows: Bank | None
