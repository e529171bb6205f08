"""Measurements over depth of a trained model: Figures 5 and 8 of the Attention Residuals paper.

They are taken over tokens of held-out text, for each of the `2L + 1` writes (the embedding, then
what every sublayer writes to the residual):

- output: the root mean square, over tokens and features, of what was written;
- residual: the root mean square of the residual after this write. With attention over depth it is
  the running sum of a block, which starts anew after each block (with Full AttnRes, at each write);
- gradient: the root mean square of `dLoss / d(write)`, with the cross-entropy summed over a batch's
  tokens (nats), so that its size does not depend on the batch's.

For each site of a mixer with weights over depth, they include the mean over tokens and heads of the
weight of each source: `alpha` of Attention Residuals, `a_ij` of DenseFormer. Where each token has
its own weights, of n sources, each site with two or more sources also has:
their own, of n sources, also for each site that has two or more:

- entropy: the entropy of the weights divided by `log n`, averaged over tokens and heads: 1 is a
  plain mean, 0 one source. (Weights that do not add up to 1 are normalized first.)
- spread: the largest `log(largest weight / least weight)` of any token and head; for a softmax, the
  range of the logits. Weights too small for the dtype count as its least normal number.

The layers run one by one, in float32 or more and without kernels for the mixing over depth. A zero
is added to every write, and its gradient is that of the write.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from rmt_tpu import config as cfg
from rmt_tpu.cores import causal
from rmt_tpu.data import Batch
from rmt_tpu.decoder import Decoder
from rmt_tpu.execution import kernels
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.residual.protocols import DepthWeights, Stepwise, Store, Unstacked
from rmt_tpu.runs.plots import line_style, save_picture
from rmt_tpu.storage import Folder
from rmt_tpu.training.loss import Loss, next_token_loss


@dataclass(frozen=True)
class DepthProfile:
    """The measurements of one model; lists are by write.

    Attributes:
      tokens: the number of tokens that means are taken over.
      loss: the loss, in nats per token.
      writes: the names of the writes: "E", "A1", "F1", "A2", ...
      output, gradient: root mean squares of each write and of its gradient.
      residual: root mean squares of the residual after each write; None where the mixer is not a
        plain sum.
      weights: the mean weights over depth; None where the mixer has none.
      entropy, spread: values by site, as in `weights`, and None at sites with one source; None in
      all where tokens do not have their own weights.
    """

    tokens: int
    loss: float
    writes: list[str]
    output: list[float]
    residual: list[float] | None
    gradient: list[float]
    weights: DepthWeights | None
    entropy: list[float | None] | None = None
    spread: list[float | None] | None = None


class Trace(NamedTuple):
    """The writes and reads of one pass over the layers, site by site.

    Attributes:
      z: what the unembedding reads.
      written: `2L + 1` arrays in the order of the writes.
      residuals: the residual after each write; empty where the mixer does not add to one.
      reads: what each site has read, the last one for the unembedding; empty where the mixer does
        not read through the store.
      weights: weights of attention over depth, by site, of the sources that it sees, oldest first.
    """

    z: Float[Array, "batch seq vectors size"]
    written: tuple[Float[Array, "batch seq *shape"], ...]
    residuals: tuple[Float[Array, "batch seq *shape"], ...]
    reads: tuple[Read, ...]
    weights: tuple[Float[Array, "sources batch seq heads"], ...]


# Measuring -----------------------------------------------------------------------------------


def measure(decoder: Decoder, batches: Iterable[Batch]) -> DepthProfile:
    """Measure a model on batches, forward and backward; at least one token must have a target."""
    graphdef, params = nnx.split(in_full_precision(decoder), nnx.Param)
    run = jax.jit(partial(_sums, graphdef))
    total, spreads = None, []
    for batch in batches:
        sums = run(params, batch)
        spreads.append([float(x) for x in sums.pop("spread")])
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    config, tokens = decoder.config, float(total["tokens"])
    features = tokens * config.residual_size
    rms = lambda name: [float(x / features) ** 0.5 for x in total[name]]
    return DepthProfile(
        tokens=round(tokens),
        loss=float(total["loss"]) / tokens,
        writes=["E", *_names(config)],
        output=rms("output"),
        residual=rms("residual") or None,
        gradient=rms("gradient"),
        weights=_depth_weights(decoder, [np.asarray(w) / tokens for w in total["weights"]]),
        entropy=_of_several(total, [float(x) / tokens for x in total["entropy"]]),
        spread=_of_several(total, [max(site) for site in zip(*spreads, strict=True)]),
    )


def _of_several(total: dict[str, Any], values: list[float]) -> list[float | None] | None:
    """Return values by site, None at sites with one source; None if there is no site."""
    counts = [len(w) for w in total["weights"]]
    return [v if n > 1 else None for n, v in zip(counts, values, strict=True)] or None


def in_full_precision(decoder: Decoder) -> Decoder:
    """Return the decoder with a config that has nothing narrower than float32."""
    dtype = jnp.promote_types(decoder.dtype, jnp.float32).name
    store = replace(decoder.config.store, dtype=dtype)
    config = replace(decoder.config, compute_dtype=dtype, remat="full", store=store)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, _ = nnx.split(abstract, nnx.Param)
    return nnx.merge(graphdef, nnx.state(decoder, nnx.Param))


@kernels.as_configured
def tapped_loss(
    decoder: Decoder, batch: Batch, taps: Sequence[Float[Array, "batch seq *shape"]]
) -> tuple[Float[Array, ""], tuple[Loss, Trace]]:
    """Return the cross-entropy summed over a batch, with `taps[k]` added to write k."""
    trace = unrolled(decoder, batch.inputs, taps=taps, segment_ids=batch.segment_ids)
    unembedding = decoder.unembedding
    loss = next_token_loss(
        trace.z,
        unembedding.kernel[...],
        batch.targets,
        batch.weights,
        multiplier=unembedding.multiplier,
    )
    return loss.objective, (loss, trace)


def no_taps(decoder: Decoder, batch: int, seq: int) -> list[Float[Array, "batch seq *shape"]]:
    """Return taps of zeros for `tapped_loss`."""
    config = decoder.config
    zeros = jnp.zeros((batch, seq, *config.residual_shape), decoder.dtype)
    return [zeros] * (config.num_sublayers + 1)


def _sums(graphdef, params, batch: Batch) -> dict[str, Any]:
    """Return sums over the tokens of a batch that have a target."""
    decoder = nnx.merge(graphdef, params)
    counts = batch.weights > 0
    taps = no_taps(decoder, *batch.inputs.shape)
    differentiate = jax.grad(partial(tapped_loss, decoder, batch), has_aux=True)
    with kernels.preferred(decoder.config):
        gradients, (loss, trace) = differentiate(taps)

    def squares(arrays):
        masked = lambda x: jnp.where(jnp.expand_dims(counts, range(2, x.ndim)), x, 0)
        return [jnp.sum(jnp.square(masked(x))) for x in arrays]

    return {
        "tokens": jnp.sum(counts),
        "loss": loss.cross_entropy,
        "output": squares(trace.written),
        "residual": squares(trace.residuals),
        "gradient": squares(gradients),
        "weights": [jnp.sum(w.mean(-1) * counts, axis=(1, 2)) for w in trace.weights],
        "entropy": [jnp.sum(_entropy(w).mean(-1) * counts) for w in trace.weights],
        "spread": [jnp.max(_spread(w).max(-1), where=counts, initial=0) for w in trace.weights],
    }


def _entropy(
    weights: Float[Array, "sources batch seq heads"],
) -> Float[Array, "batch seq heads"]:
    """Return the entropy over sources relative to that of equal weights; 0 for one source."""
    share = weights / jnp.sum(weights, axis=0)
    return -jnp.sum(jax.scipy.special.xlogy(share, share), axis=0) / np.log(max(2, len(share)))


def _spread(
    weights: Float[Array, "sources batch seq heads"],
) -> Float[Array, "batch seq heads"]:
    """Return `log(largest weight / least weight)`."""
    logs = jnp.log(jnp.maximum(weights, jnp.finfo(weights.dtype).tiny))
    return jnp.max(logs, axis=0) - jnp.min(logs, axis=0)


# The layers, one by one ----------------------------------------------------------------------


@kernels.as_configured
def unrolled(
    decoder: Decoder,
    tokens: Int[Array, "batch seq"],
    *,
    taps: Sequence[Float[Array, "batch seq *shape"]] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> Trace:
    """Do what `decoder.features` does, layer by layer, and return a record of it.

    Args:
      decoder: the decoder, without an int16 residual; see `in_full_precision`.
      tokens: tokens below the vocabulary's size.
      taps: arrays to add to each write, with the residual's shape and dtype.
      segment_ids: the document of each token; None means one document per row.
    """
    context = causal(tokens.shape[1], None, segment_ids)
    embedded = decoder.embedding(tokens, context.query_positions, decoder.dtype)
    store = _TappedStore(decoder.store, taps)
    state, y = store.start(*embedded)
    sublayers = _sublayers(decoder, context)
    if decoder.config.mixer.banked:
        unrolled = decoder.mixer.unrolled
        z, weights = unrolled(store, state, y, sublayers, decoder.final_site)
    else:
        z, weights = _advance(decoder, sublayers, store, state, y), ()
    recorded = map(tuple, (store.outputs, store.residuals, store.reads, weights))
    return Trace(z.whole, *recorded)


class _TappedStore:
    """A store that records every write and adds a tap to it.

    It is stepwise if the wrapped store is.
    """

    def __init__(self, store: Store, taps: Sequence[Array] | None):
        self._store, self._taps = store, taps
        self.dtype, self.compute_dtype = store.dtype, store.compute_dtype
        self.start, self.hold = store.start, store.hold
        if isinstance(store, Stepwise):
            self.norm_of, self.project = store.norm_of, store.project
        self.outputs: list[Array] = []
        self.residuals: list[Array] = []
        self.reads: list[Read] = []

    def write(self, residual, y, writer):
        written = self._store.write(jnp.zeros_like(residual), y, writer)
        self.residuals.append(residual + self._tapped(written))
        return self.residuals[-1]

    def read(self, residual, site, dtype):
        self.reads.append(self._store.read(residual, site, dtype))
        return self.reads[-1]

    def written(self, y, writer):
        return self._tapped(self._store.written(y, writer))

    def add_and_read(self, residual, y, site):
        residual = self.write(residual, y, site.writer)
        return residual, self.read(residual, site, y.dtype)

    def _tapped(self, written):
        if self._taps is not None:
            written = written + self._taps[len(self.outputs)]
        self.outputs.append(written)
        return written


def _sublayers(decoder, context) -> list[Unstacked]:
    unstacked = []
    for stack, of_stack in zip(decoder.stacks, decoder.config.stacks, strict=True):
        graphdef, stacked = nnx.split(stack)
        for i in range(of_stack.repeat):
            unstacked += nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], stacked))
    writers = [one.site.writer for one in unstacked[1:]] + [decoder.final_site.writer]
    return [
        Unstacked(one.site, partial(one.core, context=context, index=jnp.int32(k)), writer)
        for k, (one, writer) in enumerate(zip(unstacked, writers, strict=True))
    ]


def _advance(decoder, sublayers, store, state, y):
    """Run the decoder's loop over sites."""
    mixer = decoder.mixer
    state, y = mixer.start(store, state, y)
    for index, (site, core, _) in enumerate(sublayers):
        state, z = mixer.advance(store, state, y, site, index)
        y = core(z)
    return mixer.advance(store, state, y, decoder.final_site, len(sublayers))[1]


