"""Attention over depth and DenseFormer: against their equations, on both stores, in float64."""

import jax
import numpy as np
import pytest

from rmt_tpu import config as cfg
from tests import models
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks
from tests.tiers import later

LAYERS = 4
FULL = {
    "full": cfg.FullAttention(),
    "full, passes of one layer": cfg.FullAttention(phase_layers=1),
    "full, one pass": cfg.FullAttention(phase_layers=LAYERS),
    "full, passes that do not divide": cfg.FullAttention(phase_layers=3, key_gain=False),
}
BLOCKS = {
    "2 sublayers": cfg.BlockAttention(sublayers_per_block=2),
    "1 layer": cfg.BlockAttention(layers_per_block=1),
    "3 sublayers": cfg.BlockAttention(sublayers_per_block=3),
    "6 sublayers, 2 left over": cfg.BlockAttention(sublayers_per_block=6),
    "5 sublayers": cfg.BlockAttention(num_blocks=2),
    "1 block": cfg.BlockAttention(num_blocks=1),
    "no gain": cfg.BlockAttention(num_blocks=4, key_gain=False),
}
DENSE = {
    "dense": cfg.Dense(),
    "dense, dilated": cfg.Dense(dilation=2),
    "dense, every other layer": cfg.Dense(dilation=2, period=2),
}
ABLATIONS = {
    "input query": cfg.FullAttention(query="input"),
    "scalars": cfg.FullAttention(query="scalars"),
    "sigmoid": cfg.FullAttention(weights="sigmoid"),
    "no key norm": cfg.FullAttention(key_norm=False),
    "heads": cfg.FullAttention(num_heads=2),
    "window": cfg.FullAttention(window=3),
    "blocks, input query": cfg.BlockAttention(sublayers_per_block=3, query="input"),
    "blocks, scalars": cfg.BlockAttention(sublayers_per_block=4, query="scalars"),
    "blocks, heads, no key norm": cfg.BlockAttention(
        sublayers_per_block=4, num_heads=2, key_norm=False
    ),
}


def of_blocks(mixer: cfg.Mixer, depth: int = 2 * LAYERS) -> int:
    return mixer.sublayers_a_block(depth)


def plain_weights(k, sources, site, params, mixer, epsilon=1e-6):
    """Weights [sources, batch, seq, heads] of flat sources [sources, batch, seq, D] at site k."""
    v = np.stack(sources)
    rms = lambda x: np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)
    H, D = mixer.num_heads, v.shape[-1]
    if mixer.query == "scalars":
        before = sum(len(plain_sources_of(i, of_blocks(mixer))) for i in range(k))
        logits = params["mixer"]["logits"][before : before + len(v)][:, None, None, None]
        logits = logits * np.ones((*v.shape[:-1], 1))
    else:
        query = site["mix"]["query"].reshape(-1)
        if mixer.query == "input":
            query = query + (v[-1] / rms(v[-1])) @ site["mix"]["project"]
        keys = v / rms(v) if mixer.key_norm else v
        if "key_gain" in site["mix"]:
            keys = keys * site["mix"]["key_gain"].reshape(-1)
        logits = (query * keys).reshape(*v.shape[:-1], H, D // H).sum(-1)
    if mixer.weights == "sigmoid":
        return checks.sigmoid(logits)
    shown = np.ones(len(v), bool)
    if getattr(mixer, "window", None) is not None:
        shown[1 : -mixer.window] = False
    logits = np.where(shown[:, None, None, None], logits, -np.inf)
    return plain.softmax(logits, 0)


def plain_sources_of(k, S):
    """Which sublayers' outputs (from 1; 0 is the embedding) each source of site k adds up."""
    blocks = [range(n * S + 1, min((n + 1) * S, k) + 1) for n in range(-(-k // S))]
    return [range(0, 1), *blocks]


def attention_over_depth(mixer, params, depth=2 * LAYERS):
    """`mix(k, site, written)` for `plain.model`: equations 2 to 6 with all that was written."""

    def mix(k, site, written):
        shape = written[0].shape
        parts = plain_sources_of(k, of_blocks(mixer, depth))
        sources = [sum(written[i] for i in part).reshape(*shape[:2], -1) for part in parts]
        w = plain_weights(k, sources, site, params, mixer)
        heads = w.shape[-1]
        v = np.stack(sources)
        split = v.reshape(*v.shape[:-1], heads, -1)
        return np.sum(w[..., None] * split, axis=0).reshape(shape)

    return mix


def dense(mixer, params, depth=2 * LAYERS):
    """DenseFormer's Y of the layer that a site is in, and what that layer has added to it."""
    weights, layers = iter(params["mixer"]["weights"]), depth // 2
    a = np.eye(layers + 1).tolist()
    for i in range(1, layers + 1):
        for j in range(i + 1):
            if i % mixer.period == 0 and (i - j) % mixer.dilation == 0:
                a[i][j] = next(weights)

    def mix(k, site, written):
        outputs = [written[0]]
        for layer in range(layers + 1):
            given = sum(a[layer][j] * outputs[j] for j in range(layer + 1))
            inside = written[2 * layer + 1 : 2 * layer + 3]
            if layer == k // 2:
                return given + sum(inside)
            outputs.append(given + sum(inside))

    return mix


def reference(params, tokens, config):
    system = dense if isinstance(config.mixer, cfg.Dense) else attention_over_depth
    mix = system(config.mixer, params, config.num_sublayers)
    return plain.model(params, tokens, config, mix)


ALL = FULL | BLOCKS | DENSE | ABLATIONS
MATRIX = ["full", "3 sublayers", "6 sublayers, 2 left over", "dense", "input query"]
SYSTEMS = [("vector", name) for name in ALL] + [("matrix", name) for name in MATRIX]
# Every kind of mixer, both stores and both backward schedules.
FAST = [
    ("vector", "full", "full"),
    ("vector", "6 sublayers, 2 left over", "blocks"),
    ("vector", "input query", "full"),
    ("matrix", "3 sublayers", "full"),
    ("vector", "dense, dilated", "blocks"),
]
EVERY = [(*system, remat) for system in SYSTEMS for remat in ("full", "blocks")]


@pytest.mark.parametrize(
    ("store", "name", "remat"), FAST + later(*(case for case in EVERY if case not in FAST))
)
def test_equals_the_equations_and_so_do_its_gradients(store, name, remat):
    """Logits, and the gradients by both backward schedules, in float64."""
    with jax.enable_x64(True):
        config = models.model(
            store, num_layers=LAYERS, mixer=ALL[name], remat=remat, compute_dtype="float64"
        )
        checks.assert_follows_equations(config, reference)
