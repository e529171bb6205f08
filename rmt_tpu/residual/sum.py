"""The plain residual stream: everything that was written, added up."""


class Sum:
    """`X += write(y); z = read(norm(X))` (equations 2, 3, 15 and 16), in one step of the store."""

    def __init__(self, store):
        self.store = store

    def start(self, state, y):
        """State before the first write, and that write, as the loop over layers carries them."""
        return self.store.hold(state), y

    def advance(self, state, y, site):
        """Put what the last sublayer produced; give what the next one reads."""
        return self.store.add_and_read(state, y, site)
