"""The plain residual stream: everything that was written, added up."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import Index, Store, Written


class Sum(nnx.Module):
    """`X += write(y); z = read(norm(X))` (equations 2, 3, 15 and 16), in one step of the store."""

    def start(
        self, store: Store, state: Float[Array, "group seq *shape"], y: Written
    ) -> tuple[Any, Written]:
        """State before the first write, and that write, as the loop over layers carries them."""
        return store.hold(state), y

    def advance(
        self, store: Store, state: Any, y: Written, site: nnx.Module, index: Index
    ) -> tuple[Any, Read]:
        """Put what the last sublayer produced; give what the next one reads."""
        return store.add_and_read(state, y, site)
