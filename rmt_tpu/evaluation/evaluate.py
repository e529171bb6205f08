"""Evaluation of a model on tasks and texts.

Answers are stored in files, so that no request is computed twice.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from rmt_tpu.data import Tokenizer
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import flag_errors
from rmt_tpu.evaluation.documents import (
    Source,
    SourceRequests,
    Total,
    ask,
    check_stride,
    metrics,
)
from rmt_tpu.evaluation.metrics import Metric
from rmt_tpu.evaluation.scorer import Answer, Scorer
from rmt_tpu.generation.files import Output, open_output
from rmt_tpu.progress import ProgressDisplay
from rmt_tpu.storage import Folder

ANSWERS = "evaluation"
_SECONDS = 5.0  # The number of seconds between two writes of new answers to their files.


class Subject(NamedTuple):
    """A model that is evaluated.

    Attributes:
      name: the model's name in tables.
      scorer: the scorer that answers requests.
      tokenizer: the tokenizer of the model.
      identity: JSON values that identify the model and its settings. A stored answer is used only
        if its identity is the same.
      folder: the folder in which answers are stored.
      decoder: the model's decoder, with matrices cast to the dtype in which it computes; None if
        the model has no decoder.
      limit: the subject of the message about a continuation that is longer than the model can read;
        None is the flag --max_length with its value.
    """

    name: str
    scorer: Scorer
    tokenizer: Tokenizer
    identity: dict[str, Any]
    folder: Folder
    decoder: Decoder | None = None
    limit: str | None = None


@dataclass(frozen=True)
class Result:
    """The result of evaluating a model on one source.

    Attributes:
      source: the source.
      metrics: the metrics of the source.
      identity: the identity of the model (see `Subject`) and, for texts, the stride.
      requests: the number of requests of the source.
      cut: the number of requests whose context was too long and lost its beginning.
      tokens: the number of scored tokens.
      answered: the number of requests that this call answered; the others had stored answers.
      seconds: this source's share of the time that the call spent on answers.
      by_position: for texts, an array [2, positions]. It has the sum of nats and the number of
        tokens for each position in a window. None for tasks.
    """

    source: Source
    metrics: list[Metric]
    identity: dict[str, Any]
    requests: int
    cut: int
    tokens: int
    answered: int
    seconds: float
    by_position: np.ndarray | None = None

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        task = self.source.task
        prompt = {} if task is None else {"prompt_version": task.version}
        return {
            "task": self.source.name,
            **prompt,
            "documents": len(self.source.documents),
            "metrics": {metric.name: metric.json() for metric in self.metrics},
            "requests": self.requests,
            "contexts_cut": self.cut,
            "tokens_scored": self.tokens,
            "requests_answered_now": self.answered,
            "seconds": round(self.seconds, 3),
            "data": self.source.digest,
            **self.identity,
        }


def check_sources(subject: Subject, sources: Iterable[Source], stride: int | None = None) -> None:
    """Check that a model, which has not run yet, can read each task and text.

    The texts themselves, which may be long, are not encoded.

    Args:
      subject: the model.
      sources: the tasks and texts.
      stride: the number of tokens that each window over a text scores; see `documents.ask`.

    Raises:
      UsageError: the text of a task cannot be encoded, a continuation is longer than the model can
        read, or the stride exceeds the number of tokens that the model reads.
    """
    for source in sources:
        if source.task is not None:
            _ask(subject, source, stride)
        else:
            check_stride(stride, subject.scorer.max_length, subject.name)


def _ask(subject: Subject, source: Source, stride: int | None) -> SourceRequests:
    """Return the requests of a source, after a check that the model can read them."""
    max_length = subject.scorer.max_length
    asked = ask(source, subject.tokenizer, max_length, stride, model=subject.name)
    subject.scorer.check(source.name, asked.requests, limit=subject.limit)
    return asked


def evaluate(
    subject: Subject, sources: Iterable[Source], stride: int | None = None
) -> list[Result]:
    """Evaluate a model on sources. Only answers that are not stored yet are computed.

    Args:
      subject: the model.
      sources: the tasks and texts.
      stride: the number of tokens that each window over a text scores; see `documents.ask`.

    Returns:
      One result per source, in order.

    Raises:
      UsageError: a text cannot be encoded, a continuation is longer than the model can read, or
        another process on this host is computing the same answers for the same folder.
    """
    source_requests = [_ask(subject, source, stride) for source in sources]
    count = sum(len(requests.requests) for requests in source_requests)
    with _Progress(subject.name, count) as progress, contextlib.ExitStack() as outputs:
        pending = []
        for requests in source_requests:
            identity = _identity(subject, requests.source, stride)
            location = _location(subject.folder, requests.source, identity)
            source = _PendingSource(subject.scorer, requests, identity, Output(location))
            if source.unanswered:
                # Another process may have added answers since the file was read.
                with flag_errors("output"):
                    output = outputs.enter_context(open_output(location, progress.log))
                source = _PendingSource(subject.scorer, requests, identity, output)
            pending.append(source)
        progress.add(sum(len(source.lines) for source in pending))
        for source in pending:
            if source.unanswered and source.cut:
                progress.log(
                    f"note: {subject.name}: {source.cut} of {len(source.requests)} contexts of "
                    f"{source.source.name} exceed the {subject.scorer.max_length} tokens that the "
                    "model reads at once (--max_length); their beginnings are cut off"
                )
        _answer(subject.scorer, pending, progress)
    return [source.result() for source in pending]


def _identity(subject: Subject, source: Source, stride: int | None) -> dict[str, Any]:
    """Return the values that a stored answer must have in common with a new one."""
    return subject.identity | ({"stride": stride} if source.kind == "text" else {})


def _location(folder: Folder, source: Source, identity: dict[str, Any]) -> str:
    """Return the path of the file of a source's answers with this identity."""
    parts = json.dumps([source.name, source.digest, identity], sort_keys=True)
    key = hashlib.blake2b(parts.encode(), digest_size=6).hexdigest()
    return f"{folder}/{ANSWERS}/{source.name}-{key}.jsonl"


