"""Errors that are told to a person in one line, without a traceback."""

import difflib
from collections.abc import Iterable


class RmtError(Exception):
    """An error whose message is all that a person needs: what, which value, what is legal."""

    exit_code = 1


class UsageError(RmtError):
    """The command, config or input is wrong. Exit code 2."""

    exit_code = 2


class RunError(RmtError):
    """The run itself failed: a non-finite loss, a damaged checkpoint. Exit code 1."""


def unknown(what: str, name: str, legal: Iterable[str]) -> str:
    """One line for a name that does not exist, with the nearest and all legal names."""
    legal = list(legal)
    close = difflib.get_close_matches(name, legal, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ";"
    return f"{what} {name!r} is unknown{hint} legal: {', '.join(legal) or 'none'}"
