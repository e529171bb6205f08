"""Sources asked of a model: every answer is kept at once, and asked for only once."""

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
    """Who is asked.

    Attributes:
      name: for tables.
      scorer: that answers.
      tokenizer: of it.
      identity: all that its answers depend on, as JSON.
      folder: where they are kept.
      decoder: with its matrices in the dtype that it computes in; None is no such model.
    """

    name: str
    scorer: Scorer
    tokenizer: Tokenizer
    identity: dict[str, Any]
    folder: Folder
    decoder: Decoder | None = None


@dataclass(frozen=True)
class Result:
    """What a source gave.

    Attributes:
      cut: requests whose context's beginning was left out, for it was too long.
      tokens: that were scored.
      seconds: it took this time, and `answered` of the requests.
      by_position: of texts: nats and tokens by how many tokens stood before in the window.
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
    """Asks all that was not answered before.

    Args:
      stride: see `documents.ask`.

    Raises:
      UsageError: a text cannot be encoded, or a continuation is longer than can be read.
    """
    asked = [
        ask(source, subject.tokenizer, subject.scorer.max_length, stride) for source in sources
    ]
    for one in asked:
        subject.scorer.check(one.source.name, one.requests)
    with _Progress(subject.name, sum(len(one.requests) for one in asked)) as progress:
        return [_one(subject, one, stride, progress) for one in asked]


def _one(subject: Subject, asked: Asked, stride: int | None, progress: "_Progress") -> Result:
    source, requests, started = asked.source, asked.requests, time.monotonic()
    identity = subject.identity | ({"stride": stride} if source.kind == "text" else {})
    key = json.dumps([source.name, source.digest, identity], sort_keys=True).encode()
    name = f"{source.name}-{hashlib.blake2b(key, digest_size=6).hexdigest()}.jsonl"
    output = Output(f"{subject.folder}/{ANSWERS}/{name}")
    kept = {line["number"]: line for line in output.lines if 0 <= line["number"] < len(requests)}
    left = [number for number in range(len(requests)) if number not in kept]
    cut = subject.scorer.cut(requests)
    progress.begin(source.name, len(kept))
    if left and cut:
        progress.say(
            f"note: {source.name}: the beginnings of {cut} of {len(requests)} contexts are cut to "
            f"--max_length={subject.scorer.max_length} tokens"
        )
    answers = subject.scorer.answers([requests[number] for number in left])
    of_text = source.kind == "text"
    lines = ({left[at]: _line(a, of_text) for at, a in some.items()} for some in answers)
    kept |= _kept(output, lines, progress)
    totals = [Total(kept[n]["log_probability"], kept[n]["greedy"]) for n in range(len(requests))]
    return Result(
        source,
        metrics(asked, totals),
        identity,
        requests=len(requests),
        cut=cut,
        tokens=sum(len(request.continuation) for request in requests),
        answered=len(left),
        seconds=time.monotonic() - started,
        by_position=_by_position(asked, kept) if of_text else None,
    )


def _kept(
    output: Output, answers: Iterable[dict[int, dict[str, Any]]], progress: "_Progress"
) -> dict[int, dict[str, Any]]:
    """All lines by number, in the file now: those of some seconds, or to an error, at once.

    In a bucket each addition is a file.
    """
    lines, added, told = {}, 0, time.monotonic()

    def add() -> None:
        nonlocal added, told
        some, told = list(lines.items())[added:], time.monotonic()
        if some:
            output.add(*({"number": number, **line} for number, line in some))
        added = len(lines)

    try:
        for some in answers:
            lines |= some
            progress.add(len(some))
            if time.monotonic() - told > _SECONDS:
                add()
    finally:
        add()
    return lines


def _line(answer: Answer, each: bool) -> dict[str, Any]:
    """The answer as it is kept; with `each` token's own, of which positions are told."""
    total = Total.of(answer)
    line = {"log_probability": total.log_probability, "greedy": total.greedy}
    if each:
        # As few digits as tell these numbers apart.
        line["log_probabilities"] = [float(str(x)) for x in answer.log_probabilities]
    return line


def _by_position(asked: Asked, kept: dict[int, dict[str, Any]]) -> np.ndarray:
    """[2, positions]: sums of nats, and tokens, by how many tokens of the window stood before."""
    longest = max(request.length for request in asked.requests) + 1
    sums = np.zeros((2, longest))
    for number, request in enumerate(asked.requests):
        line, begin = kept[number], len(request.context)
        logs = line["log_probabilities"]
        sums[0, begin : begin + len(logs)] -= logs
        sums[1, begin : begin + len(logs)] += 1
    return sums


class _Progress(ProgressShown):
    """Requests that have an answer."""

    def __init__(self, label: str, total: int):
        super().__init__(
            label,
            total,
            TextColumn("[bold]{task.description}"),
            TextColumn("{task.fields[doing]}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} requests"),
            TimeRemainingColumn(),
            TextColumn("left"),
            doing="",
        )
        self._label, self._total, self._done, self._name = label, total, 0, ""

    def begin(self, name: str, done: int) -> None:
        """Of a source; so many of its requests have an answer already."""
        self._name = name
        self.change(doing=name)
        if done:
            self.add(done)

    def add(self, count: int) -> None:
        self._done += count
        line = f"{self._label} {self._name}: {self._done:,} of {self._total:,} requests"
        self.show(lambda: line, completed=self._done)
