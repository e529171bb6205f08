"""Descriptions of the arrays in a checkpoint, and functions that read and write them."""

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tensorstore as ts

from rmt_tpu import storage
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import faults

# Maximum size of a stored chunk in bytes. It is below 32 MB, because glibc maps fresh pages for
# each larger buffer. That takes longer than copying the chunk.
CHUNK_BYTES = 16 * 2**20
# Maximum bytes of concurrent reads or writes. Sixteen requests are enough for a remote store.
BYTES_IN_FLIGHT = 256 * 2**20
# On a CPU, JAX uses a numpy array without a copy if its data is aligned to this number of bytes.
_ALIGNMENT = 64

# The zarr codecs of each compression. zarr applies them to the bytes of a chunk, before it computes
# the checksum.
COMPRESSIONS = {"none": [], "zstd": [{"name": "zstd", "configuration": {"level": 1}}]}

DTYPES = frozenset(
    "bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8_e3m4 float8_e4m3fn "
    "float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 float8_e5m2fnuz bfloat16 float16 float32 "
    "float64 complex64 complex128".split()
)

# The names of stacked layer parameters, and of their optimizer state, contain the part "stacks".
_LAYERS = "stacks"

# Two different shapes of the layer axes of stacked layers: [V, L / V] for two numbers V of virtual
# stages.
Division = tuple[tuple[int, ...], tuple[int, ...]]

# An index has a pair (start, stop) for each axis. Unlike slices, such pairs are hashable.
Index = tuple[tuple[int, int], ...]


