"""Measurements at each depth of a trained model, as in the Attention Residuals paper.

They reproduce Figures 5 and 8 of the paper, on held-out text. A model of L layers writes to its
residual `2L + 1` times: first the embedding, and then the output of every sublayer. For each write,
there are:

- output: the root mean square of the written array over tokens and features;
- residual: the root mean square of the residual after this write. With attention over depth, the
  residual is the running sum of a block, which restarts after each block (with Full AttnRes, at
  each write). It is the sum of all writes if the mixer keeps this sum, as delta attention does;
- gradient: the root mean square of the gradient of the loss with respect to the written array. The
  loss is the cross-entropy in nats, summed over tokens. Its gradient for one token does not depend
  on the batch size.

A site is a point where a sublayer, or the unembedding, reads its input. Some mixers read a weighted
sum of earlier writes, called the sources. For these mixers, the mean weight of each source over
tokens and heads is measured. It is `alpha` in Attention Residuals, and `a_ij` in DenseFormer. If
the weights also differ between tokens, there are two more measurements for each site with n >= 2
sources:

- entropy: the entropy of the weights divided by `log n`, averaged over tokens and heads. It is 1
  for equal weights, and 0 if one source has all the weight. Weights that do not add up to 1 are
  normalized first, and a negative weight is replaced by its magnitude.
- spread: the maximum over tokens and heads of `log(largest weight / smallest weight)`, also with
  magnitudes. For a softmax this is the range of the logits. Weights that underflow count as the
  dtype's smallest normal number.

The layers run one by one, in float32 or wider, and without kernels for the mixing over depth. To
get the gradient with respect to a write, an array of zeros, called a tap, is added to it. Both have
the same gradient.
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
from rmt_tpu.residual.protocols import DepthWeights, SingleSublayer, StepwiseStore, Store
from rmt_tpu.runs.plots import line_style, save_picture
from rmt_tpu.storage import Folder
from rmt_tpu.tables import markdown
from rmt_tpu.training.loss import Loss, next_token_loss


@dataclass(frozen=True)
class DepthProfile:
    """The measurements of one model.

    Lists have one entry per write unless stated otherwise.

    Attributes:
      tokens: the number of tokens measured.
      loss: the mean loss in nats per token.
      writes: the names of the writes: "E", "A1", "F1", "A2", ...
      output, gradient: the root mean square of each write, and of the gradient with respect to it.
      residual: the root mean square of the residual after each write, or None if the mixer keeps no
        sum of writes.
      weights: for each site, the mean weight of each source; None if the mixer has no weights.
      entropy, spread: one value per site, or None at sites with a single source. The field is None
        if the weights do not differ between tokens.
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
    """The arrays that one pass over the layers writes to and reads from the residual.

    Attributes:
      z: the input of the unembedding.
      written: the `2L + 1` written arrays, in order.
      residuals: the residual after each write; empty if the mixer does not keep a sum of writes.
      reads: the array that each site reads, ending with the unembedding's; empty if the mixer does
        not read through the store.
      weights: for each site, the weights of its sources, oldest source first.
    """

    z: Float[Array, "batch seq vectors size"]
    written: tuple[Float[Array, "batch seq *shape"], ...]
    residuals: tuple[Float[Array, "batch seq *shape"], ...]
    reads: tuple[Read, ...]
    weights: tuple[Float[Array, "sources batch seq heads"], ...]


# Measuring -----------------------------------------------------------------------------------


def measure(decoder: Decoder, batches: Iterable[Batch]) -> DepthProfile:
    """Measure a model on batches, with a forward and a backward pass per batch.

    At least one token must have a target.
    """
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
        entropy=_per_site(total, [float(x) / tokens for x in total["entropy"]]),
        spread=_per_site(total, [max(site) for site in zip(*spreads, strict=True)]),
    )


def _per_site(total: dict[str, Any], values: list[float]) -> list[float | None] | None:
    """Return `values`, which has one value per site, with None for sites with one source.

    A site is a place that reads the residual. The result is None if the model has no weights
    over depth.
    """
    counts = [len(w) for w in total["weights"]]
    return [v if n > 1 else None for n, v in zip(counts, values, strict=True)] or None


