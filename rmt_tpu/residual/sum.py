"""The plain residual stream: everything that was written, added up."""

from flax import nnx


class Sum(nnx.Module):
    """`X += write(y); z = read(norm(X))` (equations 2, 3, 15 and 16), in one step of the store."""

    def start(self, store, state, y):
        """State before the first write, and that write, as the loop over layers carries them."""
        return store.hold(state), y

    def advance(self, store, state, y, site, index):
        """Put what the last sublayer produced; give what the next one reads."""
        return store.add_and_read(state, y, site)
