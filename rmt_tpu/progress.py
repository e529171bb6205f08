"""A progress display: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn

from rmt_tpu.streams import SafeStream, log_line


class ProgressDisplay:
    """A progress bar with messages above it, or occasional lines outside a terminal."""

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
        """Create the display.

        Args:
          label: name of the task in progress.
          total: the value of `completed` at which the task is done; None if the value is not known
            yet.
          *columns: columns of the bar.
          line_seconds: minimum number of seconds between two lines if there is no bar.
          first_line: whether the first line is shown at once, instead of after `line_seconds`.
          show: whether to show anything; only one process of a run does.
          **fields: initial values of the columns' fields.
        """
        self._line_seconds, self._show = line_seconds, show
        self._last_line = -float("inf") if first_line else time.monotonic()
        self._bar = None
        # `SafeStream` ensures that a run survives the loss of its terminal.
        if show and (terminal := SafeStream(sys.stderr)).isatty():
            self._bar = Progress(*columns, console=Console(file=terminal))
            self._task = self._bar.add_task(label, total=total, **fields)

    def __enter__(self):
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            self._bar.stop()

    def log(self, text: str) -> None:
        """Print one line, which appears above the bar if there is one."""
        if not self._show:
            return
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            log_line(text)

    def change(self, **fields: Any) -> None:
        """Set the bar's `completed`, `total` or `description`, or a field that a column shows."""
        if self._bar:
            self._bar.update(self._task, **fields)

    def show(self, line: Callable[[], str], *, now: bool = False, **fields: Any) -> None:
        """Update the bar; if there is no bar, print a line if `line_seconds` have passed.

        Args:
          line: a function that returns the line to print if there is no bar.
          now: whether to print the line even if `line_seconds` have not passed.
          **fields: see `change`.
        """
        self.change(**fields)
        if not self._bar and (now or time.monotonic() - self._last_line >= self._line_seconds):
            self._last_line = time.monotonic()
            self.log(line())
