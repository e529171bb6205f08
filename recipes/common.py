"""The flags that describe a run, and their conversion to a RunConfig.

This module does not import jax, because the import is slow.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from recipes.program import PrintAndExit
from recipes.texts import text_changes
from rmt_tpu.config import START_FIELDS, RunConfig, overrides, presets
from rmt_tpu.errors import ArgumentError, UsageError, flag_errors, unknown

# Each entry describes a flag: its name, the config path that it sets, its type and its help text.
_RUN_FLAGS = [
    ("data", "data.source", str, "text to train on: stdlib (the source of Python's standard "
     "library), a token store of recipes.prepare_data, or comma-separated .txt, .jsonl, .parquet "
     "and .arrow files and globs"),
    ("text_field", "data.text_field", str, "field of .jsonl files, or column of .parquet and "
     ".arrow files, that has the text of a document"),
    ("format", "data.format", str, "what a document is: text; messages, a conversation with a loss "
     "on the answers; or completion, a prompt and a completion with a loss on the completion"),
    ("chat_template", "data.chat_template", str, "file with a chat template for --format=messages, "
     "in place of the tokenizer's"),
    ("mixture", "data.mixture", str, "texts to mix, in place of --data, each with its share of the "
     "tokens, like runs/web=0.7,runs/books=0.3"),
    ("tokenizer", "data.tokenizer", str, "tokenizer: byte, a folder with encoder.json and "
     "vocab.bpe, or a tokenizer.json"),
     ("seq_len", "data.seq_len", int, "tokens per sequence"),
     ("steps", "train.steps", int, "number of optimizer steps"),
     ("learning_rate", "train.optimizer.learning_rate", float, "peak learning rate"),
     ("batch_size", "train.batch_size", int, "sequences per step, over all devices"),
     ("mesh", "train.mesh", str, "mesh axes, like data=2,fsdp=4; -1 means all remaining devices"),
     ("init_from", "train.init_from", str, "a run folder or a folder in Hugging Face format, "
      "from which a new run takes its initial parameters"),
     ("with_optimizer", "train.with_optimizer", bool, "continue the run of --init_from in another "
      "folder, with its optimizer state, step number and position in the text"),
     ("seed", "train.seed", int, "seed of the parameters and the data order"),
     ("log_every", "train.log_every", int, "steps between rows of metrics.jsonl"),
     ("checkpoint_every", "train.checkpoint_every", int, "steps between checkpoints; 0 means only "
      "at the end"),
     ("eval_every", "train.eval_every", int, "steps between evaluations on held-out text; 0 means "
      "only at the end"),
     ("eval_tasks", "train.eval_tasks", str, "tasks of recipes.evaluate to run during training"),
     ("eval_tasks_every", "train.eval_tasks_every", int, "steps between runs of the tasks; 0 means "
      "only at the end"),
     ("eval_tasks_limit", "train.eval_tasks_limit", int, "maximum number of documents per task, "
      "counted from the first"),
     ("eval_data_dir", "train.eval_data_dir", str, "data of the tasks: a folder with <task>.jsonl "
      "files, or hub"),
     ("sample_every", "train.sample_every", int, "steps between text samples; 0 means only at the "
      "end"),
     ("tracker", "train.tracker", str, "trackers that show the run: tensorboard, wandb, or both "
      "with a comma between them"),
     ("tensorboard", "train.tensorboard", str, "whether to write TensorBoard files: auto (if "
      "tensorboardX is installed), on or off"),
]  # fmt: skip

# The flags defined here count as flags of the recipe that calls these functions, so that its --help
# lists them.
flags.disclaim_key_flags()


def define_model_flags() -> None:
    """Define the flags that select a model's run config: see `selected_config`."""
    flags.DEFINE_string(
        "preset", None, "name of a preset (see --list_presets); the default is rmt-tiny"
    )
    flags.DEFINE_string("config", None, "config.json of a run, to use instead of a preset")


def define_run_flags() -> None:
    """Define the flags that change fields of a RunConfig.

    A flag that is not set changes nothing.
    """
    kinds = {
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
        bool: flags.DEFINE_bool,
    }
    for name, path, kind, text in _RUN_FLAGS:
        kinds[kind](name, None, f"{text} ({path})")
    flags.DEFINE_multi_string(
        "set", [], "path=value to set in the config, like model.store.key_dim=128"
    )
    define_list_presets()


def define_list_presets() -> None:
    """Define the flag that lists the presets."""
    flags.DEFINE_flag(PrintAndExit("list_presets", "list the presets, and exit", _presets))