class StoredArray(NamedTuple):
    """The description of one stored array in the manifest.

    Attributes:
      name: name of the array, with slashes between parts.
      shape: shape of the array.
      dtype: dtype of the stored numbers.
      chunk: shape of each chunk.
      prng: for typed PRNG keys, the name of their implementation; otherwise None. Keys are stored
        as their uint32 data.
      compression: compression of the chunks.
    """

    name: str
    shape: Sequence[int]
    dtype: str
    chunk: Sequence[int]
    prng: str | None
    compression: str = "none"

    def __str__(self) -> str:
        """Return what a restore compares: dtype, shape and PRNG, such as `float32[4,8]`."""
        prng = f" ({self.prng} key)" if self.prng else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{prng}"

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the array before compression."""
        return math.prod(self.shape) * jax.numpy.dtype(self.dtype).itemsize

    def fits(self, other: "StoredArray", divisions: Collection[Division] = ()) -> bool:
        """Return whether this array can be restored as `other`.

        A pipeline with V virtual stages splits the layer axis, so that stacked layers of shape [L,
        ...] have the shape [V, L / V, ...]. Both shapes fit each other, for any V.

        Args:
          other: the array that is restored.
          divisions: pairs of different [V, L / V] that other arrays of the checkpoint have here and
            there. Without them, two different shapes with two axes do not fit: they may be [L,
            size] with different sizes.
        """
        if str(self) == str(other):
            return True
        if _LAYERS not in other.name.split("/") or (self.dtype, self.prng) != (other.dtype, None):
            return False
        ours, theirs = stack_axes(self.shape, other.shape)
        if (ours, theirs) == (1, 1) or min(len(self.shape) - ours, len(other.shape) - theirs) < 0:
            return False
        of_a_layer = tuple(self.shape[ours:])
        if ours == theirs and not of_a_layer:
            return (tuple(self.shape), tuple(other.shape)) in divisions
        same_count = math.prod(self.shape[:ours]) == math.prod(other.shape[:theirs])
        return same_count and of_a_layer == tuple(other.shape[theirs:])


def divisions(pairs: Iterable[tuple[StoredArray, StoredArray]]) -> set[Division]:
    """Return the pairs of different [V, L / V] of arrays that fit each other.

    Args:
      pairs: arrays of a checkpoint and of a model.
    """
    return {
        (tuple(stored.shape[:2]), tuple(wanted.shape[:2]))
        for stored, wanted in pairs
        if stored.shape[:2] != wanted.shape[:2]
        and stack_axes(stored.shape, wanted.shape) == (2, 2)
        and stored.fits(wanted)
    }


def stack_axes(stored: Sequence[int], wanted: Sequence[int]) -> tuple[int, int]:
    """Return how many layer axes, 1 or 2, each of two shapes of a parameter has.

    A parameter of stacked layers has the shape [L, ...], or [V, L / V, ...] in a pipeline with V
    virtual stages. If two such shapes differ but have equally many axes, both have two layer axes.
    """
    more = len(stored) - len(wanted)
    return {1: (2, 1), -1: (1, 2), 0: (2, 2)}.get(more, (1, 1))


def zarr_spec(array: StoredArray, parent: dict[str, Any]) -> dict[str, Any]:
    """Return the tensorstore spec of an array in the folder with the kvstore `parent`."""
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
        # By default tensorstore stores no chunks of zeros, and reads a missing chunk as zeros. A
        # lost file would then go unnoticed.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def named_leaves(tree: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves of a tree by name, and the structure of the tree.

    Raises:
      UsageError: a name is illegal or not unique, or the array would lie inside another array's
        folder.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves: dict[str, Any] = {}
    for path, leaf in paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/") if path else "array"
        try:
            storage.join(name)
        except UsageError:
            raise UsageError(
                f"an array cannot be stored under the name {name!r}; legal: relative names without "
                "'..', backslash, colon or control characters"
            ) from None
        if name in leaves:
            raise UsageError(f"two arrays have the same name {name!r}; legal: distinct names")
        leaves[name] = leaf
    for name in leaves:
        for slash in re.finditer("/", name):
            if (outer := name[: slash.start()]) in leaves:
                raise UsageError(
                    f"array {name!r} would be stored inside array {outer!r}; legal: a name that "
                    "does not begin with another array's name and a slash"
                )
    return leaves, treedef


def describe(name: str, leaf: Any) -> StoredArray:
    """Return the description of an array, with one chunk for the whole array.

    Args:
      name: name of the array.
      leaf: the array, or any object with a shape and a dtype.

    Raises:
      UsageError: the leaf is not an array, or its dtype cannot be stored.
    """
    if not hasattr(leaf, "dtype"):
        raise UsageError(
            f"{name} has the type {type(leaf).__name__}, but only arrays can be stored"
        )
    prng = None

    def key_data(key: jax.Array) -> jax.Array:
        # A tracer shows which PRNG its keys are for, but a ShapeDtypeStruct does not. Therefore
        # trace this function.
        nonlocal prng
        prng = str(jax.random.key_impl(key))
        return jax.random.key_data(key)

    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    dtype = np.dtype(leaf.dtype).name
    if dtype not in DTYPES:
        legal = ", ".join(sorted(DTYPES))
        raise UsageError(f"{name}: numbers of dtype {dtype} cannot be stored; legal: {legal}")
    return StoredArray(name, tuple(leaf.shape), dtype, tuple(leaf.shape), prng)


def to_store(tree: Any, compression: str) -> tuple[dict[str, Any], list[StoredArray]]:
    """Return the arrays to write, as a dict from name to array, and their descriptions.

    PRNG keys are replaced by their key data.
    """
    sources, arrays = {}, []
    for name, leaf in named_leaves(tree)[0].items():
        array = describe(name, leaf)
        sources[name] = source = jax.random.key_data(leaf) if array.prng else leaf
        arrays.append(array._replace(chunk=chunk_shape(source), compression=compression))
    return sources, arrays


def chunk_shape(source: Any) -> tuple[int, ...]:
    """Return the shape of the stored chunks of an array, which have at most `CHUNK_BYTES`.

    Each shard is divided into equal chunks. No chunk overlaps two shards, because two processes
    that write to the same chunk would have to wait for each other.
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
    """Convert slices of an array with this shape to (start, stop) pairs, one per axis."""
    return tuple(i.indices(n)[:2] for i, n in zip(slices, shape, strict=True))


def slices_of(index: Index) -> tuple[slice, ...]:
    """Convert the result of `index_of` back to slices."""
    return tuple(slice(start, stop) for start, stop in index)


