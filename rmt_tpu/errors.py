"""Errors that are told to a person in one line, without a traceback."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class RmtError(Exception):
    """An error whose message is all that a person needs: what, which value, what is legal."""

    exit_code = 1


class UsageError(RmtError):
    """The command, config or input is wrong. Exit code 2."""

    exit_code = 2


class RunError(RmtError):
    """The run itself failed: a non-finite loss, a damaged checkpoint. Exit code 1."""


@contextlib.contextmanager
def of_flag(name: str) -> Iterator[None]:
    """A UsageError within is about the value of this flag, and begins with that value."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"--{name}={error}") from None


_LONGEST_LIST = 300  # characters: a line that can still be read


def unknown(what: str, name: str, legal: Iterable[str]) -> str:
    """One line for a name that does not exist: the nearest legal names, and all if they fit."""
    legal = list(legal)
    close = difflib.get_close_matches(name, legal, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ";"
    listed = ", ".join(legal) or "none"
    if len(listed) > _LONGEST_LIST:
        listed = f"{listed[:_LONGEST_LIST].rpartition(',')[0]}, ... ({len(legal)} in all)"
    return f"{what} {name!r} is unknown{hint} legal: {listed}"
