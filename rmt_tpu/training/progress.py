"""The progress display of a training run."""

import time
from collections import deque
from collections.abc import Mapping

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from rmt_tpu.progress import ProgressDisplay

_WINDOW = 20  # Tokens per second are averaged over this number of steps.


class TrainingProgress(ProgressDisplay):
    """A display of completed steps, loss, tokens per second and remaining time.

    Args:
      total: number of steps in the run.
      label: name of the run in the display.
      show: whether to show anything; only one process of a run does.
    """

    def __init__(self, total: int, label: str, *, show: bool = True):
        super().__init__(
            label,
            total,
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[doing]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            first_line=True,
            show=show,
            doing="starting",
        )
        self._total, self._label = total, label
        self._started: tuple[float, int] | None = None
        # The number of tokens and the seconds of each of the last `_WINDOW` steps.
        self._last: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def doing(self, what: str) -> None:
        """Show an activity, such as "evaluating", in the bar until the next step is done."""
        self.change(doing=what)

    def begin(self, step: int) -> None:
        """Start the display at `step` completed steps."""
        self._started = (time.monotonic(), step)
        self.change(completed=step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` is completed, with the loss and the speed from its metrics."""
        seconds = metrics["throughput/step_seconds"]
        self._last.append((metrics["throughput/tokens_per_second"] * seconds, seconds))
        speed = sum(tokens for tokens, _ in self._last) / sum(seconds for _, seconds in self._last)
        now = time.monotonic()
        self._started = self._started or (now, step)
        shown = f"loss {metrics['train/loss']:.4f} {speed:,.0f} tokens/s"
        self.show(
            lambda: (
                f"{self._label} step {step}/{self._total} {shown} {self._time_left(now, step)} left"
            ),
            now=step == self._total,
            completed=step,
            doing=shown,
        )

    def _time_left(self, now: float, step: int) -> str:
        since, first = self._started
        if step == first:
            return "?"
        seconds = round((now - since) / (step - first) * (self._total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
