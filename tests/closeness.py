"""How close arrays are to what is wanted, and trees of arrays."""

import math

import jax
import numpy as np


def float64(tree):
    """The same tree of NumPy arrays, which hold any float exactly."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def errors(got, want) -> dict[str, float]:
    """Of each leaf, by its path: the largest |got - want| relative to the largest |want|.

    NaN if one of the two has a NaN, infinite if all that is wanted is zero and not all is, and 0
    for an array without elements. What the trees are made of may differ, such as a list and a
    tuple; AssertionError if the number of leaves or a shape does.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(want)
    leaves = jax.tree.leaves(got)
    assert len(leaves) == len(paths), f"{len(leaves)} leaves and not {len(paths)}"
    found = {}
    for g, (path, w) in zip(leaves, paths, strict=True):
        name = jax.tree_util.keystr(path)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert g.shape == w.shape, f"{name} has shape {g.shape} and not {w.shape}"
        largest = np.max(np.abs(w), initial=0)
        found[name] = float(np.max(np.abs(g - w), initial=0))
        if found[name]:
            found[name] = found[name] / float(largest) if largest else found[name] * math.inf
    return found


def largest_error(got, want) -> float:
    """The largest of all leaves' `errors`; NaN if one is."""
    return float(np.max([*errors(got, want).values()], initial=0))


def assert_close(got, want, tolerance: float) -> None:
    """No leaf is off by more than `tolerance`, relative to the largest value wanted of it."""
    too_large = {name: e for name, e in errors(got, want).items() if not e <= tolerance}
    assert not too_large, f"off by more than {tolerance:g}: {too_large}"
