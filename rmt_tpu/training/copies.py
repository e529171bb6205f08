"""Copies of weights in the compute dtype, updated whenever the optimizer changes the weights.

A train step reads the copies in place of the weights. It therefore need not cast all weights first,
and gradients with respect to bfloat16 copies need half the memory of float32 gradients. Copies are
computed from the weights, so checkpoints do not contain them.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from rmt_tpu.decoder import Decoder
from rmt_tpu.layers.parameters import metadata

# Maps the path of each copied weight to its copy, or to the shape and dtype of the copy.
Copies = dict[str, Any]


def copied_paths(abstract: Decoder, dtype: jnp.dtype) -> frozenset[str]:
    """Return the paths of the weights that a train step can read as copies in `dtype`.

    These are the weights of layers. The forward pass reads each weight of a layer once, so the
    gradient of its copy is not a sum of rounded terms. The set is empty if `dtype` has at least 32
    bits, because copies would then save nothing.
    """
    if dtype.itemsize >= jnp.dtype(jnp.float32).itemsize:
        return frozenset()
    axes, exact = (dict(leaves_by_path(metadata(abstract, name))) for name in ("axes", "exact"))
    roles = leaves_by_path(metadata(abstract, "role"))
    return frozenset(
        path
        for path, role in roles
        if role == "hidden" and axes[f"{path}[0]"] == "layer" and not exact[path]
    )


def make_copies(params: Any, paths: frozenset[str], dtype: jnp.dtype) -> Copies:
    """Return a copy in `dtype` of each weight in `paths`, as a dict from path to copy."""
    return {path: x.astype(dtype) for path, x in leaves_by_path(params) if path in paths}


def substitute_copies(params: Any, copies: Copies) -> Any:
    """Return the parameters, with each weight that has a copy replaced by its copy."""
    name = jax.tree_util.keystr
    return jax.tree_util.tree_map_with_path(lambda at, x: copies.get(name(at), x), params)


def leaves_by_path(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf in a tree."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), leaf
