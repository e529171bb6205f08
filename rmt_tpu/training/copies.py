"""Copies of weights in the compute dtype, made when the optimizer changes the weights.

A step reads the copies in place of the weights: it need not begin by casting all weights, and the
gradients of copies take half the memory. Copies follow from the weights alone, so checkpoints do
not contain them.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from rmt_tpu.decoder import Decoder
from rmt_tpu.layers.parameters import metadata

# Maps the path of each weight that has a copy to the copy, or to the copy's shape.
Copies = dict[str, Any]


def copied(abstract: Decoder, dtype: jnp.dtype) -> frozenset[str]:
    """Return the paths of the weights of which a step needs only a copy in `dtype`.

    These are weights of layers. A pass reads each of them once, so that no rounded terms add up in
    its gradient. The set is empty if `dtype` has at least 32 bits.
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
    """Return copies in `dtype` of the weights at these paths."""
    return {path: x.astype(dtype) for path, x in named(params) if path in paths}


def as_read(params: Any, copies: Copies) -> Any:
    """Return the parameters with each weight that has a copy replaced by it."""
    name = jax.tree_util.keystr
    return jax.tree_util.tree_map_with_path(lambda at, x: copies.get(name(at), x), params)


def named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a tree with its path."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), leaf
