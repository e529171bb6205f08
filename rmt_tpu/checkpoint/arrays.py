"""Names, chunks and shards of the arrays of a pytree, and how arrays are written and read."""

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tensorstore as ts

from rmt_tpu import storage
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import faults

# A chunk is smaller than 32 MB, from which on glibc maps fresh pages for each buffer. That would
# cost more than the copy.
CHUNK_BYTES = 16 * 2**20
# BYTES_IN_FLIGHT is sixteen chunks, so that a distant store has enough to do.
_ALIGNMENT = 64  # bytes
BYTES_IN_FLIGHT = 256 * 2**20

# The codecs of a compression, which are applied between the bytes codec and the checksum.
COMPRESSIONS = {"none": [], "zstd": [{"name": "zstd", "configuration": {"level": 1}}]}

DTYPES = frozenset(
    "bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8_e3m4 float8_e4m3fn "
    "float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 float8_e5m2fnuz bfloat16 float16 float32 "
    "float64 complex64 complex128".split()
)

# The names of layers' parameters, and of an optimizer's state of these, contain this.
_LAYERS = "stacks"

Index = tuple[tuple[int, int], ...]  # start and stop on each axis: slices have no hash


class StoredArray(NamedTuple):
    """The entry of one stored array in the manifest.

    A typed PRNG key is stored as its uint32 key data, and `prng` names its implementation.
    """

    name: str
    shape: Sequence[int]
    dtype: str
    chunk: Sequence[int]
    prng: str | None
    compression: str = "none"

    def __str__(self) -> str:
        """Return all that must agree for a restore; the division into chunks need not."""
        prng = f" ({self.prng} key)" if self.prng else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{prng}"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jax.numpy.dtype(self.dtype).itemsize

    def fits(self, other: "StoredArray") -> bool:
        """Return whether this array can be restored as `other`.

        Layers [L, ...] and [V, L / V, ...], for any V, are the same layers: a pipeline has a stack
        for each of its virtual stages.
        """
        if str(self) == str(other):
            return True
        if _LAYERS not in other.name.split("/") or (self.dtype, self.prng) != (other.dtype, None):
            return False
        ours, theirs = stack_axes(self.shape, other.shape)
        if (ours, theirs) == (1, 1) or min(len(self.shape) - ours, len(other.shape) - theirs) < 0:
            return False
        of_a_layer = tuple(self.shape[ours:])
        if ours == theirs and not of_a_layer:  # it could also be [L, size] of another size
            return False
        same_count = math.prod(self.shape[:ours]) == math.prod(other.shape[:theirs])
        return same_count and of_a_layer == tuple(other.shape[theirs:])


def stack_axes(stored: Sequence[int], wanted: Sequence[int]) -> tuple[int, int]:
    """Return how many first axes number the layers in two shapes of the same layers: 1 or 2.

    Two different shapes with the same number of axes have two each.
    """
    more = len(stored) - len(wanted)
    return {1: (2, 1), -1: (1, 2), 0: (2, 2)}.get(more, (1, 1))


def zarr_spec(array: StoredArray, parent: dict[str, Any]) -> dict[str, Any]:
    """Return tensorstore's spec of the array, in the folder whose kvstore is `parent`."""
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codecs += [*COMPRESSIONS[array.compression], {"name": "crc32c"}]
    return {
        "driver": "zarr3",
        "kvstore": {
            **parent,
            "path": f"{parent['path']}{storage.join(array.name)}/",
        },
        "metadata": {
            "shape": array.shape,
            "data_type": array.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk}},
            "codecs": codecs,
        },
        # By default a chunk of zeros is not stored and a missing chunk is read as zeros, so that a
        # lost file would go unnoticed.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def named_leaves(tree: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves by name, in tree order, and the tree's structure.

    Raises:
      UsageError: a name cannot be stored, is not unique, or would lie inside another array.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves: dict[str, Any] = {}
    for path, leaf in paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/") if path else "array"
        try:
            storage.join(name)
        except UsageError:
            raise UsageError(f"an array cannot be stored under the name {name!r}") from None
        if name in leaves:
            raise UsageError(f"two arrays have the same name {name!r}")
        leaves[name] = leaf
    for name in leaves:
        for slash in re.finditer("/", name):
            if (outer := name[: slash.start()]) in leaves:
                raise UsageError(f"array {name!r} would be stored inside array {outer!r}")
    return leaves, treedef