def in_full_precision(decoder: Decoder) -> Decoder:
    """Return the decoder with float32 in place of every narrower dtype in its config."""
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
    """Return the cross-entropy summed over a batch, after adding `taps[k]` to write k.

    The embedding and each sublayer write to the residual.
    """
    trace = unrolled(decoder, batch.inputs, taps=taps, segment_ids=batch.segment_ids)
    unembedding = decoder.unembedding
    loss = next_token_loss(
        trace.z,
        unembedding.matrix,
        batch.targets,
        batch.weights,
        multiplier=unembedding.multiplier,
        cap=unembedding.cap,
    )
    return loss.objective, (loss, trace)


def no_taps(decoder: Decoder, batch: int, seq: int) -> list[Float[Array, "batch seq *shape"]]:
    """Return taps of zeros for `tapped_loss`."""
    config = decoder.config
    zeros = jnp.zeros((batch, seq, *config.residual_shape), decoder.dtype)
    return [zeros] * (config.num_sublayers + 1)


def _sums(graphdef, params, batch: Batch) -> dict[str, Any]:
    """Return what `measure` needs from a batch, summed over the tokens that have a target."""
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
    """Return the entropy over sources divided by the entropy of equal weights, from 0 to 1."""
    share = jnp.abs(weights)
    share /= jnp.sum(share, axis=0)
    return -jnp.sum(jax.scipy.special.xlogy(share, share), axis=0) / np.log(max(2, len(share)))


def _spread(
    weights: Float[Array, "sources batch seq heads"],
) -> Float[Array, "batch seq heads"]:
    """Return `log(largest magnitude / smallest magnitude)` over the weights of the sources."""
    logs = jnp.log(jnp.maximum(jnp.abs(weights), jnp.finfo(weights.dtype).tiny))
    return jnp.max(logs, axis=0) - jnp.min(logs, axis=0)


# Running the layers one by one ----------------------------------------------------------------


