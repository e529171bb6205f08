"""Evaluation results as a Markdown table, a plot and JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rmt_tpu.evaluation.evaluate import Result
from rmt_tpu.evaluation.metrics import Difference, Metric, difference
from rmt_tpu.evaluation.tasks import TASKS
from rmt_tpu.runs.plots import line_style, save_picture
from rmt_tpu.storage import Folder
from rmt_tpu.tables import markdown

FILE, TABLE, PICTURE = "evaluation.json", "evaluation.md", "plots/evaluation.png"


def write_report(results: Mapping[str, list[Result]], folder: Folder) -> str:
    """Write evaluation.json, evaluation.md and plots/evaluation.png, and return the table.

    Args:
      results: maps each model's name to its results. All models must have results for the same
        sources. The first model is compared with each of the others.
      folder: the folder that the files are written to.
    """
    first, *others = results
    text = table(results[first])
    for other in others:
        text += "\n" + comparison(first, results[first], other, results[other])
    content = {
        name: [result.json() for result in model_results] for name, model_results in results.items()
    }
    for other in others:
        pairs = zip(results[first], results[other], strict=True)
        content[f"{first} - {other}"] = [
            {"task": a.source.name, "metric": metric.name, **gap._asdict()}
            for a, b in pairs
            for metric, _, gap in _differences(a, b)
        ]
    folder.write(FILE, (json.dumps(content, indent=2) + "\n").encode())
    folder.write(TABLE, text.encode())
    _draw(results, folder)
    return text


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per metric, and a column with the RMT paper's values."""
    lines = [
        "task | metric | value | standard error | documents | unit | paper: 405M Transformer, "
        "305M RMT | seconds"
    ]
    for result in results:
        for number, metric in enumerate(result.metrics):
            seconds = f"{result.seconds:.1f}" if number == 0 and result.answered else ""
            lines.append(
                f"{result.source.name} | {metric.name} | {_value(metric)} | {_error(metric)} | "
                f"{len(result.source.documents):,} | {metric.unit} | {_paper(result, metric)} | "
                f"{seconds}"
            )
    return markdown(lines) + "\n"


def comparison(
    name: str, results: Sequence[Result], other_name: str, others: Sequence[Result]
) -> str:
    """Return a Markdown table of the metrics of two models, their differences and standard errors.

    Args:
      name: the name of the first model.
      results: the results of the first model.
      other_name: the name of the second model.
      others: the results of the second model on the same sources, in the same order.
    """
    lines = [
        f"task | metric | {name} | {other_name} | difference | standard error "
        "| unpaired error | p | paper: 405M Transformer, 305M RMT"
    ]
    for result, other in zip(results, others, strict=True):
        for a, b, gap in _differences(result, other):
            lines.append(
                f"{result.source.name} | {a.name} | {_value(a)} | {_value(b)} | "
                f"{_signed(a, gap.value)} | {_unsigned(a, gap.error)} | "
                f"{_unsigned(a, gap.unpaired)} | {_p(gap)} | {_paper(result, a)}"
            )
    return markdown(lines) + (
        "\n\nDifferences of shares are in percentage points, those between perplexities in nats, "
        "and those of bits per byte in bits. "
        "The standard error is for both models on the same documents; the unpaired error assumes "
        "different documents. Models that read a single text in different windows have only the "
        "unpaired error. p: McNemar's exact test for shares, Student's t-test for the others.\n"
    )


def _differences(a: Result, b: Result) -> list[tuple[Metric, Metric, Difference]]:
    pairs = zip(a.metrics, b.metrics, strict=True)
    # Metrics per token cannot be compared if the models have different tokenizers.
    same_tokenizer = a.identity["tokenizer"] == b.identity["tokenizer"]
    paired = _have_same_documents(a, b)
    return [
        (one, other, difference(one, other, paired=paired))
        for one, other in pairs
        if same_tokenizer or one.unit != "token"
    ]


def _have_same_documents(a: Result, b: Result) -> bool:
    """Return whether the metrics of two results of one source are over the same documents.

    The documents of a single text are its windows. Two models read the same windows only if they
    have the same tokenizer, window length and stride.
    """
    if a.source.kind != "text" or len(a.source.documents) > 1:
        return True
    names = ("tokenizer", "max_length", "stride")
    return all(a.identity.get(name) == b.identity.get(name) for name in names)


def _value(metric: Metric) -> str:
    return f"{100 * metric.value:.2f}%" if metric.display == "share" else f"{metric.value:,.4g}"


