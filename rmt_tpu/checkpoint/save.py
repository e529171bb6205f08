"""Functions that write a checkpoint, in a background thread and with several processes.

The arrays are first copied, so that training can continue. Writing then has three phases, and all
processes complete a phase before any process starts the next. First, process 0 creates the arrays
without content. Second, every process writes its share of the numbers on its devices. Third,
process 0 writes the manifest, and then COMMIT if there is none.
"""

import contextlib
import itertools
import json
import math
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import numpy as np
import tensorstore as ts

from rmt_tpu.checkpoint.arrays import StoredArray, in_flight, index_of, open_arrays, slices_of
from rmt_tpu.checkpoint.manifest import COMMIT_LIMIT, Commit
from rmt_tpu.checkpoint.retention import delete_attempts
from rmt_tpu.checkpoint.shares import Layout, parts_of
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError, one_line
from rmt_tpu.storage import Fault, Folder, Unavailable

_T = TypeVar("_T")


class Saved(NamedTuple):
    """The result of a successful save.

    Attributes:
      step: the step that was saved.
      num_bytes: total size of all arrays, over all processes and before compression.
      seconds: time from the call of `begin_save` to the commit of the step.
      blocked_seconds: time for which `begin_save` blocked its caller.
    """

    step: int
    num_bytes: int
    seconds: float
    blocked_seconds: float


class Block(NamedTuple):
    """A piece of an array that this process writes.

    Attributes:
      array: description of the whole array.
      index: position in the array to which the piece is written.
      values: an array that contains the values of the piece, and possibly others.
      within: the slices of `values` that are written; Ellipsis writes the whole array.
    """

    array: StoredArray
    index: Any
    values: np.ndarray | np.generic | jax.Array
    within: Any = ...

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the piece, before compression."""
        if self.within is ...:
            return self.values.nbytes
        return math.prod(s.stop - s.start for s in self.within) * self.values.dtype.itemsize

    def cut(self) -> np.ndarray | np.generic | jax.Array:
        """Return the values of the piece, as a view in host memory or a copy on the device."""
        if self.within is ...:
            return self.values
        (device,) = self.values.devices()
        if is_host(device):
            return np.asarray(self.values)[self.within]
        starts = tuple(np.int32(s.start) for s in self.within)
        return _slice(self.values, starts, tuple(s.stop - s.start for s in self.within))


# With traced start indices, one compiled program cuts all pieces of the same size.
_slice = jax.jit(jax.lax.dynamic_slice, static_argnums=2)


def blocks_of(sources: dict[str, Any], arrays: Iterable[StoredArray]) -> deque[Block]:
    """Return the pieces of arrays that this process writes.

    Each piece lies within one shard. No other process writes the same numbers.

    Args:
      sources: maps the name of each array to the array.
      arrays: the descriptions of the arrays.
    """
    arrays = list(arrays)
    shared = {
        name: source.sharding
        for name, source in sources.items()
        if isinstance(source, jax.Array) and not source.is_fully_addressable
    }
    blocks = deque()
    if processes.is_first():  # Process 0 writes the arrays that all processes have.
        own = (array for array in arrays if array.name not in shared)
        blocks += (
            Block(array, *piece) for array in own for piece in _own_pieces(sources[array.name])
        )
    if shared:
        layouts = tuple(
            Layout(
                tuple(array.shape),
                tuple(array.chunk),
                sources[array.name].dtype.itemsize,
                shared.get(array.name),
            )
            for array in arrays
        )
        blocks += _shared_blocks(sources, arrays, layouts)
    return blocks


def _own_pieces(source: Any) -> list[tuple[Any, Any]]:
    """Return the distinct shards and their indices, if this process has the whole array."""
    if not isinstance(source, jax.Array):
        return [(..., source)]
    return [(s.index, s.data) for s in source.addressable_shards if s.replica_id == 0]


def _shared_blocks(
    sources: dict[str, Any], arrays: list[StoredArray], layouts: tuple[Layout, ...]
) -> Iterator[Block]:
    """Yield the pieces that this process writes of arrays that span several processes."""
    for position, parts in itertools.groupby(
        parts_of(jax.process_index(), layouts), lambda part: part.array
    ):
        array = arrays[position]
        shards = sources[array.name].addressable_shards
        shard_at = {index_of(s.index, array.shape): s for s in reversed(shards)}
        for part in parts:
            within: Any = ...
            if part.index != part.piece:
                starts = (start for start, _ in part.piece)
                within = tuple(
                    slice(start - first, stop - first)
                    for (start, stop), first in zip(part.index, starts, strict=True)
                )
            yield Block(array, slices_of(part.index), shard_at[part.piece].data, within)


def snapshot(blocks: Iterable[Block]) -> deque[Block]:
    """Return the blocks with copies of their values, so that the arrays may be donated.

    On a CPU no values are copied, because XLA does not overwrite a buffer that numpy refers to.
    """
    return deque(block._replace(values=_host_copy(block), within=...) for block in blocks)


def _host_copy(block: Block) -> np.ndarray | jax.Array:
    if not isinstance(block.values, jax.Array):
        return np.array(block.values)
    (device,) = block.values.devices()
    if is_host(device):
        # No copy is needed, because XLA does not donate a buffer that numpy refers to.
        return np.asarray(block.cut())
    # Start an asynchronous copy to host memory. If the array is donated meanwhile, its buffer is
    # not overwritten before the copy is complete.
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    copy = jax.device_put(block.cut(), pinned, may_alias=False)
    # A cut piece is a new array in device memory. Wait until it is copied, so that there is only
    # one at a time.
    return copy if block.within is ... else jax.block_until_ready(copy)


def is_host(device: jax.Device) -> bool:
    """Return whether the memory of a device is the host's own memory."""
    return device.platform == "cpu"