# Weights over depth --------------------------------------------------------------------------


def _names(config: cfg.ModelConfig) -> list[str]:
    """Return the names of the sublayers."""
    return [f"{core.letter}{1 + k // 2}" for k, core in enumerate(config.sublayers)]


def _depth_weights(decoder: Decoder, means: list[np.ndarray]) -> DepthWeights | None:
    if not decoder.config.mixer.banked:
        return None
    return decoder.mixer.depth_weights(_names(decoder.config), means)


# Showing -------------------------------------------------------------------------------------


def table(profiles: dict[str, DepthProfile]) -> str:
    """Return a Markdown table with the first and last values of the curves, a row per run.

    Weights are means over sites with more than one source: that of the newest source (in a block:
    its running sum), that of the embedding, and that of their entropy. The spread is the largest of
    any site.
    """
    lines = [
        "| run | loss | output: first, last sublayer | gradient: first, last sublayer | "
        "weight of newest | of embedding | entropy over depth | largest spread of logits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, p in profiles.items():
        newest, embedding = _summary(p.weights) if p.weights else ("", "")
        entropies = [x for x in p.entropy or () if x is not None]
        entropy = f"{sum(entropies) / len(entropies):.3f}" if entropies else ""
        spreads = [x for x in p.spread or () if x is not None]
        spread = f"{max(spreads):.3g}" if spreads else ""
        lines.append(
            f"| {name} | {p.loss:.4f} | {p.output[1]:.3g}, {p.output[-1]:.3g} | "
            f"{p.gradient[1]:.3g}, {p.gradient[-1]:.3g} | {newest} | {embedding} | "
            f"{entropy} | {spread} |"
        )
    return "\n".join(lines) + "\n"


def _summary(weights: DepthWeights) -> tuple[str, str]:
    rows = [row for row in weights.mean if sum(w is not None for w in row) > 1]
    newest = [[w for w in row if w is not None][-1] for row in rows]
    embedding = [row[0] for row in rows if row[0] is not None]
    mean = lambda values: f"{sum(values) / len(values):.3f}" if values else ""
    return mean(newest), mean(embedding)


def write_report(profiles: dict[str, DepthProfile], folder: Folder, picture: str) -> str:
    """Draw the profiles, write their numbers as .json next to the picture, and return the table.

    Args:
      profiles: the profiles by the runs' names.
      folder: the folder of both files.
      picture: the name of the picture, which ends in .png.
    """
    rows = [{"run": name} | asdict(profile) for name, profile in profiles.items()]
    numbers = json.dumps(rows, indent=1) + "\n"
    folder.write(picture.removesuffix(".png") + ".json", numbers.encode())
    _draw(profiles, folder, picture)
    return table(profiles)


def _draw(profiles: dict[str, DepthProfile], folder: Folder, picture: str) -> None:
    from matplotlib.figure import Figure

    maps = {name: p.weights for name, p in profiles.items() if p.weights is not None}
    columns = min(3, max(1, len(maps)))
    map_rows = -(-len(maps) // columns)
    heights = [4.5] * map_rows + [4.0]
    figure = Figure(figsize=(15, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, start in zip(parts, range(0, len(maps), columns), strict=False):
        shown = list(maps.items())[start : start + columns]
        panels = part.subplots(1, columns, squeeze=False)[0]
        for axes, (name, weights) in zip(panels, shown, strict=False):
            _draw_weights(axes, name, weights)
        for axes in panels[len(shown) :]:
            axes.remove()
    _draw_curves(parts[-1], profiles)
    save_picture(figure, folder, picture)


def _draw_weights(axes, name: str, weights: DepthWeights) -> None:
    values = np.array(weights.mean, float)  # None becomes NaN, which is left white
    if weights.signed:
        most = np.nanmax(np.abs(values))
        image = axes.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    else:
        image = axes.imshow(values, cmap="viridis", vmin=0, aspect="auto")
    for axis, names in ((axes.xaxis, weights.sources), (axes.yaxis, weights.sites)):
        every = -(-len(names) // 26)
        axis.set_ticks(range(0, len(names), every), names[::every], fontsize=7)
    axes.set(title=name, xlabel="source", ylabel="read by")
    what = "learned weight" if weights.signed else "mean weight"
    axes.figure.colorbar(image, ax=axes, label=what)


def _draw_curves(figure, profiles: dict[str, DepthProfile]) -> None:
    titles = {
        "output": "what each sublayer writes (RMS)",
        "residual": "residual after each write (RMS)",
        "gradient": "loss gradient by each write (RMS)",
    }
    panels = figure.subplots(1, len(titles))
    for axes, (quantity, title) in zip(panels, titles.items(), strict=True):
        for index, (name, profile) in enumerate(profiles.items()):
            values = getattr(profile, quantity)
            if values is not None:
                axes.plot(values, label=name, markersize=3, **line_style(index))
        axes.set(title=title, xlabel="sublayer (0: the embedding)", yscale="log")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3, which="both")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
