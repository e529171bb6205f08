"""Evaluation of a model on sources. Answers are stored, so that no request is computed twice."""

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
from rmt_tpu.evaluation.documents import Asked, Source, Total, ask, metrics
from rmt_tpu.evaluation.metrics import Metric
from rmt_tpu.evaluation.scorer import Answer, Scorer
from rmt_tpu.generation.files import Output
from rmt_tpu.progress import ProgressShown
from rmt_tpu.storage import Folder

ANSWERS = "evaluation"
_SECONDS = 5.0  # seconds between writes of new answers to their files


class Subject(NamedTuple):
    """A model that is evaluated.

    Attributes:
      name: the model's name in tables.
      scorer: the scorer that answers requests.
      tokenizer: the tokenizer of the model.
      identity: everything that the answers depend on, as JSON.
      folder: the folder in which answers are stored.
      decoder: the decoder, with matrices in the dtype in which it computes; None if the subject has
        no decoder.
    """

    name: str
    scorer: Scorer
    tokenizer: Tokenizer
    identity: dict[str, Any]
    folder: Folder
    decoder: Decoder | None = None


@dataclass(frozen=True)
class Result:
    """The result of evaluating a model on one source.

    Attributes:
      source: the source.
      metrics: the metrics of the source.
      identity: everything that the answers depend on, as JSON.
      requests: the number of requests of the source.
      cut: the number of requests whose context was too long and lost its beginning.
      tokens: the number of scored tokens.
      answered: the number of requests that this call answered; the others had stored answers.
      seconds: this source's share of the time that the call spent on answering requests.
      by_position: for texts, [2, positions]: the sum of nats and the number of tokens, by the
        number of tokens that precede a token in its window.
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


def evaluate(
    subject: Subject, sources: Iterable[Source], stride: int | None = None
) -> list[Result]:
    """Evaluate a model on sources, and compute only the answers that are not stored yet.

    Args:
      subject: the model.
      sources: the sources.
      stride: see `documents.ask`.

    Returns:
      One result per source, in order.

    Raises:
      UsageError: a text cannot be encoded, or a continuation is longer than the model can read.
    """
    asked = [
        ask(source, subject.tokenizer, subject.scorer.max_length, stride) for source in sources
    ]
    for one in asked:
        subject.scorer.check(one.source.name, one.requests)
    open_ones = [_Open(subject, one, stride) for one in asked]
    with _Progress(subject.name, sum(len(one.requests) for one in asked)) as progress:
        progress.add(sum(len(one.kept) for one in open_ones))
        for one in open_ones:
            if one.left and one.cut:
                progress.log(
                    f"note: {one.source.name}: {one.cut} of {len(one.requests)} contexts exceed "
                    f"--max_length={subject.scorer.max_length} tokens; their beginnings are cut off"
                )
        _answer(subject.scorer, open_ones, progress)
    return [one.result() for one in open_ones]


class _Open:
    """A source that is being evaluated, and its answers so far.

    Attributes:
      kept: the answered lines by request number; they are in the source's file or will be written
        there.
      left: the numbers of the requests that had no stored answer.
      seconds: the time spent on computing answers.
    """

    def __init__(self, subject: Subject, asked: Asked, stride: int | None):
        self.asked, self.source, self.requests = asked, asked.source, asked.requests
        self.of_text = self.source.kind == "text"
        self.identity = subject.identity | ({"stride": stride} if self.of_text else {})
        told = [self.source.name, self.source.digest, self.identity]
        key = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=6).hexdigest()
        location = f"{subject.folder}/{ANSWERS}/{self.source.name}-{key}.jsonl"
        self._output, self._new, self.seconds = Output(location), [], 0.0
        count = len(self.requests)
        lines = self._output.lines
        self.kept = {line["number"]: line for line in lines if 0 <= line["number"] < count}
        self.left = [number for number in range(count) if number not in self.kept]
        self.cut = subject.scorer.cut(self.requests)

    def put(self, number: int, answer: Answer, seconds: float) -> None:
        """Record an answer and its share of the computing time; `add` writes it to the file."""
        line = {"number": number, **_line(answer, self.of_text)}
        self.kept[number] = line
        self._new.append(line)
        self.seconds += seconds

    def add(self) -> None:
        """Append all new lines to the file in a single write.

        Appending is costly in a bucket, where each addition becomes a separate object.
        """
        if self._new:
            self._output.add(*self._new)
        self._new = []

    def result(self) -> Result:
        """Return the result, once all requests have answers."""
        lines = (self.kept[number] for number in range(len(self.requests)))
        totals = [Total(line["log_probability"], line["greedy"]) for line in lines]
        return Result(
            self.source,
            metrics(self.asked, totals),
            self.identity,
            requests=len(self.requests),
            cut=self.cut,
            tokens=sum(len(request.continuation) for request in self.requests),
            answered=len(self.left),
            seconds=self.seconds,
            by_position=_by_position(self.asked, self.kept) if self.of_text else None,
        )


def _answer(scorer: Scorer, sources: list[_Open], progress: "_Progress") -> None:
    """Answer the open requests of all sources together, so that batches are full.

    New answers are written to their files every few seconds, and also before an error propagates.
    """
    left = [(source, number) for source in sources for number in source.left]
    last = added = time.monotonic()
    try:
        for some in scorer.answers([source.requests[number] for source, number in left]):
            now = time.monotonic()
            for at, answer in some.items():
                source, number = left[at]
                source.put(number, answer, (now - last) / len(some))
            last = now
            progress.add(len(some))
            if now - added > _SECONDS:
                added = now
                for source in sources:
                    source.add()
    finally:
        for source in sources:
            source.add()


def _line(answer: Answer, each: bool) -> dict[str, Any]:
    """Return an answer's line for the file; if `each`, with the log-probability of each token."""
    total = Total.of(answer)
    line = {"log_probability": total.log_probability, "greedy": total.greedy}
    if each:
        # Write the shortest decimal that identifies each float32.
        line["log_probabilities"] = [float(str(x)) for x in answer.log_probabilities]
    return line


def _by_position(asked: Asked, kept: dict[int, dict[str, Any]]) -> np.ndarray:
    """Return sums of nats and numbers of tokens, [2, positions], by position in the window.

    The position of a token is the number of tokens that precede it.
    """
    longest = max(request.length for request in asked.requests) + 1
    sums = np.zeros((2, longest))
    for number, request in enumerate(asked.requests):
        line, begin = kept[number], len(request.context)
        logs = line["log_probabilities"]
        sums[0, begin : begin + len(logs)] -= logs
        sums[1, begin : begin + len(logs)] += 1
    return sums


class _Progress(ProgressShown):
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
        """Count `count` more answered requests."""
        self._done += count
        line = f"{self._label}: {self._done:,} of {self._total:,} requests"
        self.show(lambda: line, completed=self._done)
