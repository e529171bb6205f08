"""Functions that open, check and read a run folder, which has all files of one run."""

import contextlib
import dataclasses
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.config import PINNED_ON_RESUME, START_FIELDS, RunConfig, overrides, resume_rule
from rmt_tpu.config.overrides import differences
from rmt_tpu.config.resume import Rule
from rmt_tpu.data import Tokenizer, load_saved
from rmt_tpu.data.token_store import MANIFEST, PLAN, read_sealed
from rmt_tpu.data.tokenizer_files import FILE as TOKENIZER
from rmt_tpu.data.tokenizer_files import is_there, spec_of_folder
from rmt_tpu.distributed import processes
from rmt_tpu.distributed.rendezvous import name_processes
from rmt_tpu.errors import RmtError, RunError, UsageError, argument_errors, flag_errors
from rmt_tpu.hub.models import is_hub
from rmt_tpu.storage import Folder, Location, open_folder

CONFIG = "config.json"
CHANGES = "config_changes.jsonl"
CHECKPOINTS = "checkpoints"

# Maximum number of seconds until a network file system shows a new file to all hosts.
SHARED_SECONDS = 10.0


class ConfigChanges(NamedTuple):
    """Changes of the run's config that the first process still has to write to the run folder.

    Attributes:
      lines: one line about each field that changes.
      restarts: whether the run restarts from scratch with a different config, because it has no
        checkpoint.
    """

    lines: list[str]
    restarts: bool


def open_checkpoints(folder: Folder, **options: Any) -> Checkpointer:
    """Return the `Checkpointer` for a run folder, created with the given options."""
    return Checkpointer(folder.child(CHECKPOINTS), **options)


def open_workdir(
    workdir: Location,
    config: RunConfig,
    *,
    change_config: bool | None = None,
    other: str | None = None,
) -> ConfigChanges:
    """Register a run in an unused folder, or check that the folder contains the same run.

    The config of a run without a checkpoint may be changed freely. With several processes, the
    first one registers the run, and all check that they see the same folder.

    Args:
      workdir: the run folder.
      config: the config that the run is started with.
      change_config: whether a run may continue with a different batch size, optimizer, number of
        steps or dtype, or with a larger D_k. False and None both refuse a different config. With
        False, the error suggests --change_config; None is for commands without this flag.
      other: a description of another process that seems to train in the folder, from
        `presence.announce_run`; None if there is none.

    Returns:
      The changes of the config, for `write_config`.

    Raises:
      UsageError: the folder cannot be written to, it holds a token store, a model in the hub's
        format, or a run with a different or a damaged config, another process trains there with a
        different config, or processes see different folders.
    """
    folder, changes = open_folder(workdir), ConfigChanges([], restarts=False)
    if processes.is_first():
        check_access(folder, write=True)
        found = folder.read(CONFIG)
        if found is None:
            _check_no_store(folder)
            write_config(folder, config)
        else:
            changes = _compare(folder, found.data, config, change_config)
            if other and changes.lines:
                raise UsageError(
                    f"--workdir={folder} is in use by {other}, with a different config: "
                    f"{'; '.join(changes.lines[:8])}; wait for it, stop it, or give another "
                    "--workdir"
                )
    if processes.num_processes() > 1:
        _check_shared(folder)
    return changes


def write_config(folder: Folder, config: RunConfig, changes: Sequence[str] = ()) -> None:
    """Write the run's config and append `changes` to a log.

    Call this only after the saved state is known to fit the new config.
    """
    if changes:
        note = json.dumps({"time": time.time(), "changes": list(changes)})
        folder.append(CHANGES, f"{note}\n".encode())
    folder.write(CONFIG, (json.dumps(overrides.to_json(config), indent=2) + "\n").encode())


def check_access(folder: Folder, *, write: bool = False) -> None:
    """Check that the run folder can be read and, if `write` is true, also written to.

    Raises:
      UsageError: the folder cannot be read or written to.
    """
    with flag_errors("workdir"):
        folder.check(write=write)
        _check_kinds(folder)


