"""How parameters are made, named, drawn and stacked."""

import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key

from rmt_tpu.config import Role

Module = TypeVar("Module", bound=nnx.Module)

# Axes of many matrices in one parameter.
OF_MANY = ("layer", "node", "expert", "projection", "stream")


class Seed(NamedTuple):
    """The random seed of one parameter: of the run's seed, its sublayer's number and its own name.

    So weights of one name, place and shape are the same ones in all models of a seed, whatever else
    these have and however their layers are stacked. A name is the path of attributes that lead to
    the parameter from the model, or within layers from its sublayer: `seed / "core" / "w_1"`.

    Attributes:
      base: of the seed, and of the numbers told so far.
      name: the path so far.
    """

    base: Key[Array, ""]
    name: str = ""

    def __truediv__(self, attribute: str) -> "Seed":
        return self._replace(name=f"{self.name}/{attribute}")

    def numbered(self, index: Int[Array, ""] | int) -> "Seed":
        """Returns the seed of the sublayer with this number, which may be traced."""
        return self._replace(base=jax.random.fold_in(self.base, index))

    def key(self) -> Key[Array, ""]:
        """Returns the key of this name's one draw."""
        # Not Python's hash, which differs from process to process.
        return jax.random.fold_in(self.base, zlib.crc32(self.name.encode()))


def parameter(
    seed: Seed,
    shape: tuple[int, ...],
    *,
    std: float | jax.Array,
    role: Role,
    axes: tuple,
    fan_in: int | None = None,
    exact: bool = False,
) -> nnx.Param:
    """A float32 parameter drawn from N(0, std^2).

    Args:
      seed: with the parameter's own name.
      shape: of the parameter, without the axis that `stack` adds.
      std: standard deviation; may be traced, so that it can differ between stacked layers.
      role: what the optimizer goes by for weight decay and width-scaled learning rates.
      axes: logical names of the axes, for sharding rules.
      fan_in: how many numbers of a token a product with it adds up; muP's rate goes by it. None is
        the size of the first axis of a "hidden" weight's matrix, and of others 1: no such sum.
      exact: whether it is read as it is; other "hidden" weights are read in the compute dtype.
    """
    if fan_in is None:
        of_matrix = (size for size, axis in zip(shape, axes, strict=True) if axis not in OF_MANY)
        fan_in = next(of_matrix) if role == "hidden" else 1
    if isinstance(std, float) and std == 0:
        value = jnp.zeros(shape, jnp.float32)
    else:
        # Behind a barrier: XLA would merge a std that it knows with the constants of the draw, and
        # round otherwise than where std is traced.
        normal = jax.random.normal(seed.key(), shape, jnp.float32)
        value = std * jax.lax.optimization_barrier(normal)
    return nnx.Param(value, role=role, axes=axes, fan_in=fan_in, exact=exact)


def storage_scale(num_sublayers: int) -> float:
    """`1 / sqrt(2L)`: weights that write to the residual start smaller by this."""
    return num_sublayers**-0.5


def gain(shape: tuple[int, ...], axes: tuple) -> nnx.Param:
    """A norm's gain: ones."""
    return nnx.Param(jnp.ones(shape, jnp.float32), role="gain", axes=axes)


def read_keys(seed: Seed, count: int, key_dim: int, *, scale: float | jax.Array = 1.0) -> nnx.Param:
    """`count` key vectors of size `key_dim` (D_k) that read, r [count, D_k].

    `z[p, v] = sum_k r[p, k] X[k, v]` adds up D_k numbers of a residual that is normed to order 1:
    of order 1 for r of `1 / sqrt(D_k)`. What Adam adds to r[p, k] has the sign of a gradient that
    is itself a sum over X[k, v], so that its D_k terms go along: by rate r moves z by `rate * D_k`.
    """
    axes, std = ("head", "key"), scale * key_dim**-0.5
    return parameter(seed, (count, key_dim), std=std, role="keys", axes=axes, fan_in=key_dim)


def store_keys(
    seed: Seed, count: int, key_dim: int, *, scale: float | jax.Array = 1.0
) -> nnx.Param:
    """`count` (R) key vectors of size `key_dim` (D_k) that write, w [R, D_k].

    `X[k, v] += sum_r w[r, k] y[r, v]`, an outer product of each vector, adds up R numbers for each
    that it writes, however large D_k: of order 1 for w of `1 / sqrt(R)`, and moved by `rate * R`.
    """
    axes, std = ("head", "key"), scale * count**-0.5
    return parameter(seed, (count, key_dim), std=std, role="keys", axes=axes, fan_in=count)


def stack(
    make: Callable[[Seed, jax.Array], Module],
    seed: Seed,
    count: int,
    *,
    axis: str = "layer",
) -> Module:
    """One module whose parameters are those of `make(seed, 0), make(seed, 1), ...`, stacked.

    The index that `make` gets is traced: layers may differ in values, not in shapes. By
    `seed.numbered` they differ in their draws. `axis` is the logical name of the axis over them.
    """

    def made(base: jax.Array, index: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(make(seed._replace(base=base), index))

    # Under jit: drawn one by one, each shape would be compiled on its own.
    draw = jax.jit(jax.vmap(made, in_axes=(None, 0)))
    stacked = nnx.merge(*draw(seed.base, jnp.arange(count)))
    for _, variable in nnx.to_flat_state(nnx.state(stacked, nnx.Param)):
        variable.set_metadata(axes=(axis, *variable.get_metadata("axes")))
    return stacked


def metadata(module: nnx.Module, name: str) -> dict:
    """What `parameter` was told of each one ("role", "axes", ..), as `nnx.to_pure_dict` has them.

    One that says nothing of its fan-in has 1, and is exact.
    """
    state = nnx.state(module, nnx.Param)
    default = {"fan_in": 1, "exact": True}
    found = lambda leaf: (default | leaf.get_metadata())[name]
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    return nnx.to_pure_dict(jax.tree.map(found, state, is_leaf=is_variable))