class Attempt(NamedTuple):
    """One attempt to save a step.

    Attributes:
      folder: the folder of all steps.
      context: tensorstore's context.
      step: the step to save.
      arrays: the descriptions of all arrays, over all processes.
      blocks: the blocks that this process writes; each is released once it is written.
      manifest: the bytes of the step's manifest.
      loss: the loss on held-out text, if it is known.
      before_commit: a function that process 0 calls just before it writes COMMIT, or None.
      damaged: generation number of a damaged COMMIT of the step, which may be replaced; None if
        there is none.
      before_begin: a function that process 0 calls before anything is written.
      exchange: the method `processes.Channel.exchange` of a channel that only this thread uses.
    """

    folder: Folder
    context: ts.Context
    step: int
    arrays: list[StoredArray]
    blocks: deque[Block]
    manifest: bytes
    loss: int | float | None
    before_commit: Callable[[], None] | None
    damaged: Any
    before_begin: Callable[[], None]
    exchange: Callable[[str, str], list[str]]

    def run(self) -> None:
        """Save the step in the three phases that the docstring of this module describes.

        Raises:
          RunError: the step is already committed, or some process failed.
        """
        name = f"attempt-{uuid.uuid4().hex[:16]}"
        first, stores = processes.is_first(), None
        try:
            with self._on_all_processes("begin", name) as names:
                if first:
                    self.before_begin()
                    self.make_way()
                    stores = self._open(name, "create")
            name = names[0]
            with self._on_all_processes("write"):
                self.write_stores(stores or self._open(name, "write"))
            with self._on_all_processes("commit"):
                if first:
                    self.folder.write(f"{self.step}/{name}/manifest.json", self.manifest)
                    if self.before_commit:
                        self.before_commit()
                    commit(self.folder, self.step, Commit(name, self.loss))
        except Exception as error:
            # All processes raise a Fault together, so the attempt can be deleted. After other
            # errors, another process may still be writing.
            if first and isinstance(error, Fault):
                self._abandon(name)
            line = f"cannot save step {self.step} in {self.folder}: {one_line(error)}"
            raise RunError(line) from None

    def _on_all_processes(self, part: str, message: str = "") -> AbstractContextManager[list[str]]:
        return on_all_processes(
            self.exchange, f"checkpoint {self.step}: {part}", message, faults=Exception
        )

    def make_way(self) -> None:
        """Delete the step's COMMIT if a restore found it damaged.

        Raises:
          Fault: the step has a COMMIT that is not the damaged one.
        """
        path = f"{self.step}/COMMIT"
        found = self.folder.read(path, limit=COMMIT_LIMIT)
        if found and not (
            found.generation == self.damaged
            and self.folder.delete(path, generation=found.generation)
        ):
            raise Fault(f"step {self.step} is already committed: the file {path} exists")

    def _open(self, attempt: str, mode: Literal["create", "write"]) -> dict[str, ts.TensorStore]:
        parent = self.folder.child(f"{self.step}/{attempt}/arrays").kvstore()
        opened = open_arrays(parent, self.arrays, self.context, mode)
        return {array.name: store for array, store in opened}

    def write_stores(self, stores: dict[str, ts.TensorStore]) -> None:
        """Write this process's blocks to the stores of their arrays, and release each block."""

        def jobs():
            while self.blocks:
                block = self.blocks.popleft()
                part = stores[block.array.name][block.index]
                write = lambda part=part, block=block: part.write(
                    np.asarray(block.cut()), can_reference_source_data_indefinitely=True
                )
                yield block.array, block.num_bytes, write

        deque(in_flight(jobs()), maxlen=0)  # Run all jobs, and discard their results.

    def _abandon(self, attempt: str) -> None:
        """Delete the folder of an attempt that is not committed, and ignore storage errors."""
        with contextlib.suppress(Fault):
            found = self.folder.read(f"{self.step}/COMMIT", limit=COMMIT_LIMIT)
            if not found or attempt.encode() not in found.data:
                delete_attempts(self.folder, self.step, [attempt])


