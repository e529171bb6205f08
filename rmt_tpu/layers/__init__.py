"""Layers that map input arrays to output arrays and do not depend on the kind of residual."""