def _presets() -> str:
    from rmt_tpu.cost import parameters

    names = presets.presets()
    width = max(map(len, names))
    lines = [f"{'preset':<{width}} {'parameters':>17} {'residual':>8}  what it is"]
    for name in names:
        model = presets.preset(name)
        sizes = f"{sum(parameters(model).values()):>17,} {model.residual_size:>8,}"
        lines.append(f"{name:<{width}} {sizes}  {presets.about(name)}")
    return "\n".join(lines)


def selected_config(
    stored_config: Callable[[str], RunConfig | None] = lambda name: None,
) -> tuple[str, RunConfig]:
    """Return the name and the RunConfig of --preset or --config, without other flags.

    Args:
      stored_config: a function of the preset's name. It returns the config of a run that has
        started in the run folder, or None. A run that has started no longer needs the folder of
        --init_from.

    Raises:
      UsageError: both flags are given, or a preset is unknown, or a config cannot be read.
    """
    preset, config = flags.FLAGS.preset, flags.FLAGS.config
    if config and preset:
        raise UsageError(f"--preset={preset} and --config={config} both set the model; give one")
    init_from = flags.FLAGS.init_from
    if not (preset or config):
        name = Path(init_from or "rmt-tiny").name
        if stored := stored_config(name):
            return Path(stored.train.init_from).name, _with_free_residual(stored)
        if init_from:
            return name, _config_of_source(init_from)
    name = config or preset or "rmt-tiny"
    return name, with_warm_start(base_config(preset or "rmt-tiny", config), stored_config(name))


def with_warm_start(base: RunConfig, stored_config: RunConfig | None = None) -> RunConfig:
    """Return `base` with the tokenizer and the vocabulary of the model in --init_from.

    The vocabulary may be larger than the tokenizer's. The setting `tied_embeddings` is copied too.

    Args:
      base: the run config before --init_from is applied.
      stored_config: the config of a run that was started before, or None; see `selected_config`.

    Raises:
      UsageError: the folder of --init_from contains no model.
    """
    if stored_config is None and not flags.FLAGS.init_from:
        return base
    source = stored_config or _config_of_source(flags.FLAGS.init_from)
    vocabulary = {key: getattr(source.model, key) for key in ("vocab_size", "tied_embeddings")}
    model = base.model.replace(**vocabulary)
    data = dataclasses.replace(base.data, tokenizer=source.data.tokenizer)
    train = base.train
    if stored_config:
        start_values = {name: getattr(stored_config.train, name) for name in START_FIELDS}
        train = dataclasses.replace(train, **start_values)
    return RunConfig(model, train, data)


def _with_free_residual(stored: RunConfig) -> RunConfig:
    """Return a stored config with "auto" as the dtype of a residual that is int16 there.

    "auto" chooses int16 again, and lets a residual that outgrows int16 continue in float32.
    """
    store = stored.model.store
    store = dataclasses.replace(store, dtype="auto") if store.dtype == "int16" else store
    return dataclasses.replace(stored, model=dataclasses.replace(stored.model, store=store))


def _config_of_source(init_from: str) -> RunConfig:
    """Return the RunConfig of the model in a run folder, or in a folder in the hub's format."""
    from rmt_tpu.data import spec_of_folder
    from rmt_tpu.hub.models import describe, is_hub
    from rmt_tpu.storage import open_folder

    with flag_errors("init_from"):
        folder = open_folder(init_from)
    if is_hub(folder):
        try:
            model, max_length, *_ = describe(folder)
        except UsageError as error:
            raise UsageError(f"--init_from cannot be loaded: {error}") from None
        config = presets.modern_run(model)
        seq_len = min(config.data.seq_len, max_length)
        tokenizer = spec_of_folder(init_from)
        data = dataclasses.replace(config.data, seq_len=seq_len, tokenizer=tokenizer)
        return dataclasses.replace(config, data=data)
    from rmt_tpu.runs.workdir import read_config

    try:
        config = read_config(init_from)
    except ArgumentError as error:
        _, _, value_and_reason = str(error).partition("=")
        raise UsageError(f"--init_from={value_and_reason}") from None
    # The source run may itself have started from other weights. The new run does not need them, so
    # clear the fields that name them. What the source chose for its devices is chosen anew. Only an
    # RMT chooses the parts of a batch; in other models they were set, maybe for want of memory.
    parts = None if config.model.rebuilds_residual else config.train.accumulate
    train = dataclasses.replace(config.train, init_from="", with_optimizer=False, accumulate=parts)
    store = dataclasses.replace(config.model.store, dtype="auto")
    model = dataclasses.replace(config.model, compute_dtype="auto", remat="auto", store=store)
    return RunConfig(model, train, config.data)


