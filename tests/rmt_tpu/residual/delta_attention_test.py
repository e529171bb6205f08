"""Delta attention against its equations, in float64, on both stores; its start."""

import jax
import numpy as np
import optax
import pytest

from rmt_tpu import config as cfg
from rmt_tpu.layers.parameters import metadata
from rmt_tpu.training.optimizer import make_optimizer
from tests import models
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks
from tests.tiers import later

LAYERS = 4
DELTAS = {
    "1 sublayer": cfg.DeltaAttention(sublayers_per_block=1),
    "1 sublayer, null": cfg.DeltaAttention(sublayers_per_block=1, null_source=0.0),
    "1 layer": cfg.DeltaAttention(layers_per_block=1),
    "1 layer, null": cfg.DeltaAttention(layers_per_block=1, null_source=0.5),
    "3 sublayers, null": cfg.DeltaAttention(sublayers_per_block=3, null_source=0.0),
    "6 sublayers, 2 left over": cfg.DeltaAttention(sublayers_per_block=6, null_source=1.0),
    "2 layers": cfg.DeltaAttention(layers_per_block=2),
    "3 sublayers": cfg.DeltaAttention(sublayers_per_block=3),
    "1 block, no gain": cfg.DeltaAttention(num_blocks=1, key_gain=False),
}
SYSTEMS = [
    (store, name, remat)
    for store in ("vector", "matrix")
    for name in DELTAS
    for remat in ("full", "blocks")
]
FAST = [("matrix", "1 layer, null", "full"), ("vector", "3 sublayers", "full")]


def mix_of(mixer, depth):
    """`mix(k, site, written)` for `plain.model`: h, and what attention over deltas adds to it."""
    S = mixer.sublayers_a_block(depth)

    def mix(k, site, written):
        shape, mix = written[0].shape, site["mix"]
        h = sum(written)
        if k == 0:
            return h
        deltas = [sum(written[1 + n : 1 + min(n + S, k)]) for n in range(0, k, S)]
        v = np.stack(deltas).reshape(len(deltas), *shape[:2], -1)
        keys = v / np.sqrt(np.mean(v**2, axis=-1, keepdims=True) + mixer.epsilon)
        gain = mix["key_gain"].reshape(-1) if "key_gain" in mix else 1
        logits = (keys * gain) @ mix["query"].reshape(-1)
        if mixer.null_source is not None:
            logits = np.concatenate([logits, mix["null_logit"] * np.ones((1, *shape[:2]))])
            v = np.concatenate([v, np.zeros_like(v[:1])])
        a = plain.softmax(logits, 0)
        return h + mix["gate"] * np.sum(a[..., None] * v, axis=0).reshape(shape)

    return mix


def reference(params, tokens, config):
    return plain.model(params, tokens, config, mix_of(config.mixer, config.num_sublayers))


@pytest.mark.parametrize(
    ("store", "name", "remat"), FAST + later(*(case for case in SYSTEMS if case not in FAST))
)
def test_equals_the_equations_and_so_do_its_gradients(store, name, remat):
    with jax.enable_x64(True):
        changes = {"num_layers": LAYERS, "remat": remat, "compute_dtype": "float64"}
        config = models.model(store, mixer=DELTAS[name], **changes)
        # The softmax over the single delta of a single block does not depend on the query.
        unused = ("query",) if config.mixer.num_blocks == 1 else ()
        checks.assert_follows_equations(config, reference, unused=unused)


@pytest.mark.slow
def test_vectors_held_in_whole_tiles_are_the_same_vectors():
    with jax.enable_x64(True):
        changes = {"store": cfg.VectorStore(120), "norm": "rmsnorm", "compute_dtype": "float64"}
        config = models.model("vector", mixer=DELTAS["3 sublayers, null"], **changes)
        checks.assert_follows_equations(config, reference)


@pytest.mark.slow
def test_queries_get_a_gradient_once_their_gate_has_moved():
    """Queries get no gradient while their gate is 0, and one after the gate's first step."""
    config = models.model("vector", mixer=cfg.DeltaAttention(num_blocks=3), num_layers=3)
    _, params = models.split(config)
    run, tree = checks.gradients_and_logits(config), lambda n: metadata(models.abstract(config), n)
    optimizer = make_optimizer(
        cfg.AdamW(learning_rate=0.01),
        rates=jax.tree.map(lambda _: 1.0, params),
        roles=tree("role"),
        axes=tree("axes"),
        steps=5,
    )
    norms = lambda tree, name: [
        float(np.linalg.norm(x))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if path[-1].key == name
    ]
    gradients, _ = run(params)
    assert max(norms(gradients, "query")) == 0 < min(norms(gradients, "gate"))
    updates, _ = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(params), params)
    params = jax.jit(optax.apply_updates)(params, updates)
    assert min(norms(run(params)[0], "query")) > 0
