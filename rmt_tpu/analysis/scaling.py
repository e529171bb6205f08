"""Figure 1 of Mak and Flanigan (2025): what a larger residual costs, from the formulas alone."""

from dataclasses import dataclass, replace
from pathlib import Path

from rmt_tpu import cost as resources
from rmt_tpu.config import MatrixStore, ModelConfig, VectorStore
from rmt_tpu.config.presets import preset

SEQ_LEN = 512
_SIZES = (1024, 1536, 2048, 3072, 4096, 6144, 8192)


@dataclass(frozen=True)
class Point:
    """One model: size of its residual, parameters, and forward FLOPs a token with embeddings."""

    residual_size: int
    parameters: int
    flops: int


def point(config: ModelConfig) -> Point:
    """Parameters and FLOPs, embeddings counted, at the figure's sequence length."""
    return Point(
        config.residual_size,
        sum(resources.parameters(config).values()),
        sum(resources.forward_flops(config, SEQ_LEN).values()),
    )


def resource_scaling() -> dict[str, list[Point]]:
    """GPT-2-medium shapes with residuals of 1024 numbers and more, by vector and by matrix."""
    transformer, rmt = preset("gpt2-405m"), preset("rmt-305m")
    _, vector_dim = rmt.data_shape
    return {
        "Transformer": [point(replace(transformer, store=VectorStore(s))) for s in _SIZES],
        "RMT": [point(replace(rmt, store=MatrixStore(s // vector_dim))) for s in _SIZES],
    }


def draw_resource_scaling(path: str | Path) -> str:
    """Draws the figure into `path`; returns its numbers as a Markdown table."""
    from matplotlib.figure import Figure

    curves = resource_scaling()
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_parameters, by_flops = figure.subplots(1, 2)
    lines = ["| model | residual | parameters | GFLOPs a token |", "|---|---|---|---|"]
    for name, points in curves.items():
        sizes = [p.residual_size for p in points]
        by_parameters.plot(sizes, [p.parameters / 1e6 for p in points], "o-", label=name)
        by_flops.plot(sizes, [p.flops / 1e9 for p in points], "o-", label=name)
        lines += [
            f"| {name} | {p.residual_size} | {p.parameters / 1e6:.1f}M | {p.flops / 1e9:.3f} |"
            for p in points
        ]
    by_parameters.set(ylabel="million parameters")
    by_flops.set(ylabel="forward GFLOPs a token")
    for axes in (by_parameters, by_flops):
        axes.set(xlabel="numbers in a token's residual", ylim=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
    return "\n".join(lines) + "\n"
