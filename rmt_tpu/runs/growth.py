"""Growth of a residual matrix: a checkpoint with K slots opens as the same function with K' > K.

A token's residual `X [K, D_v]` becomes `X' = [X; A X] [K', D_v]`. The J = K' - K new slots hold the
old slots multiplied by a fixed matrix `A [J, K]` with

    A^T A = (J / K) I        1_J^T A = (J / K) 1_K^T        A 1_K = 1_J

so that X' has the mean and the mean square of X, and every norm divides by the same number, epsilon
included. Empty slots would change both, and no gain can undo their effect on the mean. Writes are
linear in the storage keys, so the storage keys are multiplied by A like the residual. All
parameters that read or score the residual have zeros in the new slots:

    w' = [w, w A^T]    r' = [r, 0]    gain' = [gain, 1]    query' = [query, 0]    (depth attention)

Such an A needs J >= K and exists for no smaller J: `||A X||^2` must be a multiple of `||X||^2` for
every X, so A has rank K.

The model uses the new slots from the first step on: the gradient of r' there is d_z times the
normed `A X`, which is as large as the gradient in the old slots. Once r' has moved, w' and the gain
move too.

Adam's moments of a new entry are
- first moment 0, because no gradient has acted on it yet. `mu A^T` for w' would be the gradient
  through reads that the new slots do not have.
- second moment `nu (A * A)^T`, a mean of the moments of the old slots with weights that add up to 1
  on average. It is the expected square of `A g`. With zeros, because Adam's step count is that of
  the run, updates would be as large as the learning rate for any gradient, and up to
  `(1 - b1) / sqrt(1 - b2)` times it.

Depth attention with `num_heads` parts of the residual grows each part by an A of its own.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float

from rmt_tpu.checkpoint import Checkpointer, StoredArray
from rmt_tpu.config import ModelConfig, overrides
from rmt_tpu.errors import UsageError

New = Literal["turned", "zeros", "ones"]

# Maps the name of a parameter of a site or the embedding to its axes of size D_k, counted from the
# last, and to the content of new slots.
KEYED: dict[str, tuple[tuple[int, ...], New]] = {
    "store_keys": ((-1,), "turned"),
    "position_keys": ((-1,), "turned"),
    "read_keys": ((-1,), "zeros"),
    "gain": ((-2,), "ones"),
    "query": ((-2,), "zeros"),
    "key_gain": ((-2,), "ones"),
    # The matrix of an "input" query is [D_k D_v, D_k D_v], seen here as [D_k, D_v, D_k, D_v].
    "project": ((-4, -2), "zeros"),
}
# Fields that may differ between the models: D_k, and how numbers are stored and recomputed.
_FREE = ("store", "compute_dtype", "remat")


def grow(tree: Any, before: ModelConfig, after: ModelConfig) -> Any:
    """Grow `tree` from `before.store.key_dim` slots to `after.store.key_dim` slots.

    Args:
      tree: numpy arrays: parameters as `nnx.to_pure_dict` has them, stacked in any way, or a
        TrainState with them and Adam's moments.
      before: the model of `tree`.
      after: the same model with another size of the residual.

    Returns:
      The same tree in the same dtypes, with the new slots after the old ones (within each head of
      depth attention). Arrays without an axis of D_k are returned unchanged.

    Raises:
      UsageError: the models differ in more than D_k, or no exact growth to that size is known.
    """
    slots = _Slots(before, after)
    return jax.tree_util.tree_map_with_path(slots.grown, tree)


def restore_grown(
    checkpoints: Checkpointer,
    like: Any,
    model: ModelConfig,
    step: int | None = None,
    *,
    partial: bool = False,
) -> tuple[int, Any, dict]:
    """Restore a checkpoint like `checkpoints.restore`, also if it has a smaller D_k than `model`.

    Every process reads arrays with an axis of D_k whole, which are small compared with the others,
    and grows them on its host; each device gets its part of them. The other arrays are read as
    usual, so the meshes of the checkpoint and of `like` may differ. The D_k of a step is found from
    its arrays: steps before and after a growth may be in one folder.

    Args:
      checkpoints: the run's checkpoints.
      like: the argument `like` of `Checkpointer.restore`, for `model`.
      model: the model whose D_k the result has. A step that has it already is just restored.
      step: step of the checkpoint; None is the newest undamaged one.
      partial: the argument `partial` of `Checkpointer.restore`.

    Returns:
      The step, the grown tree, and the meta it was saved with.

    Raises:
      UsageError: see `grow` and `Checkpointer.restore`.
      RunError: see `Checkpointer.restore`.
    """
    slots: _Slots | None = None

    def ungrown(stored: Mapping[str, StoredArray]) -> Any:
        nonlocal slots
        slots, size = None, key_dim(stored)
        if not model.store.has_keys or size in (None, model.store.key_dim):
            return like
        store = dataclasses.replace(model.store, key_dim=size)
        slots = _Slots(dataclasses.replace(model, store=store), model)
        return jax.tree_util.tree_map_with_path(slots.ungrown, like)

    step, tree, meta = checkpoints.restore(ungrown, step, partial=partial)
    if slots is None:
        return step, tree, meta
    place = lambda path, leaf, read: _placed(slots.grown(path, read), leaf, read)
    return step, jax.tree_util.tree_map_with_path(place, like, tree), meta


def key_dim(stored: Mapping[str, StoredArray]) -> int | None:
    """Return D_k of a checkpoint's model, given `Checkpointer.arrays`; None if it has no keys."""
    keys = stored.get("params/final_site/store_keys")
    return keys.shape[-1] if keys and len(keys.shape) == 2 else None