def own_indices(leaf: Any, shape: Sequence[int]) -> dict[Index, list[jax.Device]]:
    """Return the pieces of a stored array that the devices of this process need.

    Args:
      leaf: the array to restore, or an object with its shape, dtype and sharding.
      shape: the shape of the stored array. For PRNG keys it has one more axis than `leaf`.

    Returns:
      A dict from each distinct piece to the list of devices that need it. For a numpy array, the
      list is empty.
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
    """Build the restored array from its pieces, with the type and the sharding of `leaf`.

    Args:
      leaf: the array to restore, or an object with its shape, dtype and sharding.
      array: the description of the stored array.
      pieces: the values of the pieces that `own_indices` returns.

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
        raise UsageError(
            f"{array.name}: {leaf.dtype} needs jax_enable_x64=True in JAX's config, or a numpy "
            "array to restore into"
        )
    return placed


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    # An array without a committed device must be restored without one. Otherwise jit could refuse
    # to combine it with arrays on other devices.
    return leaf.sharding if getattr(leaf, "committed", True) else None


def in_flight(
    jobs: Iterable[tuple[StoredArray, int, Callable]],
) -> Iterator[tuple[StoredArray, Any]]:
    """Run reads or writes concurrently, with at most BYTES_IN_FLIGHT bytes at a time.

    A larger job runs alone. When the generator ends, even with an error, no job is still running.

    Args:
      jobs: the array, the size in bytes, and the function of each job. The function starts the job
        and returns a future.

    Yields:
      The array and the result of each job, in order.
    """
    waiting, bytes_in_flight = deque(), 0

    def finish_first() -> tuple[StoredArray, Any]:
        nonlocal bytes_in_flight
        array, size, future = waiting.popleft()
        bytes_in_flight -= size
        with faults(f"array {array.name}: "):
            return array, future.result()

    try:
        for array, size, start in jobs:
            while waiting and bytes_in_flight + size > BYTES_IN_FLIGHT:
                yield finish_first()
            waiting.append((array, size, start()))
            bytes_in_flight += size
        while waiting:
            yield finish_first()
    finally:
        for _, _, future in waiting:
            future.exception()


def read(
    stores: Iterable[tuple[StoredArray, Any]], leaves: dict[str, Any]
) -> Iterator[tuple[StoredArray, dict[Index, np.ndarray]]]:
    """Read arrays, and yield each one with the pieces that this process needs.

    Args:
      stores: the description of each array, with its open TensorStore.
      leaves: a dict from names to the arrays to restore, or to objects with their shapes, dtypes
        and shardings.
    """
    plans = [(array, store, _ReadPlan.of(leaves[array.name], array)) for array, store in stores]
    parts = (
        (array, store[slices_of(index)]) for array, store, plan in plans for index in plan.pieces
    )
    jobs = (
        (array, part.size * part.dtype.numpy_dtype.itemsize, partial(_PendingRead.start, part))
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


class _PendingRead(NamedTuple):
    """A read in progress, which fills memory allocated by numpy.

    Memory from numpy causes a tenth of the page faults of memory from tensorstore, because numpy
    requests huge pages. The memory is aligned, so that JAX on a CPU can use it for an array without
    a copy.
    """

    host: np.ndarray
    future: Any

    @classmethod
    def start(cls, part: ts.TensorStore) -> "_PendingRead":
        dtype = part.dtype.numpy_dtype
        buffer = np.empty(part.size * dtype.itemsize + _ALIGNMENT, np.uint8)
        skip = -buffer.ctypes.data % _ALIGNMENT
        host = buffer[skip : skip + part.size * dtype.itemsize].view(dtype).reshape(part.shape)
        return cls(host, ts.array(host).write(part))

    def result(self) -> np.ndarray:
        self.future.result()
        return self.host

    def exception(self) -> Exception | None:
        return self.future.exception()


class _ReadPlan(NamedTuple):
    """A plan for reading the requested pieces of an array.

    The saved array may have other layer axes, because it was saved with another number of virtual
    pipeline stages. All layers are then read, and the requested layers are cut out.

    Attributes:
      pieces: for each range that is read from the stored array, the requested pieces within it.
      shape: the requested sizes of the layer axes.
      stored_axes: the number of layer axes in the stored array.
    """

    pieces: dict[Index, list[Index]]
    shape: tuple[int, ...]
    stored_axes: int

    @classmethod
    def of(cls, leaf: Any, array: StoredArray) -> "_ReadPlan":
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
    """Open arrays in a folder, and check that their metadata matches their descriptions.

    Args:
      parent: kvstore spec of the folder.
      arrays: the descriptions of the arrays.
      context: tensorstore's context.
      mode: "create" also opens an array that already exists, because a retried request may have
        created it.
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