@kernels.as_configured
def unrolled(
    decoder: Decoder,
    tokens: Int[Array, "batch seq"],
    *,
    taps: Sequence[Float[Array, "batch seq *shape"]] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> Trace:
    """Run the computation of `decoder.features` layer by layer, and return its intermediate arrays.

    Args:
      decoder: the decoder, without an int16 residual; see `in_full_precision`.
      tokens: token ids.
      taps: one array per write, with the residual's shape and dtype, which is added to the write.
      segment_ids: the id of each token's document, or None for one document per row.
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
    residuals = store.residuals if decoder.config.mixer.one_residual else ()
    recorded = map(tuple, (store.outputs, residuals, store.reads, weights))
    return Trace(z.residual, *recorded)


class _TappedStore:
    """A residual store that adds a tap to every write and records the result.

    It wraps another store. It has the additional methods of a vector store only if it wraps one.
    """

    def __init__(self, store: Store, taps: Sequence[Array] | None):
        self._store, self._taps = store, taps
        self.dtype, self.compute_dtype = store.dtype, store.compute_dtype
        names = ["start", "hold", "merge_and_read"]
        if isinstance(store, StepwiseStore):
            names += ["apply_norm", "project", "decode_params", "decode_merge_and_read"]
        for name in names:
            setattr(self, name, getattr(store, name))
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

    def read_groups(self, residuals, site, dtype):
        self.reads.append(self._store.read_groups(residuals, site, dtype))
        return self.reads[-1]

    def write_term(self, y, writer):
        return self._tapped(self._store.write_term(y, writer))

    def add_and_read(self, residual, y, site):
        residual = self.write(residual, y, site.writer)
        return residual, self.read(residual, site, y.dtype)

    def _tapped(self, written):
        if self._taps is not None:
            written = written + self._taps[len(self.outputs)]
        self.outputs.append(written)
        return written


def _sublayers(decoder, context) -> list[SingleSublayer]:
    unstacked = []
    for stack, stack_config in zip(decoder.stacks, decoder.config.stacks, strict=True):
        graphdef, stacked = nnx.split(stack)
        for i in range(stack_config.repeat):
            unstacked += nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], stacked))
    writers = [sublayer.site.writer for sublayer in unstacked[1:]] + [decoder.final_site.writer]
    return [
        SingleSublayer(
            sublayer.site, partial(sublayer.core, context=context, index=jnp.int32(k)), writer
        )
        for k, (sublayer, writer) in enumerate(zip(unstacked, writers, strict=True))
    ]


def _advance(decoder, sublayers, store, state, y):
    """Run all sublayers after the embedding `y`, and return the input of the unembedding."""
    mixer = decoder.mixer
    state, y = mixer.start(store, state, y)
    for index, (site, core, _) in enumerate(sublayers):
        state, z = mixer.advance(store, state, y, site, index)
        y = core(z)
    return mixer.advance(store, state, y, decoder.final_site, len(sublayers))[1]


# Weights over depth --------------------------------------------------------------------------


def _names(config: cfg.ModelConfig) -> list[str]:
    """Return the names of the sublayers, like "A1" and "F1"."""
    return [f"{core.letter}{1 + k // 2}" for k, core in enumerate(config.sublayers)]


def _depth_weights(decoder: Decoder, means: list[np.ndarray]) -> DepthWeights | None:
    if not decoder.config.mixer.banked:
        return None
    return decoder.mixer.depth_weights(_names(decoder.config), means)


# Reports -------------------------------------------------------------------------------------


def table(profiles: dict[str, DepthProfile]) -> str:
    """Return a Markdown table with the first and last value of each curve of each run.

    The table also has the weight of the newest source, the weight of the embedding, and the
    entropy. These are averaged over sites with more than one source. Within a block, the newest
    source is the running sum. The spread is the maximum over sites.
    """
    lines = [
        "run | loss | output: first, last sublayer | gradient: first, last sublayer | "
        "weight of the newest source | weight of the embedding | entropy over depth | "
        "largest spread of log weights"
    ]
    for name, p in profiles.items():
        newest, embedding = _summary(p.weights) if p.weights else ("", "")
        entropies = [x for x in p.entropy or () if x is not None]
        entropy = f"{sum(entropies) / len(entropies):.3f}" if entropies else ""
        spreads = [x for x in p.spread or () if x is not None]
        spread = f"{max(spreads):.3g}" if spreads else ""
        lines.append(
            f"{name} | {p.loss:.4f} | {p.output[1]:.3g}, {p.output[-1]:.3g} | "
            f"{p.gradient[1]:.3g}, {p.gradient[-1]:.3g} | {newest} | {embedding} | "
            f"{entropy} | {spread}"
        )
    return markdown(lines) + "\n"


def _summary(weights: DepthWeights) -> tuple[str, str]:
    rows = [row for row in weights.mean if sum(w is not None for w in row) > 1]
    newest = [[w for w in row if w is not None][-1] for row in rows]
    embedding = [row[0] for row in rows if row[0] is not None]
    mean = lambda values: f"{sum(values) / len(values):.3f}" if values else ""
    return mean(newest), mean(embedding)


def write_report(profiles: dict[str, DepthProfile], folder: Folder, picture: str) -> str:
    """Draw profiles, write their numbers as JSON, and return a Markdown table.

    Args:
      profiles: maps the name of each run to its profile.
      folder: the folder of both files.
      picture: the file name of the picture, which ends in .png.
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
            _draw_weights(axes, name, weights, learned=profiles[name].entropy is None)
        for axes in panels[len(shown) :]:
            axes.remove()
    _draw_curves(parts[-1], profiles)
    save_picture(figure, folder, picture)


def _draw_weights(axes, name: str, weights: DepthWeights, *, learned: bool) -> None:
    values = np.array(weights.mean, float)  # None becomes NaN, which the heat map leaves white.
    if weights.signed:
        largest = np.nanmax(np.abs(values))
        image = axes.imshow(values, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto")
    else:
        image = axes.imshow(values, cmap="viridis", vmin=0, aspect="auto")
    for axis, names in ((axes.xaxis, weights.sources), (axes.yaxis, weights.sites)):
        every = -(-len(names) // 26)
        axis.set_ticks(range(0, len(names), every), names[::every], fontsize=7)
    axes.set(title=name, xlabel="source", ylabel="read by")
    what = "learned weight" if learned else "mean weight"
    axes.figure.colorbar(image, ax=axes, label=what)


def _draw_curves(figure, profiles: dict[str, DepthProfile]) -> None:
    titles = {
        "output": "output of each sublayer (RMS)",
        "residual": "residual after each sublayer (RMS)",
        "gradient": "gradient of the loss by each output (RMS)",
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
