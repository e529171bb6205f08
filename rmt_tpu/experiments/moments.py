"""Tables 1 and 2 of Mak and Flanigan (2025): variances of writes and reads at initialization.

Weights w are drawn with Xavier's variance 2 / (in + out). If the input x and the gradient with
respect to the output have variance 1, then

    storage of an RMT     X = sum_h w^h (x) x^h     Var X = R Var w       Var dx = D_k Var w
    retrieval of an RMT   z^p = w^p . X             Var z = D_k Var w     Var dX = P Var w
    a Transformer's       y = W x                   Var y = in Var w      Var dx = out Var w

with R writes and P reads per sublayer. The shapes are those of GPT-2 medium: 16 heads of size 64, a
feed-forward size D_FF of 4096, and a key size D_k of 64.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from rmt_tpu.experiments.plan import Page
from rmt_tpu.tables import markdown

_HEADS, _HEAD_DIM, _KEY_DIM, _HIDDEN, _TOKENS, _DRAWS = 16, 64, 64, 4096, 8, 128
_WIDTH = _HEADS * _HEAD_DIM


class LayerOperation(NamedTuple):
    """A write to the residual or a read from it, with the variances that the paper prints.

    Attributes:
      layer, operation, model: the names in Table 2, such as "ATTN", "storage" and "RMT".
      out_of, into: the fan-in and fan-out of the weight. For key vectors, these are the numbers of
        terms (entries or data vectors) in a sum of the forward and of the backward pass.
      printed: the variance ratios printed in Table 2, for the forward and the backward pass.
    """

    layer: str
    operation: str
    model: str
    out_of: int
    into: int
    printed: tuple[float, float]

    def formula(self) -> tuple[float, float]:
        """Return the forward and backward variance ratios by Table 1, with Xavier's variance."""
        variance = 2 / (self.out_of + self.into)
        return self.out_of * variance, self.into * variance


OPERATIONS = (
    LayerOperation("ATTN", "storage", "RMT", _HEADS, _KEY_DIM, (0.4, 1.6)),
    LayerOperation("ATTN", "storage", "Transformer", _WIDTH, _WIDTH, (1, 1)),
    LayerOperation("ATTN", "retrieval", "RMT", _KEY_DIM, 3 * _HEADS, (1.14, 0.86)),
    LayerOperation("ATTN", "retrieval", "Transformer", _WIDTH, 3 * _WIDTH, (0.5, 1.5)),
    LayerOperation("FF", "storage", "RMT", _HEADS, _KEY_DIM, (1, 1)),
    LayerOperation("FF", "storage", "Transformer", _HIDDEN, _WIDTH, (1.6, 0.4)),
    LayerOperation("FF", "retrieval", "RMT", _KEY_DIM, _HEADS, (1, 1)),
    LayerOperation("FF", "retrieval", "Transformer", _WIDTH, _HIDDEN, (0.4, 1.6)),
)


class SimulatedMoments(NamedTuple):
    """Simulated means and variances of the output and of the gradient with respect to the input.

    Each field is a mean over draws of the weights, with its standard error.
    """

    mean: tuple[float, float]
    variance: tuple[float, float]
    gradient_mean: tuple[float, float]
    gradient_variance: tuple[float, float]


def simulate(operation: LayerOperation, *, draws: int = _DRAWS) -> SimulatedMoments:
    """Simulate an operation with random weights, inputs and gradients, and return the moments.

    The inputs have a mean of 1/2 and a second moment of 1.
    """
    import jax
    import numpy as np

    apply, shape = _apply_and_shape(operation)

    def once(key):
        weight_key, input_key, gradient_key = jax.random.split(key, 3)
        deviation = math.sqrt(2 / (operation.out_of + operation.into))
        weight = deviation * jax.random.normal(weight_key, (operation.into, operation.out_of))
        x = 0.5 + math.sqrt(0.75) * jax.random.normal(input_key, (_TOKENS, *shape))
        y, back = jax.vjp(lambda x: apply(weight, x), x)
        (dx,) = back(jax.random.normal(gradient_key, y.shape))
        return y.mean(), y.var(), dx.mean(), dx.var()

    keys = jax.random.split(jax.random.key(0), draws)
    found = np.asarray(jax.jit(lambda keys: jax.lax.map(once, keys))(keys), np.float64)
    ends = found.mean(1), found.std(1, ddof=1) / math.sqrt(draws)
    return SimulatedMoments(
        *((float(mean), float(error)) for mean, error in zip(*ends, strict=True))
    )


