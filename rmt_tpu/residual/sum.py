"""The standard residual stream, which sums all outputs."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import StackSlice
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import Index, Store, Written


class Sum(nnx.Module):
    """The mixer `X += write(y); z = read(norm(X))`, computed by one call to `Store.add_and_read`.

    X is the residual, y a sublayer's output and z the next sublayer's input (equations 2, 3, 15 and
    16 of the RMT paper).
    """

    def start(
        self, store: Store, state: Float[Array, "key_batch seq *shape"], y: Written
    ) -> tuple[Any, Written]:
        """Return the residual before the first write, and the output that is written first."""
        return store.hold(state), y

    def advance(
        self, store: Store, state: Any, y: Written, site: nnx.Module | StackSlice, index: Index
    ) -> tuple[Any, Read]:
        """Write the previous output y; return the new residual and the next sublayer's input."""
        return store.add_and_read(state, y, site)
