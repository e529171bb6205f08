"""How weights lie in memory: as steps read them.

XLA lays out an argument by its shape alone, and a program whose products want it otherwise turns it
each time that it runs: of a width of 1264, no whole tiles, up to 0.5 GB in every dispatch of steps.
So the TPU compiler is asked once how steps would have the weights, and all programs take them so.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

import sharding
from rmt_tpu.decoder import Cache, Decoder
from rmt_tpu.generation import programs
from rmt_tpu.generation.programs import Model

# Of the steps that are asked; other sizes want the same.
_CAPACITY, _COUNT = 1024, 8
_MATRICES = ("embedding", "hidden", "unembedding")
_PLATFORM = "tpu"  # others have one order


def lay_out(decoder: Decoder, rows: int) -> None:
    """Puts a decoder's parameters as steps of so many rows want them to lie, on TPUs.

    They are replaced in the decoder itself, one by one, so that memory need not hold all of them
    twice. A decoder may be of shapes that have the devices where they would be.
    """
    params = nnx.state(decoder, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    where = getattr(leaves[0], "sharding", None)  # of an array of NumPy there is none
    if where is None or any(device.platform != _PLATFORM for device in where.device_set):
        return
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves)
    del leaves
    model, _ = Model.of(decoder)
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for variable, wanted in zip(variables, _chosen(model, tree, shapes, rows), strict=True):
        variable.set_value(_put(variable.get_value(), wanted))


def lower_steps(
    model: Model, params: nnx.State, rows: int, capacity: int, count: int
) -> jax.stages.Lowered:
    """A dispatch of steps that each take the likeliest token; the compiler lays out the weights.

    Args:
      model, params: from `Model.of`, of shapes that have the devices where they would be.
      rows: on all devices.
      capacity: tokens that the cache has room for; it is donated.
      count: steps.
    """
    of_rows = model.over(sharding.CACHE_RULES["batch"])
    one = jax.tree.leaves(params)[0].sharding

    def placed(x: jax.ShapeDtypeStruct, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
        where = one if model.mesh is None else NamedSharding(model.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    of_device = rows // model.devices("batch")
    empty = lambda params: programs.empty_cache(model, params, of_device, capacity)
    specs = () if model.mesh is None else (model.cache,)
    empty = jax.tree.map(placed, jax.eval_shape(empty, params), *specs)
    token = placed(jax.ShapeDtypeStruct((rows,), jnp.int32), of_rows)

    def steps(params, token, cache):
        ends = (of_rows, model.cache)
        out_specs = ends, model.over(None, sharding.CACHE_RULES["batch"])
        return model.run(partial(_likeliest, count), params, (token, cache), ends, out_specs)

    def where(variable: nnx.Variable) -> nnx.Variable:
        """What is small stays as it is: nothing else is made of how it lies."""
        of = variable.get_value().sharding
        if variable.get_metadata("role") in _MATRICES:
            of = Format(Layout.AUTO, of)
        return variable.replace(of)

    anyhow = jax.tree.map(where, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    jitted = jax.jit(steps, in_shardings=(anyhow, None, None), donate_argnums=2)
    return jitted.lower(shapes, token, empty)


def _likeliest(
    count: int, decoder: Decoder, token: Int[Array, " batch"], cache: Cache
) -> tuple[tuple[Array, Cache], Int[Array, "steps batch"]]:
    """The newest tokens with the cache, and all of them."""

    def step(carry, _):
        token, cache = carry
        logits, cache = decoder.decode(token[:, None], cache)
        token = jnp.argmax(logits[:, 0], axis=-1).astype(token.dtype)
        return (token, cache), token

    return jax.lax.scan(step, (token, cache), length=count)


@cache
def _chosen(
    model: Model, tree: jax.tree_util.PyTreeDef, shapes: tuple[jax.ShapeDtypeStruct, ...], rows: int
) -> list[Format]:
    """How each parameter is to lie, in the order of their tree."""
    steps = lower_steps(model, tree.unflatten(shapes), rows, _CAPACITY, _COUNT)
    return jax.tree.leaves(steps.compile().input_formats[0][0])


def _put(x: Array | jax.ShapeDtypeStruct, wanted: Format) -> Array | jax.ShapeDtypeStruct:
    if wanted.layout is None:  # steps do not read it
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted)
    return jax.device_put(x, wanted)
