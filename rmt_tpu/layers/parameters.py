"""Functions that create, name, initialise and stack parameters."""

import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key

from rmt_tpu import config as cfg

Module = TypeVar("Module", bound=nnx.Module)

# Logical axes that index the matrices of a stacked parameter. The fan-in is the size of the first
# axis that is not in this list.
OF_MANY = ("layer", "node", "expert", "projection", "stream")


class Seed(NamedTuple):
    """The random seed of one parameter, derived from the run's seed, a sublayer number and a name.

    In two models with the same run seed, weights with the same name, sublayer number and shape
    therefore start with the same values, even if the rest of the models differs. A name is the path
    of attributes to the parameter. The path starts from the model or, inside a layer, from the
    sublayer: for example `seed / "core" / "w_1"`.

    Attributes:
      base: the JAX key made from the run's seed and from the sublayer numbers so far.
      name: the path of attributes so far.
    """

    base: Key[Array, ""]
    name: str = ""

    def __truediv__(self, attribute: str) -> "Seed":
        return self._replace(name=f"{self.name}/{attribute}")

    def numbered(self, index: Int[Array, ""] | int) -> "Seed":
        """Return the seed for sublayer number `index`, which may be a traced value."""
        return self._replace(base=jax.random.fold_in(self.base, index))

    def key(self) -> Key[Array, ""]:
        """Return the JAX key that draws the initial value of the parameter with this name.

        Use the key for one draw only.
        """
        # CRC-32 maps a name to the same number in every process. Python's own hash would not.
        return jax.random.fold_in(self.base, zlib.crc32(self.name.encode()))


def parameter(
    seed: Seed,
    shape: tuple[int, ...],
    *,
    std: float | jax.Array,
    role: cfg.Role,
    axes: tuple,
    fan_in: int | None = None,
    exact: bool = False,
) -> nnx.Param:
    """Return a float32 parameter drawn from N(0, std^2).

    Args:
      seed: the seed, which includes the parameter's own name.
      shape: the parameter's shape, without the axis that `stack` adds.
      std: the standard deviation. It may be a traced value, which can differ between stacked
        layers.
      role: the kind of parameter, from which the optimizer chooses weight decay and width-scaled
        learning rates.
      axes: the logical names of the axes, used by the sharding rules.
      fan_in: the number of terms in each sum when the parameter is multiplied by a token's data.
        The muP learning rate depends on this number. None means the size of the first matrix axis
        for a "hidden" weight, and 1 (no sum) for every other role.
      exact: whether the parameter is used in float32. "Hidden" weights that are not exact are cast
        to the compute dtype.
    """
    if fan_in is None:
        of_matrix = (size for size, axis in zip(shape, axes, strict=True) if axis not in OF_MANY)
        fan_in = next(of_matrix) if role == "hidden" else 1
    if isinstance(std, float) and std == 0:
        value = jnp.zeros(shape, jnp.float32)
    else:
        # Without the barrier, XLA would merge a constant std with the constants of the random draw.
        # The result would then be rounded differently than with a traced std.
        normal = jax.random.normal(seed.key(), shape, jnp.float32)
        value = std * jax.lax.optimization_barrier(normal)
    return nnx.Param(value, role=role, axes=axes, fan_in=fan_in, exact=exact)


def storage_scale(num_sublayers: int) -> float:
    """Return `1 / sqrt(2L)`, the initial scale of weights that write to the residual."""
    return num_sublayers**-0.5


def gain(shape: tuple[int, ...], axes: tuple) -> nnx.Param:
    """Return the gain of a norm: a parameter that is initialised to ones."""
    return nnx.Param(jnp.ones(shape, jnp.float32), role="gain", axes=axes)


