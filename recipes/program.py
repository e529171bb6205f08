"""The start-up, error reporting and exit codes that all recipes share.

This module does not import jax, because the import is slow. Help texts and errors in flags are
therefore printed immediately.
"""

import contextlib
import faulthandler
import glob
import logging
import math
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from absl import flags

import rmt_tpu
from recipes import interrupts
from recipes.interrupts import INTERRUPTED
from rmt_tpu import streams
from rmt_tpu.errors import RmtError, UsageError, shown, unknown

# The exit code that a shell reports for SIGPIPE.
BROKEN_PIPE = 141

# Patterns in absl's error messages about flags, and the clearer texts that replace them.
_REWORDED = [
    (r"=None: Flag --\w+ must have a value other than None\.", " is needed"),
    (r": invalid literal for int\(\).*", " must be a whole number in digits, like 1000"),
    (r": Exceeds the limit \(\d+ digits\).*", " must be a smaller whole number"),
    (r": could not convert string to float.*", " must be a number"),
    (r": \('Non-boolean argument to boolean flag'.*", " must be true or false"),
]
# Maps flag names of other programs to the recipes' flags that error messages suggest.
_OTHER_NAMES = {
    "lr": "learning_rate",
    "bs": "batch_size",
    "epochs": "steps",
    "model": "preset",
    "dataset": "data",
    "output_dir": "workdir",
    "output": "workdir",
}

# Flags whose value may be an empty string.
_MAY_BE_EMPTY = ("prompt",)

# Flags whose value may be white space, such as a line break at which a text stops.
_MAY_BE_BLANK = ("stop",)

# The flags defined here count as flags of the recipe that calls these functions, so that its --help
# lists them.
flags.disclaim_key_flags()


class PrintAndExit(flags.BooleanFlag):
    """A flag like --help, which prints a text and exits the program with code 0."""

    def __init__(self, name: str, help_text: str, text: Callable[[], str], **options):
        super().__init__(name=name, default=False, help=help_text, **options)
        self._text = text

    def parse(self, argument: Any) -> None:
        """Set the flag; if it is true, print the text and exit."""
        super().parse(argument)
        if self.value:
            streams.need_stdout()
            sys.exit(_print_or_fail(lambda: print(self._text())))


def start(
    main: Callable[[], int | None], *, operand: str | None = None, only_printed: bool = False
) -> NoReturn:
    """Run a recipe: parse the flags, call `main`, and exit with the code that `main` returns.

    An error that the user can act on is printed as one line. The exit code is then 2 for a usage
    error, and 1 for an error of the run.

    Args:
      main: the recipe's function.
      operand: the name of a flag whose value may be given as a positional argument.
      only_printed: whether standard output is the only place for the recipe's results. If so, the
        recipe fails if it cannot write there. Any other recipe continues, and drops what it cannot
        print.
    """
    # absl registers flags by module name, or by the file's path for the main module.
    module = sys.argv[0] if main.__module__ == "__main__" else main.__module__
    help_text = lambda: f"{sys.modules[main.__module__].__doc__}\nFlags:\n{_flag_help(module)}"
    flags.DEFINE_flag(PrintAndExit("help", "print this help, and exit", help_text, short_name="h"))
    flags.DEFINE_flag(PrintAndExit("version", "print the version, and exit", _version))
    _prepare()
    argv = _parse_flags(module)
    if operand and argv[1:] and flags.FLAGS[operand].value is None:
        flags.FLAGS[operand].value = argv.pop(1)
    if only_printed:
        streams.need_stdout()
    interrupts.leave(_main(main, argv))


def start_unparsed(main: Callable[[], int | None]) -> NoReturn:
    """Run a recipe that parses its command line itself; see `start`."""
    _prepare()
    interrupts.leave(_main(main, sys.argv[:1]))


def _prepare() -> None:
    streams.install()
    # `enable` raises an error if standard error is not a file.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.enable()
    # Hide the INFO logs of libraries; the recipes print their own messages instead of logging them.
    for library in ("jax", "matplotlib"):
        logging.getLogger(library).setLevel(logging.WARNING)
    _hush_libtpu()


def _flag_help(module: str) -> str:
    text = flags.FLAGS.module_help(module).partition(":\n")[2]
    return re.sub(r"--\[no\](help|version|list_presets)\b", r"--\1", text)


def _version() -> str:
    from importlib.metadata import version

    python = ".".join(map(str, sys.version_info[:3]))
    return f"rmt_tpu {rmt_tpu.__version__}, jax {version('jax')}, Python {python}"


def exit_code(stopped_by: signal.Signals, other: int = 0) -> int:
    """Return the exit code of a run that was stopped by a signal and then saved.

    Args:
      stopped_by: the signal.
      other: the exit code for a signal other than SIGINT. Schedulers send such a signal before they
        end a process, and most schedulers expect 0.
    """
    return INTERRUPTED if stopped_by == signal.SIGINT else other


def resume_command() -> str:
    """Return the shell command that runs this program again, in the same folder."""
    program = Path(sys.argv[0])
    # An installed command, like rmt-train, is a file that does not end in .py.
    if program.suffix != ".py":
        return shlex.join(sys.argv)
    # Use this interpreter's path, because "python" may be a different one in the user's shell.
    return shlex.join([sys.executable, "-m", f"recipes.{program.stem}", *sys.argv[1:]])