def describe(name: str, leaf: Any) -> StoredArray:
    """Return how an array is stored in one chunk; a stand-in with a shape and a dtype will do.

    Raises:
      UsageError: the leaf is no array, or its dtype cannot be stored.
    """
    if not hasattr(leaf, "dtype"):
        raise UsageError(f"{name}: only arrays can be stored, not {type(leaf).__name__}")
    prng = None

    def key_data(key: jax.Array) -> jax.Array:
        # A ShapeDtypeStruct does not expose its key's implementation, but a tracer does.
        nonlocal prng
        prng = str(jax.random.key_impl(key))
        return jax.random.key_data(key)

    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    dtype = np.dtype(leaf.dtype).name
    if dtype not in DTYPES:
        raise UsageError(f"{name}: numbers of dtype {dtype} cannot be stored")
    return StoredArray(name, tuple(leaf.shape), dtype, tuple(leaf.shape), prng)


def to_store(tree: Any, compression: str) -> tuple[dict[str, Any], list[StoredArray]]:
    """Return the arrays to write, PRNG keys as their data, and how each array is stored."""
    sources, arrays = {}, []
    for name, leaf in named_leaves(tree)[0].items():
        array = describe(name, leaf)
        sources[name] = source = jax.random.key_data(leaf) if array.prng else leaf
        arrays.append(array._replace(chunk=chunk_shape(source), compression=compression))
    return sources, arrays


def chunk_shape(source: Any) -> tuple[int, ...]:
    """Return the shape of a chunk: one shard, cut into equal parts until it is small enough.

    Equal parts keep chunks within one shard. Two shards in one chunk may belong to two processes,
    which would have to wait for each other's writes.
    """
    sharded = isinstance(source, jax.Array)
    shape = source.sharding.shard_shape(source.shape) if sharded else source.shape
    chunk = [max(1, size) for size in shape]
    while math.prod(chunk) * source.dtype.itemsize > CHUNK_BYTES and max(chunk) > 1:
        parts, _, axis = min(
            (_smallest_factor(size), -size, axis) for axis, size in enumerate(chunk) if size > 1
        )
        chunk[axis] //= parts
    return tuple(chunk)


def _smallest_factor(size: int) -> int:
    return next((n for n in range(2, math.isqrt(size) + 1) if size % n == 0), size)


