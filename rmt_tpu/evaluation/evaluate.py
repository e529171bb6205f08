"""Evaluation of sources: every answer is stored as it comes, and asked for only once."""

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
_SECONDS = 5.0  # between additions to a file of answers


class Subject(NamedTuple):
    """A model that is evaluated.

    Attributes:
      name: the name for tables.
      scorer: the scorer that answers requests.
      tokenizer: the tokenizer of the model.
      identity: all that the answers depend on, as JSON.
      folder: the folder in which answers are kept.
      decoder: the decoder with its matrices in the dtype that it computes in; None for a subject
        without one.
    """

    name: str
    scorer: Scorer
    tokenizer: Tokenizer
    identity: dict[str, Any]
    folder: Folder
    decoder: Decoder | None = None


@dataclass(frozen=True)
class Result:
    """The result of one source.

    Attributes:
      source: the source.
      metrics: its metrics.
      identity: all that the answers depend on, as JSON.
      requests: how many requests it has.
      cut: how many requests lost the beginning of a context that was too long.
      tokens: how many tokens were scored.
      answered: how many requests were answered by this call.
      seconds: the source's share of the time that these took.
      by_position: for texts, sums of nats and of tokens by how many tokens precede in the window.
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
    """Ask all requests that were not answered before.

    Args:
      subject: the model that is evaluated.
      sources: the sources that it is asked.
      stride: see `documents.ask`.

    Raises:
      UsageError: a text cannot be encoded, or a continuation is longer than can be read.
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
                progress.say(
                    f"note: {one.source.name}: the beginnings of {one.cut} of "
                    f"{len(one.requests)} contexts are cut to "
                    f"--max_length={subject.scorer.max_length} tokens"
                )
        _answer(subject.scorer, open_ones, progress)
    return [one.result() for one in open_ones]


class _Open:
    """A source and its answers.

    Attributes:
      kept: all answered lines by number; they are in the source's file or will be.
      left: the numbers of the requests that had no answer.
      seconds: the time that their answers have taken.
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
        """Keep an answer and its share of the time; `add` writes it to the file."""
        line = {"number": number, **_line(answer, self.of_text)}
        self.kept[number] = line
        self._new.append(line)
        self.seconds += seconds

    def add(self) -> None:
        """Add new lines to the file, all at once: in a bucket each addition is a file."""
        if self._new:
            self._output.add(*self._new)
        self._new = []

    def result(self) -> Result:
        """Return the result, when all requests have an answer."""
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

    Lines are written to their files every few seconds, and at once if there is an error.
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
    """Return the line of an answer, with each token's log-probability if `each` is true."""
    total = Total.of(answer)
    line = {"log_probability": total.log_probability, "greedy": total.greedy}
    if each:
        # Write as few digits as identify each float32.
        line["log_probabilities"] = [float(str(x)) for x in answer.log_probabilities]
    return line


def _by_position(asked: Asked, kept: dict[int, dict[str, Any]]) -> np.ndarray:
    """Return sums of nats and of tokens, [2, positions], by preceding tokens in the window."""
    longest = max(request.length for request in asked.requests) + 1
    sums = np.zeros((2, longest))
    for number, request in enumerate(asked.requests):
        line, begin = kept[number], len(request.context)
        logs = line["log_probabilities"]
        sums[0, begin : begin + len(logs)] -= logs
        sums[1, begin : begin + len(logs)] += 1
    return sums


class _Progress(ProgressShown):
    """Progress in requests that have an answer."""

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
        """Count more answered requests."""
        self._done += count
        line = f"{self._label}: {self._done:,} of {self._total:,} requests"
        self.show(lambda: line, completed=self._done)