def _check_kinds(folder: Folder) -> None:
    """Check that the run's files are not folders, and that its folders are not files.

    Raises:
      UsageError: there is a folder in place of a file, or a file in place of a folder.
    """
    # A bucket may have a file and a folder of the same name.
    if folder.local_path is None:
        return
    names = folder.names()
    if CHECKPOINTS in names:
        raise UsageError(f"{folder}: {CHECKPOINTS} is not a folder; move it away")
    for name in (CONFIG, TOKENIZER):
        if f"{name}/" in names:
            raise UsageError(f"{folder}: {name} is a folder, not a file; move it away")


def _check_no_store(folder: Folder) -> None:
    """Check that a folder without a run holds no token store, whose tokenizer a run would replace.

    Raises:
      UsageError: the folder holds a token store.
    """
    for name in {MANIFEST, PLAN} & set(folder.names()):
        with contextlib.suppress(RmtError):  # Another program may have written such a file.
            if read_sealed(folder, name) is not None:
                break
    else:
        return
    raise UsageError(
        f"--workdir={folder} holds a token store; legal: --data={folder} with another --workdir"
    )


def _check_shared(folder: Folder) -> None:
    mark = f".seen-{processes.from_first(uuid.uuid4().hex, 'the run folder')}"
    if processes.is_first():
        folder.write(mark, b"")
    processes.exchange("", "writing to the run folder")
    until = time.monotonic() + SHARED_SECONDS
    while not (seen := folder.read(mark) is not None) and time.monotonic() < until:
        time.sleep(0.1)
    answers = processes.exchange("seen" if seen else "", "reading the run folder")
    if processes.is_first():
        folder.delete(mark)
    if blind := [process for process, answer in enumerate(answers) if not answer]:
        raise UsageError(
            f"--workdir={folder} is not the same folder on {name_processes(blind)} as on process "
            "0; legal: a folder on a file system that all hosts share, or gs://"
        )


def read_config(workdir: Location) -> RunConfig:
    """Return the config of the run in a folder.

    Raises:
      ArgumentError: there is no run in the folder, or its config cannot be read by this version.
    """
    with argument_errors("workdir"):
        folder = open_folder(workdir)
        folder.check()
        _check_kinds(folder)
        found = folder.read(CONFIG)
        if found is None:
            raise UsageError(f"{folder} holds no run: there is no {folder}/{CONFIG}")
        if is_hub(folder):
            raise UsageError(f"{folder} is in Hugging Face format; legal: a run folder")
        return _parsed(folder, found.data)


def resume_overrides(folder: Folder) -> dict[str, Any]:
    """Return a dict from config path to value, for values that a run keeps when it resumes.

    `training.run.resolve_auto` uses them in place of "auto". The result is {} if the folder has no
    run, or if the run has no checkpoint yet.
    """
    values = {}
    if processes.is_first() and (found := folder.read(CONFIG)) is not None:
        # Ignore a damaged config here, because `open_workdir` reports it.
        with contextlib.suppress(UsageError):
            config = _parsed(folder, found.data)
            if open_checkpoints(folder).steps():
                paths = (
                    *PINNED_ON_RESUME,
                    "model.compute_dtype",
                    "train.depth_rate",
                    *(f"train.{name}" for name in START_FIELDS),
                )
                values = {path: overrides.value_at(config, path) for path in paths}
    return processes.from_first(values, "reading the config that the run keeps")


def warm_started_config(folder: Folder) -> RunConfig | None:
    """Return the config of a run that started from another model's weights and has checkpoints.

    Such a run folder contains the tokenizer of the other model. If the other model's folder has
    been deleted, the config names this copy. For any other folder the result is None.

    Raises:
      UsageError: the folder cannot be read.
    """
    check_access(folder)
    # Ignore a damaged config here, because `open_workdir` reports it.
    with contextlib.suppress(UsageError):
        if (found := folder.read(CONFIG)) is not None:
            config = _parsed(folder, found.data)
            if config.train.init_from and open_checkpoints(folder).steps():
                if is_there(config.data.tokenizer):
                    return config
                own = dataclasses.replace(config.data, tokenizer=spec_of_folder(folder))
                return dataclasses.replace(config, data=own)
    return None


