"""Checkpoints that survive a kill at any moment and notice every damaged byte.

    <root>/<step>/<attempt>/arrays/<name...>/   one zarr3 array per leaf, each chunk with a crc32c
    <root>/<step>/<attempt>/manifest.json       names, shapes and dtypes of the arrays, and `meta`
    <root>/<step>/COMMIT                        names the attempt; written last, and only if absent

A step exists once its COMMIT does. A save that dies earlier leaves an attempt which no COMMIT
names: nothing reads it, and a later save deletes it. Every byte goes through a tensorstore
`KvStore`, so the place where checkpoints live is decided in `_kvstore_spec` alone.

In a run of several processes all of them call `save` and `restore`, with one root that all see.
Each writes and reads the pieces of arrays that its own devices hold, and process 0 the rest: it
creates the arrays, and commits once every process has written its pieces.
"""

import contextlib
import json
import os
import re
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorstore as ts
from absl import logging

from rmt_tpu import distributed
from rmt_tpu.checkpoint_arrays import (
    Fault,
    StoredArray,
    describe,
    faults,
    in_flight,
    named_leaves,
    open_arrays,
    own_blocks,
    place,
    read,
    to_store,
)
from rmt_tpu.errors import RunError, UsageError

# 2: weights number the entries of concatenated data vectors by place, then by vector.
FORMAT_VERSION = 2

