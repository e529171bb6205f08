"""What the recipes share: flags of a run, and how a program starts, fails and ends."""

import dataclasses
import glob
import json
import logging
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags
from absl import logging as absl_logging

from rmt_tpu import data
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.distributed import processes
from rmt_tpu.distributed.roll_call import Member
from rmt_tpu.errors import RmtError, UsageError, unknown
from sharding import MeshError

# Flag, config path, type, help.
_RUN_FLAGS = [
    ("data", "data.source", str, "stdlib, a token store of recipes.prepare_data, or "
     "comma-separated .txt and .jsonl files and globs"),
    ("tokenizer", "data.tokenizer", str, "byte, a folder with encoder.json and vocab.bpe, or a "
     "tokenizer.json"),
    ("seq_len", "data.seq_len", int, "tokens in a window"),
    ("steps", "train.steps", int, "optimizer steps"),
    ("batch_size", "train.batch_size", int, "sequences a step, over all devices"),
    ("mesh", "train.mesh", str, "device axes, like data=2,fsdp=4; -1 fills"),
    ("seed", "train.seed", int, "of parameters and data order"),
    ("log_every", "train.log_every", int, "steps between rows of metrics.jsonl"),
    ("checkpoint_every", "train.checkpoint_every", int, "steps; 0 is only at the end"),
    ("eval_every", "train.eval_every", int, "steps; 0 is only at the end"),
    ("sample_every", "train.sample_every", int, "steps between samples of text; 0 is only at the "
     "end"),
    ("tensorboard", "train.tensorboard", str, "auto (where tensorboardX is installed), on or off"),
]  # fmt: skip

# Exit codes as a shell gives them for SIGINT and SIGPIPE.
INTERRUPTED, BROKEN_PIPE = 130, 141

# What absl says of a flag, and what a person is told.
_REWORDED = [
    (r"=None: Flag --\w+ must have a value other than None\.", " is needed"),
    (r": invalid literal for int\(\).*", " must be a whole number"),
    (r": could not convert string to float.*", " must be a number"),
]

# The flags that this module defines are those of the recipe that has it define them: in --help too.
flags.disclaim_key_flags()


def define_run_flags() -> None:
    """Flags that make up a RunConfig, all but the preset. None is the preset's own value."""
    for name, path, kind, text in _RUN_FLAGS:
        define = flags.DEFINE_integer if kind is int else flags.DEFINE_string
        define(name, None, f"{text} ({path})")
    flags.DEFINE_multi_string("set", [], "path=value in the config, like model.store.key_dim=128")


def define_distributed_flags() -> None:
    """Flags by which several processes train as one."""
    flags.DEFINE_bool(
        "distributed",
        False,
        "one of several processes; which one is found out on TPU slices and in SLURM, Open MPI and "
        "Kubernetes jobs, and said by --coordinator, --num_processes and --process_id elsewhere",
    )
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, the same for all")
    flags.DEFINE_integer("num_processes", None, "how many there are, the same for all")
    flags.DEFINE_integer("process_id", None, "which one this is, from 0")
    flags.DEFINE_float(
        "distributed_timeout",
        processes.DEFAULT_TIMEOUT,
        "seconds to wait for other processes, at the start and at each checkpoint",
    )


def join_processes() -> None:
    """Joins the other processes, if the flags say that there are any; before devices are touched.

    Raises:
      UsageError: the flags do not say which process this is.
      RunError: the processes are not all there, or do not fit together.
    """
    timeout = flags.FLAGS.distributed_timeout
    given = {name: flags.FLAGS[name].value for name in ("coordinator", *Member._fields[1:])}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    devices = None
    if not missing:
        member = Member(*given.values())
    elif len(missing) < len(given):
        raise UsageError(f"{' and '.join(missing)} must be given with the other flags of a process")
    elif flags.FLAGS.distributed:
        member, devices = processes.find_member(timeout)
    else:
        return
    processes.initialize(member, timeout=timeout, local_device_ids=devices)
    print(
        f"process {member.process_id} of {member.num_processes} has joined"
        + ("" if processes.is_first() else "; process 0 tells how the run goes"),
        file=sys.stderr,
        flush=True,
    )


