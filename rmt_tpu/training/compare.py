"""Runs on the same tokens, side by side: one table and one picture."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rmt_tpu.analysis import resources
from rmt_tpu.training.metrics import read_metrics, series
from rmt_tpu.workdir import read_config


@dataclass(frozen=True)
class Result:
    """What a run cost and reached. Losses are nats per token; FLOPs forward and backward."""

    name: str
    parameters: int
    residual_size: int
    tokens: int
    flops: int
    seconds: float
    train_loss: float
    held_out_loss: float


def result(name: str, workdir: str | Path) -> Result:
    """The numbers of a complete run.

    `train_loss` is the mean over the last tenth of the steps: single steps are noisy.
    """
    config, rows = read_config(workdir), read_metrics(workdir)
    _, losses = series(rows, "train/loss")
    _, held_out = series(rows, "eval/loss")
    tail = losses[-max(1, len(losses) // 10) :]
    tokens = config.train.steps * config.train.batch_size * config.data.seq_len
    return Result(
        name=name,
        parameters=sum(resources.parameters(config.model).values()),
        residual_size=config.model.residual_size,
        tokens=tokens,
        flops=resources.train_flops(
            resources.flops_per_token(config.model, config.data.seq_len), tokens
        ),
        seconds=sum(series(rows, "throughput/step_seconds")[1]) * config.train.log_every,
        train_loss=sum(tail) / len(tail),
        held_out_loss=held_out[-1],
    )


def write_comparison(runs: dict[str, Path], folder: str | Path) -> str:
    """Writes comparison.png, .md and .json of complete runs by name; returns the table."""
    results = [result(name, workdir) for name, workdir in runs.items()]
    table = markdown(results)
    Path(folder, "comparison.md").write_text(table, encoding="utf-8")
    rows = json.dumps([asdict(r) for r in results], indent=2)
    Path(folder, "comparison.json").write_text(rows + "\n", encoding="utf-8")
    _draw(runs, Path(folder, "comparison.png"))
    return table


def markdown(results: list[Result]) -> str:
    """The results as a Markdown table, a row a run."""
    lines = [
        "| preset | parameters | residual | tokens | FLOPs | seconds | train loss | held out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.parameters:,} | {r.residual_size:,} | {r.tokens:,} | {r.flops:.3g} | "
        f"{r.seconds:.1f} | {r.train_loss:.4f} | {r.held_out_loss:.4f} |"
        for r in results
    ]
    return "\n".join(lines) + "\n"


def _draw(runs: dict[str, Path], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_tokens, by_flops = figure.subplots(1, 2, sharey=True)
    first_held_out = []
    for index, (name, workdir) in enumerate(runs.items()):
        config, rows = read_config(workdir), read_metrics(workdir)
        per_step = config.train.batch_size * config.data.seq_len
        flops = resources.train_flops(
            resources.flops_per_token(config.model, config.data.seq_len), 1
        )
        color = f"C{index}"
        for metric, style in (("train/loss", {"alpha": 0.35}), ("eval/loss", {"marker": "o"})):
            steps, losses = series(rows, metric)
            first_held_out += losses[:1] if metric == "eval/loss" else []
            label = name if metric == "eval/loss" else None
            tokens = [step * per_step for step in steps]
            by_tokens.plot(tokens, losses, color=color, label=label, **style)
            by_flops.plot([t * flops for t in tokens], losses, color=color, label=label, **style)
    by_tokens.set(xlabel="tokens", ylabel="loss (nats per token)")
    by_flops.set(xlabel="training FLOPs (analytic, without embedding look-ups)")
    # The fall of the first steps is the same for all and would take most of the height.
    by_tokens.set_ylim(top=max(first_held_out) + 0.5)
    for axes in (by_tokens, by_flops):
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3)
        axes.legend(title="dots: held out; faint: train")
    figure.savefig(path, dpi=150)
