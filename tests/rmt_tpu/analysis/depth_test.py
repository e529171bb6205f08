"""What is measured over depth is what the decoder does."""

import json
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import FigureBase

from rmt_tpu import config as cfg
from rmt_tpu.analysis import depth
from rmt_tpu.storage import open_folder
from rmt_tpu.training.step import batch_loss
from tests import models
from tests.tiers import later

MIXERS = {
    "sum": ("vector", cfg.Sum()),
    "matrix sum": ("matrix", cfg.Sum()),
    "full": ("vector", cfg.FullAttention()),
    "blocks": ("vector", cfg.BlockAttention(sublayers_per_block=4)),
    "odd blocks": ("matrix", cfg.BlockAttention(sublayers_per_block=3)),
    "scalars": ("vector", cfg.BlockAttention(sublayers_per_block=4, query="scalars")),
    "scalars of a window": ("vector", cfg.FullAttention(query="scalars", window=2)),
    "sum beside a window": ("vector", cfg.FullAttention(window=2, output_site="sum")),
    "input query": ("vector", cfg.BlockAttention(sublayers_per_block=3, query="input")),
    "open": (
        "vector",
        cfg.BlockAttention(
            sublayers_per_block=4, newest_bias=3.0, cumulative=True, output_site="newest"
        ),
    ),
    "marin": (
        "matrix",
        cfg.BlockAttention(sublayers_per_block=3, normed_embedding=True, output_site="sum"),
    ),
    "mean": ("matrix", cfg.BlockAttention(sublayers_per_block=3, query="none")),
    "delta": ("matrix", cfg.DeltaAttention(sublayers_per_block=3, null_source=0.0)),
    "delta of vectors": ("vector", cfg.DeltaAttention(sublayers_per_block=4)),
    "wide streams": ("matrix", cfg.WideStreams()),
    "residual scalars": ("vector", cfg.ResidualScalars()),
    "dense": ("matrix", cfg.Dense()),
    "mudd": ("matrix", cfg.Mudd()),
    "hyper-connections": ("vector", cfg.HyperConnections()),
    "depth-wise LSTM": ("vector", cfg.DepthLstm()),
    "hierarchical": ("vector", cfg.Hierarchical(hidden_dim=7)),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(kind: str, mixer: cfg.Mixer, *, zero_queries: bool = False, **changes):
    """A decoder in float64, its parameters random, but for queries if they are to be zero."""
    config = models.model(kind, mixer=mixer, compute_dtype="float64", **changes)
    graphdef = models.graph(config)
    params = models.random_parameters(config)
    if zero_queries:
        zero = lambda path, p: 0 * p if path[-1].key == "query" else p
        params = jax.tree_util.tree_map_with_path(zero, params)
    return nnx.merge(graphdef, jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), params))


def features(decoder, batch):
    return jax.jit(lambda b: decoder.features(b.inputs, segment_ids=b.segment_ids).z)(batch)


NOW = ["full", "delta of vectors"]
WITHOUT_A_RESIDUAL = ("wide streams", "hyper-connections", "depth-wise LSTM")