def _hush_libtpu() -> None:
    """Silence libtpu on a machine without a TPU, which has it only for its compiler."""
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def _main(main: Callable[[], int | None], argv: list[str]) -> int | None:
    try:
        if argv[1:]:
            raise UsageError(f"argument {shown(argv[1])} is not a flag; flags are --name=value")
        with interrupts.raised():
            code = _until_pipe_breaks(main)
        if processes := _processes():
            processes.finish()
        return code
    except RmtError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt as interrupt:
        return _fail(str(interrupt) or "interrupted", interrupts.exit_code(interrupt))
    except Exception as error:
        if line := _no_platform():
            return _fail(line, UsageError.exit_code)
        processes = _processes()
        if processes is None or processes.num_processes() == 1:
            raise
        import jax

        if isinstance(error, jax.errors.JaxRuntimeError):
            processes.fail_after_device_error(str(error).split("\n")[0])
        traceback.print_exc()
        processes.fail(f"{type(error).__name__}: {error}", RmtError.exit_code)


def _until_pipe_breaks(print_text: Callable[[], int | None]) -> int | None:
    """Return the result of `print_text`, or BROKEN_PIPE if the reader of the output has exited.

    The reader may be a program like `head`. A broken pipe raises an error only in programs with
    `only_printed`: see `start`.
    """
    try:
        code = print_text()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return BROKEN_PIPE


def _print_or_fail(print_text: Callable[[], None]) -> int | None:
    """Return the exit code of `print_text`; an error of this project is printed as one line."""
    try:
        return _until_pipe_breaks(print_text)
    except RmtError as error:
        return _fail(str(error), error.exit_code)


def _processes() -> ModuleType | None:
    """Return `rmt_tpu.distributed.processes`, or None if the program has not imported it yet."""
    return sys.modules.get("rmt_tpu.distributed.processes")


def _no_platform() -> str | None:
    """Return an error message if JAX_PLATFORMS prevents jax from finding a device, else None."""
    jax = sys.modules.get("jax")
    platforms = jax and jax.config.jax_platforms
    if not platforms:
        return None
    try:
        jax.devices()
        return None
    except (RuntimeError, AssertionError):  # jax raises an AssertionError if a plugin is missing.
        jax.config.update("jax_platforms", None)
        available = dict.fromkeys([jax.default_backend(), "cpu"])
        return (
            f"JAX_PLATFORMS={platforms} is a platform without a device or a plugin here; legal: "
            f"{' or '.join(available)}, or unset"
        )


def _parse_flags(module: str) -> list[str]:
    try:
        _check_values_follow(sys.argv[1:])
        argv = flags.FLAGS(sys.argv)
        _check_empty()
        _check_finite()
        return argv
    except UsageError as error:
        message = str(error)
    except flags.UnrecognizedFlagError as error:
        legal = [f"--{flag.name}" for flag in flags.FLAGS.get_key_flags_for_module(module)]
        suggestion = f"--{_OTHER_NAMES.get(error.flagname)}"
        close = [suggestion] if suggestion in legal else None
        message = unknown("flag", f"--{error.flagname}", legal, close)
    except flags.Error as error:
        message = " and ".join(" ".join(line.split()) for line in str(error).splitlines())
        for pattern, words in _REWORDED:
            message = re.sub(pattern, words, message)
        message = re.sub(r"(\S{100})\S{100,}", r"\1...", message)
    sys.exit(_fail(message, UsageError.exit_code))


def _check_values_follow(arguments: list[str]) -> None:
    """Check that no flag without `=` takes the next flag as its value.

    Raises:
      UsageError: a value starts with "--". This happens if the intended value was an empty shell
        variable.
    """
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            return  # absl parses no flags after this, but it does after a positional argument.
        name = re.sub("^--?", "", argument)
        if name == argument or name not in flags.FLAGS or flags.FLAGS[name].boolean:
            continue
        if (value := next(remaining, "")).startswith("--"):
            raise UsageError(f"--{name} has no value before {shown(value)}; legal: --{name}=VALUE")


def _check_empty() -> None:
    """Check that no flag has an empty value.

    Raises:
      UsageError: a flag has an empty value, or a list has an empty item. An empty value, for
        example from an unset shell variable, does not select the default.
    """
    for name, flag in flags.FLAGS._flags().items():
        values = flag.value if isinstance(flag.value, list) else [flag.value]
        if not flag.present or name in _MAY_BE_EMPTY:
            continue
        text = str if name in _MAY_BE_BLANK else lambda value: str(value).strip()
        if not any(map(text, values)):
            raise UsageError(f"--{name}= is empty; leave it out, or give: {_help(flag)}")
        if "" in values:
            parts = ",".join(values)
            raise UsageError(f"--{name}={parts} has an empty item; legal: {_help(flag)}")


def _check_finite() -> None:
    """Check that the value of each flag for a number is finite.

    Raises:
      UsageError: a value is not finite. absl's bounds accept NaN.
    """
    for name, flag in flags.FLAGS._flags().items():
        if flag.present and isinstance(flag.value, float) and not math.isfinite(flag.value):
            raise UsageError(f"--{name}={flag.value} must be a finite number")


def _help(flag: flags.Flag) -> str:
    """Return a flag's help text in one line."""
    return " ".join(flag.help.split())


def _fail(message: str, code: int) -> int:
    processes = _processes()
    if processes and processes.num_processes() > 1:
        processes.fail(message, code)
    print(f"error: {message}", file=sys.stderr)
    return code