def run_config(base: RunConfig) -> RunConfig:
    """Return `base` changed by the flags of `define_run_flags`.

    If a flag changes the tokenizer, the vocabulary size changes too. With --init_from, it remains
    the size of the loaded parameters (see `with_warm_start`).

    Raises:
      UsageError: the value of a flag, or a path in --set, is not valid.
    """
    flag_values = {path: (name, getattr(flags.FLAGS, name)) for name, path, _, _ in _RUN_FLAGS}
    changes = {path: value for path, (_, value) in flag_values.items() if value is not None}
    flag_names = {path: f"--{flag_values[path][0]}" for path in changes}
    _check_once(flag_names)
    changes |= assigned()
    flag_names |= {path: f"--set={path}" for path in assigned()}
    try:
        changes |= text_changes(changes, flag_names)
        config = overrides.apply(base, changes)
    except UsageError as error:
        raise UsageError(_with_flag_name(str(error), flag_names)) from None
    fixed_vocabulary = config.train.init_from or "model.vocab_size" in changes
    if "data.tokenizer" in changes and not fixed_vocabulary:
        return _with_vocabulary(config)
    return config


def _check_once(flag_names: dict[str, str]) -> None:
    """Check that --set and another flag do not set the same value.

    Args:
      flag_names: maps each config path that a flag sets to the flag as written on the command line.

    Raises:
      UsageError: --set and a flag in `flag_names` set the same value, so that one of them would
        have no effect. A string in --set that selects the kind of a config object is legal, even if
        a flag sets a field of this object.
    """
    for path, value in assigned().items():
        for flag_path, flag in flag_names.items():
            is_within = flag_path.startswith(f"{path}.") and not isinstance(value, str)
            if flag_path == path or is_within or path.startswith(f"{flag_path}."):
                raise UsageError(f"{flag} and --set={path} both set {flag_path}; give one")


def given_paths() -> dict[str, str]:
    """Return a dict from each config path to the run flag that sets it, as the user wrote it."""
    paths = {path: f"--{name}" for name, path, *_ in _RUN_FLAGS if flags.FLAGS[name].present}
    return paths | {path: f"--set={path}" for path in assigned()}


def assigned() -> dict[str, Any]:
    """Return the values of --set, keyed by config path.

    Raises:
      UsageError: an assignment does not have the form path=value, or two of them give a path
        different values.
    """
    return overrides.parse_assignments(flags.FLAGS.set)


def preset_changes(preset: str, presets: list[str], assignments: list[str]) -> dict[str, Any]:
    """Return the config changes for one preset, from the assignments of a --set flag.

    Args:
      preset: the preset whose changes are returned.
      presets: all presets in the command.
      assignments: texts of the form path=value, for all presets, or preset:path=value, for one.

    Raises:
      UsageError: an assignment has neither form.
    """
    changes = {}
    for text in assignments:
        target, colon, assignment = text.partition(":")
        if not colon or "=" in target:
            target, assignment = preset, text
        elif target not in presets:
            raise UsageError(unknown(f"--set={text}: preset", target, presets))
        path, value = overrides.parse_assignment(assignment)
        if target == preset:
            changes[path] = value
    return changes


def _with_flag_name(message: str, flag_names: dict[str, str]) -> str:
    """Return the message with the flag that sets the config path at its start.

    The flag takes the path's place. If it sets more, such as a whole mixture, it goes before the
    path.
    """
    path = message.partition("=")[0].partition(" ")[0]
    if path in flag_names:
        return message.replace(path, flag_names[path], 1)
    wider = [flag for whole, flag in flag_names.items() if path.startswith(f"{whole}.")]
    return f"{wider[0]}: {message}" if wider else message


def base_config(preset: str, config_file: str | None) -> RunConfig:
    """Return the RunConfig of a preset, or of a config.json file.

    Raises:
      UsageError: the preset does not exist, or the file cannot be read as a config.
    """
    if config_file is None:
        return _with_vocabulary(presets.run(preset))
    try:
        values = overrides.parse_json(Path(config_file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config={config_file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--config={config_file} is not JSON: {error}") from None
    try:
        return overrides.from_json(RunConfig, values)
    except UsageError as error:
        raise UsageError(f"--config={config_file} is not a legal config: {error}") from None


def _with_vocabulary(config: RunConfig) -> RunConfig:
    """Return `config` with the vocabulary size of its tokenizer."""
    from rmt_tpu import data

    vocab_size = data.load_tokenizer(config.data.tokenizer).vocab_size
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=vocab_size)
    )