@pytest.mark.parametrize("name", NOW + later(*(name for name in MIXERS if name not in NOW)))
def test_unrolled_layers_are_the_decoder(name):
    # To float64 rounding: the mixing over depth is added up in another order.
    decoder, batch = make(*MIXERS[name]), models.batch()
    run = jax.jit(lambda b: depth.unrolled(decoder, b.inputs, segment_ids=b.segment_ids))
    trace, expected = run(batch), features(decoder, batch)
    np.testing.assert_allclose(trace.z, expected, rtol=0, atol=1e-11 * np.abs(expected).max())
    assert len(trace.written) == 7
    shapes = {w.shape for w in (*trace.written, *trace.residuals)}
    assert shapes == {(4, 11, 20) if decoder.config.store.kind == "vector" else (4, 11, 5, 6)}
    assert (len(trace.residuals) == 7) == (name not in WITHOUT_A_RESIDUAL)
    if name in ("sum", "delta", "delta of vectors", "open"):  # Those that add up all outputs.
        added = np.diff(np.stack(trace.residuals), axis=0)
        atol = 1e-11 * np.abs(added).max()
        np.testing.assert_allclose(added, np.stack(trace.written[1:]), rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocks", *later("matrix sum", "dense", "depth-wise LSTM")])
def test_gradients_of_taps(name):
    """Of each write, against a central difference over 2e-5 in a random direction.

    Its error is the step squared times a third derivative, and rounding divided by the step: 1e-7
    of the largest of the seven is asked for.
    """
    decoder, batch = make(*MIXERS[name]), models.batch()
    batch = jax.tree.map(jnp.asarray, batch)
    loss = jax.jit(lambda taps: depth.tapped_loss(decoder, batch, taps)[0])
    zeros = depth.no_taps(decoder, *batch.inputs.shape)
    gradients = jax.jit(jax.grad(loss))(zeros)
    rng = np.random.default_rng(1)
    got, expected = [], []
    for k, gradient in enumerate(gradients):
        direction, step = rng.normal(size=gradient.shape), 1e-5
        at = lambda by, k=k, d=direction: float(loss([*zeros[:k], by * d, *zeros[k + 1 :]]))
        expected.append((at(step) - at(-step)) / (2 * step))
        got.append(float(jnp.sum(gradient * direction)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-7 * np.abs(expected).max())
    assert np.abs(expected).min() > 1e-3 * np.abs(expected).max()


def seen(weights: depth.DepthWeights) -> list[list[int]]:
    return [[i for i, w in enumerate(row) if w is not None] for row in weights.mean]


def rows(weights: depth.DepthWeights) -> list[list[float]]:
    return [[w for w in row if w is not None] for row in weights.mean]


BLOCKS = [[0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]  # of 4 sublayers


@pytest.mark.slow
def test_measures():
    """Loss, and root mean squares over the tokens that have a target, of all batches."""
    decoder = make("vector", cfg.BlockAttention(sublayers_per_block=4))
    batches = [models.batch(seed=seed) for seed in (0, 1)]
    batches[1].weights[0] = 0
    profile = depth.measure(decoder, batches)
    graphdef, params = nnx.split(decoder)
    loss = jax.jit(lambda b: batch_loss(graphdef, params, b).cross_entropy)
    losses = [float(loss(b)) for b in batches]
    counts = [b.weights > 0 for b in batches]
    tokens = sum(c.sum() for c in counts)
    assert profile.tokens == tokens
    np.testing.assert_allclose(profile.loss, sum(losses) / tokens, rtol=1e-12)

    zeros = depth.no_taps(decoder, *batches[0].inputs.shape)
    grad = jax.jit(jax.grad(lambda t, b: depth.tapped_loss(decoder, b, t), has_aux=True))
    passes = [grad(zeros, b) for b in batches]
    gradients, traces = [g for g, _ in passes], [trace for _, (_, trace) in passes]

    def rms(arrays_of_batches, k):
        kept = [np.asarray(x[k])[c] for x, c in zip(arrays_of_batches, counts, strict=True)]
        return np.sqrt(np.mean(np.concatenate(kept) ** 2))

    for k in range(7):
        np.testing.assert_allclose(profile.gradient[k], rms(gradients, k), rtol=1e-12)
        np.testing.assert_allclose(profile.output[k], rms([t.written for t in traces], k), 1e-12)
    assert profile.writes == ["E", "A1", "F1", "A2", "F2", "A3", "F3"]
    assert profile.weights.sites == ["A1", "F1", "A2", "F2", "A3", "F3", "U"]
    assert seen(profile.weights) == BLOCKS
    for row in rows(profile.weights):
        np.testing.assert_allclose(sum(row), 1, rtol=1e-12)
    assert max(np.ptp(row) for row in rows(profile.weights)) > 1e-2  # no plain means
    for k, sources in enumerate(BLOCKS):
        w = np.concatenate(
            [np.asarray(t.weights[k])[:, c] for t, c in zip(traces, counts, strict=True)], axis=1
        )
        if len(sources) == 1:
            assert profile.entropy[k] is profile.spread[k] is None
            continue
        entropy = -np.sum(w * np.log(w), axis=0).mean() / np.log(len(sources))
        np.testing.assert_allclose(profile.entropy[k], entropy, rtol=1e-12)
        spread = np.log(w.max(axis=0) / w.min(axis=0)).max()
        np.testing.assert_allclose(profile.spread[k], spread, rtol=1e-12)
    # Blocks of 4: a running sum starts with the first and the fifth sublayer.
    np.testing.assert_allclose(np.array(profile.residual)[[1, 5]], np.array(profile.output)[[1, 5]])
    others = np.array(profile.residual)[[2, 3, 4, 6]] / np.array(profile.output)[[2, 3, 4, 6]]
    assert np.abs(others - 1).min() > 0.01


@pytest.mark.slow
def test_weights_at_zero_queries_are_equal():
    weights = depth.measure(make(*MIXERS["full"], zero_queries=True), [models.batch()]).weights
    assert seen(weights) == [list(range(k + 1)) for k in range(7)]
    for row in rows(weights):
        np.testing.assert_allclose(row, 1 / len(row), rtol=1e-12)


def test_one_source_alone_has_no_entropy_and_weights_that_vanish_no_infinite_spread():
    weights = jnp.asarray([[1.0, 0.5, 0.2], [0.0, 0.5, 0.2]], jnp.float32).reshape(2, 1, 3, 1)
    np.testing.assert_allclose(depth._entropy(weights).reshape(-1), [0, 1, 1], atol=1e-6)
    spread = depth._spread(weights).reshape(-1)
    assert 80 < spread[0] < 90 and not np.any(spread[1:])


def test_negative_weights_count_by_their_magnitude():
    weights = jnp.asarray([[1.0, 3.0], [-1.0, -1.0]], jnp.float32).reshape(2, 1, 2, 1)
    quarters = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(2)
    np.testing.assert_allclose(depth._entropy(weights).reshape(-1), [1, quarters], rtol=1e-6)
    np.testing.assert_allclose(depth._spread(weights).reshape(-1), [0, np.log(3)], rtol=1e-6)


@pytest.mark.slow
def test_weights_stand_at_their_sources():
    """Learned logits do not depend on the tokens, so that the weights are known."""
    decoder = make(*MIXERS["scalars"])
    weights = depth.measure(decoder, [models.batch()]).weights
    logits = list(np.asarray(decoder.mixer.logits[...]))
    for row, sources in zip(weights.mean, BLOCKS, strict=True):
        mine = np.exp([logits.pop(0) for _ in sources])
        got = [row[source] for source in sources]
        np.testing.assert_allclose(got, mine / mine.sum(), rtol=1e-12)
    assert not logits
    assert weights.sources == ["E", "B1", "B2"]


@pytest.mark.slow
def test_window():
    mixer = cfg.FullAttention(weights="sigmoid", key_norm=False, window=2)
    weights = depth.measure(make("vector", mixer, num_layers=2), [models.batch()]).weights
    assert seen(weights) == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4]]
    assert all(0 < w < 1 for row in rows(weights) for w in row)


@pytest.mark.slow
def test_dense_weights():
    decoder = make("vector", cfg.Dense(dilation=2, period=2), num_layers=2)
    weights = depth.measure(decoder, [models.batch()]).weights
    # Only Y_2 is a sum, of X_0 and X_2; the others are X_i itself.
    a, b = map(float, decoder.mixer.weights[...])
    assert weights.mean == [[1.0, None, None], [None, 1.0, None], [a, None, b]]
    assert (weights.sites, weights.sources) == (["1", "2", "U"], ["E", "1", "2"])
    assert weights.signed


@pytest.mark.slow
def test_a_narrow_decoder_is_measured_in_float32():
    model = models.model("matrix")
    # The residual is int16, which has no zero to be added and no gradient.
    narrow = models.decoder(replace(model, compute_dtype="bfloat16", remat="reversible"))
    wide = depth.in_full_precision(narrow)
    store = replace(model.store, dtype="float32")
    assert wide.config == replace(model, compute_dtype="float32", remat="full", store=store)
    assert wide.dtype == wide.store.dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, nnx.state(wide), nnx.state(narrow))


