"""How parameters are made, named and stacked."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from rmt_tpu.config import Role

Module = TypeVar("Module", bound=nnx.Module)


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], *, std: float | jax.Array, role: Role, axes: tuple
) -> nnx.Param:
    """A float32 parameter drawn from N(0, std^2).

    Args:
      rngs: one key of its `params` stream is used.
      shape: of the parameter, without the axis that `stack` adds.
      std: standard deviation; may be traced, so that it can differ between stacked layers.
      role: what the optimizer goes by for weight decay and width-scaled learning rates.
      axes: logical names of the axes, for sharding rules.
    """
    value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, role=role, axes=axes)


def storage_scale(num_sublayers: int) -> float:
    """`1 / sqrt(2L)`: weights that write to the residual start smaller by this."""
    return num_sublayers**-0.5


def gain(shape: tuple[int, ...], axes: tuple) -> nnx.Param:
    """A norm's gain: ones."""
    return nnx.Param(jnp.ones(shape, jnp.float32), role="gain", axes=axes)


def keys(rngs: nnx.Rngs, count: int, key_dim: int, *, std: float | jax.Array) -> nnx.Param:
    """`count` key vectors of size `key_dim`, [count, key_dim]."""
    return parameter(rngs, (count, key_dim), std=std, role="keys", axes=("head", "key"))


def stack(
    make: Callable[[nnx.Rngs, jax.Array], Module],
    rngs: nnx.Rngs,
    count: int,
    *,
    axis: str = "layer",
) -> Module:
    """One module whose parameters are those of `make(rngs, 0), make(rngs, 1), ...`, stacked.

    The index that `make` gets is traced: layers may differ in values, not in shapes. `axis` is the
    logical name of the axis over them.
    """

    def made(key: jax.Array, index: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(make(nnx.Rngs(params=key), index))

    # Under jit: drawn one by one, each shape would be compiled on its own.
    draw = jax.jit(jax.vmap(made))
    stacked = nnx.merge(*draw(jax.random.split(rngs.params(), count), jnp.arange(count)))
    for _, variable in nnx.to_flat_state(nnx.state(stacked, nnx.Param)):
        variable.set_metadata(axes=(axis, *variable.get_metadata("axes")))
    return stacked


def metadata(module: nnx.Module, name: str) -> dict:
    """The `name` ("role" or "axes") of each parameter, in the tree of `nnx.to_pure_dict`."""
    state = nnx.state(module, nnx.Param)
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    return nnx.to_pure_dict(
        jax.tree.map(lambda leaf: leaf.get_metadata(name), state, is_leaf=is_variable)
    )
