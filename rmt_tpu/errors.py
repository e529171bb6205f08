"""Errors that are shown to the user as one line, without a traceback."""

import contextlib
import difflib
import reprlib
from collections.abc import Iterable, Iterator

from sharding.errors import RmtError


class UsageError(RmtError):
    """An error in the command, config or input; the exit code is 2."""

    exit_code = 2


class RunError(RmtError):
    """A failure of the run itself, such as a damaged checkpoint; the exit code is 1."""


class DivergedError(RunError):
    """The error for a run whose loss or gradient has stayed non-finite."""


@contextlib.contextmanager
def flag_errors(name: str) -> Iterator[None]:
    """Prepend `--name=` to the message of a UsageError.

    The error must come from the body of the `with` statement, and its message must start with the
    flag's value.
    """
    try:
        yield
    except UsageError as value_and_reason:
        raise UsageError(f"--{name}={value_and_reason}") from None


@contextlib.contextmanager
def about_flag(name: str, beginning: str) -> Iterator[None]:
    """Prepend `--name: ` to the message of a UsageError if the message starts with `beginning`.

    The error must come from the body of the `with` statement.
    """
    try:
        yield
    except UsageError as reason:
        if not str(reason).startswith(beginning):
            raise
        raise UsageError(f"--{name}: {reason}") from None


class ArgumentError(UsageError):
    """An illegal argument of a function call; the message begins with `name=value`."""


@contextlib.contextmanager
def argument_errors(name: str) -> Iterator[None]:
    """Turn a UsageError into an ArgumentError about the argument `name`.

    The UsageError must come from the body of the `with` statement, and its message must start with
    the argument's value.
    """
    try:
        yield
    except UsageError as value_and_reason:
        raise ArgumentError(f"{name}={value_and_reason}") from None


@contextlib.contextmanager
def arguments_as_flags() -> Iterator[None]:
    """Turn an ArgumentError into a UsageError about the flag with the argument's name.

    The ArgumentError must come from the body of the `with` statement.
    """
    try:
        yield
    except ArgumentError as name_value_and_reason:
        raise UsageError(f"--{name_value_and_reason}") from None


_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxlong, _short.maxother = 3, 120, 40, 120


def shown(value: object) -> str:
    """Return the `repr` of a value, shortened if it is too long or too deeply nested for a line."""
    return _short.repr(value)


def one_line(error: Exception) -> str:
    """Format an error on one line, with its type in front unless it is an RmtError."""
    kind = "" if isinstance(error, RmtError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


_LONGEST_LIST = 300  # A list of legal names in a message has at most this number of characters.


def unknown(kind: str, name: object, legal: Iterable[str], close: list[str] | None = None) -> str:
    """Return an error message about an unknown name, with similar names and all legal names.

    The list of legal names is shortened if it is too long.

    Args:
      kind: the kind of thing that has the name, like "preset".
      name: the name as it was given.
      legal: all legal names.
      close: legal names to suggest; None suggests names with a similar spelling.
    """
    legal = list(legal)
    text = name if isinstance(name, str) else shown(name)
    if close is None:
        close = difflib.get_close_matches(text[:_LONGEST_LIST], legal, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ";"
    listed = ", ".join(legal) or "none"
    if len(listed) > _LONGEST_LIST:
        listed = f"{listed[:_LONGEST_LIST].rpartition(',')[0]}, ... ({len(legal)} in all)"
    return f"{kind} {shown(name)} is unknown{hint} legal: {listed}"