def index_of(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    """Return (start, stop) of each axis for slices of an array of this shape."""
    return tuple(i.indices(n)[:2] for i, n in zip(slices, shape, strict=True))


def slices_of(index: Index) -> tuple[slice, ...]:
    """Return the slices, each with start and stop, of an index made by `index_of`."""
    return tuple(slice(start, stop) for start, stop in index)


def own_indices(leaf: Any, shape: Sequence[int]) -> dict[Index, list[jax.Device]]:
    """Return the distinct pieces of a stored array that own devices need, with the devices.

    Args:
      leaf: the array or stand-in that the stored array is restored as.
      shape: the shape of the stored array; longer than that of `leaf` if that is a PRNG key.
    """
    whole = tuple((0, size) for size in shape)
    if isinstance(leaf, np.ndarray | np.generic) or _sharding(leaf) is None:
        return {whole: []}
    indices: dict[Index, list[jax.Device]] = {}
    of_device = leaf.sharding.addressable_devices_indices_map(tuple(leaf.shape))
    for device, index in of_device.items():
        own = index_of(index, leaf.shape)
        indices.setdefault((*own, *whole[len(own) :]), []).append(device)
    return indices


def place(leaf: Any, array: StoredArray, pieces: dict[Index, np.ndarray]) -> Any:
    """Return the restored array as the kind of array that `leaf` is, with its placement.

    Args:
      leaf: the array or stand-in that the stored array is restored as.
      array: the stored array.
      pieces: the pieces of `own_indices`, by index.

    Raises:
      UsageError: jax does not support the dtype of `leaf` without jax_enable_x64.
    """
    sharding, shape = None, tuple(array.shape if array.prng else leaf.shape)
    if isinstance(leaf, np.ndarray | np.generic) or (sharding := _sharding(leaf)) is None:
        (host,) = pieces.values()
        if isinstance(leaf, np.ndarray | np.generic):
            return host[()] if isinstance(leaf, np.generic) else host
        placed = jax.device_put(host)
    else:
        devices = own_indices(leaf, shape)
        placed = jax.make_array_from_single_device_arrays(
            shape,
            sharding,
            [jax.device_put(pieces[index], d) for index in pieces for d in devices[index]],
        )
    if array.prng:
        wrap = partial(jax.random.wrap_key_data, impl=array.prng)
        placed = jax.jit(wrap, out_shardings=sharding)(placed)
    if placed.dtype != leaf.dtype:
        raise UsageError(f"{array.name}: {leaf.dtype} needs jax_enable_x64, or numpy in its place")
    return placed


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    # An uncommitted array must stay so, or jit refuses to combine it with arrays on other devices.
    return leaf.sharding if getattr(leaf, "committed", True) else None


def in_flight(
    jobs: Iterable[tuple[StoredArray, int, Callable]],
) -> Iterator[tuple[StoredArray, Any]]:
    """Run reads or writes concurrently, at most BYTES_IN_FLIGHT or one job at a time.

    A job is its array, its size in bytes, and a function that starts it and returns its future. The
    generator yields the array and the result of each job, in order. When it ends, even by an error,
    no job is under way.
    """
    waiting, held = deque(), 0

    def finish_first() -> tuple[StoredArray, Any]:
        nonlocal held
        array, size, future = waiting.popleft()
        held -= size
        with faults(f"array {array.name}: "):
            return array, future.result()

    try:
        for array, size, start in jobs:
            while waiting and held + size > BYTES_IN_FLIGHT:
                yield finish_first()
            waiting.append((array, size, start()))
            held += size
        while waiting:
            yield finish_first()
    finally:
        for _, _, future in waiting:
            future.exception()


def read(
    stores: Iterable[tuple[StoredArray, Any]], leaves: dict[str, Any]
) -> Iterator[tuple[StoredArray, dict[Index, np.ndarray]]]:
    """Yield each array with the pieces that this process's devices need.

    Args:
      stores: the arrays, each with its open TensorStore.
      leaves: by name, the array or stand-in that each is restored as.
    """
    plans = [(array, store, _Plan.of(leaves[array.name], array)) for array, store in stores]
    parts = (
        (array, store[slices_of(index)]) for array, store, plan in plans for index in plan.pieces
    )
    jobs = (
        (array, part.size * part.dtype.numpy_dtype.itemsize, partial(_Reading.start, part))
        for array, part in parts
    )
    with contextlib.closing(in_flight(jobs)) as hosts:
        for array, _, plan in plans:
            pieces: dict[Index, np.ndarray] = {}
            for wanted in plan.pieces.values():
                _, host = next(hosts)
                for index in wanted:
                    pieces[index] = plan.cut(host, index)
            yield array, pieces


class _Reading(NamedTuple):
    """A read under way into memory that numpy allocated.

    That takes a tenth of the page faults of tensorstore's own memory, because numpy asks for huge
    pages. The memory has the alignment that JAX wants, so that an array on a CPU uses it without a
    copy.
    """

    host: np.ndarray
    future: Any

    @classmethod
    def start(cls, part: ts.TensorStore) -> "_Reading":
        dtype = part.dtype.numpy_dtype
        room = np.empty(part.size * dtype.itemsize + _ALIGNMENT, np.uint8)
        skip = -room.ctypes.data % _ALIGNMENT
        host = room[skip : skip + part.size * dtype.itemsize].view(dtype).reshape(part.shape)
        return cls(host, ts.array(host).write(part))

    def result(self) -> np.ndarray:
        self.future.result()
        return self.host

    def exception(self) -> Exception | None:
        return self.future.exception()


class _Plan(NamedTuple):
    """A plan for reading the wanted pieces of an array.

    Where the stored layers are stacked differently than in `shape`, all layers are read, and the
    wanted ones are cut out: a chunk may have several layers, and is read as a whole in any case.

    Attributes:
      pieces: what to read of the stored array, and for each the pieces that are cut from it.
      shape: the wanted sizes of the axes that number layers.
      stored_axes: how many axes number layers in the stored array.
    """

    pieces: dict[Index, list[Index]]
    shape: tuple[int, ...]
    stored_axes: int

    @classmethod
    def of(cls, leaf: Any, array: StoredArray) -> "_Plan":
        if array.prng or tuple(array.shape) == tuple(leaf.shape):
            return cls({i: [i] for i in own_indices(leaf, array.shape)}, (), 0)
        stored_axes, axes = stack_axes(array.shape, leaf.shape)
        layers = tuple((0, size) for size in array.shape[:stored_axes])
        pieces: dict[Index, list[Index]] = {}
        for index in own_indices(leaf, leaf.shape):
            pieces.setdefault((*layers, *index[axes:]), []).append(index)
        return cls(pieces, tuple(leaf.shape[:axes]), stored_axes)

    def cut(self, host: np.ndarray, index: Index) -> np.ndarray:
        whole = host.reshape((*self.shape, *host.shape[self.stored_axes :]))
        return whole[(*slices_of(index[: len(self.shape)]), ...)]


def open_arrays(
    parent: dict[str, Any],
    arrays: Iterable[StoredArray],
    context: ts.Context,
    mode: Literal["create", "write", "read"],
) -> list[tuple[StoredArray, ts.TensorStore]]:
    """Open arrays in the folder `parent`, where their metadata must be as in `arrays`.

    Mode "create" accepts arrays that exist already, because a repeated request can cause that.
    """
    how = {
        "context": context,
        "create": mode == "create",
        "open": True,
        "read": mode == "read",
        "write": mode != "read",
    }
    specs = ((array, zarr_spec(array, parent)) for array in arrays)
    return list(in_flight((array, 0, partial(ts.open, spec, **how)) for array, spec in specs))
