"""What a person sees while something goes on: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn

from rmt_tpu.streams import Told, say


class ProgressShown:
    """A bar with what is said above it; or, elsewhere than on a terminal, a line now and then."""

    def __init__(
        self,
        label: str,
        total: int | None,
        *columns: ProgressColumn,
        line_seconds: float = 5.0,
        first_line: bool = False,
        show: bool = True,
        **fields: Any,
    ):
        """
        Args:
          label: what goes on.
          total: at which it is done; None is not known yet.
          *columns: of the bar.
          line_seconds: elsewhere, at most one line in so many seconds.
          first_line: whether there is one at once, and not only when these are over.
          show: False says nothing, as do all processes of a run but one.
          **fields: of the columns, at first.
        """
        self._line_seconds, self._show = line_seconds, show
        self._last_line = -float("inf") if first_line else time.monotonic()
        self._bar = None
        # A terminal that is gone ends no run.
        if show and (terminal := Told(sys.stderr)).isatty():
            self._bar = Progress(*columns, console=Console(file=terminal))
            self._task = self._bar.add_task(label, total=total, **fields)

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line, above the bar."""
        if not self._show:
            return
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            say(text)

    def change(self, **fields: Any) -> None:
        """Of the bar: `completed`, `total`, `description` or a column's own."""
        if self._bar:
            self._bar.update(self._task, **fields)

    def show(self, line: Callable[[], str], *, now: bool = False, **fields: Any) -> None:
        """
        Args:
          line: for those who have no bar, if one is due.
          now: one is due in any case.
          **fields: see `change`.
        """
        self.change(**fields)
        if not self._bar and (now or time.monotonic() - self._last_line >= self._line_seconds):
            self._last_line = time.monotonic()
            self.say(line())
