"""Memory layouts of weights: as decode steps read them.

XLA lays out an argument by its shape alone. A program whose products need another layout transposes
the argument each time that it runs: for a width of 1264, which is no whole number of tiles, up to
0.5 GB in every dispatch of steps. Therefore steps are compiled for the TPU to see which weights
they transpose, and all programs take these weights transposed. `Layout.AUTO` does not suffice: a
program compiled for the layouts that it chose may transpose weights that the first one did not.
"""

import re
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

# Cache capacity and number of the steps that are compiled; other sizes transpose the same weights.
_CAPACITY, _COUNT = 1024, 8
_ROUNDS = 4  # at most
_PLATFORM = "tpu"  # other platforms have one layout
_MATRICES = ("embedding", "hidden", "unembedding")
_ENTRY = "\nENTRY "
_PARAMETER = re.compile(r"%(\S+) = \S+ parameter\((\d+)\)")
_TURNED = re.compile(r" = \w+\[[\d,]+\]\{([\d,]+)\S* (?:copy|transpose)\(%([^\s,)]+)\)")


def lay_out(decoder: Decoder, rows: int) -> None:
    """Put a decoder's parameters into the layouts that steps of `rows` rows read, on TPUs.

    They are replaced in the decoder itself, one by one, so that memory need not hold all of them
    twice. The decoder may consist of shapes with shardings, so its devices need not be there.
    """
    params = nnx.state(decoder, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    where = getattr(leaves[0], "sharding", None)  # NumPy arrays have no sharding
    if where is None or any(device.platform != _PLATFORM for device in where.device_set):
        return
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves)
    del leaves
    model, _ = Model.of(decoder)
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for place, order in _chosen(model, tree, shapes, rows).items():
        if variables[place].get_metadata("role") in _MATRICES:
            variables[place].set_value(_put(variables[place].get_value(), order))


def lower_steps(
    model: Model, params: nnx.State, rows: int, capacity: int, count: int
) -> jax.stages.Lowered:
    """Lower a dispatch of greedy steps, for weights in the layouts that they have.

    Args:
      model, params: from `Model.of`, as shapes with shardings; the devices need not be there.
      rows: the rows on all devices together.
      capacity: tokens that the cache has room for; it is donated.
      count: steps of the dispatch.
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

    return jax.jit(steps, donate_argnums=2).lower(params, token, empty)


def _likeliest(
    count: int, decoder: Decoder, token: Int[Array, " batch"], cache: Cache
) -> tuple[tuple[Array, Cache], Int[Array, "steps batch"]]:
    """Run `count` greedy steps; return the newest tokens with the cache, and all tokens."""

    def step(carry, _):
        token, cache = carry
        logits, cache = decoder.decode(token[:, None], cache)
        token = jnp.argmax(logits[:, 0], axis=-1).astype(token.dtype)
        return (token, cache), token

    return jax.lax.scan(step, (token, cache), length=count)


@cache
def _chosen(
    model: Model, tree: jax.tree_util.PyTreeDef, shapes: tuple[jax.ShapeDtypeStruct, ...], rows: int
) -> dict[int, tuple[int, ...]]:
    """Return the axis order, major to minor, of each parameter that steps read.

    Parameters are named by their places in the tree.
    """
    params, orders = tree.unflatten(shapes), {}
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    # A transposed matrix may cause another one to be transposed.
    for _ in range(_ROUNDS):
        steps = lower_steps(model, params, rows, _CAPACITY, _COUNT).compile()
        layouts = [given.layout for given in jax.tree.leaves(steps.input_formats[0][0])]
        given = [layout and layout.major_to_minor for layout in layouts]
        orders |= {place: order for place, order in enumerate(given) if order is not None}
        found = turned(steps.as_text(), given).items()
        found = {n: order for n, order in found if variables[n].get_metadata("role") in _MATRICES}
        if not found:
            break
        for place, order in found.items():
            variables[place].set_value(_put(variables[place].get_value(), order))
        orders |= found
    return orders


def turned(text: str, given: list[tuple[int, ...] | None]) -> dict[int, tuple[int, ...]]:
    """Return the arguments that a compiled program transposes first, with the axis order they get.

    Args:
      text: the HLO of the program.
      given: the axis order of each of its first arguments; None for an argument that the program
        does not read, which is then not among its parameters.
    """
    read = [place for place, order in enumerate(given) if order is not None]
    entry = text[text.index(_ENTRY) :]
    parameters = {found[1]: int(found[2]) for found in _PARAMETER.finditer(entry)}
    orders = {}
    for found in _TURNED.finditer(entry):
        number = parameters.get(found[2])
        if number is not None and number < len(read):
            order = tuple(int(axis) for axis in reversed(found[1].split(",")))
            if order != given[read[number]]:
                orders[read[number]] = order
    return orders


def _put(x: Array | jax.ShapeDtypeStruct, order: tuple[int, ...]) -> Array | jax.ShapeDtypeStruct:
    wanted = Format(Layout(order), x.sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted)
    return x if x.format.layout.major_to_minor == order else jax.device_put(x, wanted)
