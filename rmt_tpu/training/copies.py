"""Copies of weights in the compute dtype, made as the optimizer changes these.

A step reads them in place of the weights: it does not begin with a cast of them all, and their
gradients take half the memory. They add nothing to what a run is: the weights give them, and no
checkpoint has them.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from rmt_tpu.decoder import Decoder
from rmt_tpu.layers.parameters import metadata

# Arrays, or their shapes, of each weight that has one under its path.
Copies = dict[str, Any]


def copied(abstract: Decoder, dtype: jnp.dtype) -> frozenset[str]:
    """Paths of the weights of which a step needs nothing but a copy in `dtype`.

    Those of layers: each is read once in a pass, so that its gradient is no sum of roundings.
    """
    if dtype.itemsize >= jnp.dtype(jnp.float32).itemsize:
        return frozenset()
    axes, exact = (dict(named(metadata(abstract, name))) for name in ("axes", "exact"))
    roles = named(metadata(abstract, "role"))
    return frozenset(
        path
        for path, role in roles
        if role == "hidden" and axes[f"{path}[0]"] == "layer" and not exact[path]
    )


def copies_of(params: Any, paths: frozenset[str], dtype: jnp.dtype) -> Copies:
    """Those of the weights at these paths."""
    return {path: x.astype(dtype) for path, x in named(params) if path in paths}


def as_read(params: Any, copies: Copies) -> Any:
    """The parameters with copies in place of the weights that they are of."""
    name = jax.tree_util.keystr
    return jax.tree_util.tree_map_with_path(lambda at, x: copies.get(name(at), x), params)


def named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Leaves under their paths."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), leaf
