"""How the arrays of a pytree are named, cut into chunks and shards, written and read."""

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

# Below the 32 MB from which glibc takes fresh pages for each buffer, which cost more than the copy.
CHUNK_BYTES = 16 * 2**20
# Sixteen chunks, so that a store which is far away has enough to do.
_ALIGNMENT = 64  # bytes
BYTES_IN_FLIGHT = 256 * 2**20

# Between the numbers' bytes and their checksum, by which name.
COMPRESSIONS = {"none": [], "zstd": [{"name": "zstd", "configuration": {"level": 1}}]}

DTYPES = frozenset(
    "bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float8_e3m4 float8_e4m3fn "
    "float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 float8_e5m2fnuz bfloat16 float16 float32 "
    "float64 complex64 complex128".split()
)

# Parameters of layers, and what an optimizer keeps of each, have this in their names.
_LAYERS = "stacks"

Index = tuple[tuple[int, int], ...]  # start and stop on each axis: slices have no hash


class StoredArray(NamedTuple):
    """What the manifest says about one stored array.

    A typed PRNG key is stored as its uint32 key data, and `prng` names its implementation.
    """

    name: str
    shape: Sequence[int]
    dtype: str
    chunk: Sequence[int]
    prng: str | None
    compression: str = "none"

    def __str__(self) -> str:
        """All that must agree for a restore; how the array is split into chunks need not."""
        prng = f" ({self.prng} key)" if self.prng else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{prng}"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jax.numpy.dtype(self.dtype).itemsize

    def fits(self, other: "StoredArray") -> bool:
        """Whether this can be restored as `other`, which is in one of the ways it is stored.

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
        if ours == theirs and not of_a_layer:  # as likely [L, size] of another size
            return False
        same_count = math.prod(self.shape[:ours]) == math.prod(other.shape[:theirs])
        return same_count and of_a_layer == tuple(other.shape[theirs:])


def stack_axes(stored: Sequence[int], wanted: Sequence[int]) -> tuple[int, int]:
    """How many first axes of two shapes of the same layers number the layers: each 1 or 2.

    Two shapes of as many axes that differ have two each.
    """
    more = len(stored) - len(wanted)
    return {1: (2, 1), -1: (1, 2), 0: (2, 2)}.get(more, (1, 1))


def zarr_spec(array: StoredArray, parent: dict[str, Any]) -> dict[str, Any]:
    """Of the array in tensorstore, in the folder whose kvstore is `parent`."""
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
        # By default a chunk of zeros is not stored and a missing chunk is read as zeros, so that
        # a lost file would go unnoticed.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def named_leaves(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves by name, in tree order, and the tree's structure."""
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
    """How an array, or a stand-in with a shape and a dtype, is stored when in one chunk."""
    if not hasattr(leaf, "dtype"):
        raise UsageError(f"{name}: only arrays can be stored, not {type(leaf).__name__}")
    prng = None

    def key_data(key: jax.Array) -> jax.Array:
        # A ShapeDtypeStruct does not tell its key's implementation, but a tracer does.
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
    """The arrays to write, PRNG keys as their data, and how each of them is stored."""
    sources, arrays = {}, []
    for name, leaf in named_leaves(tree)[0].items():
        array = describe(name, leaf)
        sources[name] = source = jax.random.key_data(leaf) if array.prng else leaf
        arrays.append(array._replace(chunk=chunk_shape(source), compression=compression))
    return sources, arrays


def chunk_shape(source: Any) -> tuple[int, ...]:
    """One shard, cut into equal parts until it is small enough.

    Equal ones, so that no chunk has parts of two shards: those may be of two processes, which
    would have to wait for each other's writes.
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
    """Turns slices of an array of this shape into (start, stop) of each axis."""
    return tuple(i.indices(n)[:2] for i, n in zip(slices, shape, strict=True))


def slices_of(index: Index) -> tuple[slice, ...]:
    """Turns such numbers back into slices, each with its start and stop."""
    return tuple(slice(start, stop) for start, stop in index)


def own_indices(leaf: Any, shape: Sequence[int]) -> dict[Index, list[jax.Device]]:
    """The distinct pieces that this process's devices need of a stored array, and which devices.

    Args:
      leaf: what the array is restored as.
      shape: of the array as it is stored; longer than that of `leaf` if that is a PRNG key.
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
    """The restored array as the kind of array that `leaf` is, and where `leaf` is.

    Args:
      leaf: what the array is restored as.
      array: as it is stored.
      pieces: by index, those of `own_indices`.
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
    # An uncommitted array must stay so, or jit refuses it beside arrays on other devices.
    return leaf.sharding if getattr(leaf, "committed", True) else None


def in_flight(
    jobs: Iterable[tuple[StoredArray, int, Callable]],
) -> Iterator[tuple[StoredArray, Any]]:
    """Runs reads or writes concurrently, with at most BYTES_IN_FLIGHT or one job under way.

    A job is its array, its size in bytes, and what starts it and returns its future. Yields the
    array and result of each, in order. When this ends, also by an error, no job is under way.
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
    """Of each array, the pieces that this process's devices need.

    Args:
      stores: the arrays, each with its open TensorStore.
      leaves: by name, what each is restored as.
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
    """A read under way into memory that numpy made.

    That takes a tenth of the page faults of tensorstore's own, for numpy asks for huge pages. It
    begins where JAX wants it to, so that a CPU's array is this memory and no copy of it.
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
    """How to come by the wanted pieces of an array.

    Where its layers are stacked otherwise than in `shape`, all of them are read, and the wanted
    ones cut out: a chunk may have several, and is read as a whole in any case.

    Attributes:
      pieces: what to read of the stored array, and which pieces are cut from that.
      shape: wanted, of the axes that number layers.
      stored_axes: how many do in the stored array.
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
    """Opens arrays in the folder `parent`; their metadata there must be what `arrays` says.

    To "create" one that is there is no error: that comes of a repeated request.
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
