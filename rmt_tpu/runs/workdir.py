"""The run folder: config, tokenizer, metrics, checkpoints, plots and samples of one run."""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rmt_tpu import memory
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.config import BEGAN, KEPT, RunConfig, overrides, resume_rule
from rmt_tpu.config.overrides import differences
from rmt_tpu.config.resume import Rule
from rmt_tpu.data import Tokenizer, load_saved
from rmt_tpu.data.tokenizer_files import FILE as TOKENIZER
from rmt_tpu.distributed import processes
from rmt_tpu.distributed.roll_call import listed
from rmt_tpu.errors import ArgumentError, RunError, UsageError, of_argument, of_flag
from rmt_tpu.hub.models import describe, is_hub
from rmt_tpu.runs import text_ends
from rmt_tpu.storage import Folder, Location, open_folder

CONFIG = "config.json"
CHANGES = "config_changes.jsonl"
CHECKPOINTS = "checkpoints"

# A network file system may show a new file late.
_SHARED_SECONDS = 10.0


class Opened(NamedTuple):
    """What is to be changed in the folder's config, on the first process.

    Attributes:
      changes: lines that say so.
      anew: the run there has no checkpoint, and begins again.
    """

    changes: list[str]
    anew: bool


def open_checkpoints(folder: Folder, **options: Any) -> Checkpointer:
    """Open the checkpoints of a run, with any `options` of `Checkpointer`."""
    return Checkpointer(folder.child(CHECKPOINTS), **options)


def open_workdir(
    workdir: Location,
    config: RunConfig,
    *,
    change_config: bool = False,
    other: str | None = None,
) -> Opened:
    """Make the folder this run's if it is nobody's, or check that it is the same run's.

    A run that has no checkpoint yet may be given any config. Of several processes the first one
    does all this, and all check that they see the same folder.

    Args:
      workdir: of the run.
      config: it is started with.
      change_config: let a run go on with another batch size, optimizer, number of steps, dtype or
        a wider D_k.
      other: which other process seems to train there, see `lease.held`.

    Returns:
      What `write_config` is to change.

    Raises:
      UsageError: the folder cannot be written, or holds a run with another config, or one whose
        config is damaged; or another process trains there with another config; or it is another
        folder for another process.
    """
    folder, opened = open_folder(workdir), Opened([], anew=False)
    if processes.is_first():
        check_access(folder, write=True)
        found = folder.read(CONFIG)
        if found is None:
            write_config(folder, config)
        else:
            opened = _compare(folder, found.data, config, change_config)
            if other and opened.changes:
                raise UsageError(
                    f"--workdir={folder} is that of a run that {other} trains with another config: "
                    f"{'; '.join(opened.changes[:8])}; wait for it, stop it, or give another "
                    "--workdir"
                )
    if processes.num_processes() > 1:
        _check_shared(folder)
    return opened


def write_config(folder: Folder, config: RunConfig, changes: Sequence[str] = ()) -> None:
    """Replaces the run's config, once its state is known to fit; notes what that changes."""
    if changes:
        note = json.dumps({"time": time.time(), "changes": list(changes)})
        folder.append(CHANGES, f"{note}\n".encode())
    folder.write(CONFIG, (json.dumps(overrides.to_json(config), indent=2) + "\n").encode())


def check_access(folder: Folder, *, write: bool = False) -> None:
    """
    Raises:
      UsageError: the run folder cannot be read, or written to.
    """
    with of_flag("workdir"):
        folder.check(write=write)
        _check_kinds(folder)


def _check_kinds(folder: Folder) -> None:
    """
    Raises:
      UsageError: a folder is where a file belongs, or a file where a folder does.
    """
    if folder.local_path is None:  # where both may have one name
        return
    names = folder.names()
    if CHECKPOINTS in names:
        raise UsageError(f"{folder}: {CHECKPOINTS} there is no folder; move it away")
    for name in (CONFIG, TOKENIZER):
        if f"{name}/" in names:
            raise UsageError(f"{folder}: {name} there is a folder and no file; move it away")