def find_warm_started_config(folder: Folder, depth: int = 5) -> RunConfig | None:
    """Return `warm_started_config` of the first run in a folder and its subfolders.

    At most `depth` levels of subfolders are searched. The result is None if nothing is found.
    """
    names = folder.names()
    if CONFIG in names:
        return warm_started_config(folder)
    if depth:
        for name in names:
            if name.endswith("/"):
                found = find_warm_started_config(folder.child(name.removesuffix("/")), depth - 1)
                if found is not None:
                    return found
    return None


def _parsed(folder: Folder, content: bytes) -> RunConfig:
    try:
        values = overrides.parse_json(content)
    except ValueError as error:
        raise UsageError(
            f"{folder}: {CONFIG} is damaged: it is not JSON: {error}. Restore it, or delete it "
            "and repeat the run's original command"
        ) from None
    try:
        return overrides.from_json(RunConfig, values)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None


def holds_run(folder: Folder, config: RunConfig) -> bool:
    """Return whether the run in a folder has this config, ignoring fields that may always change.

    Such fields do not affect the loss curve; file paths are an example.

    Args:
      folder: a folder, with or without a run.
      config: the config, as returned by `training.run.resolve_auto`.
    """
    if (found := folder.read(CONFIG)) is None:
        return False
    try:
        old = _parsed(folder, found.data)
    except UsageError:
        return False
    return not _different(old, config, has_begun=bool(open_checkpoints(folder).steps()))


def _different(old: RunConfig, config: RunConfig, *, has_begun: bool) -> dict[str, Rule]:
    """Return the differences of two configs: a dict from a line about a field to its resume rule.

    Fields that may always change (rule "free") are left out.

    Args:
      old: the config of the run in the folder.
      config: the config that the run is started with.
      has_begun: whether the run has a checkpoint.
    """
    pair = overrides.to_json(old), overrides.to_json(config)
    lines = {line: line.split(" ", 1)[0] for line in differences(*pair)}
    rules = {line: resume_rule(config, path) for line, path in lines.items()}
    # Before the first checkpoint, fields such as init_from affect the run, so they may not change.
    # Later, the other model may have moved, but a run that began without one cannot get it.
    began = {
        f"train.{name}" for name in START_FIELDS if not (has_begun and getattr(old.train, name))
    }
    rules |= {line: "fixed" for line, path in lines.items() if path in began}
    return {line: rule for line, rule in rules.items() if rule != "free"}


def _compare(
    folder: Folder, found: bytes, config: RunConfig, change_config: bool | None
) -> ConfigChanges:
    """Return how a config differs from the one in the run folder.

    Raises:
      UsageError: the config in the folder is damaged or that of a model in the hub's format, or a
        difference is not allowed.
    """
    if is_hub(folder):
        raise UsageError(
            f"--workdir={folder} holds a model in the hub's format; legal: --init_from={folder} "
            "with another --workdir"
        )
    # Parse the old config, so that fields that were added in later versions get their defaults.
    with flag_errors("workdir"):
        old = _parsed(folder, found)
    has_begun = bool(open_checkpoints(folder).steps())
    rules = _different(old, config, has_begun=has_begun)
    different = list(rules)
    if not different:
        return ConfigChanges([], restarts=False)
    if not has_begun:
        return ConfigChanges(different, restarts=True)
    fixed = [line for line in different if rules[line] != "change"]
    if change_config and not fixed:
        return ConfigChanges(different, restarts=False)
    what = fixed if change_config else different
    shown, more = what[:8], len(what) - 8
    shown += [f"and {more} more"] if more > 0 else []
    may_change = change_config is not None and not fixed
    or_change = "--change_config to continue with these, " if may_change else ""
    raise UsageError(
        f"--workdir={folder} holds a run with a different config: {'; '.join(shown)}. "
        f"Give the same flags to resume it, {or_change}or another --workdir"
    )


