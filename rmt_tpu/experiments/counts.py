"""Parameter and FLOP counts in Mak and Flanigan (2025): Figure 1 and Tables 4, 7, 8 and 9.

The counts are computed with `rmt_tpu.cost` and compared with the paper's.
"""

from dataclasses import asdict, dataclass, replace

from rmt_tpu import cost
from rmt_tpu.config import MatrixStore, ModelConfig, VectorStore
from rmt_tpu.config.presets import preset, run
from rmt_tpu.experiments.plan import Page, tokens
from rmt_tpu.tables import markdown

SEQ_LEN = 512
_SIZES = (1024, 1536, 2048, 3072, 4096, 6144, 8192)

# These dicts map presets to numbers that the paper prints. _FLOPS: the training FLOPs on 6.04e9
# tokens in Table 4. _PRINTED: the parameters and training tokens in Tables 8 and 9.
_FLOPS = {"gpt2-405m": 1.18e19, "rmt-305m": 8.45e18}
_PRINTED = {
    "gpt2-49m": (49e6, 212e6), "gpt2-160m": (160e6, 1.7e9), "gpt2-260m": (260e6, 3.5e9),
    "gpt2-405m": (405e6, 6e9), "rmt-46m": (46e6, 142e6), "rmt-134m": (134e6, 1.1e9),
    "rmt-206m": (206e6, 2.3e9), "rmt-305m": (305e6, 6e9),
}  # fmt: skip


@dataclass(frozen=True)
class ModelCounts:
    """A point in Figure 1: a model's residual size, parameter count and FLOPs per token.

    FLOPs are those of the forward pass. Parameters and FLOPs include the embeddings.
    """

    residual_size: int
    parameters: int
    flops: int


def model_counts(config: ModelConfig) -> ModelCounts:
    """Return a model's counts, including embeddings, for the sequence length of Figure 1."""
    return ModelCounts(
        config.residual_size,
        sum(cost.parameters(config).values()),
        sum(cost.forward_flops(config, SEQ_LEN).values()),
    )


def resource_scaling() -> dict[str, list[ModelCounts]]:
    """Return counts for Figure 1: models like GPT-2 medium, with larger and larger residuals.

    There is one curve for vector residuals, and one for matrix residuals.
    """
    transformer, rmt = preset("gpt2-405m"), preset("rmt-305m")
    _, vector_dim = rmt.data_shape
    return {
        "Transformer": [model_counts(replace(transformer, store=VectorStore(s))) for s in _SIZES],
        "RMT": [model_counts(replace(rmt, store=MatrixStore(s // vector_dim))) for s in _SIZES],
    }


def page() -> Page:
    """Return a page with Figure 1, and with tables of the paper's counts and computed counts."""
    curves = resource_scaling()
    parts = ["Figure 1, with embeddings, for windows of 512 tokens:", _curves_table(curves)]
    parts += ["Table 4, training FLOPs on 6.04e9 tokens, without embeddings:", _flops_table()]
    parts += ["Tables 8 and 9:", _sizes_table()]
    parts += [
        "Errata: the last two rows of Table 9 print D_k 896 and 1024, but only 48 and 64 give "
        "their parameters and residuals. Table 7's total FLOPs include half of the key vectors' "
        "FLOPs that section A.2 lists, and its parameters count V once although embedding and "
        "unembedding are separate. All but the last pair of models read 20 tokens per weight "
        "outside of embeddings."
    ]
    numbers = {name: [asdict(p) for p in points] for name, points in curves.items()}
    return Page("\n\n".join(parts) + "\n", numbers, {"figure_1.png": lambda: _draw(curves)})


def _curves_table(curves: dict[str, list[ModelCounts]]) -> str:
    lines = ["model | residual | parameters | GFLOPs per token | if doubled: parameters, FLOPs"]
    for name, points in curves.items():
        by_size = {p.residual_size: p for p in points}
        for p in points:
            twice = by_size.get(2 * p.residual_size)
            growth = twice and (
                f"{twice.parameters / p.parameters - 1:+.2%}, {twice.flops / p.flops - 1:+.2%}"
            )
            lines.append(
                f"{name} | {p.residual_size} | {p.parameters / 1e6:.1f}M | {p.flops / 1e9:.3f} "
                f"| {growth or ''}"
            )
    return markdown(lines)


def _flops_table() -> str:
    lines = ["model | printed | here"]
    for name, printed in _FLOPS.items():
        flops = cost.train_flops(cost.non_embedding_flops(preset(name), SEQ_LEN), 6.04e9)
        lines.append(f"{name} | {printed:.3g} | {flops:.4g}")
    return markdown(lines)


def _sizes_table() -> str:
    lines = [
        "model | parameters, printed | here | residual | tokens, printed | 20 per weight | run"
    ]
    for name, (parameters, read) in _PRINTED.items():
        model, counted = preset(name), cost.parameters(preset(name))
        total = sum(counted.values())
        weights = total - counted["embedding"] - counted["unembedding"]
        lines.append(
            f"{name} | {parameters / 1e6:.0f}M | {total:,} | {model.residual_size} | "
            f"{read:.3g} | {20 * weights:.3g} | {tokens(run(name)):.4g}"
        )
    return markdown(lines)


def _draw(curves: dict[str, list[ModelCounts]]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    by_parameters, by_flops = figure.subplots(1, 2)
    for name, points in curves.items():
        sizes = [p.residual_size for p in points]
        by_parameters.plot(sizes, [p.parameters / 1e6 for p in points], "o-", label=name)
        by_flops.plot(sizes, [p.flops / 1e9 for p in points], "o-", label=name)
    by_parameters.set(ylabel="million parameters")
    by_flops.set(ylabel="forward GFLOPs per token")
    for axes in (by_parameters, by_flops):
        axes.set(xlabel="numbers in a token's residual", ylim=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