def _apply_and_shape(operation: LayerOperation) -> tuple[Callable, tuple[int, ...]]:
    """Return the operation as a function of a weight [into, out_of] and of inputs.

    The second result is the shape of one token's input.
    """
    import jax.numpy as jnp

    if operation.model == "Transformer":
        return (lambda w, x: x @ w.T), (operation.out_of,)
    # Storage sums R data vectors, and retrieval sums D_k rows of the residual; both use the same
    # code.
    return (lambda w, x: jnp.einsum("os,tsv->tov", w, x)), (operation.out_of, _HEAD_DIM)


def page() -> Page:
    """Return a page that compares values from formulas, simulation and the paper's tables."""
    lines = [
        "layer | operation | model | forward: formula | simulated | printed | backward: formula "
        "| simulated | printed"
    ]
    numbers, differ, means = [], [], []
    for operation in OPERATIONS:
        found, formula = simulate(operation), operation.formula()
        variances = found.variance, found.gradient_variance
        cells = []
        for expected, (value, error), printed in zip(
            formula, variances, operation.printed, strict=True
        ):
            # The tolerance is wide, because some printed values have only one digit.
            wrong = abs(printed - expected) > 0.05
            cells += [f"{expected:.3f}", f"{value:.3f} ± {error:.3f}"]
            cells.append(f"**{printed:g}**" if wrong else f"{printed:g}")
        if "**" in "".join(cells):
            differ.append(f"{operation.model}'s {operation.operation} of {operation.layer}")
        lines.append([operation.layer, operation.operation, operation.model, *cells])
        numbers.append({**operation._asdict(), "formula": formula, "simulated": found._asdict()})
        means += [found.mean, found.gradient_mean]
    worst = max(abs(mean) / error for mean, error in means)
    text = (
        "Ratios of variances (output / input, and gradient of the input / gradient of the output) "
        f"for inputs with second moment 1 and mean 1/2: {_DRAWS} draws of weights, {_TOKENS} "
        "tokens each, with the standard error of the mean. All means are 0 (the largest is "
        f"{worst:.1f} standard errors away).\n\n{markdown(lines)}\n\n"
        "**Bold**: printed in Table 2, but different from Table 1's own formulas at these shapes: "
        f"{'; '.join(differ)}. Storage and retrieval of a feed-forward layer have the shapes of "
        "attention's storage, and its ratios or their mirror image.\n"
    )
    return Page(text, numbers, {"moments.png": lambda: _draw(numbers)})


def _draw(numbers: list[dict]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    names = [f"{n['layer']} {n['operation']}\n{n['model']}" for n in numbers]
    at = range(len(names))
    kinds = (("forward", "variance", 0), ("backward", "gradient_variance", 1))
    for axes, (kind, field, index) in zip(figure.subplots(1, 2, sharey=True), kinds, strict=True):
        axes.bar(at, [n["formula"][index] for n in numbers], 0.6, color="0.8", label="formula")
        values, errors = zip(*(n["simulated"][field] for n in numbers), strict=True)
        axes.errorbar(at, values, errors, fmt="o", markersize=4, capsize=3, label="simulated")
        axes.plot(at, [n["printed"][index] for n in numbers], "x", color="C3", label="printed")
        axes.axhline(1, color="0.5", linewidth=1)
        axes.set_xticks(at, names, fontsize=6)
        axes.set(title=f"{kind}: variance of output / input")
        axes.legend(fontsize=8)
    return figure
