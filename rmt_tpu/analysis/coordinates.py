"""Coordinate checks: how the change of activations in training depends on the width.

The check follows Yang et al. (2022), appendix D.1. A model trains for a few steps on one batch.
Before the first step and after each step, these quantities are recorded:

- read: what a site (the input of a sublayer, or of the unembedding) reads from the residual,
- written: what a sublayer writes to the residual,
- residual: the residual after each write (with attention over depth, the running sum of the block),
- logits.

For each quantity, the check computes two root mean squares: that of the entries, and that of their
change since before the first step. Both are taken over all tokens and sites. In the maximal update
parametrisation (muP), the change does not depend on the width. In the standard parametrisation, it
grows with the width.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sharding
from rmt_tpu.analysis import depth
from rmt_tpu.config import RunConfig
from rmt_tpu.data import Batch
from rmt_tpu.execution import kernels
from rmt_tpu.runs.plots import line_style, save_picture
from rmt_tpu.storage import Folder
from rmt_tpu.tables import markdown
from rmt_tpu.training.run import prepare

QUANTITIES = ("read", "written", "residual", "logits")


@dataclass(frozen=True)
class Coordinates:
    """The size and the change of the activations of one model, as root mean squares.

    Each list has one value before the first step, and one value after each step.

    Attributes:
      size: maps each of QUANTITIES to the root mean squares of its entries.
      moved: maps each of QUANTITIES to the root mean squares of its change since before the first
        step.
    """

    size: dict[str, list[float]]
    moved: dict[str, list[float]]


def measure(config: RunConfig, batch: Batch, *, steps: int = 4) -> Coordinates:
    """Train a model for `steps` steps on one batch, and record the size and change of activations.

    The optimizer and the learning-rate schedule are those in `config`.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    run = prepare(config, sharding.make_mesh("data=1", jax.devices()[:1]))

    @jax.jit
    def measured() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        state = run.init()
        first = _activations(run.graphdef, state.params, batch)

        def step(state: Any, _: None) -> tuple[Any, Any]:
            state, _ = run.step(state, batch)
            now = _activations(run.graphdef, state.params, batch)
            far = jax.tree.map(jnp.subtract, now, first)
            return state, (_sizes(now), _sizes(far))

        _, (size, moved) = jax.lax.scan(step, state, length=steps)
        before = lambda first, rest: jnp.concatenate([first[None], rest])
        size = jax.tree.map(before, _sizes(first), size)
        return size, jax.tree.map(lambda rest: before(jnp.zeros(()), rest), moved)

    lists = lambda found: {name: np.asarray(x).tolist() for name, x in found.items()}
    return Coordinates(*map(lists, measured()))


def _activations(graphdef: nnx.GraphDef, params: Any, batch: Batch) -> dict[str, list[jax.Array]]:
    decoder = nnx.merge(graphdef, params)
    with kernels.preferred(decoder.config):
        return _decoder_activations(decoder, batch)


def _decoder_activations(decoder, batch):
    trace = depth.unrolled(decoder, batch.inputs, segment_ids=batch.segment_ids)
    read = [part for read in trace.reads[:-1] for part in read if part is not None]
    return {
        "read": read,
        "written": list(trace.written[1:]),
        "residual": list(trace.residuals),
        "logits": [decoder.unembedding(trace.z)],
    }


def _sizes(activations: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
    mean_square = lambda arrays: sum(jnp.mean(jnp.square(x)) for x in arrays) / len(arrays)
    return {name: jnp.sqrt(mean_square(x)) for name, x in activations.items() if x}


def growth(by_width: dict[int | float, Coordinates], quantity: str) -> float:
    """Return the exponent p with which the change of a quantity grows as width^p.

    The exponent is the slope of a least-squares line through log(change after the last step)
    against log(width).
    """
    widths = np.log(list(by_width))
    moved = np.log([found.moved[quantity][-1] for found in by_width.values()])
    return round(float(np.polyfit(widths, moved, 1)[0]), 4) + 0.0  # Adding 0 turns -0 into 0.


def random_batch(vocab_size: int) -> Batch:
    """Return a batch of random tokens, one document per row; low token ids are more frequent."""
    rng = np.random.default_rng(0)
    stream = np.minimum(rng.zipf(1.3, (8, 17)) - 1, vocab_size - 1).astype(np.int32)
    ones = np.ones((8, 16), np.int32)
    return Batch(stream[:, :-1].copy(), stream[:, 1:].copy(), ones, np.float32(ones))


# Reports -------------------------------------------------------------------------------------

# Maps the name of a parametrisation to a dict from width to the coordinates of a model. A width is
# given as a multiple of the width of the first model.
CoordinatesByModel = dict[str, dict[int | float, Coordinates]]


def table(found: CoordinatesByModel) -> str:
    """Return a Markdown table of the growth exponents (see `growth`), with one row per model."""
    lines = [["activation", "widths", *QUANTITIES]]
    for name, by_width in found.items():
        powers = [f"{growth(by_width, quantity):+.2f}" for quantity in QUANTITIES]
        widths = ", ".join(f"x{width:g}" for width in by_width)
        lines.append([name, widths, *powers])
    return markdown(lines) + "\n"


def write_check(found: CoordinatesByModel, folder: Folder) -> str:
    """Write coordinates.png, .md and .json to a folder, and return the Markdown table."""
    rows = [
        {"what": name, "width": width} | asdict(coordinates)
        for name, by_width in found.items()
        for width, coordinates in by_width.items()
    ]
    folder.write("coordinates.json", (json.dumps(rows, indent=1) + "\n").encode())
    text = table(found)
    folder.write("coordinates.md", text.encode())
    _draw(found, folder)
    return text


def _draw(found: CoordinatesByModel, folder: Folder) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.6 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), len(QUANTITIES), squeeze=False, sharex="row", sharey=True)
    for row, (name, by_width) in zip(panels, found.items(), strict=True):
        for axes, quantity in zip(row, QUANTITIES, strict=True):
            moved = np.array([coordinates.moved[quantity] for coordinates in by_width.values()])
            for step in range(1, moved.shape[1]):
                style = line_style(step) | {"markersize": 3}
                axes.loglog(list(by_width), moved[:, step], label=f"step {step}", **style)
            axes.set_title(f"{quantity}: width^{growth(by_width, quantity):+.2f}", fontsize=9)
            axes.set_xticks(list(by_width), [f"x{width:g}" for width in by_width])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        row[0].set_ylabel(name, fontsize=9)
    panels[0, 0].legend(fontsize=7)
    figure.suptitle(
        "change of the entries since the start of training (RMS), by width", fontsize=11
    )
    save_picture(figure, folder, "coordinates.png")