def _check_shared(folder: Folder) -> None:
    mark = f".seen-{processes.from_first(uuid.uuid4().hex, 'the run folder')}"
    if processes.is_first():
        folder.write(mark, b"")
    processes.exchange("", "the run folder, written")
    until = time.monotonic() + _SHARED_SECONDS
    while not (seen := folder.read(mark) is not None) and time.monotonic() < until:
        time.sleep(0.1)
    answers = processes.exchange("seen" if seen else "", "the run folder, looked into")
    if processes.is_first():
        folder.delete(mark)
    if blind := [process for process, answer in enumerate(answers) if not answer]:
        raise UsageError(
            f"--workdir={folder} is another folder on {listed(blind)} than on process 0; give one "
            "on a file system that all hosts share, or gs://"
        )


def read_config(workdir: Location) -> RunConfig:
    """The config of the run in a folder.

    Raises:
      ArgumentError: there is no run, or its config is not one of this version.
    """
    with of_argument("workdir"):
        folder = open_folder(workdir)
        folder.check()
        _check_kinds(folder)
        found = folder.read(CONFIG)
        if found is None:
            raise UsageError(f"{folder} holds no run: there is no {folder}/{CONFIG}")
        return _parsed(folder, found.data)


def kept(folder: Folder) -> dict[str, Any]:
    """What `training.run.resolved` takes of the run in a folder that goes on, if there is one."""
    values = {}
    if processes.is_first() and (found := folder.read(CONFIG)) is not None:
        with contextlib.suppress(UsageError):  # which `open_workdir` tells
            config = _parsed(folder, found.data)
            if open_checkpoints(folder).steps():
                paths = (*KEPT, "train.depth_rate", *(f"train.{name}" for name in BEGAN))
                values = {path: overrides.value_at(config, path) for path in paths}
    return processes.from_first(values, "what the run keeps")


def begun_from(folder: Folder) -> RunConfig | None:
    """The config of the run in a folder, if it began with another's weights and has a checkpoint.

    It brings the vocabulary and tokenizer that it took from there: the other is needed no more.

    Raises:
      UsageError: the folder cannot be read.
    """
    check_access(folder)
    with contextlib.suppress(UsageError):  # which `open_workdir` tells
        if (found := folder.read(CONFIG)) is not None:
            config = _parsed(folder, found.data)
            if config.train.init_from and open_checkpoints(folder).steps():
                return config
    return None


def begun_within(folder: Folder, depth: int = 5) -> RunConfig | None:
    """`begun_from` of the first run in a folder of run folders, or of one in folders within it."""
    names = folder.names()
    if CONFIG in names:
        return begun_from(folder)
    if depth:
        for name in names:
            if name.endswith("/"):
                found = begun_within(folder.child(name.removesuffix("/")), depth - 1)
                if found is not None:
                    return found
    return None


class Loaded(NamedTuple):
    """A trained decoder.

    Attributes:
      step: that it was trained to; None is not known, of a folder of the hub.
      seq_len: tokens that it read at a time.
    """

    decoder: Any
    tokenizer: Tokenizer
    step: int | None
    seq_len: int


def load(workdir: Location, step: int | None = None, *, mesh: str | None = None):
    """The trained decoder of a run folder, and its tokenizer: the first two of `load_step`."""
    return load_step(workdir, step, mesh=mesh)[:2]


def load_step(workdir: Location, step: int | None = None, *, mesh: str | None = None) -> Loaded:
    """What a run folder has of a step; or what a folder of the hub's form has (`rmt_tpu.hub`).

    Args:
      workdir: of `recipes.train`, local or gs://.
      step: of the checkpoint; None is the last good one.
      mesh: of devices, like "tensor=2,sequence=4", over which the parameters are divided as they
        are read, for an `Engine`; None is one device.

    Returns:
      The decoder, with its tokenizer and step.

    Raises:
      ArgumentError: there is no run in the folder, or no such step.
      MeshError: there are not so many devices, or the model does not divide over them.
      RunError: no checkpoint of the run can be read, a weight is not finite, or there is no memory.
    """
    import jax
    from flax import nnx

    import sharding
    from rmt_tpu import kernel_tables
    from rmt_tpu.decoder import Decoder
    from rmt_tpu.generation.placement import parameter_shardings
    from rmt_tpu.residual.fixed_point import in_floats
    from rmt_tpu.runs.growth import restore_grown

    kernel_tables.use_storage()
    with of_argument("workdir"):
        folder = open_folder(workdir)
    if is_hub(folder.local_path):
        with memory.told_if_out("the model's parameters do not fit"):
            return _of_hub(folder, step, mesh)
    config = read_config(workdir)
    abstract = nnx.eval_shape(lambda: Decoder(in_floats(config.model), rngs=nnx.Rngs(0)))
    graphdef, shapes = nnx.split(abstract, nnx.Param)
    params = nnx.to_pure_dict(shapes)
    if mesh is not None:
        placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        shardings = parameter_shardings(abstract, sharding.make_mesh(mesh))
        params = jax.tree.map(placed, params, shardings)
    checkpoints = open_checkpoints(folder)
    like = {"params": params}
    with memory.told_if_out("the model's parameters do not fit"):
        step, state, meta = restore_grown(checkpoints, like, config.model, step, partial=True)
    with of_argument("workdir"):
        check_saved_with(folder, config, step, meta, "model.")
    _check_finite(state["params"], f"step {step} of {folder}")
    decoder = nnx.merge(graphdef, state["params"])
    tokenizer = load_saved(folder)
    tokenizer.ends = text_ends.saved(folder, tokenizer)
    return Loaded(decoder, tokenizer, step, config.data.seq_len)


