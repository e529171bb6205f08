"""Errors that are shown to the user as one line, without a traceback."""

import contextlib
import difflib
import reprlib
from collections.abc import Iterable, Iterator

from sharding.errors import RmtError


class UsageError(RmtError):
    """The command, config or input is wrong. The exit code is 2."""

    exit_code = 2


class RunError(RmtError):
    """The run itself failed: a non-finite loss, a damaged checkpoint. The exit code is 1."""


class DivergedError(RunError):
    """The loss or its gradient stayed non-finite."""


@contextlib.contextmanager
def of_flag(name: str) -> Iterator[None]:
    """Prefix a UsageError in the body, which starts with this flag's value, with `--name=`."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"--{name}={error}") from None


@contextlib.contextmanager
def about_flag(name: str, beginning: str) -> Iterator[None]:
    """Prefix a UsageError in the body that starts with `beginning` with `--name: `."""
    try:
        yield
    except UsageError as error:
        if not str(error).startswith(beginning):
            raise
        raise UsageError(f"--{name}: {error}") from None


class ArgumentError(UsageError):
    """An argument of a call is illegal; the message begins with `name=value`."""


@contextlib.contextmanager
def of_argument(name: str) -> Iterator[None]:
    """Turn a UsageError in the body, which starts with the value, into an ArgumentError."""
    try:
        yield
    except UsageError as error:
        raise ArgumentError(f"{name}={error}") from None


@contextlib.contextmanager
def arguments_as_flags() -> Iterator[None]:
    """Turn an ArgumentError in the body into a UsageError about the flag of the same name."""
    try:
        yield
    except ArgumentError as error:
        raise UsageError(f"--{error}") from None


_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxlong, _short.maxother = 3, 120, 40, 120


def shown(value: object) -> str:
    """Return `repr` of a value, cut where it is too long or too deep for a line."""
    return _short.repr(value)


def one_line(error: Exception) -> str:
    """Format an error on one line; one that is not meant for the user begins with its type."""
    kind = "" if isinstance(error, RmtError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


_LONGEST_LIST = 300  # in characters; a longer line would be hard to read


def unknown(what: str, name: object, legal: Iterable[str], close: list[str] | None = None) -> str:
    """Return one line about an unknown name, with the nearest legal names, and all if they fit.

    Args:
      what: the kind of thing that has the name, like "preset".
      name: the name as it was given.
      legal: all legal names.
      close: legal names that may be meant; None are those with a similar spelling.
    """
    legal = list(legal)
    named = name if isinstance(name, str) else shown(name)
    if close is None:
        close = difflib.get_close_matches(named[:_LONGEST_LIST], legal, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ";"
    listed = ", ".join(legal) or "none"
    if len(listed) > _LONGEST_LIST:
        listed = f"{listed[:_LONGEST_LIST].rpartition(',')[0]}, ... ({len(legal)} in all)"
    return f"{what} {shown(name)} is unknown{hint} legal: {listed}"
