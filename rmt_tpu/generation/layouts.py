"""Memory layouts of weights, chosen so that decode steps need not transpose them.

By default, XLA chooses the layout of an argument from its shape alone. A program whose matrix
products need another layout transposes the argument on every run. At a width of 1264, which is not
a multiple of the tile size, this moves up to 0.5 GB per dispatch. Therefore `lay_out` compiles the
decode steps for the TPU, finds the weights that they transpose, and stores these weights transposed
for all programs. `Layout.AUTO` is not enough: a program compiled for the layouts that it chose may
transpose weights that the first program did not.
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

# Capacity of the cache, in tokens, and number of steps in the program that is compiled to find the
# layouts. Programs of other sizes transpose the same weights.
_CAPACITY, _COUNT = 1024, 8
_ROUNDS = 4  # maximum number of compilations
_PLATFORM = "tpu"  # other platforms have only one layout
_MATRICES = ("embedding", "hidden", "unembedding")
_ENTRY = "\nENTRY "
_PARAMETER = re.compile(r"%(\S+) = \S+ parameter\((\d+)\)")
_TURNED = re.compile(r" = \w+\[[\d,]+\]\{([\d,]+)\S* (?:copy|transpose)\(%([^\s,)]+)\)")


def lay_out(decoder: Decoder, rows: int) -> None:
    """Store a decoder's parameters in the layouts that decode steps read; only on TPUs.

    The parameters are replaced in place and one at a time, so that memory need not hold two copies
    of all of them. The parameters may be abstract shapes with shardings; the devices need not exist
    then.

    Args:
      decoder: the decoder, which is modified.
      rows: the number of rows in the batch of a step.
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
    """Lower (for compilation) a program of greedy decode steps, keeping the layouts of the weights.

    Args:
      model, params: the results of `Model.of`, with shapes and shardings in place of arrays; the
        devices need not exist.
      rows: the number of rows on all devices together.
      capacity: the number of tokens that the cache has room for. The cache is donated.
      count: the number of steps that the program runs.
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
    """Return the axis order, from major to minor, of each parameter that decode steps read.

    The keys are the indices of the parameters among the leaves of the tree.
    """
    params, orders = tree.unflatten(shapes), {}
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    # Transposing one matrix may cause the compiler to transpose another, so search repeatedly.
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
    """Return the arguments that a compiled program transposes first, with the axis orders it needs.

    Args:
      text: the program's HLO.
      given: the axis order of each of the program's first arguments, from major to minor. None
        marks an argument that the program does not read and that is therefore not among its HLO
        parameters.

    Returns:
      A mapping from the argument's index in `given` to the axis order that the program needs.
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
