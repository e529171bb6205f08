"""The plain residual stream, which sums all outputs."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import StackSlice
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import Index, Store, Written


class Sum(nnx.Module):
    """The mixer `X += write(y); z = read(norm(X))`, computed by one call to the store.

    These are equations 2, 3, 15 and 16.
    """

    def start(
        self, store: Store, state: Float[Array, "group seq *shape"], y: Written
    ) -> tuple[Any, Written]:
        """Return the state before the first write, and the output to write first."""
        return store.hold(state), y

    def advance(
        self, store: Store, state: Any, y: Written, site: nnx.Module | StackSlice, index: Index
    ) -> tuple[Any, Read]:
        """Write the previous output y; return the new state and the next sublayer's input."""
        return store.add_and_read(state, y, site)
