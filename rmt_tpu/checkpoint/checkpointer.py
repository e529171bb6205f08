"""Checkpoints that stay valid if a process is killed, and that detect damaged bytes.

    <root>/<step>/<attempt>/arrays/<name...>/   one zarr3 array per leaf, each chunk with a crc32c
    <root>/<step>/<attempt>/manifest.json       names, shapes and dtypes of the arrays, and `meta`
    <root>/<step>/COMMIT                        names the valid attempt; written last, if absent
    <root>/BACK                                 last valid step, while later steps are deleted

A step exists once it has a COMMIT. If a save is killed before that, its attempt is never read, and
a later save deletes it. All access to storage goes through `rmt_tpu.storage`.

In a run with several processes, all of them call `save` and `restore`, with a root that all can
access. Each process reads the pieces of arrays that its devices need. It writes some of the pieces
that its devices hold, so that all processes write about the same number of bytes. Process 0 creates
the arrays. It commits the step after every process has finished writing.
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
    divisions,
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
from rmt_tpu.checkpoint.save import (
    Attempt,
    Background,
    Saved,
    blocks_of,
    on_all_processes,
    snapshot,
)
from rmt_tpu.distributed import processes
from rmt_tpu.errors import ArgumentError, RunError, UsageError, shown, unknown
from rmt_tpu.storage import Fault, Folder, Unavailable
from rmt_tpu.streams import log_line

_RETENTION = Retention()  # By default, the last three steps are kept.

_channels = itertools.count()

SLOW_SECONDS = 60.0  # Number of seconds after which a save is reported as slow.


class Checkpointer:
    """A store of checkpoints, each of which has a pytree of arrays and metadata for one step.

    Only one run should write to a root at a time. Any number of programs may read from it. If two
    runs save the same step, one of them commits it, and the save of the other fails.

    All methods must be called from the same thread. `begin_save` starts another thread, for which
    the interpreter waits before it exits.

    As in tensorstore's default (`file_io_sync`), each file is synced to disk before its write
    completes. COMMIT therefore never reaches the disk before the data.

    Attributes:
      root: the folder of all steps.
    """

    def __init__(
        self,
        root: str | Folder,
        *,
        retention: Retention = _RETENTION,
        compression: str = "none",
        report: Callable[[str], None] = log_line,
    ):
        """Create the checkpointer without accessing `root`.

        A restore needs only permission to read `root`.

        Args:
          root: a local path or a `gs://bucket/path`. The first save creates it.
          retention: the rules for which committed steps are kept after a save.
          compression: compression of saved arrays, "none" or "zstd". A restore reads the
            compression from the checkpoint.
          report: a function that is called with one line of text, from any thread. By default it
            prints to standard error. It reports damaged steps that a restore skips, slow saves, and
            old steps that could not be deleted. At exit, it reports the error of a save if no
            method has raised it.

        Raises:
          UsageError: `root` or `compression` is not legal.
        """
        if compression not in COMPRESSIONS:
            raise UsageError(unknown("compression", compression, COMPRESSIONS))
        self.root = storage.open_folder(root) if isinstance(root, str) else root
        self._context = self.root.context()
        self._retention, self._compression = retention, compression
        self.report = report
        # The generation number of the COMMIT file of each damaged step.
        self._damaged: dict[int, Any] = {}
        self._has_gone_back = False  # Whether this object has completed any interrupted `go_back`.
        self._channel: processes.Channel | None = None
        self._background: Background[Saved] = Background("checkpoint")
        # If no method has raised the error of a save, report it at interpreter exit. By then, the
        # interpreter has waited for the thread that saves.
        weakref.finalize(self, self._background.tell, report)

    def steps(self) -> list[int]:
        """Return the committed steps in ascending order.

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
        """Save a step, and return once it is stored and committed; see `begin_save`."""
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
        """Start saving `tree` and `meta` as `step` in a background thread.

        The method first waits for an earlier save that is still in progress. It returns once the
        arrays may be donated or overwritten. This process keeps a copy of its part of the arrays in
        host memory until it is stored. On a CPU, only arrays that are donated are copied.

        After the step is committed, steps that `retention` does not keep are deleted.

        Args:
          step: number of the step. It must not be committed yet. A step that this object found
            damaged in a restore is replaced.
          tree: a pytree of jax or numpy arrays, which may include typed PRNG keys.
          meta: a dict of JSON values. A restore returns tuples as lists and integer keys as
            strings.
          loss: the loss on held-out text, for `retention.best`. A loss that is not finite is
            ignored.
          before_commit: a function that process 0 calls in the saving thread just before it writes
            COMMIT. If it raises an error, the step is not committed.

        Returns:
          The result of `wait` for the previous save.

        Raises:
          UsageError: the tree or `meta` cannot be stored.
          RunError: the previous save has failed; see `check`.
        """
        return self._begin(step, tree, meta, loss, before_commit, copy=True)

    def check(self) -> Saved | None:
        """Return the result of a save that has completed since the last call, or None.

        Raises:
          RunError: the save has failed because the step was already committed, writing failed, or a
            process did not respond. A failure in one process is raised in all.
        """
        return self._background.take()

    def wait(self) -> Saved | None:
        """Wait for the save in progress, if any, and return the result of `check`."""
        self._background.join()
        return self.check()

    def _begin(self, step, tree, meta, loss, before_commit, *, copy: bool) -> Saved | None:
        started = time.monotonic()
        before = self.wait()
        if step < 0:
            raise UsageError(f"step={step} must not be negative; legal: 0 or more")
        sources, arrays = to_store(tree, self._compression)
        manifest = seal(arrays, meta)
        blocks = blocks_of(sources, arrays)
        # Channels are numbered in the main thread. There all processes start the same saves in the
        # same order, so they agree on the numbers.
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
            self._finish_going_back,
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

        # Start the timer's thread here and not in the background thread, because no thread can be
        # started while the interpreter exits.
        slow.start()
        self._background.start(run)
        return before

    def go_back(self, step: int) -> None:
        """Make `step` the last step by deleting all later steps.

        In a run with several processes, all must call this method. Even if a process is killed,
        readers see either all of the later steps or none.

        Raises:
          UsageError: there is no such step.
          RunError: the storage does not answer or refuses access.
        """
        self.wait()
        self._check_step(processes.from_first(self.steps(), f"steps in {self.root}"), step)
        with on_all_processes(processes.exchange, f"going back to checkpoint {step}"):
            if processes.is_first():
                go_back(self.root, step)
        self._has_gone_back = True

    def _finish_going_back(self) -> None:
        if not self._has_gone_back:
            finish_going_back(self.root)
            self._has_gone_back = True

    def _note_if_slow(self, step: int) -> threading.Timer:
        """Return a timer that reports a slow save, because requests may be retried for minutes."""
        line = (
            f"note: step {step} is not saved yet after {SLOW_SECONDS:g} s; {self.root} is slow or "
            "does not answer; the save continues"
        )
        timer = threading.Timer(SLOW_SECONDS, self.report, [line])
        timer.daemon = True
        return timer

    def _tidy(self, saved: int) -> None:
        try:
            tidy(self.root, saved, self._retention, self._damaged)
        except Fault as fault:
            self.report(f"cannot delete old checkpoints in {self.root}: {fault}")

    # Restoring -------------------------------------------------------------------------------

    def restore(
        self,
        like: Any | Callable[[dict[str, StoredArray]], Any],
        step: int | None = None,
        *,
        partial: bool = False,
    ) -> tuple[int, Any, dict]:
        """Restore a step with the tree structure, shapes, dtypes and shardings of `like`.

        The mesh, the number of processes and the number of virtual pipeline stages may have changed
        since the save.

        Args:
          like: a pytree of arrays or `jax.ShapeDtypeStruct`, or a function that returns one. The
            function is called with a dict from names to the descriptions of the arrays in the
            checkpoint. Each restored array gets the sharding of its leaf. It is a numpy array if
            the leaf is one.
          step: the step to restore; by default the newest undamaged step.
          partial: whether to ignore arrays in the checkpoint that `like` does not have. Otherwise
            they are an error.

        Returns:
          The step, the restored tree, and the `meta` with which the step was saved.

        Raises:
          UsageError: the arrays in the checkpoint do not match `like`, or there is no such step.
          RunError: there is no undamaged checkpoint, or the storage does not answer or refuses
            access.
        """
        self._background.join()

        def steps() -> list[int]:
            # All processes use the list of steps from process 0. A network file system may show new
            # files to some hosts later than to others.
            return processes.from_first(self.steps(), f"list of checkpoints in {self.root}")

        return self._newest(steps, step, lambda found: self._load_together(found, like, partial))

    def _load_together(self, step: int, like: Any, partial: bool) -> tuple[int, Any, dict]:
        """Load a step on all processes. If it is damaged on one, all raise the error."""
        self._damaged.pop(step, None)
        commit = None
        try:
            with on_all_processes(processes.exchange, f"checkpoint {step}: restore"):
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
        """Return a dict from array name to description, for the arrays in a step.

        Only the step's manifest is read. A single process may call this method without the other
        processes.

        Args:
          step: the step; by default the newest step with an undamaged manifest.

        Raises:
          UsageError: there is no such step.
          RunError: there is no checkpoint, or none with an undamaged manifest.
        """
        return self._find(step).arrays

    def identity(self, step: int | None = None) -> tuple[int, str]:
        """Return a step and the name of its attempt, which is different for every save.

        Args:
          step: the step, as for `arrays`.
        """
        found = self._find(step)
        return found.step, found.attempt

    def meta(self, step: int | None = None) -> dict:
        """Return the `meta` with which a step was saved.

        Args:
          step: the step, as for `arrays`.
        """
        return self._find(step).meta

    def array(self, name: str, step: int | None = None) -> ts.TensorStore:
        """Open one array in a step to read a part of it, like `array("w")[5:7].read().result()`.

        Args:
          name: a name from `arrays`. PRNG keys are stored as their uint32 data.
          step: the step, as for `arrays`.

        Raises:
          UsageError: there is no such step or array.
          RunError: no step has an undamaged manifest, or the array cannot be opened.
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

        return self._newest(self.steps, step, look)

    def _newest(
        self, steps: Callable[[], list[int]], step: int | None, look: Callable[[int], Any]
    ) -> Any:
        """Return the result of `look` for `step`, or for the newest step that is not damaged.

        `look` reads a step and raises Fault if it is damaged. It raises Unavailable if the step
        cannot be accessed. The step may then be undamaged, and an older one would lose training.
        Therefore this method raises Unavailable too.

        `steps` lists the steps. They are listed again after a fault, because another process may
        have saved a newer step meanwhile, and deleted this one.
        """
        found = steps()
        if step is not None:
            self._check_step(found, step)
        if not found:
            raise RunError(f"no checkpoint in {self.root}")
        problems: dict[int, str] = {}
        untried = found if step is None else [step]
        while untried:
            candidate = untried[-1]
            try:
                return look(candidate)
            except Unavailable as fault:
                raise Unavailable(f"cannot read step {candidate} in {self.root}: {fault}") from None
            except Fault as fault:
                problems[candidate] = f"step {candidate}: {fault}"
            if step is not None:
                break
            found = steps()
            if candidate in found:
                self.report(f"damaged checkpoint in {self.root} skipped: {problems[candidate]}")
            else:
                self._damaged.pop(candidate, None)
            untried = [other for other in found if other not in problems]
        said = "; ".join(problems.values())
        raise RunError(f"no undamaged checkpoint in {self.root}: {said}")

    def _check_step(self, steps: list[int], step: int) -> None:
        if step not in steps:
            available = ", ".join(map(str, steps)) or "none"
            problem = (
                "is not a checkpoint" if type(step) is int else "must be the number of a checkpoint"
            )
            raise ArgumentError(
                f"step={shown(step)} {problem} in {self.root}; available: {available}"
            )

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
        pairs = [
            (stored[name], wanted[name]) for name in names if name in wanted and name in stored
        ]
        divided = divisions(pairs)
        for name in names:
            ours, theirs = wanted.get(name, "has none"), stored.get(name, "has none")
            if not (name in wanted and name in stored and theirs.fits(ours, divided)):
                differing.append(f"{name}: checkpoint {theirs}, model {ours}")
        if differing:
            more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
            raise UsageError(
                f"checkpoint step {step} in {self.root} does not fit the model: "
                f"{'; '.join(differing[:8])}{more}"
            )

    def _read(self, name: str, limit: int) -> storage.Found:
        found = self.root.read(name, limit=limit)
        if found is None:
            raise Fault(f"the file {name} is missing")
        return found

    def _open(self, found: "_Found", arrays: Iterable[StoredArray]) -> list:
        parent = self.root.child(f"{found.step}/{found.attempt}/arrays").kvstore()
        return open_arrays(parent, arrays, self._context, "read")


class _Found(NamedTuple):
    """The content of a step's COMMIT and manifest.json.

    Attributes:
      step: the step.
      attempt: name of the valid attempt's folder.
      arrays: maps the name of each array to its description.
      meta: the metadata with which the step was saved.
    """

    step: int
    attempt: str
    arrays: dict[str, StoredArray]
    meta: dict
