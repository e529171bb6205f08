"""Calls of an implementation of the key-vector ops, array by array: of a site, or half of one."""

from types import ModuleType

from pallas_kernels.key_vector.interface import Site


class Halves:
    def __init__(self, module: ModuleType):
        self._module = module

    def unsupported(self, *arrays):
        """Of a site's forward pass."""
        return self._module.unsupported("forward", Site(*arrays))

    def store(self, X, w, y, **options):
        return self._module.forward(Site(X, w, y), **options).residual

    def norm_retrieve(self, X, gain, r, **options):
        return self._module.forward(Site(X, gain=gain, read_keys=r), **options)[1:]

    def store_norm_retrieve(self, X, w, y, gain, r, **options):
        return tuple(self._module.forward(Site(X, w, y, gain, r), **options))

    def backward(self, X, statistics, w, y, gain, r, dX, dz, means=None, **options):
        site = Site(X, w, y, gain, r)
        return self._module.backward(site, statistics, dX, dz, means, **options)

    def read_backward(self, X, statistics, gain, r, dz, means=None, **options):
        site = Site(X, gain=gain, read_keys=r)
        g = self._module.backward(site, statistics, None, dz, means, **options)
        assert g.data is None and g.store_keys is None
        return g.residual, g.gain, g.read_keys

    def store_backward(self, dX, w, y, **options):
        g = self._module.backward(Site(None, w, y), None, dX, None, **options)
        assert g.gain is None and g.read_keys is None
        return g.store_keys, g.data
