"""Checkpoints that survive a kill at any moment and notice every damaged byte.

    <root>/<step>/<attempt>/arrays/<name...>/   one zarr3 array per leaf, each chunk with a crc32c
    <root>/<step>/<attempt>/manifest.json       names, shapes and dtypes of the arrays, and `meta`
    <root>/<step>/COMMIT                        names the attempt; written last, and only if absent

A step exists once its COMMIT does. A save that dies earlier leaves an attempt which no COMMIT
names: nothing reads it, and a later save deletes it. Every byte goes through a tensorstore
`KvStore`, so the place where checkpoints live is decided in `_kvstore_spec` alone.
"""

import contextlib
import json
import math
import os
import re
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts
from absl import logging

from rmt_tpu.errors import RunError, UsageError

# 2: weights number the entries of concatenated data vectors by place, then by vector.
FORMAT_VERSION = 2
CHUNK_BYTES = 256 * 2**20
BYTES_IN_FLIGHT = 1024 * 2**20

_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_SAFE_NAME_PART = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f\\]+")
_OUR_KEY = re.compile(rb"(0|[1-9][0-9]*)/(COMMIT$|attempt-[0-9a-f]{16}(?=/))")
_ATTEMPT = re.compile(r"attempt-[0-9a-f]{16}")


class _Fault(Exception):
    """Something in the store could not be read or written; the message says what and why."""


class _Array(NamedTuple):
    """What the manifest says about one stored array.

    A typed PRNG key is stored as its uint32 key data, and `prng` names its implementation.
    """

    name: str
    shape: Sequence[int]
    dtype: str
    chunk: Sequence[int]
    prng: str | None

    def __str__(self) -> str:
        """All that must agree for a restore; how the array is split into chunks need not."""
        prng = f" ({self.prng} key)" if self.prng else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{prng}"


