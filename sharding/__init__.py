"""Meshes of devices, and how arrays lie on them. Imports jax only."""

from sharding.local import add_up, on_mesh, over_batch
from sharding.mesh import MeshError, make_mesh
from sharding.rules import batch_sharding, check_batch_size, parameter_shardings, replicated

__all__ = [
    "MeshError",
    "add_up",
    "batch_sharding",
    "check_batch_size",
    "make_mesh",
    "on_mesh",
    "over_batch",
    "parameter_shardings",
    "replicated",
]
