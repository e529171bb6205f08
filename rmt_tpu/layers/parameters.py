"""Functions that make, name, draw and stack parameters."""

import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key

from rmt_tpu.config import Role

Module = TypeVar("Module", bound=nnx.Module)

# Logical axes over which one parameter holds many matrices.
OF_MANY = ("layer", "node", "expert", "projection", "stream")


class Seed(NamedTuple):
    """The random seed of one parameter, from the run's seed, a sublayer's number and a name.

    Weights of one name, place and shape are therefore the same in all models of a seed, whatever
    else these models contain and however their layers are stacked. A name is the path of attributes
    that leads to the parameter from the model or, within layers, from its sublayer:
    `seed / "core" / "w_1"`.

    Attributes:
      base: the key made from the run's seed and from the numbers folded in so far.
      name: the path so far.
    """

    base: Key[Array, ""]
    name: str = ""

    def __truediv__(self, attribute: str) -> "Seed":
        return self._replace(name=f"{self.name}/{attribute}")

    def numbered(self, index: Int[Array, ""] | int) -> "Seed":
        """Return the seed of the sublayer with this number, which may be traced."""
        return self._replace(base=jax.random.fold_in(self.base, index))

    def key(self) -> Key[Array, ""]:
        """Return the key from which the parameter of this name is drawn, once."""
        # Python's own hash would differ from process to process.
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
    """Return a float32 parameter drawn from N(0, std^2).

    Args:
      seed: the seed, which includes the parameter's own name.
      shape: the parameter's shape, without the axis that `stack` adds.
      std: the standard deviation; may be traced, so that it can differ between stacked layers.
      role: the role by which the optimizer chooses weight decay and width-scaled learning rates.
      axes: logical names of the axes, for sharding rules.
      fan_in: how many numbers of a token a product with the parameter adds up; muP's learning rate
        depends on it. None stands for the size of the first axis of a "hidden" weight's matrix, and
        for 1 (no such sum) otherwise.
      exact: whether the parameter is read in float32; other "hidden" weights are read in the
        compute dtype.
    """
    if fan_in is None:
        of_matrix = (size for size, axis in zip(shape, axes, strict=True) if axis not in OF_MANY)
        fan_in = next(of_matrix) if role == "hidden" else 1
    if isinstance(std, float) and std == 0:
        value = jnp.zeros(shape, jnp.float32)
    else:
        # The barrier is needed because XLA would merge a known std with the constants of the draw,
        # and so round differently than where std is traced.
        normal = jax.random.normal(seed.key(), shape, jnp.float32)
        value = std * jax.lax.optimization_barrier(normal)
    return nnx.Param(value, role=role, axes=axes, fan_in=fan_in, exact=exact)


def storage_scale(num_sublayers: int) -> float:
    """Return `1 / sqrt(2L)`, the factor for initial weights that write to the residual."""
    return num_sublayers**-0.5


def gain(shape: tuple[int, ...], axes: tuple) -> nnx.Param:
    """Return the gain of a norm, which starts as ones."""
    return nnx.Param(jnp.ones(shape, jnp.float32), role="gain", axes=axes)


def read_keys(seed: Seed, count: int, key_dim: int, *, scale: float | jax.Array = 1.0) -> nnx.Param:
    """Return `count` key vectors of size `key_dim` (D_k) that read the residual, r [count, D_k].

    `z[p, v] = sum_k r[p, k] X[k, v]` adds up D_k numbers of a residual that is normed to order 1,
    so z is of order 1 for r of `1 / sqrt(D_k)`. What Adam adds to r[p, k] has the sign of a
    gradient that is itself a sum over X[k, v], so the D_k terms add up with one sign: a learning
    rate moves z by `rate * D_k`.
    """
    axes, std = ("head", "key"), scale * key_dim**-0.5
    return parameter(seed, (count, key_dim), std=std, role="keys", axes=axes, fan_in=key_dim)


def store_keys(
    seed: Seed, count: int, key_dim: int, *, scale: float | jax.Array = 1.0
) -> nnx.Param:
    """Return `count` (R) key vectors of size `key_dim` (D_k) that write the residual, w [R, D_k].

    `X[k, v] += sum_r w[r, k] y[r, v]`, an outer product for each vector, adds up R numbers for each
    number that it writes, however large D_k is. The write is of order 1 for w of `1 / sqrt(R)`, and
    a learning rate moves it by `rate * R`.
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
    """Return one module whose parameters are those of `make(seed, 0), make(seed, 1), ...`, stacked.

    The index that `make` gets is traced, so layers may differ in values but not in shapes. They
    differ in their random draws if `make` uses `seed.numbered`. `axis` is the logical name of the
    new axis.
    """

    def made(base: jax.Array, index: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(make(seed._replace(base=base), index))

    # Without jit, parameters would be drawn one by one, each shape compiled on its own.
    draw = jax.jit(jax.vmap(made, in_axes=(None, 0)))
    stacked = nnx.merge(*draw(seed.base, jnp.arange(count)))
    for _, variable in nnx.to_flat_state(nnx.state(stacked, nnx.Param)):
        variable.set_metadata(axes=(axis, *variable.get_metadata("axes")))
    return stacked


def metadata(module: nnx.Module, name: str) -> dict:
    """Return the metadata `name` ("role", "axes", ...) of each parameter, as a pure dict of `nnx`.

    A parameter without `fan_in` counts as 1, and one without `exact` as exact.
    """
    state = nnx.state(module, nnx.Param)
    default = {"fan_in": 1, "exact": True}
    found = lambda leaf: (default | leaf.get_metadata())[name]
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    return nnx.to_pure_dict(jax.tree.map(found, state, is_leaf=is_variable))
