"""Meshes of devices, and how arrays lie on them. Imports jax only."""

from sharding.mesh import MeshError, make_mesh
from sharding.rules import batch_sharding, check_batch_size, parameter_shardings, replicated

__all__ = [
    "MeshError",
    "batch_sharding",
    "check_batch_size",
    "make_mesh",
    "parameter_shardings",
    "replicated",
]