class Checkpointer:
    """Saves and restores pytrees of arrays under one root folder.

    One process writes to a root at a time; any number may read. Should two writers race for one
    step all the same, exactly one of them commits it and the other one's `save` raises.

    Durability is tensorstore's default (`file_io_sync`): each file is fsynced before it counts as
    written, so COMMIT never reaches the disk ahead of the data it names.
    """

    def __init__(self, root: str, *, keep: int = 3, report: Callable[[str], None] = logging.error):
        """Opens `root` without touching it: reading needs no right to write.

        Args:
            root: A local path. It is created by the first save.
            keep: How many of the last committed steps to keep, at least 1.
            report: Is told in one line about each damaged step that a restore passes over, and
                about old steps that could not be deleted.

        Raises:
            UsageError: `keep` is below 1, or `root` is not a local path.
        """
        if keep < 1:
            raise UsageError(f"keep must be at least 1, not {keep}")
        self._spec = _kvstore_spec(root)
        self._kv = ts.KvStore.open(self._spec).result()
        # Every chunk is used once, so a cache would only hold memory.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._keep = keep
        self._report = report
        # Which COMMIT, by its generation, this object found to lead to damaged data.
        self._damaged: dict[int, bytes] = {}
        self.root = root

    def steps(self) -> list[int]:
        """The committed steps, ascending.

        Raises:
            UsageError: `root` cannot be listed.
        """
        return sorted(step for step, entries in self._listing().items() if "COMMIT" in entries)

    def check_writable(self) -> None:
        """Writes and deletes a small file, as `save` does, for a run to know before it trains.

        Raises:
            UsageError: `root` cannot be written to.
        """
        with _faults(f"cannot write to {self.root}: ", UsageError):
            self._kv.write(".write_probe", b"").result()
            self._kv.write(".write_probe", None).result()

    def save(self, step: int, tree: Any, meta: dict) -> None:
        """Commits `tree` and `meta` as `step`, then deletes what is no longer kept.

        Returns once everything is on disk; from then on the arrays may be donated.

        Args:
            step: The step's number. It must not be committed yet, unless this object found it
                damaged in a restore: then it is replaced.
            tree: A pytree of jax or numpy arrays. Typed PRNG keys are arrays too.
            meta: A JSON dict. Tuples come back as lists and integer keys as strings.

        Raises:
            UsageError: The tree or `meta` cannot be stored, or `root` cannot be written to.
            RunError: The step is already committed, or writing failed midway.
        """
        if step < 0:
            raise UsageError(f"a checkpoint's step must not be negative, got {step}")
        sources, arrays = _to_store(tree)
        manifest = _seal(arrays, meta)
        attempt = f"attempt-{uuid.uuid4().hex[:16]}"
        self.check_writable()
        try:
            self._make_way(step)
            self._write(f"{step}/{attempt}", sources, arrays, manifest)
            self._commit(step, attempt)
        except _Fault as fault:
            self._abandon(step, attempt)
            raise RunError(f"cannot save step {step} in {self.root}: {fault}") from None
        self._tidy(step)

    def restore(
        self, like: Any, step: int | None = None, *, partial: bool = False
    ) -> tuple[int, Any, dict]:
        """Reads a step into the structure, shapes, dtypes and placement of `like`.

        Args:
            like: A pytree of arrays or `jax.ShapeDtypeStruct`. Where one has a sharding, the
                restored array gets it. Where it is a numpy array, so is the restored one.
            step: Which step; by default the newest undamaged one.
            partial: Leave alone what the checkpoint has beyond `like`; else it is refused.

        Returns:
            The step, the tree, and the `meta` it was saved with.

        Raises:
            UsageError: The checkpoint's arrays are not those of `like`, or there is no such step.
            RunError: There is no checkpoint, or none that is undamaged.
        """
        leaves, treedef = _named_leaves(like)
        wanted = {name: _describe(name, leaf) for name, leaf in leaves.items()}

        def load(step: int, commit: bytes) -> tuple[Any, dict]:
            attempt, arrays, meta = self._read_manifest(step, commit)
            compared = wanted.keys() if partial else arrays.keys() | wanted.keys()
            self._check_fit(step, arrays, wanted, sorted(compared))
            stores = self._open_arrays(f"{step}/{attempt}", map(arrays.get, leaves), create=False)
            jobs = ((a, s.size * s.dtype.numpy_dtype.itemsize, s.read) for a, s in stores)
            values = [_place(leaves[array.name], array, host) for array, host in _in_flight(jobs)]
            return treedef.unflatten(values), meta

        found, (tree, meta) = self._first_undamaged(step, load)
        return found, tree, meta

    def _first_undamaged(self, step: int | None, load: Callable) -> tuple[int, Any]:
        steps = self.steps()
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"no checkpoint of step {step} in {self.root}; available: {there}")
        if not steps:
            raise RunError(f"no checkpoint in {self.root}")
        problems = []
        for candidate in reversed(steps) if step is None else [step]:
            commit = None
            self._damaged.pop(candidate, None)
            try:
                commit = self._read(f"{candidate}/COMMIT")
                return candidate, load(candidate, commit.value)
            except _Fault as fault:
                problems.append(f"step {candidate}: {fault}")
            if commit:
                self._damaged[candidate] = commit.stamp.generation
            if step is None:
                self._report(f"damaged checkpoint in {self.root} passed over: {problems[-1]}")
        raise RunError(f"no undamaged checkpoint in {self.root}: {'; '.join(problems)}")

    def _read_manifest(self, step: int, commit: bytes) -> tuple[str, dict[str, _Array], dict]:
        try:
            attempt = _ATTEMPT.fullmatch(json.loads(commit)["attempt"])[0]
        except (ValueError, KeyError, TypeError):
            raise _Fault("COMMIT is damaged: it names no attempt") from None
        return attempt, *_unseal(self._read(f"{step}/{attempt}/manifest.json").value)

    def _check_fit(
        self, step: int, stored: dict[str, _Array], wanted: dict[str, _Array], names: list[str]
    ) -> None:
        differing = []
        for name in names:
            ours, theirs = str(wanted.get(name, "has none")), str(stored.get(name, "has none"))
            if ours != theirs:
                differing.append(f"{name}: checkpoint {theirs}, model {ours}")
        if differing:
            what = f"checkpoint step {step} in {self.root} does not fit the model"
            raise UsageError(f"{what}: {'; '.join(differing)}")

    def _read(self, key: str) -> ts.KvStore.ReadResult:
        with _faults():
            found = self._kv.read(key).result()
        if found.state == "missing":
            raise _Fault(f"{key} is missing")
        return found

    def _open_arrays(self, folder: str, arrays: Iterable[_Array], create: bool) -> list:
        """Opens the arrays of an attempt; their stored metadata must be what `arrays` says."""
        parent = {**self._spec, "path": f"{self._spec['path']}{folder}/arrays/"}
        how = {"context": self._context, "create": create, "open": not create}
        specs = ((array, _zarr_spec(array, parent)) for array in arrays)
        return list(_in_flight((array, 0, partial(ts.open, spec, **how)) for array, spec in specs))

    def _write(self, folder: str, sources: dict, arrays: list[_Array], manifest: bytes) -> None:
        stores = self._open_arrays(folder, arrays, create=True)
        jobs = (
            (array, block.nbytes, lambda part=store[index], b=block: part.write(np.asarray(b)))
            for array, store in stores
            for index, block in _blocks(sources[array.name])
        )
        deque(_in_flight(jobs), maxlen=0)  # runs them all and keeps no result
        with _faults():
            self._kv.write(f"{folder}/manifest.json", manifest).result()

    def _make_way(self, step: int) -> None:
        """Deletes the step's COMMIT if it is still the one that was found damaged."""
        key = f"{step}/COMMIT"
        with _faults():
            commit = self._kv.read(key).result()
            if commit.state != "missing":
                if commit.stamp.generation != self._damaged.get(step):
                    raise _Fault("it is already committed")
                self._kv.write(key, None, if_equal=commit.stamp.generation).result()
        self._damaged.pop(step, None)

    def _commit(self, step: int, attempt: str) -> None:
        key, value = f"{step}/COMMIT", json.dumps({"attempt": attempt}).encode()
        with _faults():
            before = self._kv.read(key).result()
            if before.state == "missing":
                written = self._kv.write(key, value, if_equal=before.stamp.generation).result()
                # A refused write does not raise: it has no generation.
                if written.generation:
                    return
            # A write repeated after a lost answer is refused because of its own success.
            if self._kv.read(key).result().value == value:
                return
        raise _Fault("another writer committed it first")

    def _abandon(self, step: int, attempt: str) -> None:
        """Deletes an attempt that no COMMIT names, as far as the store still lets us."""
        with contextlib.suppress(_Fault), _faults():
            if attempt.encode() not in self._kv.read(f"{step}/COMMIT").result().value:
                self._delete_attempts(step, [attempt])

    def _tidy(self, saved: int) -> None:
        """Drops the steps beyond `keep` and the attempts that no COMMIT names.

        Steps known to be damaged do not count as kept ones, and go once a newer step is good.
        A step below the kept ones stays if it is the one just saved: a run may go back in time.
        """
        found = self._listing()
        good = [step for step in found if "COMMIT" in found[step] and step not in self._damaged]
        kept = {*sorted(good)[-self._keep :], saved}
        # The other steps; another writer's attempt at the one just saved may still be alive.
        found.pop(saved, None)
        try:
            for step, entries in sorted(found.items()):
                self._tidy_step(step, entries, step in kept or step > max(kept))
        except _Fault as fault:
            self._report(f"cannot delete old checkpoints in {self.root}: {fault}")

    def _tidy_step(self, step: int, entries: set[str], keep: bool) -> None:
        dead = entries - {"COMMIT"}
        if "COMMIT" in entries and keep:
            commit = self._read(f"{step}/COMMIT").value
            dead = {attempt for attempt in dead if attempt.encode() not in commit}
        elif "COMMIT" in entries:
            # COMMIT goes first, so that a kill in between leaves no half step behind it.
            with _faults():
                self._kv.write(f"{step}/COMMIT", None).result()
        self._delete_attempts(step, dead)

    def _listing(self) -> dict[int, set[str]]:
        """Maps each step to which of its entries are ours: COMMIT and attempts."""
        # Only keys that begin with a digit: other folders in the root are not walked through.
        with _faults(f"cannot read {self.root}: ", UsageError):
            keys = self._kv.list(ts.KvStore.KeyRange("0", ":")).result()
        found: dict[int, set[str]] = {}
        for match in filter(None, map(_OUR_KEY.match, keys)):
            found.setdefault(int(match[1]), set()).add(match[2].decode())
        return found

    def _delete_attempts(self, step: int, attempts: Iterable[str]) -> None:
        folders = [f"{step}/{attempt}" for attempt in attempts]
        for folder in folders:
            # "0" follows "/", so the range ends where the folder does.
            with _faults():
                self._kv.delete_range(ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")).result()
        # The file driver leaves the empty folders, which an object store does not have.
        for folder in [*folders, str(step)]:
            with contextlib.suppress(OSError):
                os.rmdir(self._spec["path"] + folder)


def _kvstore_spec(root: str) -> dict[str, str]:
    """Where `root` is, as tensorstore writes it; `path` ends with a slash."""
    if "://" in root:
        raise UsageError(f"checkpoint root {root!r}: only local paths can be used")
    return {"driver": "file", "path": os.path.join(os.path.abspath(root), "")}


def _zarr_spec(array: _Array, parent: dict[str, str]) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {**parent, "path": f"{parent['path']}{array.name}/"},
        "metadata": {
            "shape": array.shape,
            "data_type": array.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk}},
            "codecs": _CODECS,
        },
        # By default a chunk of zeros is not stored and a missing chunk is read as zeros, so that
        # a lost file would go unnoticed.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def _named_leaves(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves by name, in tree order, and the tree's structure."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves: dict[str, Any] = {}
    for path, leaf in paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/") if path else "array"
        if not all(_SAFE_NAME_PART.fullmatch(part) for part in name.split("/")):
            raise UsageError(f"an array cannot be stored under the name {name!r}")
        if name in leaves:
            raise UsageError(f"two arrays have the same name {name!r}")
        leaves[name] = leaf
    for name in leaves:
        for slash in re.finditer("/", name):
            if (outer := name[: slash.start()]) in leaves:
                raise UsageError(f"array {name!r} would be stored inside array {outer!r}")
    return leaves, treedef


