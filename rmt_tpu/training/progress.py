"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_WINDOW = 20  # steps that tokens per second are the mean of


class TrainingProgress:
    """Steps done, loss, tokens per second and time left.

    Args:
      total: steps of the run.
      label: what is being trained.
      line_seconds: elsewhere than on a terminal, at most one line in so many seconds.
      show: False says nothing, as do all processes of a run but one.
    """

    def __init__(self, total: int, label: str, *, line_seconds: float = 5.0, show: bool = True):
        self._total, self._label = total, label
        self._line_seconds, self._last_line = line_seconds, -float("inf")
        self._started: tuple[float, int] | None = None
        self._last: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # tokens, seconds of steps
        self._show = show
        self._bar = None
        if show and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[doing]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(label, total=total, doing="starting")

    def __enter__(self) -> "TrainingProgress":
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
            print(text, file=sys.stderr, flush=True)

    def doing(self, what: str) -> None:
        """Shown in the bar until the next step is done."""
        if self._bar:
            self._bar.update(self._task, doing=what)

    def begin(self, step: int) -> None:
        """So many steps are done already."""
        self._started = (time.monotonic(), step)
        if self._bar:
            self._bar.update(self._task, completed=step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` is done."""
        seconds = metrics["throughput/step_seconds"]
        self._last.append((metrics["throughput/tokens_per_second"] * seconds, seconds))
        speed = sum(tokens for tokens, _ in self._last) / sum(seconds for _, seconds in self._last)
        now = time.monotonic()
        self._started = self._started or (now, step)
        shown = f"loss {metrics['train/loss']:.4f} {speed:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=step, doing=shown)
        elif step == self._total or now - self._last_line >= self._line_seconds:
            self._last_line = now
            left = self._time_left(now, step)
            self.say(f"{self._label} step {step}/{self._total} {shown} {left} left")

    def _time_left(self, now: float, step: int) -> str:
        since, first = self._started
        if step == first:
            return "?"
        seconds = round((now - since) / (step - first) * (self._total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
