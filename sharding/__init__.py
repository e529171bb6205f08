"""Meshes of devices, and the sharding of arrays over them.

The package depends only on jax, and imports jax only when devices are used. Names that configs and
their errors need are imported with the package. All other names are loaded on first use.
"""

import importlib

from sharding.errors import MeshError, RmtError, divisors, nearest_multiples
from sharding.spec import AXES, parse_mesh

_ON_DEVICES = {
    "mesh": ("make_mesh", "mesh_sizes"),
    "per_device": (
        "add_up",
        "axis_index",
        "axis_size",
        "gather",
        "own_part",
        "per_device",
        "scatter_sum",
        "swap",
        "token_axes",
        "total",
    ),
    "rules": (
        "CACHE_RULES",
        "RULES",
        "batch_sharding",
        "check_divides",
        "check_experts",
        "check_keys",
        "parameter_specs",
        "replicated",
        "used_axes",
    ),
    "schedule": ("Schedule",),
}
_NAMES = [name for names in _ON_DEVICES.values() for name in names]

__all__ = [
    "AXES",
    "MeshError",
    "RmtError",
    "divisors",
    "nearest_multiples",
    "parse_mesh",
    *_NAMES,
]


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'sharding' has no attribute {name!r}")
    # Set all names together. The function `per_device` replaces the submodule with the same name,
    # so a later import through the package would not find the submodule.
    found = {m: importlib.import_module(f"sharding.{m}") for m in _ON_DEVICES}
    globals().update({n: getattr(found[m], n) for m, names in _ON_DEVICES.items() for n in names})
    return globals()[name]


def __dir__():
    return __all__