def bias(shape: tuple[int, ...], axes: tuple) -> nnx.Param:
    """Return a bias: a parameter that is initialised to zeros."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), role="gain", axes=axes)


def key_init_scale(config: cfg.ModelConfig, count: int, base_count: int, *, writes: bool) -> float:
    """Return muP's factor for the initial standard deviation of keys; 1 without muP.

    The factor is relative to the base model. The largest singular value of a random matrix [m, n]
    whose entries have standard deviation s is `s (sqrt(m) + sqrt(n))`. The layers before a matrix
    learn along its largest singular vectors. For the output to change as much as the input does,
    the largest singular value must be `sqrt(out / in)` (Yang, Simon and Bernstein 2023). Therefore
    s must be `1 / sqrt(in) / (1 + sqrt(in / out))`. The factor `1 / (1 + sqrt(in / out))`, which
    this function returns relative to the base model, stays constant if all sizes grow together. If
    only R or only D_k grows, the keys behave increasingly like an unembedding.

    Args:
      config: the model's config.
      count: the number of keys.
      base_count: the number of the same keys in muP's base model.
      writes: whether the keys write to the residual, or read from it.
    """

    def narrow(model: cfg.ModelConfig, count: int) -> float:
        ratio = count / model.store.key_dim
        return 1 / (1 + (ratio if writes else 1 / ratio) ** 0.5)

    return narrow(config, count) / narrow(config.base_model, base_count)


def read_keys(seed: Seed, count: int, key_dim: int, *, scale: float | jax.Array = 1.0) -> nnx.Param:
    """Return `count` key vectors r [count, D_k] for reading a matrix residual, D_k = `key_dim`.

    A read is `z[p, v] = sum_k r[p, k] X[k, v]`, where X is the normed residual, with entries of
    order 1. To make z of order 1, the entries of r are of order `1 / sqrt(D_k)`. One step of Adam
    changes each entry of r by about the learning rate. The D_k changes have the signs of X, so they
    add up in z, which changes by about `D_k` times the learning rate.
    """
    axes, std = ("head", "key"), scale * key_dim**-0.5
    return parameter(seed, (count, key_dim), std=std, role="keys", axes=axes, fan_in=key_dim)


def store_keys(
    seed: Seed, count: int, key_dim: int, *, scale: float | jax.Array = 1.0
) -> nnx.Param:
    """Return R = `count` key vectors w [R, D_k] for writing to a matrix residual, D_k = `key_dim`.

    A write `X[k, v] += sum_r w[r, k] y[r, v]` adds one outer product per data vector y[r] to the
    residual X. Each entry of X gets a sum of R terms. To make the sum of order 1, the entries of w
    are of order `1 / sqrt(R)`. One step changes the sum by about R times the learning rate.
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
    """Return one module with the stacked parameters of `make(seed, i)` for i from 0 to `count - 1`.

    The index i is traced, so the modules may differ in values but not in shapes. Their random draws
    differ only if `make` uses `seed.numbered`. `axis` is the logical name of the new leading axis.
    """

    def made(base: jax.Array, index: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(make(seed._replace(base=base), index))

    # Without jit, JAX would compile a separate program for the draw of each shape.
    draw = jax.jit(jax.vmap(made, in_axes=(None, 0)))
    stacked = nnx.merge(*draw(seed.base, jnp.arange(count)))
    for _, variable in nnx.to_flat_state(nnx.state(stacked, nnx.Param)):
        variable.set_metadata(axes=(axis, *variable.get_metadata("axes")))
    return stacked


def metadata(module: nnx.Module, name: str) -> dict:
    """Return one metadata entry, such as "role" or "axes", for each parameter of a module.

    The result is a pure dict in the structure of the `nnx` state. A parameter without `fan_in` gets
    the value 1, and a parameter without `exact` gets True.
    """
    state = nnx.state(module, nnx.Param)
    default = {"fan_in": 1, "exact": True}
    found = lambda leaf: (default | leaf.get_metadata())[name]
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    return nnx.to_pure_dict(jax.tree.map(found, state, is_leaf=is_variable))