def identity(workdir: Location, step: int | None = None) -> tuple[int | str, Any]:
    """Which weights a folder has, without reading them: a step or "hub", and what tells them apart.

    Args:
      workdir: as of `load_step`.
      step: of the checkpoint; None is the last good one.

    Raises:
      ArgumentError: there is no run in the folder, or no such step.
    """
    with of_argument("workdir"):
        folder = open_folder(workdir)
    if not is_hub(folder.local_path):
        read_config(workdir)  # tells if it holds no run
        return open_checkpoints(folder).identity(step)
    if step is not None:
        raise _no_step(step, folder)
    files = sorted(p for p in folder.local_path.iterdir() if p.suffix in (".json", ".safetensors"))
    return "hub", [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]


def _no_step(step: int, folder: Folder) -> ArgumentError:
    return ArgumentError(f"step={step} is of a run folder, and {folder} is one of the hub's form")


def _check_finite(params: Any, where: str) -> None:
    """One pass over the parameters, where they lie.

    Raises:
      RunError: one has a number that is not finite.
    """
    import jax
    import jax.numpy as jnp

    finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(params)
    for path, good in jax.tree_util.tree_leaves_with_path(jax.device_get(finite)):
        if not good:
            name = "/".join(str(key.key) for key in path)
            raise RunError(
                f"{where}: {name} has numbers that are not finite; open another --step of the run"
            )


def _of_hub(folder: Folder, step: int | None, mesh: str | None) -> Loaded:
    from rmt_tpu.hub.folder import load

    if step is not None:
        raise _no_step(step, folder)
    return Loaded(*load(folder.local_path, mesh=mesh), None, describe(folder.local_path).max_length)


def _parsed(folder: Folder, content: bytes) -> RunConfig:
    try:
        values = overrides.parse_json(content)
    except ValueError as error:
        raise UsageError(
            f"{folder}: {CONFIG} is damaged: it is not JSON: {error}. Put it back, or delete it "
            "and give the run's own flags again"
        ) from None
    try:
        return overrides.from_json(RunConfig, values)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None


def is_of(folder: Folder, config: RunConfig) -> bool:
    """Whether the run in a folder is this one: what differs changes no number, as paths.

    Args:
      folder: of a run, or none.
      config: `training.run.resolved`.
    """
    if (found := folder.read(CONFIG)) is None:
        return False
    try:
        old = _parsed(folder, found.data)
    except UsageError:
        return False
    return not _different(old, config, has_begun=bool(open_checkpoints(folder).steps()))


def _different(old: RunConfig, config: RunConfig, *, has_begun: bool) -> dict[str, Rule]:
    """Lines for all that differs and is not free, with its rule."""
    pair = overrides.to_json(old), overrides.to_json(config)
    lines = {line: line.split(" ", 1)[0] for line in differences(*pair)}
    rules = {line: resume_rule(config, path) for line, path in lines.items()}
    if not has_begun:  # it matters until its weights are in a checkpoint
        began = {f"train.{name}" for name in BEGAN}
        rules |= {line: "fixed" for line, path in lines.items() if path in began}
    return {line: rule for line, rule in rules.items() if rule != "free"}


