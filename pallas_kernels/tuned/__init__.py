"""Look-up of kernels' block sizes in tables, one per device kind and kernel.

In this package, a kernel's "blocks" are its block sizes and other tunable parameters.
"""

from pallas_kernels.tuned.lookup import (
    KERNELS,
    READERS,
    VARIABLE,
    Blocks,
    Kernel,
    Look,
    clear_caches,
    collecting,
    field_types,
    fields,
    fingerprint,
    look_up,
    package_table,
    register,
    shipped,
    tuned,
    usable,
    user_path,
    user_table,
    winner,
)
from pallas_kernels.tuned.table import Entry, Items, Source, Table, Value, items, parse

__all__ = [
    "KERNELS",
    "READERS",
    "VARIABLE",
    "Blocks",
    "Entry",
    "Items",
    "Kernel",
    "Look",
    "Source",
    "Table",
    "Value",
    "collecting",
    "field_types",
    "fields",
    "fingerprint",
    "items",
    "look_up",
    "package_table",
    "parse",
    "clear_caches",
    "register",
    "shipped",
    "tuned",
    "usable",
    "user_path",
    "user_table",
    "winner",
]