def test_report(tmp_path, monkeypatch):
    """A run without weights, one with positive and one with signed ones, in one picture."""
    curves = {"output": [3.0, 0.5, 0.25], "gradient": [0.1, 0.02, 0.004]}
    profiles = {
        name: depth.DepthProfile(
            tokens=9,
            loss=2.5,
            writes=["E", "A1", "F1"],
            residual=residual,
            weights=weights,
            entropy=[None, 0.8125] if name == "softmax" else None,
            spread=[None, 2.5] if name == "softmax" else None,
            **curves,
        )
        for name, residual, weights in [
            ("plain", [3.0, 3.1, 3.2], None),
            ("softmax", [3.0, 0.5, 0.25], _two_sites(0.25, 0.75, signed=False)),
            ("sum", None, _two_sites(-0.5, 1.0, signed=True)),
        ]
    }
    picture = tmp_path / "depth.png"
    labels, usual = [], FigureBase.colorbar
    note = lambda *args, label, **how: (labels.append(label), usual(*args, label=label, **how))[1]
    monkeypatch.setattr(FigureBase, "colorbar", note)
    table = depth.write_report(profiles, open_folder(tmp_path), "depth.png")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert labels == ["mean weight", "learned weight"]
    rows = json.loads(picture.with_suffix(".json").read_text())
    assert rows == [{"run": name} | asdict(p) for name, p in profiles.items()]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
    assert cells[2] == ["plain", "2.5000", "0.5, 0.25", "0.02, 0.004", "", "", "", ""]
    assert cells[3][-4:] == ["0.750", "0.250", "0.812", "2.5"]
    assert cells[4][-4:] == ["1.000", "-0.500", "", ""]


def _two_sites(embedding: float, newest: float, *, signed: bool) -> depth.DepthWeights:
    mean = [[1.0, None], [embedding, newest]]
    return depth.DepthWeights(["A1", "F1"], ["E", "A1"], mean, signed=signed)