def _compare(folder: Folder, found: bytes, config: RunConfig, change_config: bool) -> Opened:
    """What differs in a way that may be or was asked for; raises for any other way."""
    # Through the config's classes: fields that came later have their defaults.
    with of_flag("workdir"):
        old = _parsed(folder, found)
    has_begun = bool(open_checkpoints(folder).steps())
    rules = _different(old, config, has_begun=has_begun)
    different = list(rules)
    if not different:
        return Opened([], anew=False)
    if not has_begun:
        return Opened(different, anew=True)
    fixed = [line for line in different if rules[line] != "change"]
    if change_config and not fixed:
        return Opened(different, anew=False)
    what = fixed if change_config else different
    shown, more = what[:8], len(what) - 8
    shown += [f"and {more} more"] if more > 0 else []
    ways = "Give the same flags to resume it, " + (
        "" if fixed else "--change_config to go on with these, "
    )
    raise UsageError(
        f"--workdir={folder} holds a run with another config: {'; '.join(shown)}. "
        f"{ways}or another --workdir"
    )


def saved_with(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a checkpoint's meta says of its run, for `check_saved_with`."""
    return {"config": overrides.to_json(config), "tokenizer": tokenizer.fingerprint()}


def check_saved_with(
    folder: Folder, config: RunConfig, step: int, meta: Mapping[str, Any], within: str = ""
) -> None:
    """Whether a checkpoint is of the run that `config.json` says; they lie side by side only.

    What may differ when a run goes on may differ here.

    Args:
      folder: of the run.
      config: that it says.
      step: of the checkpoint.
      meta: that it was saved with.
      within: the beginning of the paths that are compared, like "model.".

    Raises:
      UsageError: it is of another run; the message begins with the folder.
    """
    try:
        old = overrides.to_json(overrides.from_json(RunConfig, meta["config"]))
    except UsageError as error:
        raise UsageError(f"{folder}: the config in checkpoint {step}: {error}") from None
    lines = differences(old, overrides.to_json(config))
    paths = {line: line.split(" ", 1)[0] for line in lines}
    if different := [
        line
        for line, path in paths.items()
        if path.startswith(within) and resume_rule(config, path) == "fixed"
    ]:
        raise UsageError(
            f"{folder}: {CONFIG} is not that of the run that saved checkpoint {step}: "
            f"{'; '.join(different[:8])}. Put the run's own back, or give another folder"
        )


def check_tokenizer(folder: Folder, tokenizer: Tokenizer, name: str) -> None:
    """
    Raises:
      UsageError: the run in the folder has another tokenizer than this one, called `name`.
    """
    try:
        saved = load_saved(folder)
    except UsageError:  # missing or damaged: it is written again
        return
    if saved.fingerprint() != tokenizer.fingerprint():
        raise UsageError(
            f"--tokenizer={name} is another one than that of the run in --workdir={folder}; give "
            "the same one, or another --workdir"
        )


def step_to_go_back_to(folder: Folder, from_step: int | None, *, changes: bool) -> int | None:
    """The checkpoint that a run begins again from, or None where it goes on from its last one.

    The command that made it go back may be given again, after a kill: the last checkpoint says
    that the run went back to that step. With another config it does so once more.

    Args:
      folder: of the run.
      from_step: that is asked for, if one is.
      changes: whether the config is to be changed.

    Raises:
      UsageError: there is no such checkpoint.
    """
    if from_step is None:
        return None
    checkpoints = open_checkpoints(folder, report=lambda damaged: None)  # which the restore tells
    steps = checkpoints.steps()
    if steps and steps[-1] != from_step and not changes:
        with contextlib.suppress(RunError):
            if checkpoints.meta().get("branch") == from_step:
                return None
    if from_step not in steps:
        there = f"legal: {', '.join(map(str, steps))}" if steps else "it has none"
        raise UsageError(f"--from_step={from_step} is no checkpoint of --workdir={folder}; {there}")
    return from_step


def check_workdir(
    workdir: Location,
    config: RunConfig,
    *,
    change_config: bool = False,
    from_step: int | None = None,
) -> None:
    """What `open_workdir` and `step_to_go_back_to` refuse, with nothing written.

    Raises:
      UsageError: see both; of a folder that is not there the one around it counts.
    """
    folder, opened = open_folder(workdir), Opened([], anew=False)
    check_access(folder)
    if found := folder.read(CONFIG):
        opened = _compare(folder, found.data, config, change_config)
    step_to_go_back_to(folder, from_step, changes=bool(opened.changes))
    there = folder.local_path
    while there is not None and not os.path.lexists(there):
        there = there.parent
    if there is not None and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        why = "may not be written to" if there.is_dir() else "is no folder"
        raise UsageError(f"--workdir={folder} cannot be written to: {there} {why}")
