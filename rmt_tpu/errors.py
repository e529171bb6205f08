"""Errors that are told to a person in one line, without a traceback."""

import contextlib
import difflib
import reprlib
from collections.abc import Iterable, Iterator

from sharding.errors import RmtError


class UsageError(RmtError):
    """The command, config or input is wrong. Exit code 2."""

    exit_code = 2


class RunError(RmtError):
    """The run itself failed: a non-finite loss, a damaged checkpoint. Exit code 1."""


class DivergedError(RunError):
    """The loss or its gradient stayed non-finite."""


@contextlib.contextmanager
def of_flag(name: str) -> Iterator[None]:
    """A UsageError within is about the value of this flag, and begins with that value."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"--{name}={error}") from None


@contextlib.contextmanager
def about_flag(name: str, beginning: str) -> Iterator[None]:
    """A UsageError within that begins so is about this flag, of which it does not speak."""
    try:
        yield
    except UsageError as error:
        if not str(error).startswith(beginning):
            raise
        raise UsageError(f"--{name}: {error}") from None


class ArgumentError(UsageError):
    """An argument of a call cannot be; the message begins with `name=value`."""


@contextlib.contextmanager
def of_argument(name: str) -> Iterator[None]:
    """A UsageError within is about the value of this argument, and begins with that value."""
    try:
        yield
    except UsageError as error:
        raise ArgumentError(f"{name}={error}") from None


@contextlib.contextmanager
def arguments_as_flags() -> Iterator[None]:
    """An ArgumentError within is told of the flag of the same name."""
    try:
        yield
    except ArgumentError as error:
        raise UsageError(f"--{error}") from None


_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxlong, _short.maxother = 3, 120, 40, 120


def shown(value: object) -> str:
    """`repr` of a value, cut where it is too long or too deep for a line."""
    return _short.repr(value)


def one_line(error: Exception) -> str:
    """Those that are not for a person, with their kind."""
    kind = "" if isinstance(error, RmtError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


_LONGEST_LIST = 300  # characters: a line that can still be read


def unknown(what: str, name: object, legal: Iterable[str], close: list[str] | None = None) -> str:
    """One line for a name that does not exist: the nearest legal names, and all if they fit.

    Args:
      what: the name is of.
      name: as it was given.
      legal: all that there are.
      close: of them, what may be meant; None is those that are spelt like it.
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