def run_config(base: RunConfig) -> RunConfig:
    """`base` with the flags of `define_run_flags`; another tokenizer brings its vocabulary.

    Raises:
      UsageError: a flag's value, or a path of --set, is not legal.
    """
    given = {path: getattr(flags.FLAGS, name) for name, path, _, _ in _RUN_FLAGS}
    changes = {path: value for path, value in given.items() if value is not None}
    changes |= dict(overrides.parse_assignment(text) for text in flags.FLAGS.set)
    source = changes.get("data.source")
    if source is not None and "data.tokenizer" not in changes and data.is_store(source):
        data.open_store(source)  # tells, before the tokenizer is looked for, if it is not complete
        changes["data.tokenizer"] = source
    config = overrides.apply(base, changes)
    if "data.tokenizer" in changes and "model.vocab_size" not in changes:
        return _with_vocabulary(config)
    return config


def base_config(preset: str, config_file: str | None) -> RunConfig:
    """The run of a preset, or that of a config.json.

    Raises:
      UsageError: there is no such preset, or the file cannot be read as a config.
    """
    if config_file is None:
        return _with_vocabulary(preset_run(preset))
    try:
        values = json.loads(Path(config_file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config={config_file}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--config={config_file} is not JSON: {error}") from None
    try:
        return overrides.from_json(RunConfig, values)
    except UsageError as error:
        raise UsageError(f"--config={config_file}: {error}") from None


def _with_vocabulary(config: RunConfig) -> RunConfig:
    """`config` with as many tokens as its tokenizer has."""
    vocab_size = data.load_tokenizer(config.data.tokenizer).vocab_size
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=vocab_size)
    )


def start(main: Callable[[], int | None]) -> None:
    """Run a recipe: `main` after the flags are parsed; its return value is the exit code.

    An error that a person can act on is one line and exit code 2 (usage) or 1 (the run).
    """
    jax.config.config_with_absl()
    # Libraries say much at INFO; what the recipes say themselves is printed.
    flags.FLAGS.set_default("verbosity", absl_logging.WARNING)
    for library in ("jax", "matplotlib"):
        logging.getLogger(library).setLevel(logging.WARNING)
    _hush_libtpu()
    app.run(lambda argv: sys.exit(_main(main, argv)), flags_parser=_parse_flags)


def exit_code_of(stopped_by: signal.Signals) -> int:
    """Of a run that a signal ended and that is saved: what sends SIGTERM expects nothing else."""
    return INTERRUPTED if stopped_by == signal.SIGINT else 0


def resume_command() -> str:
    """The command line of this program, for a shell in the same folder."""
    module = Path(sys.argv[0]).stem
    # Not "python": this one may be of an environment that is not activated.
    return shlex.join([sys.executable, "-m", f"recipes.{module}", *sys.argv[1:]])


def _hush_libtpu() -> None:
    """An installed libtpu without a TPU (the tests use its compiler) would say so at length."""
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def _main(main: Callable[[], int | None], argv: list[str]) -> int | None:
    try:
        if argv[1:]:
            raise UsageError(f"argument {argv[1]!r} is not a flag; flags are --name=value")
        code = main()
        processes.finish()
        return code
    except RmtError as error:
        return _fail(str(error), error.exit_code)
    except MeshError as error:
        return _fail(str(error), UsageError.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if processes.num_processes() == 1:
            raise
        if isinstance(error, jax.errors.JaxRuntimeError):
            processes.lost(str(error).split("\n")[0])
        traceback.print_exc()
        processes.fail(f"{type(error).__name__}: {error}", RmtError.exit_code)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        legal = [f"--{flag.name}" for flag in flags.FLAGS.get_key_flags_for_module(argv[0])]
        message = unknown("flag", f"--{error.flagname}", legal)
    except flags.Error as error:
        message = " and ".join(" ".join(line.split()) for line in str(error).splitlines())
        for pattern, words in _REWORDED:
            message = re.sub(pattern, words, message)
    sys.exit(_fail(message, UsageError.exit_code))


def _fail(message: str, code: int) -> int:
    if processes.num_processes() > 1:
        processes.fail(message, code)
    print(f"error: {message}", file=sys.stderr)
    return code