_OUR_KEY = re.compile(rb"(0|[1-9][0-9]*)/(COMMIT$|attempt-[0-9a-f]{16}(?=/))")
_ATTEMPT = re.compile(r"attempt-[0-9a-f]{16}")


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
        with faults(f"cannot write to {self.root}: ", UsageError):
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
        sources, arrays = to_store(tree)
        manifest = _seal(arrays, meta)
        attempt = f"attempt-{uuid.uuid4().hex[:16]}"
        first = distributed.is_first()
        if first:
            self.check_writable()
        try:
            attempt = self._together(
                f"checkpoint {step}: begin", lambda: self._begin(step, attempt, arrays, first)
            )
            folder = f"{step}/{attempt}"
            self._together(
                f"checkpoint {step}: write", lambda: self._write(folder, sources, arrays)
            )
            self._together(
                f"checkpoint {step}: commit",
                lambda: self._finish(step, attempt, manifest) if first else "",
            )
        except Fault as fault:
            if first:
                self._abandon(step, attempt)
            raise RunError(f"cannot save step {step} in {self.root}: {fault}") from None
        if first:
            self._tidy(step)

    def restore(
        self, like: Any, step: int | None = None, *, partial: bool = False
    ) -> tuple[int, Any, dict]:
        """Reads a step into the structure, shapes, dtypes and placement of `like`.

        Args:
            like: A pytree of arrays or `jax.ShapeDtypeStruct`. Where one has a sharding, the
                restored array gets it. Where it is a numpy array, so is the restored one.
            step: Which step; by default the newest undamaged one.
            partial: Leave alone what the checkpoint has beyond `like`; else it is refused. And
                take layers that were saved as a stack for each stage as the one stack of `like`.

        Returns:
            The step, the tree, and the `meta` it was saved with.

        Raises:
            UsageError: The checkpoint's arrays are not those of `like`, or there is no such step.
            RunError: There is no checkpoint, or none that is undamaged.
        """
        leaves, treedef = named_leaves(like)
        wanted = {name: describe(name, leaf) for name, leaf in leaves.items()}

        def load(step: int, commit: bytes) -> tuple[Any, dict]:
            attempt, arrays, meta = self._read_manifest(step, commit)
            compared = wanted.keys() if partial else arrays.keys() | wanted.keys()
            self._check_fit(step, arrays, wanted, sorted(compared), stacks=partial)
            stores = self._open_arrays(f"{step}/{attempt}", map(arrays.get, leaves), create=False)
            values = [place(leaves[array.name], array, ps) for array, ps in read(stores, leaves)]
            return treedef.unflatten(values), meta

        found, (tree, meta) = self._first_undamaged(step, load)
        return found, tree, meta

    def _first_undamaged(self, step: int | None, load: Callable) -> tuple[int, Any]:
        # Process 0's answer, for a file system may show files to one host before another.
        steps = distributed.from_first(self.steps(), f"list of checkpoints in {self.root}")
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"no checkpoint of step {step} in {self.root}; available: {there}")
        if not steps:
            raise RunError(f"no checkpoint in {self.root}")
        problems = []
        for candidate in reversed(steps) if step is None else [step]:
            commit, loaded = None, None
            self._damaged.pop(candidate, None)

            def attempt(candidate=candidate) -> str:
                nonlocal commit, loaded
                commit = self._read(f"{candidate}/COMMIT")
                loaded = load(candidate, commit.value)
                return ""

            try:
                self._together(f"checkpoint {candidate}: restore", attempt)
                return candidate, loaded
            except Fault as fault:
                problems.append(f"step {candidate}: {fault}")
            if commit:
                self._damaged[candidate] = commit.stamp.generation
            if step is None:
                self._report(f"damaged checkpoint in {self.root} passed over: {problems[-1]}")
        raise RunError(f"no undamaged checkpoint in {self.root}: {'; '.join(problems)}")

    def _read_manifest(self, step: int, commit: bytes) -> tuple[str, dict[str, StoredArray], dict]:
        try:
            attempt = _ATTEMPT.fullmatch(json.loads(commit)["attempt"])[0]
        except (ValueError, KeyError, TypeError):
            raise Fault("COMMIT is damaged: it names no attempt") from None
        return attempt, *_unseal(self._read(f"{step}/{attempt}/manifest.json").value)

    def _check_fit(
        self,
        step: int,
        stored: dict[str, StoredArray],
        wanted: dict[str, StoredArray],
        names: list[str],
        stacks: bool,
    ) -> None:
        differing = []
        for name in names:
            ours, theirs = wanted.get(name, "has none"), stored.get(name, "has none")
            of_stages = stacks and name in stored and name in wanted and theirs.is_stacks_of(ours)
            if str(ours) != str(theirs) and not of_stages:
                differing.append(f"{name}: checkpoint {theirs}, model {ours}")
        if differing:
            what = f"checkpoint step {step} in {self.root} does not fit the model"
            raise UsageError(f"{what}: {'; '.join(differing)}")

    def _read(self, key: str) -> ts.KvStore.ReadResult:
        with faults():
            found = self._kv.read(key).result()
        if found.state == "missing":
            raise Fault(f"{key} is missing")
        return found

    def _together(self, what: str, action: Callable[[], str]) -> str:
        """Does a part of the work on every process; if it fails on one, it fails on all.

        Returns what process 0's `action` returned.
        """
        result, fault = "", None
        try:
            result = action()
        except Fault as error:
            fault = str(error)
        if distributed.num_processes() == 1:
            answers = [(result, fault)]
        else:
            answers = map(json.loads, distributed.exchange(json.dumps((result, fault)), what))
        results, found = zip(*answers, strict=True)
        for process, fault in enumerate(found):
            if fault is not None:
                where = f"process {process}: " if len(found) > 1 else ""
                raise Fault(where + fault)
        return results[0]

    def _open_arrays(self, folder: str, arrays: Iterable[StoredArray], create: bool) -> list:
        parent = {**self._spec, "path": f"{self._spec['path']}{folder}/arrays/"}
        return open_arrays(parent, arrays, self._context, create=create)

    def _begin(self, step: int, attempt: str, arrays: list[StoredArray], first: bool) -> str:
        """Makes the arrays, empty, on process 0; returns the attempt."""
        if first:
            self._make_way(step)
            self._open_arrays(f"{step}/{attempt}", arrays, create=True)
        return attempt

    def _write(self, folder: str, sources: dict, arrays: list[StoredArray]) -> str:
        jobs = (
            (array, block.nbytes, lambda part=store[index], b=block: part.write(np.asarray(b)))
            for array, store in self._open_arrays(folder, arrays, create=False)
            for index, block in own_blocks(sources[array.name])
        )
        deque(in_flight(jobs), maxlen=0)  # runs them all and keeps no result
        return ""

    def _finish(self, step: int, attempt: str, manifest: bytes) -> str:
        with faults():
            self._kv.write(f"{step}/{attempt}/manifest.json", manifest).result()
        self._commit(step, attempt)
        return ""

    def _make_way(self, step: int) -> None:
        """Deletes the step's COMMIT if it is still the one that was found damaged."""
        key = f"{step}/COMMIT"
        with faults():
            commit = self._kv.read(key).result()
            if commit.state != "missing":
                if commit.stamp.generation != self._damaged.get(step):
                    raise Fault("it is already committed")
                self._kv.write(key, None, if_equal=commit.stamp.generation).result()
        self._damaged.pop(step, None)

    def _commit(self, step: int, attempt: str) -> None:
        key, value = f"{step}/COMMIT", json.dumps({"attempt": attempt}).encode()
        with faults():
            before = self._kv.read(key).result()
            if before.state == "missing":
                written = self._kv.write(key, value, if_equal=before.stamp.generation).result()
                # A refused write does not raise: it has no generation.
                if written.generation:
                    return
            # A write repeated after a lost answer is refused because of its own success.
            if self._kv.read(key).result().value == value:
                return
        raise Fault("another writer committed it first")

    def _abandon(self, step: int, attempt: str) -> None:
        """Deletes an attempt that no COMMIT names, as far as the store still lets us."""
        with contextlib.suppress(Fault), faults():
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
        except Fault as fault:
            self._report(f"cannot delete old checkpoints in {self.root}: {fault}")

    def _tidy_step(self, step: int, entries: set[str], keep: bool) -> None:
        dead = entries - {"COMMIT"}
        if "COMMIT" in entries and keep:
            commit = self._read(f"{step}/COMMIT").value
            dead = {attempt for attempt in dead if attempt.encode() not in commit}
        elif "COMMIT" in entries:
            # COMMIT goes first, so that a kill in between leaves no half step behind it.
            with faults():
                self._kv.write(f"{step}/COMMIT", None).result()
        self._delete_attempts(step, dead)

    def _listing(self) -> dict[int, set[str]]:
        """Maps each step to which of its entries are ours: COMMIT and attempts."""
        # Only keys that begin with a digit: other folders in the root are not walked through.
        with faults(f"cannot read {self.root}: ", UsageError):
            keys = self._kv.list(ts.KvStore.KeyRange("0", ":")).result()
        found: dict[int, set[str]] = {}
        for match in filter(None, map(_OUR_KEY.match, keys)):
            found.setdefault(int(match[1]), set()).add(match[2].decode())
        return found

    def _delete_attempts(self, step: int, attempts: Iterable[str]) -> None:
        folders = [f"{step}/{attempt}" for attempt in attempts]
        for folder in folders:
            # "0" follows "/", so the range ends where the folder does.
            with faults():
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


def _seal(arrays: list[StoredArray], meta: dict) -> bytes:
    """The manifest's bytes: its content and a checksum of that content."""
    try:
        # Through JSON and back first: the checksum is of what a reader will see.
        meta = json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a checkpoint's meta must be JSON: {error}") from None
    content = {"version": FORMAT_VERSION, "arrays": [a._asdict() for a in arrays], "meta": meta}
    return json.dumps({"crc32": _checksum(content), "content": content}, indent=1).encode()


def _unseal(manifest: bytes) -> tuple[dict[str, StoredArray], dict]:
    """The arrays by name and the meta that a manifest lists."""
    try:
        sealed = json.loads(manifest)
        content = sealed["content"]
        if sealed["crc32"] != _checksum(content):
            raise Fault("manifest.json is damaged: its checksum does not match")
    except (ValueError, KeyError, TypeError):
        raise Fault("manifest.json is damaged: it is not a manifest") from None
    if (version := content["version"]) != FORMAT_VERSION:
        raise UsageError(f"checkpoint format {version} is not {FORMAT_VERSION}, which is read here")
    return {entry["name"]: StoredArray(**entry) for entry in content["arrays"]}, content["meta"]


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
