"""Memory layouts of weights, chosen so that decode steps need not transpose them.

By default, XLA chooses the layout of an argument from its shape alone. A program whose matrix
products need a different layout transposes the argument on every run. At a width of 1264, which
is not a multiple of the tile size, this moves up to 0.5 GB per dispatch. Therefore `lay_out`
compiles the decode steps for the TPU, finds the weights that they transpose, and stores these
weights transposed. `Layout.AUTO` is not enough: a program that is compiled for the layouts that it
chooses may transpose other weights.
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
from rmt_tpu.generation.programs import ModelSpec

# The sizes of the program that is compiled to find the layouts: the capacity of its cache in
# tokens, and its number of decode steps. Programs of other sizes transpose the same weights. A
# small cache is sure to fit in memory.
_CAPACITY, _COUNT = 128, 8
# Maximum number of compilations of the decode steps.
_ROUNDS = 4
# The only platform on which arrays can have several layouts.
PLATFORM = "tpu"
_MATRICES = ("embedding", "hidden", "unembedding")
_ENTRY = "\nENTRY "
_PARAMETER = re.compile(r"%(\S+) = \S+ parameter\((\d+)\)")
_TRANSPOSE = re.compile(r" = \w+\[[\d,]+\]\{([\d,]+)\S* (?:copy|transpose)\(%([^\s,)]+)\)")


def lay_out(decoder: Decoder, rows: int) -> None:
    """Store a decoder's parameters in the layouts that decode steps read; only on TPUs.

    The parameters are replaced in place and one at a time, so that memory never contains two copies
    of all of them. The parameters may be abstract shapes with shardings. In that case, the devices
    need not exist.

    Args:
      decoder: the decoder, which is modified.
      rows: the number of rows in the batch of a step.
    """
    params = nnx.state(decoder, nnx.Param)
    leaves, tree = jax.tree.flatten(params)
    where = getattr(leaves[0], "sharding", None)  # NumPy arrays have no sharding.
    if where is None or any(device.platform != PLATFORM for device in where.device_set):
        return
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves)
    del leaves
    model, _ = ModelSpec.of(decoder)
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for index, order in axis_orders(model, tree, shapes, rows).items():
        if variables[index].get_metadata("role") in _MATRICES:
            variables[index].set_value(_set_order(variables[index].get_value(), order))


def lower_steps(
    model: ModelSpec, params: nnx.State, rows: int, capacity: int, count: int
) -> jax.stages.Lowered:
    """Lower (for compilation) a program of greedy decode steps, keeping the layouts of the weights.

    Args:
      model, params: the results of `ModelSpec.of`, with shapes and shardings in place of arrays;
        the devices need not exist.
      rows: the number of rows on all devices together.
      capacity: the number of tokens that the cache has room for. The cache is donated.
      count: the number of steps that the program runs.
    """
    row_spec = model.spec(sharding.CACHE_RULES["batch"])
    device_sharding = jax.tree.leaves(params)[0].sharding

    def abstract(
        x: jax.ShapeDtypeStruct, spec: PartitionSpec | None = None
    ) -> jax.ShapeDtypeStruct:
        where = device_sharding if model.mesh is None else NamedSharding(model.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    rows_per_device = rows // model.devices("batch")
    empty = lambda params: programs.empty_cache(model, params, rows_per_device, capacity)
    specs = () if model.mesh is None else (model.cache,)
    empty = jax.tree.map(abstract, jax.eval_shape(empty, params), *specs)
    token = abstract(jax.ShapeDtypeStruct((rows,), jnp.int32), row_spec)

    def steps(params, token, cache):
        ends = (row_spec, model.cache)
        out_specs = ends, model.spec(None, sharding.CACHE_RULES["batch"])
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
def axis_orders(
    model: ModelSpec,
    tree: jax.tree_util.PyTreeDef,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    rows: int,
) -> dict[int, tuple[int, ...]]:
    """Return axis orders of parameters for which decode steps need not transpose any matrix.

    Args:
      model: the description of the model.
      tree: the structure of the parameters.
      shapes: the shapes and shardings of the parameters, in the order of the tree's leaves.
      rows: the number of rows in the batch of a step.

    Returns:
      A mapping from a parameter's index in `shapes` to its axes, from major to minor. Parameters
      that decode steps do not read are left out.
    """
    params, orders = tree.unflatten(shapes), {}
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    # After one matrix has a new layout, the compiler may transpose another one. Compile again until
    # it transposes none.
    for _ in range(_ROUNDS):
        steps = lower_steps(model, params, rows, _CAPACITY, _COUNT).compile()
        layouts = [argument.layout for argument in jax.tree.leaves(steps.input_formats[0][0])]
        current = [layout and layout.major_to_minor for layout in layouts]
        orders |= {index: order for index, order in enumerate(current) if order is not None}
        transposed = transposed_arguments(steps.as_text(), current).items()
        transposed = {
            n: order for n, order in transposed if variables[n].get_metadata("role") in _MATRICES
        }
        if not transposed:
            break
        for index, order in transposed.items():
            variables[index].set_value(_set_order(variables[index].get_value(), order))
        orders |= transposed
    return orders


def transposed_arguments(
    text: str, current: list[tuple[int, ...] | None]
) -> dict[int, tuple[int, ...]]:
    """Return the arguments that a compiled program transposes before it uses them.

    Args:
      text: the program's HLO.
      current: the axis order of each of the program's first arguments, from major to minor. None
        marks an argument that the program does not read; the HLO has no parameter for it.

    Returns:
      A mapping from the argument's index in `current` to the axis order that the program needs.
    """
    arguments_read = [index for index, order in enumerate(current) if order is not None]
    entry = text[text.index(_ENTRY) :]
    parameters = {match[1]: int(match[2]) for match in _PARAMETER.finditer(entry)}
    orders = {}
    for match in _TRANSPOSE.finditer(entry):
        number = parameters.get(match[2])
        if number is not None and number < len(arguments_read):
            order = tuple(int(axis) for axis in reversed(match[1].split(",")))
            if order != current[arguments_read[number]]:
                orders[arguments_read[number]] = order
    return orders


def _set_order(
    x: Array | jax.ShapeDtypeStruct, order: tuple[int, ...]
) -> Array | jax.ShapeDtypeStruct:
    target = Format(Layout(order), x.sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)
    return x if x.format.layout.major_to_minor == order else jax.device_put(x, target)