def turn(slots: int, new: int) -> Float[np.ndarray, "new slots"]:
    """Return the matrix A as float64; it depends on the sizes only.

    A maps the mean direction to the mean direction, and everything orthogonal to it to directions
    orthogonal to the mean: `A = 1 1^T / K + sqrt(J / K) Q P^T` with orthonormal columns
    `Q [J, K - 1]` and `P [K, K - 1]`, each of which adds up to 0.
    """
    rng = np.random.default_rng((slots, new))

    def centred(size: int) -> np.ndarray:
        columns = rng.standard_normal((size, slots - 1))
        return np.linalg.qr(columns - columns.mean(axis=0))[0]

    return 1 / slots + math.sqrt(new / slots) * centred(new) @ centred(slots).T


class _Slots:
    """The slots of two models, in `parts` of equal size that grow separately."""

    def __init__(self, before: ModelConfig, after: ModelConfig):
        _check(before, after)
        self.parts = getattr(after.mixer, "num_heads", 1)
        self.size, self.size_after = before.store.key_dim, after.store.key_dim
        self.vector_dim = after.data_shape[1]
        part, part_after = self.size // self.parts, self.size_after // self.parts
        self.turn = turn(part, part_after - part) if part_after > part else np.zeros((0, part))

    def ungrown(self, path: Sequence[Any], leaf: Any) -> Any:
        """Return what to restore for a leaf of the grown model: a host's array if it has slots."""
        if not _is_keyed(path):
            return leaf
        axes, _ = KEYED[_name(path)]
        shape = list(self._with_slots(path, leaf.shape, self.size_after))
        for axis in axes:
            shape[axis] = self.size
        # Only the shape and dtype matter, so the array repeats a single number.
        return np.broadcast_to(np.zeros((), leaf.dtype), self._stored(path, shape))

    def grown(self, path: Sequence[Any], x: Any) -> Any:
        """Return an array of the smaller model grown to the larger one."""
        if not _is_keyed(path):
            return x
        axes, new = KEYED[_name(path)]
        moment = next((_key(part) for part in path if _key(part) in ("mu", "nu")), None)
        shape = self._with_slots(path, x.shape, self.size)
        y = np.asarray(x, np.float64).reshape(shape)
        for axis in axes:
            y = self._extended(y, axis, {"mu": "zeros", "nu": "squared"}.get(moment, new))
        return y.reshape(self._stored(path, y.shape)).astype(x.dtype)

    def _extended(self, x: np.ndarray, axis: int, new: str) -> np.ndarray:
        """Return `x` with new slots after the old ones of each part."""
        x = np.moveaxis(x, axis, -1)
        old = x.reshape(*x.shape[:-1], self.parts, -1)
        match new:
            case "turned":
                more = old @ self.turn.T
            case "squared":
                more = old @ np.square(self.turn).T
            case "zeros" | "ones":
                more = np.full((*old.shape[:-1], len(self.turn)), float(new == "ones"))
        y = np.concatenate([old, more], axis=-1)
        return np.moveaxis(y.reshape(*x.shape[:-1], -1), -1, axis)

    def _with_slots(self, path: Sequence[Any], shape: Sequence[int], size: int) -> tuple[int, ...]:
        if _name(path) != "project":
            return tuple(shape)
        return (*shape[:-2], *2 * (size, self.vector_dim))

    def _stored(self, path: Sequence[Any], shape: Sequence[int]) -> tuple[int, ...]:
        if _name(path) != "project":
            return tuple(shape)
        return (*shape[:-4], math.prod(shape[-4:-2]), math.prod(shape[-2:]))


def _check(before: ModelConfig, after: ModelConfig) -> None:
    if not (before.store.has_keys and after.store.has_keys):
        raise UsageError("only the residual of a matrix store has a D_k that can be grown")
    old, new = overrides.to_json(before), overrides.to_json(after)
    different = overrides.differences(old, new | {name: old[name] for name in _FREE}, "model")
    if different:
        raise UsageError(f"a checkpoint grows in D_k alone: {'; '.join(different)}")
    size, wanted = before.store.key_dim, after.store.key_dim
    parts = getattr(after.mixer, "num_heads", 1)
    if wanted != size and size % parts:
        raise UsageError(
            f"model.store.key_dim={size} cannot be grown with mixer.num_heads={parts}, whose parts "
            "end within a slot; legal: no growth"
        )
    if wanted != size and (wanted < 2 * size or wanted % parts):
        multiples = f" in multiples of {parts}" if parts > 1 else ""
        raise UsageError(
            f"model.store.key_dim={wanted} cannot be the same function as the checkpoint's {size}; "
            f"legal: {size}, or {2 * size} and more{multiples}"
        )


def _placed(grown: Any, like: Any, read: Any) -> Any:
    """Return a grown array as the same kind of array as `like`, with the sharding of `like`."""
    if grown is read or isinstance(like, np.ndarray):
        return grown
    if not getattr(like, "committed", True) or like.sharding is None:
        return jax.device_put(grown)
    return jax.make_array_from_callback(grown.shape, like.sharding, lambda index: grown[index])


def _is_keyed(path: Sequence[Any]) -> bool:
    # Cores have gains of their own, over heads.
    return bool(path) and _name(path) in KEYED and "core" not in map(_key, path)


def _name(path: Sequence[Any]) -> str:
    return _key(path[-1])


def _key(part: Any) -> str:
    return jax.tree_util.keystr((part,), simple=True)
