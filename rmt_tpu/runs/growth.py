"""Growth of a residual matrix: a trained model gets a larger D_k and computes the same function.

The rows of a token's residual are called slots. Growth from K to K' > K slots maps the residual `X
[K, D_v]` to `X' = [X; A X] [K', D_v]`. The J = K' - K new slots are the old slots multiplied by a
fixed matrix `A [J, K]` with

    A^T A = (J / K) I        1_J^T A = (J / K) 1_K^T        A 1_K = 1_J

Therefore X' has the same mean and mean square as X, and every norm divides by the same number,
including epsilon. Slots of zeros would change both, and no gain could undo their effect on the
mean. Writes are linear in the storage keys w, so A is applied to the storage keys in the same way
as to the residual. Read keys r, gains and the queries of depth attention get new entries that keep
the function unchanged:

    w' = [w, w A^T]    r' = [r, 0]    gain' = [gain, 1]    query' = [query, 0]

Such an A exists only for J >= K, because its columns are orthogonal.

The model learns to use the new slots from the first step onwards. In the new slots, the gradient of
r' is the gradient of the read vectors times the normed `A X`. It is as large as in the old slots.
Once r' has changed, w' and the gain receive gradients too.

Adam's moments for new entries are initialised as follows:

- The first moment is 0, because no gradient has acted on the entry yet. The alternative `mu A^T`
  for w' would be the gradient through reads that the new slots do not have.
- The second moment is `nu (A * A)^T`, where nu are the second moments of the old slots. It is the
  expected square of `A g` for a gradient g. If it were 0, any gradient, however small, would cause
  updates as large as the learning rate. They could even be `(1 - b1) / sqrt(1 - b2)` times as
  large, because Adam's step count continues from the run.

If depth attention splits the residual into `num_heads` parts, each part grows separately, with the
matrix A for its size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float

from rmt_tpu.checkpoint import Checkpointer, StoredArray
from rmt_tpu.config import ModelConfig
from rmt_tpu.errors import UsageError

SlotContent = Literal["turned", "zeros", "ones"]

# This dict has the parameters with axes of size D_k. A value has these axes, as negative indices,
# and the content of the new slots along them: "zeros", "ones", or the old slots times the matrix A
# ("turned").
KEY_AXES: dict[str, tuple[tuple[int, ...], SlotContent]] = {
    "store_keys": ((-1,), "turned"),
    "position_keys": ((-1,), "turned"),
    "read_keys": ((-1,), "zeros"),
    "gain": ((-2,), "ones"),
    "query": ((-2,), "zeros"),
    "key_gain": ((-2,), "ones"),
    # The projection of an "input" query has shape [D_k D_v, D_k D_v], and is reshaped here to [D_k,
    # D_v, D_k, D_v].
    "project": ((-4, -2), "zeros"),
    # The first projections of MUDD's networks have shape [D_k, D_v, n].
    "project_in": ((-3,), "zeros"),
}


def restore_grown(
    checkpoints: Checkpointer,
    like: Any,
    model: ModelConfig,
    step: int | None = None,
    *,
    partial: bool = False,
) -> tuple[int, Any, dict]:
    """Restore a checkpoint as `Checkpointer.restore` does, growing it if its D_k is smaller.

    Every process reads the whole of each array with an axis of size D_k, grows it on its host, and
    puts shards of it on its devices. These arrays are small. Other arrays are read as usual. The
    meshes of the checkpoint and of `like` may differ. A folder may have checkpoints from before and
    after a growth. New slots follow the old slots, separately in each head of depth attention.

    Args:
      checkpoints: the run's checkpoints.
      like: the argument `like` of `Checkpointer.restore`, for `model`. Its parameters are those of
        `nnx.to_pure_dict`, stacked in any way.
      model: the config of the model to restore. The checkpoint's model differs from it at most in
        D_k. A checkpoint with the same D_k is restored without growth.
      step: step of the checkpoint; None is the newest undamaged one.
      partial: the argument `partial` of `Checkpointer.restore`.

    Returns:
      The step, the grown tree, and the metadata that the checkpoint was saved with.

    Raises:
      UsageError: no exact growth from the checkpoint's D_k is known, or see `Checkpointer.restore`.
      RunError: see `Checkpointer.restore`.
    """
    slots: _Slots | None = None

    def tree_before_growth(stored: Mapping[str, StoredArray]) -> Any:
        nonlocal slots
        slots, size = None, key_dim(stored)
        if not model.store.has_keys or size in (None, model.store.key_dim):
            return like
        slots = _Slots(model, size)
        return jax.tree_util.tree_map_with_path(slots.leaf_before_growth, like)

    step, tree, meta = checkpoints.restore(tree_before_growth, step, partial=partial)
    if slots is None:
        return step, tree, meta
    place = lambda path, leaf, read: _put_like(slots.grow_leaf(path, read), leaf, read)
    return step, jax.tree_util.tree_map_with_path(place, like, tree), meta


def key_dim(stored: Mapping[str, StoredArray]) -> int | None:
    """Return the D_k of a checkpoint, from its `Checkpointer.arrays`, or None if it has no keys."""
    keys = stored.get("params/final_site/store_keys")
    return keys.shape[-1] if keys and len(keys.shape) == 2 else None


def growth_matrix(slots: int, new: int) -> Float[np.ndarray, "new slots"]:
    """Return the matrix A for K = `slots` and J = `new` in float64; it depends only on the sizes.

    A maps the vector of ones to the vector of ones, and a vector whose entries sum to 0 to another
    such vector: `A = 1 1^T / K + sqrt(J / K) Q P^T`, where `Q [J, K - 1]` and `P [K, K - 1]` have
    orthonormal columns whose entries sum to 0.
    """
    rng = np.random.default_rng((slots, new))

    def centred(size: int) -> np.ndarray:
        columns = rng.standard_normal((size, slots - 1))
        return np.linalg.qr(columns - columns.mean(axis=0))[0]

    return 1 / slots + math.sqrt(new / slots) * centred(new) @ centred(slots).T


class _Slots:
    """The conversion of arrays from a model with a smaller D_k to the same model with a larger one.

    The slots (rows of a token's residual matrix) are split into `parts` of equal size, the heads of
    attention over depth. Each part grows separately.

    Args:
      model: the config of the model with the larger D_k.
      size: the smaller D_k.

    Raises:
      UsageError: no exact growth from `size` is known.
    """

    def __init__(self, model: ModelConfig, size: int):
        self.parts = getattr(model.mixer, "num_heads", 1)
        self.size, self.new_size = size, model.store.key_dim
        _check(self.size, self.new_size, self.parts)
        self.vector_dim = model.data_shape[1]
        part, new_part = self.size // self.parts, self.new_size // self.parts
        self.matrix = growth_matrix(part, new_part - part)

    def leaf_before_growth(self, path: Sequence[Any], leaf: Any) -> Any:
        """Return the array that must be restored before a leaf of the grown model can be computed.

        For a leaf with an axis of size D_k, this is a numpy array with the old D_k. Other leaves
        are returned unchanged.
        """
        if not _has_key_axis(path):
            return leaf
        axes, _ = KEY_AXES[_name(path)]
        shape = list(self._split_projection_axes(path, leaf.shape, self.new_size))
        for axis in axes:
            shape[axis] = self.size
        # Only the shape and dtype are used, so a broadcast zero is enough.
        return np.broadcast_to(np.zeros((), leaf.dtype), self._merge_projection_axes(path, shape))

    def grow_leaf(self, path: Sequence[Any], x: Any) -> Any:
        """Return the array of the new model that corresponds to an array of the old model."""
        if not _has_key_axis(path):
            return x
        axes, new = KEY_AXES[_name(path)]
        moment = next((_key(part) for part in path if _key(part) in ("mu", "nu")), None)
        shape = self._split_projection_axes(path, x.shape, self.size)
        y = np.asarray(x, np.float64).reshape(shape)
        for axis in axes:
            y = self._append_slots(y, axis, {"mu": "zeros", "nu": "squared"}.get(moment, new))
        return y.reshape(self._merge_projection_axes(path, y.shape)).astype(x.dtype)

    def _append_slots(self, x: np.ndarray, axis: int, new: str) -> np.ndarray:
        """Return `x` with new slots along `axis`, which follow the old slots of each part.

        Args:
          x: an array with an axis over slots.
          axis: this axis.
          new: what the new slots contain: "zeros", "ones", the growth matrix times the old slots
            ("turned"), or the squared matrix times the old slots ("squared").
        """
        x = np.moveaxis(x, axis, -1)
        old = x.reshape(*x.shape[:-1], self.parts, -1)
        match new:
            case "turned":
                more = old @ self.matrix.T
            case "squared":
                more = old @ np.square(self.matrix).T
            case "zeros" | "ones":
                more = np.full((*old.shape[:-1], len(self.matrix)), float(new == "ones"))
        y = np.concatenate([old, more], axis=-1)
        return np.moveaxis(y.reshape(*x.shape[:-1], -1), -1, axis)

    def _split_projection_axes(
        self, path: Sequence[Any], shape: Sequence[int], size: int
    ) -> tuple[int, ...]:
        if _name(path) != "project":
            return tuple(shape)
        return (*shape[:-2], *2 * (size, self.vector_dim))

    def _merge_projection_axes(self, path: Sequence[Any], shape: Sequence[int]) -> tuple[int, ...]:
        if _name(path) != "project":
            return tuple(shape)
        return (*shape[:-4], math.prod(shape[-4:-2]), math.prod(shape[-2:]))


def _check(size: int, wanted: int, parts: int) -> None:
    if size % parts:
        raise UsageError(
            f"model.store.key_dim={size} cannot grow with model.mixer.num_heads={parts}, because "
            f"{size} is not a multiple of {parts}; legal: {size}"
        )
    if wanted < 2 * size or wanted % parts:
        multiples = f" in multiples of {parts}" if parts > 1 else ""
        raise UsageError(
            f"model.store.key_dim={wanted} cannot compute the same function as the "
            f"checkpoint's {size}; "
            f"legal: {size}, or {2 * size} and more{multiples}"
        )


def _put_like(grown: Any, like: Any, read: Any) -> Any:
    """Return a grown array as a numpy or jax array like `like`, with the sharding of `like`."""
    if grown is read or isinstance(like, np.ndarray):
        return grown
    if not getattr(like, "committed", True) or like.sharding is None:
        return jax.device_put(grown)
    return jax.make_array_from_callback(grown.shape, like.sharding, lambda index: grown[index])


def _has_key_axis(path: Sequence[Any]) -> bool:
    # A gain within a core (attention or feed-forward sublayer) has no axis of size D_k.
    return bool(path) and _name(path) in KEY_AXES and "core" not in map(_key, path)


def _name(path: Sequence[Any]) -> str:
    return _key(path[-1])


def _key(part: Any) -> str:
    return jax.tree_util.keystr((part,), simple=True)
