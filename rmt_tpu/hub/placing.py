"""Functions that read parameters from a hub folder directly onto devices.

Each process reads only its own devices' shards. A large parameter is read in several steps, so a
model may be larger than the host's memory.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float

from rmt_tpu.hub.pieces import Piece
from rmt_tpu.hub.weights import Target, Tensors, fill, is_moved

_ITEM = 4  # the number of bytes of a float32


class Step(NamedTuple):
    """The part of each device's shard that is read in one step.

    Attributes:
      begin: the first indices of the part within a shard.
      sizes: the sizes of the part.
    """

    begin: tuple[int, ...]
    sizes: tuple[int, ...]


def read_parameter(
    tensors: Tensors,
    parameter_pieces: list[Piece],
    stored: tuple[int, ...],
    shape: tuple[int, ...],
    sharding: Sharding,
) -> Float[Array, "..."]:
    """Read a parameter onto the devices of a sharding, in float32.

    A host needs at most `tensors.memory` bytes in addition to the parameter itself. Every process
    that has devices of the sharding must call this function.

    Args:
      tensors: the tensors in the folder.
      parameter_pieces: the pieces that map tensors to the parameter.
      stored: the shape of the parameter that the pieces refer to.
      shape: the shape of the result: `stored`, or `stored` with the first axis split into two.
      sharding: the sharding of the result.

    Raises:
      RunError: a value is not finite, or a file is damaged.
    """
    shard = sharding.shard_shape(shape)
    devices = sharding.device_set
    own = -(-len(devices) // len({device.process_index for device in devices}))
    # The host needs memory for a step's array, and maybe for a copy that is sent to the device.
    most = max(tensors.memory // (4 * own * _ITEM), 1)
    steps = list(_steps(shard, _axis_order(parameter_pieces, stored, shape), most))
    where = sharding.addressable_devices_indices_map(shape)
    begins = {
        device: tuple(part.indices(size)[0] for part, size in zip(index, shape, strict=True))
        for device, index in where.items()
    }

    def parts(step: Step) -> list[jax.Array]:
        arrays = {begin: np.zeros(step.sizes, np.float32) for begin in begins.values()}
        targets: list[Target] = []
        for begin, values in arrays.items():
            at = tuple(a + b for a, b in zip(begin, step.begin, strict=True))
            targets += _targets(at, values, stored, shape)
        fill(tensors, parameter_pieces, targets)
        return [jax.device_put(arrays[begin], device) for device, begin in begins.items()]

    join = functools.partial(jax.make_array_from_single_device_arrays, sharding=sharding)
    if len(steps) == 1:
        return join(shape, arrays=parts(steps[0]))
    shards = [size // part for size, part in zip(shape, shard, strict=True)]
    whole = jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=sharding)()
    for step in steps:
        sizes = tuple(count * size for count, size in zip(shards, step.sizes, strict=True))
        part = join(sizes, arrays=parts(step))
        whole = _writer(sharding)(whole, part, np.array(step.begin, np.int32))
        # Wait, so that this step's memory is free before the next step allocates its own.
        jax.block_until_ready(whole)
        del part
    return whole


def _axis_order(
    parameter_pieces: list[Piece], stored: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the axes of a parameter, in the order in which they are divided into steps.

    Axes along which the parameter has several pieces come first. The others follow in the order in
    which the file stores them. Each step then reads contiguous bytes, and no byte is read twice.
    """
    axes = list(range(len(stored)))
    if parameter_pieces:
        first = parameter_pieces[0]
        moved = [*axes[-1:], *axes[:-1]] if is_moved(first) else axes
        axes = sorted(moved, key=lambda axis: first.sizes[axis] == stored[axis])
    return tuple(axes) if shape == stored else (0, *(axis + 1 for axis in axes))


def _steps(shard: tuple[int, ...], order: tuple[int, ...], most: int) -> Iterator[Step]:
    """Yield steps of at most `most` elements that cover a shard, which has at least one axis.

    All steps have the same sizes, so that one compiled program can write them all. The last step
    may overlap the one before it.

    Args:
      shard: the shape of the shard.
      order: the shard's axes, in the order in which they are divided.
      most: the maximum number of array elements per step.
    """
    inner, sizes = math.prod(shard), list(shard)
    starts: list[Sequence[int]] = [(0,) for _ in shard]
    for axis in order:
        inner //= shard[axis]
        count = -(-shard[axis] // max(most // inner, 1))
        sizes[axis] = size = -(-shard[axis] // count)
        starts[axis] = [min(number * size, shard[axis] - size) for number in range(count)]
        if inner <= most:
            break
    for begin in itertools.product(*(starts[axis] for axis in order)):
        at = dict(zip(order, begin, strict=True))
        yield Step(tuple(at[axis] for axis in range(len(shard))), tuple(sizes))


def _targets(
    begin: tuple[int, ...],
    values: Float[np.ndarray, "..."],
    stored: tuple[int, ...],
    shape: tuple[int, ...],
) -> Iterator[Target]:
    """Yield the targets (see `weights.Target`) that together fill one array of a step.

    Args:
      begin: the first indices of the array in the result of `read_parameter`.
      values: the array.
      stored, shape: see `read_parameter`. Virtual pipeline stages split the layer axis into chunks;
        there is then one target for each chunk in the array.
    """
    if stored == shape:
        yield Target(begin, values)
        return
    for chunk, part in enumerate(values):
        layer = (begin[0] + chunk) * shape[1] + begin[1]
        yield Target((layer, *begin[2:]), part)


@functools.lru_cache(maxsize=64)
def _writer(sharding: Sharding):
    """Return a compiled function that writes one step into a parameter's shards, in place."""

    def write(whole, part, begin):
        return jax.lax.dynamic_update_slice(whole, part, list(begin))

    if isinstance(sharding, NamedSharding):
        specs = sharding.spec, sharding.spec, PartitionSpec()
        write = jax.shard_map(
            write, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False
        )
    return jax.jit(write, donate_argnums=0, out_shardings=sharding)
