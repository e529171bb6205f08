"""Metrics of the server in Prometheus's format: queue, slots, tokens and latencies.

Only `Metrics` needs the package prometheus_client, which is imported when the class is used.
"""

import importlib.util
import threading
import time
from collections import deque
from collections.abc import Callable

from rmt_tpu.serving.worker import Piece, Worker

# The number of tokens per second is a mean over this number of seconds.
_WINDOW = 10
# The upper bounds of the histograms' buckets, in seconds.
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one server.

    Args:
      worker: the thread that generates texts.
      texts: a function that returns the number of open texts: those that are queued or being
        generated.
    """

    def __init__(self, worker: Worker, texts: Callable[[], int]):
        import prometheus_client as prometheus

        self._registry = prometheus.CollectorRegistry()
        options = {"namespace": "rmt", "registry": self._registry}
        gauge = lambda name, words: prometheus.Gauge(name, words, **options)
        count = lambda name, words, *labels: prometheus.Counter(name, words, labels, **options)
        histogram = lambda name, words, buckets: prometheus.Histogram(
            name, words, buckets=buckets, **options
        )
        queued = lambda: max(0, texts() - worker.slots_used)
        gauge("queued_texts", "Texts that wait for a slot.").set_function(queued)
        gauge("slots", "Texts that can be generated at the same time.").set(worker.slots)
        used = gauge("slots_used", "Slots that hold a text.")
        used.set_function(lambda: worker.slots_used)
        speed = gauge("tokens_per_second", f"New tokens per second in the last {_WINDOW} seconds.")
        self._recent = _Recent()
        speed.set_function(self._recent.per_second)
        self.first = histogram("first_token_seconds", "From a request to its first token.", _FIRST)
        self.each = histogram("token_seconds", "From one token of a text to the next.", _EACH)
        self.prompt_tokens = count("prompt_tokens", "Tokens of prompts.")
        self.new_tokens = count("new_tokens", "Generated tokens.")
        self.ended = count("texts", "Texts, per finish reason; none if cut off.", "finish")
        self.refused = count("refused_requests", "Requests with an error, per status.", "status")

    @staticmethod
    def installed() -> bool:
        """Return whether prometheus_client is installed, which this class needs."""
        return importlib.util.find_spec("prometheus_client") is not None

    def page(self) -> tuple[bytes, str]:
        """Return all metrics as text, and the content type of the text."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def tokens(self, count: int) -> None:
        """Count new tokens."""
        self.new_tokens.inc(count)
        self._recent.add(count)


class Stopwatch:
    """A stopwatch for the tokens of one request, which adds its times to the server's metrics.

    `add` is called in the worker's thread and `close` in a different thread. Pieces that are added
    after `close` are not counted.

    Args:
      metrics: the server's metrics.
      texts: the number of texts of the request.
      prompt_tokens: the number of tokens of all texts' prompts together.
    """

    def __init__(self, metrics: Metrics, texts: int, prompt_tokens: int):
        self._metrics, self._begun, self._open = metrics, time.monotonic(), texts
        # Maps the index of a text to the time of its newest token.
        self._last: dict[int, float] = {}
        metrics.prompt_tokens.inc(prompt_tokens)

    def add(self, piece: Piece) -> None:
        """Count the tokens of a piece and, if the piece ends a text, the text."""
        if not self._open:
            return
        now, count = time.monotonic(), len(piece.completion.tokens)
        last = self._last.get(piece.index)
        if count and last is None:
            self._metrics.first.observe(now - self._begun)
        elif count:
            # The tokens of a dispatch arrive together. Each gets an equal share of the time.
            for _ in range(count):
                self._metrics.each.observe((now - last) / count)
        if count:
            self._last[piece.index] = now
            self._metrics.tokens(count)
        if piece.completion.finish:
            self._open -= 1
            self._metrics.ended.labels(piece.completion.finish).inc()

    def close(self) -> None:
        """Count texts that were cut off by an error or because the client disconnected."""
        if self._open:
            self._metrics.ended.labels("none").inc(self._open)
            self._open = 0


class _Recent:
    """A thread-safe count of the tokens generated in the last `_WINDOW` seconds."""

    def __init__(self):
        self._lock, self._counts = threading.Lock(), deque()

    def add(self, count: int) -> None:
        with self._lock:
            self._forget()
            self._counts.append((time.monotonic(), count))

    def per_second(self) -> float:
        with self._lock:
            self._forget()
            return sum(count for _, count in self._counts) / _WINDOW

    def _forget(self) -> None:
        oldest = time.monotonic() - _WINDOW
        while self._counts and self._counts[0][0] < oldest:
            self._counts.popleft()