def _describe(name: str, leaf: Any) -> _Array:
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
    return _Array(name, leaf.shape, np.dtype(leaf.dtype).name, leaf.shape, prng)


def _to_store(tree: Any) -> tuple[dict[str, Any], list[_Array]]:
    """The arrays to write, PRNG keys as their data, and how each of them is stored."""
    sources, arrays = {}, []
    for name, leaf in _named_leaves(tree)[0].items():
        array = _describe(name, leaf)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise UsageError(f"{name}: an array that spans several processes cannot be stored")
        sources[name] = source = jax.random.key_data(leaf) if array.prng else leaf
        arrays.append(array._replace(chunk=_chunk_shape(source)))
    return sources, arrays


def _chunk_shape(source: Any) -> tuple[int, ...]:
    """One shard, halved along its longest axis until it is small enough."""
    sharded = isinstance(source, jax.Array)
    shape = source.sharding.shard_shape(source.shape) if sharded else source.shape
    chunk = [max(1, size) for size in shape]
    # An odd size makes chunks cross shards; tensorstore then merges the writes.
    while math.prod(chunk) * source.dtype.itemsize > CHUNK_BYTES and max(chunk) > 1:
        longest = chunk.index(max(chunk))
        chunk[longest] = -(-chunk[longest] // 2)
    return tuple(chunk)


def _blocks(source: Any) -> list[tuple[Any, Any]]:
    """The distinct pieces of an array with the index of each: no piece is assembled from others."""
    if not isinstance(source, jax.Array):
        return [(..., source)]
    return [(s.index, s.data) for s in source.addressable_shards if s.replica_id == 0]


def _place(leaf: Any, array: _Array, host: np.ndarray) -> Any:
    """The restored array as the kind of array that `leaf` is, and where `leaf` is."""
    if isinstance(leaf, np.ndarray | np.generic):
        return host[()] if isinstance(leaf, np.generic) else host
    # An uncommitted array must stay so, or jit refuses it beside arrays on other devices.
    sharding = leaf.sharding if getattr(leaf, "committed", True) else None
    if array.prng:
        host = jax.random.wrap_key_data(jax.device_put(host), impl=array.prng)
    placed = jax.device_put(host, sharding)
    if placed.dtype != leaf.dtype:
        raise UsageError(f"{array.name}: {leaf.dtype} needs jax_enable_x64, or numpy in its place")
    return placed


def _in_flight(jobs: Iterable[tuple[_Array, int, Callable]]) -> Iterator[tuple[_Array, Any]]:
    """Runs reads or writes concurrently, with at most BYTES_IN_FLIGHT or one job under way.

    A job is its array, its size in bytes, and what starts it and returns its future. Yields the
    array and result of each, in order. When this ends, also by an error, no job is under way.
    """
    waiting, held = deque(), 0

    def finish_first() -> tuple[_Array, Any]:
        nonlocal held
        array, size, future = waiting.popleft()
        held -= size
        with _faults(f"array {array.name}: "):
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


def _seal(arrays: list[_Array], meta: dict) -> bytes:
    """The manifest's bytes: its content and a checksum of that content."""
    try:
        # Through JSON and back first: the checksum is of what a reader will see.
        meta = json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a checkpoint's meta must be JSON: {error}") from None
    content = {"version": FORMAT_VERSION, "arrays": [a._asdict() for a in arrays], "meta": meta}
    return json.dumps({"crc32": _checksum(content), "content": content}, indent=1).encode()


def _unseal(manifest: bytes) -> tuple[dict[str, _Array], dict]:
    """The arrays by name and the meta that a manifest lists."""
    try:
        sealed = json.loads(manifest)
        content = sealed["content"]
        if sealed["crc32"] != _checksum(content):
            raise _Fault("manifest.json is damaged: its checksum does not match")
    except (ValueError, KeyError, TypeError):
        raise _Fault("manifest.json is damaged: it is not a manifest") from None
    if (version := content["version"]) != FORMAT_VERSION:
        raise UsageError(f"checkpoint format {version} is not {FORMAT_VERSION}, which is read here")
    return {entry["name"]: _Array(**entry) for entry in content["arrays"]}, content["meta"]


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


@contextlib.contextmanager
def _faults(where: str = "", kind: type[Exception] = _Fault) -> Iterator[None]:
    """Turns tensorstore's errors, which are all ValueErrors, into errors of one line."""
    try:
        yield
    except ValueError as error:
        # What follows is the whole spec of the array.
        reason = str(error).split(" [tensorstore_spec=")[0]
        raise kind(where + " ".join(reason.split())) from None
