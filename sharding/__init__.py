"""Meshes of devices, and how arrays lie on them. Imports jax only."""

from sharding.mesh import AXES, MeshError, make_mesh
from sharding.per_device import (
    add_up,
    axis_index,
    axis_size,
    gather,
    own_part,
    per_device,
    scatter_sum,
    swap,
    total,
)
from sharding.rules import RULES, batch_sharding, check_divides, parameter_specs, replicated
from sharding.schedule import Schedule

__all__ = [
    "AXES",
    "RULES",
    "MeshError",
    "Schedule",
    "add_up",
    "axis_index",
    "axis_size",
    "batch_sharding",
    "check_divides",
    "gather",
    "make_mesh",
    "own_part",
    "parameter_specs",
    "per_device",
    "replicated",
    "scatter_sum",
    "swap",
    "total",
]