def commit(folder: Folder, step: int, content: Commit) -> None:
    """Commit a step by creating its COMMIT file.

    Raises:
      Fault: another writer has committed the step, or the write failed.
    """
    if not folder.create(f"{step}/COMMIT", content.to_bytes()):
        raise Fault(
            f"another writer committed the step first: the file {step}/COMMIT exists; is another "
            "process training in this folder?"
        )


@contextlib.contextmanager
def on_all_processes(
    exchange: Callable[[str, str], list[str]],
    what: str,
    message: str = "",
    *,
    faults: type[Exception] = Fault,
) -> Iterator[list[str]]:
    """Run the `with` body on every process. If it fails on one, all raise the error.

    Args:
      exchange: the method `exchange` of this thread's channel.
      what: a description of the work, for messages.
      message: a short text that this process sends to all others.
      faults: types of exceptions that all processes raise as a Fault. Other exceptions stop only
        this process.

    Yields:
      A list. It contains the texts of all processes, in order, after all have finished.

    Raises:
      Fault: the body failed on some process. It is Unavailable if every failure was that the
        storage did not answer.
      RunError: some process did not respond.
    """
    answers, fault, unavailable = [], None, False
    try:
        yield answers
    except faults as error:
        fault, unavailable = one_line(error), isinstance(error, Unavailable)
    own = json.dumps((message, fault, unavailable))
    replies = [own] if processes.num_processes() == 1 else exchange(own, what)
    messages, reasons, unavailable_on = zip(*map(json.loads, replies), strict=True)
    failed = [process for process, fault in enumerate(reasons) if fault is not None]
    if failed:
        where = f"process {failed[0]}: " if len(reasons) > 1 else ""
        kind = Unavailable if all(unavailable_on[process] for process in failed) else Fault
        raise kind(where + reasons[failed[0]]) from None
    answers += messages


class Background(Generic[_T]):
    """A thread that runs one function at a time.

    The interpreter waits for the function before it exits.
    """

    def __init__(self, name: str):
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: _T | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], _T]) -> None:
        """Run a function in the thread; no other function may be running.

        Args:
          work: the function to run. If it raises an error, `take` raises this error.
        """

        def run() -> None:
            try:
                self._result = work()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=self._name)
        self._thread.start()

    def join(self) -> None:
        """Wait until the running function, if any, has returned."""
        if self._thread:
            self._thread.join()

    def take(self) -> _T | None:
        """Return the result of the function that has completed, or raise its error.

        Each result or error is delivered only once. The result is None if no function has completed
        since the last call.
        """
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        result, self._result = self._result, None
        error, self._error = self._error, None
        if error:
            raise error
        return result

    def tell(self, report: Callable[[str], None]) -> None:
        """Report an error of the completed function that `take` has not raised."""
        if self._error:
            report(one_line(self._error))