def _error(metric: Metric) -> str:
    if metric.error is None:
        return ""
    return f"{100 * metric.error:.2f}" if metric.display == "share" else f"{metric.error:,.2g}"


def _signed(metric: Metric, value: float) -> str:
    return f"{100 * value:+.2f}" if metric.display == "share" else f"{value:+.4f}"


def _unsigned(metric: Metric, error: float | None) -> str:
    return "" if error is None else _signed(metric, error).removeprefix("+")


def _p(gap: Difference) -> str:
    if gap.p is None:
        return ""
    return f"{gap.p:.2g}" if gap.p >= 1e-99 else "<1e-99"


def _paper(result: Result, metric: Metric) -> str:
    task = result.source.task
    printed = task.papers.get(metric.name) if task else None
    if printed is None:
        return ""
    share = metric.display == "share"
    return ", ".join(f"{100 * x:.1f}%" if share else f"{x:.2f}" for x in printed)


# Drawing the plot -------------------------------------------------------------------------


def _draw(results: Mapping[str, list[Result]], folder: Folder) -> None:
    """Plot accuracies with their standard errors and, for texts, nats per token by position."""
    from matplotlib.figure import Figure

    shares = _bars(results)
    texts = {
        f"{name} {result.source.name}": result
        for name, model_results in results.items()
        for result in model_results
        if result.by_position is not None
    }
    panels = [bool(shares), bool(texts)]
    if not any(panels):
        return
    height = max(1.6 + 0.4 * len(shares) * (1 + 0.5 * len(results)), 3.5)
    figure = Figure(figsize=(6 * sum(panels), height), layout="constrained")
    axes = iter(figure.subplots(1, sum(panels), squeeze=False)[0])
    if shares:
        _draw_shares(next(axes), shares, list(results))
    if texts:
        _draw_positions(next(axes), texts)
    save_picture(figure, folder, PICTURE)


def _bars(results: Mapping[str, list[Result]]) -> dict[tuple[str, str], list[Metric]]:
    """Return the metrics that are reported as shares, such as accuracies.

    The keys are pairs (task name, metric name). Each value has one metric per model.
    """
    bars: dict[tuple[str, str], list[Metric]] = {}
    for model_results in results.values():
        for result in model_results:
            for metric in result.metrics:
                if metric.display == "share":
                    bars.setdefault((result.source.name, metric.name), []).append(metric)
    return bars


def _draw_shares(
    axes: Any, shares: Mapping[tuple[str, str], list[Metric]], names: list[str]
) -> None:
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        rows = np.arange(len(shares)) + (number - (len(names) - 1) / 2) * width
        values = [100 * metrics[number].value for metrics in shares.values()]
        errors = [100 * (metrics[number].error or 0) for metrics in shares.values()]
        axes.barh(rows, values, 0.9 * width, xerr=errors, color=f"C{number}", label=name)
    for row, (task, _) in enumerate(shares):
        chance = 100 * TASKS[task].chance
        axes.plot([chance, chance], [row - 0.45, row + 0.45], "k:", linewidth=1)
    axes.set_yticks(range(len(shares)), [f"{task} {metric}" for task, metric in shares])
    axes.invert_yaxis()
    axes.set(xlabel="correct answers (percent); bar: standard error; dots: chance")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)


def _draw_positions(axes: Any, texts: Mapping[str, Result]) -> None:
    for number, (name, result) in enumerate(texts.items()):
        centers, nats = by_position(result.by_position)
        style = line_style(number)
        axes.plot(centers, nats, label=name, markersize=4, **style)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the window (tokens)", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def by_position(sums: np.ndarray) -> tuple[list[float], list[float]]:
    """Return nats per token as a function of a token's position in its window.

    The position of a token is the number of tokens that precede it. Positions are grouped into
    ranges. Each bound of a range is about sqrt(2) times the previous one.

    Args:
      sums: [2, positions]: sums of nats and numbers of tokens.

    Returns:
      The first position of each range, and the range's nats per token.
    """
    edges = np.unique(np.round(2 ** np.arange(0, np.log2(sums.shape[1]) + 0.5, 0.5)).astype(int))
    centers, nats = [], []
    for start, stop in zip(edges, [*edges[1:], sums.shape[1]], strict=True):
        total, count = sums[:, start:stop].sum(axis=1)
        if count:
            centers.append(float(start))
            nats.append(float(total / count))
    return centers, nats