class _PendingSource:
    """A source that is being evaluated, and its answers so far.

    Attributes:
      lines: maps the number of a request to its answer, as a JSON object.
      unanswered: the numbers of the requests for which the file had no answer at the start.
      seconds: the number of seconds spent on computing answers.
    """

    def __init__(
        self,
        scorer: Scorer,
        source_requests: SourceRequests,
        identity: dict[str, Any],
        output: Output,
    ):
        self.source_requests, self.identity = source_requests, identity
        self.source, self.requests, _ = source_requests
        self.is_text = self.source.kind == "text"
        self._output, self._new, self.seconds = output, [], 0.0
        count = len(self.requests)
        lines = self._output.lines
        self.lines = {line["number"]: line for line in lines if 0 <= line["number"] < count}
        self.unanswered = [number for number in range(count) if number not in self.lines]
        self.cut = scorer.cut(self.requests)

    def record(self, number: int, answer: Answer, seconds: float) -> None:
        """Record an answer and its share of the computing time; `flush` writes it to the file."""
        line = {"number": number, **_line(answer, self.is_text)}
        self.lines[number] = line
        self._new.append(line)
        self.seconds += seconds

    def flush(self) -> None:
        """Append all new lines to the file in a single write.

        Many small writes to gs:// would be slow, because each write creates a separate object.
        """
        if self._new:
            self._output.add(*self._new)
        self._new = []

    def result(self) -> Result:
        """Return the metrics of the source; all its requests must have answers."""
        lines = (self.lines[number] for number in range(len(self.requests)))
        totals = [Total(line["log_probability"], line["greedy"]) for line in lines]
        return Result(
            self.source,
            metrics(self.source_requests, totals),
            self.identity,
            requests=len(self.requests),
            cut=self.cut,
            tokens=sum(len(request.continuation) for request in self.requests),
            answered=len(self.unanswered),
            seconds=self.seconds,
            by_position=_by_position(self.source_requests, self.lines) if self.is_text else None,
        )


def _answer(scorer: Scorer, sources: list[_PendingSource], progress: "_Progress") -> None:
    """Answer the unanswered requests of all sources together, so that batches are full.

    New answers are written to their files every few seconds, and also before an error propagates.
    """
    unanswered = [(source, number) for source in sources for number in source.unanswered]
    last = added = time.monotonic()
    try:
        for answers in scorer.answers([source.requests[number] for source, number in unanswered]):
            now = time.monotonic()
            for index, answer in answers.items():
                source, number = unanswered[index]
                source.record(number, answer, (now - last) / len(answers))
            last = now
            progress.add(len(answers))
            if now - added > _SECONDS:
                added = now
                for source in sources:
                    source.flush()
    finally:
        for source in sources:
            source.flush()


def _line(answer: Answer, per_token: bool) -> dict[str, Any]:
    """Return an answer as a JSON object; `per_token` adds the log-probability of each token."""
    total = Total.of(answer)
    line = {"log_probability": total.log_probability, "greedy": total.greedy}
    if per_token:
        # str() of a NumPy float32 returns the shortest decimal that identifies the value.
        line["log_probabilities"] = [float(str(x)) for x in answer.log_probabilities]
    return line


def _by_position(source_requests: SourceRequests, lines: dict[int, dict[str, Any]]) -> np.ndarray:
    """Return the sum of nats and the number of tokens for each position in a window.

    The result has the shape [2, positions]. The position of a token is the number of tokens that
    precede it.
    """
    longest = max(request.length for request in source_requests.requests) + 1
    sums = np.zeros((2, longest))
    for number, request in enumerate(source_requests.requests):
        line, begin = lines[number], len(request.context)
        logs = line["log_probabilities"]
        sums[0, begin : begin + len(logs)] -= logs
        sums[1, begin : begin + len(logs)] += 1
    return sums


class _Progress(ProgressDisplay):
    """A progress display that counts answered requests."""

    def __init__(self, label: str, total: int):
        super().__init__(
            label,
            total,
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} requests"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._label, self._total, self._done = label, total, 0

    def add(self, count: int) -> None:
        """Add `count` to the displayed number of answered requests."""
        self._done += count
        line = f"{self._label}: {self._done:,} of {self._total:,} requests"
        self.show(lambda: line, completed=self._done)
