"""Checkpoints that survive a kill at any moment and notice every damaged byte.

    <root>/<step>/<attempt>/arrays/<name...>/   one zarr3 array per leaf, each chunk with a crc32c
    <root>/<step>/<attempt>/manifest.json       names, shapes and dtypes of the arrays, and `meta`
    <root>/<step>/COMMIT                        names the attempt; written last, and only if absent
    <root>/BACK                                 while later steps are deleted: the last that counts

A step exists once its COMMIT does. A save that dies earlier leaves an attempt that no COMMIT names:
nothing reads it, and a later save deletes it. Only `rmt_tpu.storage` knows where checkpoints are
stored.

In a run of several processes all of them call `save` and `restore`, with one root that all see.
Each reads the pieces of arrays that its own devices hold, and writes a share of them. Pieces that
several processes hold are divided so that each writes about as many bytes. Process 0 does the rest:
it creates the arrays, and commits once every process has written its share.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorstore as ts

from rmt_tpu import storage
from rmt_tpu.checkpoint.arrays import (
    COMPRESSIONS,
    StoredArray,
    describe,
    named_leaves,
    open_arrays,
    place,
    read,
    to_store,
)
from rmt_tpu.checkpoint.manifest import COMMIT_LIMIT, MANIFEST_LIMIT, Commit, seal, unseal
from rmt_tpu.checkpoint.retention import (
    Retention,
    committed,
    finish_going_back,
    go_back,
    tidy,
)
from rmt_tpu.checkpoint.save import Attempt, Background, Saved, blocks_of, snapshot, together
from rmt_tpu.distributed import processes
from rmt_tpu.errors import ArgumentError, RunError, UsageError, shown, unknown
from rmt_tpu.storage import Fault, Folder, Unavailable
from rmt_tpu.streams import say

_RETENTION = Retention()  # the default

_channels = itertools.count()

_SLOW_SECONDS = 60.0  # after which a save says that it is still under way


class Checkpointer:
    """Saves and restores pytrees of arrays under one root folder.

    One run writes to a root at a time; any number may read. If two writers race for one step all
    the same, exactly one of them commits it and the other one's save fails.

    Its methods must be called from one thread. The interpreter waits at its end for the thread that
    `begin_save` starts, and then reports an error that no method has raised.

    Durability is tensorstore's default (`file_io_sync`): each file is fsynced before it counts as
    written, so COMMIT never reaches the disk ahead of the data it names.

    Attributes:
      root: the folder of all steps.
    """

    def __init__(
        self,
        root: str | Folder,
        *,
        retention: Retention = _RETENTION,
        compression: str = "none",
        report: Callable[[str], None] = say,
    ):
        """Open `root` without touching it: reading needs no right to write.

        Args:
          root: a local path or a `gs://bucket/path`. The first save creates it.
          retention: the rules for which committed steps stay after a save.
          compression: the compression of the arrays that are saved: "none" or "zstd". A restore
            reads it from the checkpoint.
          report: a function that is called with one line about each damaged step that a restore
            passes over, about a save that takes long, about old steps that could not be deleted,
            and at the very end about an error of the background. Any thread may call it. By default
            it prints to standard error.

        Raises:
          UsageError: `root` or `compression` is not legal.
        """
        if compression not in COMPRESSIONS:
            raise UsageError(unknown("compression", compression, COMPRESSIONS))
        self.root = storage.open_folder(root) if isinstance(root, str) else root
        self._context = self.root.context()
        self._retention, self._compression = retention, compression
        self._report = report
        # The steps that this object found damaged, with the generation of their COMMIT.
        self._damaged: dict[int, Any] = {}
        self._has_gone_back = False  # whether the rest of a killed `go_back` is done
        self._channel: processes.Channel | None = None
        self._background: Background[Saved] = Background("checkpoint")
        # This runs at the latest when the interpreter ends, after its wait for threads.
        weakref.finalize(self, self._background.tell, report)

    def steps(self) -> list[int]:
        """Return the committed steps, ascending.

        Raises:
          RunError: `root` cannot be listed.
        """
        return committed(self.root)

    # Saving ----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tree: Any,
        meta: dict,
        *,
        loss: int | float | None = None,
        before_commit: Callable[[], None] | None = None,
    ) -> Saved:
        """Run `begin_save` and `wait`: return once everything is stored and committed."""
        self._begin(step, tree, meta, loss, before_commit, copy=False)
        return self.wait()

    def begin_save(
        self,
        step: int,
        tree: Any,
        meta: dict,
        *,
        loss: int | float | None = None,
        before_commit: Callable[[], None] | None = None,
    ) -> Saved | None:
        """Begin to commit `tree` and `meta` as `step`; a thread does the rest.

        The method returns once the arrays may be donated or overwritten. Until they are stored,
        this process has a copy of its part of them in host memory; on a CPU those that are donated
        are copied. A save that is still under way is waited for first.

        When the step is committed, the steps that `retention` does not name are deleted.

        Args:
          step: the step's number. It must not be committed yet, unless this object found it damaged
            in a restore: then it is replaced.
          tree: a pytree of jax or numpy arrays. Typed PRNG keys are arrays too.
          meta: a JSON dict. Tuples come back as lists and integer keys as strings.
          loss: the loss on held-out text, for `retention.best`. A loss that is not finite counts as
            none.
          before_commit: a function that the thread of process 0 calls when all else is stored. If
            it raises, the step is not committed.

        Returns:
          The result of `wait` for the save before.

        Raises:
          UsageError: the tree or `meta` cannot be stored.
          RunError: the save before has failed; see `check`.
        """
        return self._begin(step, tree, meta, loss, before_commit, copy=True)

    def check(self) -> Saved | None:
        """Return the save that ended since the last call of this or `wait`, or None.

        Raises:
          RunError: the save has failed: the step was committed already, or writing failed midway,
            or a process did not come. A failure of one process is raised in all.
        """
        return self._background.take()

    def wait(self) -> Saved | None:
        """Wait until the save under way has ended, then return `check`."""
        self._background.join()
        return self.check()

    def _begin(self, step, tree, meta, loss, before_commit, *, copy: bool) -> Saved | None:
        started = time.monotonic()
        before = self.wait()
        if step < 0:
            raise UsageError(f"a checkpoint's step must not be negative, got {step}")
        sources, arrays = to_store(tree, self._compression)
        manifest = seal(arrays, meta)
        blocks = blocks_of(sources, arrays)
        # Channels are numbered in the main thread, where all processes begin the same saves.
        self._channel = self._channel or processes.Channel(f"checkpoint-{next(_channels)}")
        attempt = Attempt(
            self.root,
            self._context,
            step,
            arrays,
            snapshot(blocks) if copy else blocks,
            manifest,
            loss,
            before_commit,
            self._damaged.get(step),
            self._make_sure_it_went_back,
            self._channel.exchange,
        )
        blocked, slow = time.monotonic() - started, self._note_if_slow(step)

        def run() -> Saved:
            try:
                attempt.run()
            finally:
                slow.cancel()
            self._damaged.pop(step, None)
            if processes.is_first():
                self._tidy(step)
            seconds = time.monotonic() - started
            return Saved(step, sum(a.num_bytes for a in arrays), seconds, blocked)

        # The timer starts here, because no thread can start another when the interpreter is about
        # to end.
        slow.start()
        self._background.start(run)
        return before

    def go_back(self, step: int) -> None:
        """Make `step` the last one: later ones are deleted, and no reader sees them any more.

        In a run of several processes all must call it. If it is killed at any moment, either all of
        it counts as done or nothing.

        Raises:
          UsageError: there is no such step.
          RunError: the store does not answer, or refuses.
        """
        self.wait()
        self._check_step(processes.from_first(self.steps(), f"steps in {self.root}"), step)
        with together(processes.exchange, f"going back to checkpoint {step}"):
            if processes.is_first():
                go_back(self.root, step)
        self._has_gone_back = True

    def _make_sure_it_went_back(self) -> None:
        if not self._has_gone_back:
            finish_going_back(self.root)
            self._has_gone_back = True

    def _note_if_slow(self, step: int) -> threading.Timer:
        """Return a timer that reports a slow save, because stores are retried for minutes."""
        line = (
            f"note: step {step} is not saved yet after {_SLOW_SECONDS:g} s; {self.root} is slow or "
            "does not answer, and is tried further"
        )
        timer = threading.Timer(_SLOW_SECONDS, self._report, [line])
        timer.daemon = True
        return timer

    def _tidy(self, saved: int) -> None:
        try:
            tidy(self.root, saved, self._retention, self._damaged)
        except Fault as fault:
            self._report(f"cannot delete old checkpoints in {self.root}: {fault}")

    # Restoring -------------------------------------------------------------------------------

    def restore(
        self,
        like: Any | Callable[[dict[str, StoredArray]], Any],
        step: int | None = None,
        *,
        partial: bool = False,
    ) -> tuple[int, Any, dict]:
        """Read a step into the structure, shapes, dtypes and placement of `like`.

        The mesh, the number of processes and the number of a pipeline's virtual stages may differ
        from those of the save.

        Args:
          like: a pytree of arrays or `jax.ShapeDtypeStruct`. Where one has a sharding, the restored
            array gets it. Where it is a numpy array, so is the restored one. Or a function that
            returns such a pytree, given the arrays that a step has.
          step: the step to read; by default the newest undamaged one.
          partial: whether to ignore arrays of the checkpoint that `like` does not have; otherwise
            they are an error.

        Returns:
          The step, the tree, and the `meta` it was saved with.

        Raises:
          UsageError: the checkpoint's arrays are not those of `like`, or there is no such step.
          RunError: there is no checkpoint, or none that is undamaged; or the store does not answer
            or gives no access, so that the last good step is not known.
        """
        self._background.join()
        # All processes use the answer of process 0, because a file system may show files to one
        # host before another.
        steps = processes.from_first(self.steps(), f"list of checkpoints in {self.root}")
        load = lambda candidate: self._load_together(candidate, like, partial)
        return self._newest(steps, step, load)

    def _load_together(self, step: int, like: Any, partial: bool) -> tuple[int, Any, dict]:
        """Load a step on all processes; a step that is damaged for one is damaged for all."""
        self._damaged.pop(step, None)
        commit = None
        try:
            with together(processes.exchange, f"checkpoint {step}: restore"):
                commit = self._read(f"{step}/COMMIT", COMMIT_LIMIT)
                found = self._read_manifest(step, commit.data)
                tree = self._load(found, like, partial)
        except Fault as fault:
            if commit is not None and not isinstance(fault, Unavailable):
                self._damaged[step] = commit.generation
            raise
        return step, tree, found.meta

    def _load(self, found: "_Found", like: Any, partial: bool) -> Any:
        leaves, treedef = named_leaves(like(found.arrays) if callable(like) else like)
        wanted = {name: describe(name, leaf) for name, leaf in leaves.items()}
        compared = wanted.keys() if partial else found.arrays.keys() | wanted.keys()
        self._check_fit(found.step, found.arrays, wanted, sorted(compared))
        stores = self._open(found, map(found.arrays.get, leaves))
        values = [place(leaves[array.name], array, ps) for array, ps in read(stores, leaves)]
        return treedef.unflatten(values)

    def arrays(self, step: int | None = None) -> dict[str, StoredArray]:
        """Return the arrays of a step by name, from its manifest alone.

        A process may call this without the others.

        Args:
          step: the step; by default the newest one with an undamaged manifest.

        Raises:
          UsageError: there is no such step.
          RunError: there is no checkpoint, or none with an undamaged manifest.
        """
        return self._find(step).arrays

    def identity(self, step: int | None = None) -> tuple[int, str]:
        """Return a step, as for `arrays`, and the name of its attempt, unique to the save."""
        found = self._find(step)
        return found.step, found.attempt

    def meta(self, step: int | None = None) -> dict:
        """Return the `meta` that a step, as for `arrays`, was saved with."""
        return self._find(step).meta

    def array(self, name: str, step: int | None = None) -> ts.TensorStore:
        """Open one array of a step, to read in part: `array("w")[5:7].read().result()`.

        Args:
          name: one of the names of `arrays`. PRNG keys are stored as their uint32 data.
          step: the step, as for `arrays`.

        Raises:
          UsageError: there is no such step or array.
          RunError: there is none with an undamaged manifest, or its array cannot be opened.
        """
        found = self._find(step)
        if name not in found.arrays:
            raise UsageError(unknown(f"in step {found.step}, array", name, found.arrays))
        ((_, store),) = self._open(found, [found.arrays[name]])
        return store

    def _find(self, step: int | None) -> "_Found":
        def look(candidate: int) -> _Found:
            commit = self._read(f"{candidate}/COMMIT", COMMIT_LIMIT)
            return self._read_manifest(candidate, commit.data)

        return self._newest(self.steps(), step, look)

    def _newest(self, steps: list[int], step: int | None, look: Callable[[int], Any]) -> Any:
        """Return what `look` returns for `step`, or for the newest step that is not damaged.

        A step that cannot be read may be good. It is therefore an error, because an older step in
        its place would lose the steps between.
        """
        if step is not None:
            self._check_step(steps, step)
        if not steps:
            raise RunError(f"no checkpoint in {self.root}")
        problems = []
        for candidate in reversed(steps) if step is None else [step]:
            try:
                return look(candidate)
            except Unavailable as fault:
                raise Unavailable(f"cannot read step {candidate} in {self.root}: {fault}") from None
            except Fault as fault:
                problems.append(f"step {candidate}: {fault}")
            if step is None:
                self._report(f"damaged checkpoint in {self.root} passed over: {problems[-1]}")
        raise RunError(f"no undamaged checkpoint in {self.root}: {'; '.join(problems)}")

    def _check_step(self, steps: list[int], step: int) -> None:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            what = (
                "is no checkpoint" if type(step) is int else "must be a whole number, a checkpoint"
            )
            raise ArgumentError(f"step={shown(step)} {what} in {self.root}; available: {there}")

    def _read_manifest(self, step: int, commit: bytes) -> "_Found":
        attempt = Commit.from_bytes(commit).attempt
        manifest = self._read(f"{step}/{attempt}/manifest.json", MANIFEST_LIMIT)
        arrays, meta = unseal(manifest.data)
        return _Found(step, attempt, arrays, meta)

    def _check_fit(
        self,
        step: int,
        stored: dict[str, StoredArray],
        wanted: dict[str, StoredArray],
        names: list[str],
    ) -> None:
        differing = []
        for name in names:
            ours, theirs = wanted.get(name, "has none"), stored.get(name, "has none")
            if not (name in wanted and name in stored and theirs.fits(ours)):
                differing.append(f"{name}: checkpoint {theirs}, model {ours}")
        if differing:
            what = f"checkpoint step {step} in {self.root} does not fit the model"
            more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
            raise UsageError(f"{what}: {'; '.join(differing[:8])}{more}")

    def _read(self, name: str, limit: int) -> storage.Found:
        found = self.root.read(name, limit=limit)
        if found is None:
            raise Fault(f"{name} is missing")
        return found

    def _open(self, found: "_Found", arrays: Iterable[StoredArray]) -> list:
        parent = self.root.child(f"{found.step}/{found.attempt}/arrays").kvstore()
        return open_arrays(parent, arrays, self._context, "read")


class _Found(NamedTuple):
    """The contents of the small files of a step."""

    step: int
    attempt: str
    arrays: dict[str, StoredArray]
    meta: dict