def config_meta(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the part of a checkpoint's metadata that `check_config_meta` compares."""
    return {"config": overrides.to_json(config), "tokenizer": tokenizer.fingerprint()}


def check_config_meta(
    folder: Folder, config: RunConfig, step: int, meta: Mapping[str, Any], within: str = ""
) -> None:
    """Check that a checkpoint was saved by the run that `config.json` in its folder describes.

    Fields that may change when a run resumes may differ.

    Args:
      folder: the run folder.
      config: the config in `config.json`.
      step: step of the checkpoint.
      meta: the metadata that the checkpoint was saved with.
      within: a prefix like "model."; only config paths that start with it are compared.

    Raises:
      UsageError: the checkpoint is from a different run; the message begins with the folder.
    """
    try:
        old = overrides.to_json(overrides.from_json(RunConfig, meta["config"]))
    except UsageError as error:
        raise UsageError(
            f"{folder}: the config in checkpoint {step} is not legal: {error}"
        ) from None
    lines = differences(old, overrides.to_json(config))
    paths = {line: line.split(" ", 1)[0] for line in lines}
    if different := [
        line
        for line, path in paths.items()
        if path.startswith(within) and resume_rule(config, path) == "fixed"
    ]:
        raise UsageError(
            f"{folder}: {CONFIG} does not match the run that saved checkpoint {step}: "
            f"{'; '.join(different[:8])}. Restore the config of that run, or give another folder"
        )


def check_tokenizer(folder: Folder, tokenizer: Tokenizer, name: str) -> None:
    """Check that `tokenizer` is the same tokenizer as the one saved in the run folder.

    Args:
      folder: the run folder.
      tokenizer: the tokenizer that the run is started with.
      name: name of the tokenizer for the error message.

    Raises:
      UsageError: the run in the folder has a different tokenizer.
    """
    try:
        saved = load_saved(folder)
    except UsageError:  # A missing or damaged tokenizer file is written again later.
        return
    if saved.fingerprint() != tokenizer.fingerprint():
        raise UsageError(
            f"--tokenizer={name} differs from the tokenizer of the run in --workdir={folder}; "
            "give the same one, or another --workdir"
        )


def step_to_go_back_to(folder: Folder, from_step: int | None, *, changes: bool) -> int | None:
    """Return the step of the checkpoint to go back to, or None to resume from the last checkpoint.

    If a run that went back was killed, the same command can be repeated. The last checkpoint
    records the step to which the run went back, so the run resumes from the last checkpoint and
    does not go back again. If the config has changed, it does go back again.

    Args:
      folder: the run folder.
      from_step: the step that the user requested, or None.
      changes: whether the config differs from the one in the folder.

    Raises:
      UsageError: there is no checkpoint of this step.
    """
    if from_step is None:
        return None
    # Print nothing about damaged checkpoints here, because the restore that follows reports them.
    checkpoints = open_checkpoints(folder, report=lambda damaged: None)
    steps = checkpoints.steps()
    if steps and steps[-1] != from_step and not changes:
        with contextlib.suppress(RunError):
            if checkpoints.meta().get("branch") == from_step:
                return None
    if from_step not in steps:
        legal = f"legal: {', '.join(map(str, steps))}" if steps else "it has none"
        raise UsageError(
            f"--from_step={from_step} is not a checkpoint of --workdir={folder}; {legal}"
        )
    return from_step


def check_workdir(
    workdir: Location,
    config: RunConfig,
    *,
    change_config: bool | None = None,
    from_step: int | None = None,
) -> None:
    """Perform the checks of `open_workdir` and `step_to_go_back_to` without writing any file.

    Raises:
      UsageError: one of their checks fails, or the folder does not exist and cannot be created in
        its nearest existing parent folder.
    """
    folder, changes = open_folder(workdir), ConfigChanges([], restarts=False)
    check_access(folder)
    if found := folder.read(CONFIG):
        changes = _compare(folder, found.data, config, change_config)
    else:
        _check_no_store(folder)
    step_to_go_back_to(folder, from_step, changes=bool(changes.lines))
    there = folder.local_path
    while there is not None and not os.path.lexists(there):
        there = there.parent
    if there is not None and not (os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)):
        why = "is not writable" if os.path.isdir(there) else "is not a folder"
        raise UsageError(f"--workdir={folder} cannot be written to: {there} {why}")
