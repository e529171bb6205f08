"""Mixers that begin as the plain model: with its weights they have its logits, loss and gradients.

All in float64. A site of attention over depth whose query is zero reads the mean h of n sources S,
and the plain model their sum, so that before every read

    norm(S / n) = S / sqrt(mean(S^2) + n^2 epsilon)      norm(S) = S / sqrt(mean(S^2) + epsilon)

differ by a share of less than `n^2 epsilon / (2 mean(S^2))`. So does the sum of n equal streams, of
hyper-connections. What L sublayers and the readout make of it, to first order: see `bound`.
"""

import dataclasses
import functools
import re
from typing import get_args

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import sharding
from rmt_tpu import Decoder
from rmt_tpu import config as cfg
from rmt_tpu.layers.parameters import metadata
from rmt_tpu.training.optimizer import make_optimizer
from rmt_tpu.training.run import prepare
from tests import models
from tests.closeness import assert_close, largest_error
from tests.rmt_tpu.residual import checks

EPSILON = 1e-14  # of every norm behind a read
LAYERS = 4
ATTENTION = {
    "full": cfg.FullAttention(),
    "full, passes of one layer": cfg.FullAttention(phase_layers=1),
    "full, passes that do not divide": cfg.FullAttention(phase_layers=3),
    "1 block": cfg.BlockAttention(num_blocks=1),
    "1 layer": cfg.BlockAttention(layers_per_block=1),
    "3 sublayers": cfg.BlockAttention(sublayers_per_block=3),
    "5 sublayers": cfg.BlockAttention(sublayers_per_block=5),
    "6 sublayers": cfg.BlockAttention(sublayers_per_block=6),
    "mean": cfg.BlockAttention(sublayers_per_block=3, query="none"),
    "full mean": cfg.FullAttention(query="none"),
    "input query": cfg.BlockAttention(num_blocks=2, query="input"),
    "scalars": cfg.FullAttention(query="scalars"),
    "sigmoid": cfg.FullAttention(weights="sigmoid"),
    "heads, no key norm": cfg.FullAttention(num_heads=2, key_norm=False),
    "no key gain": cfg.BlockAttention(sublayers_per_block=3, key_gain=False),
    "bias of zero": cfg.BlockAttention(sublayers_per_block=3, newest_bias=0.0),
    "output sum": cfg.BlockAttention(sublayers_per_block=3, output_site="sum"),
}
OTHERS = {
    "delta, 3 sublayers": cfg.DeltaAttention(sublayers_per_block=3),
    "delta, 1 sublayer": cfg.DeltaAttention(sublayers_per_block=1, null_source=0.0),
    "dense": cfg.Dense(),
    "mudd": cfg.Mudd(),
    "hc, static": cfg.HyperConnections(streams=2, dynamic=False),
    "hc": cfg.HyperConnections(),
    "mhc": cfg.Mhc(),
    "mhc-lite": cfg.MhcLite(init="prenorm"),
    "wide": cfg.WideStreams(),
    "scalars": cfg.ResidualScalars(),
}
BEGINS = ATTENTION | OTHERS
ON_MATRICES = {name: mixer for name, mixer in OTHERS.items() if mixer.on_matrix}
STORES = {"vector": BEGINS, "matrix": ATTENTION | ON_MATRICES}
EVERY = [
    (store, name, remat)
    for store, mixers in STORES.items()
    for name, mixer in mixers.items()
    for remat in (("full", "blocks") if mixer.banked else ("none", "dots", "full"))
]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(store: str, mixer: cfg.Mixer, **changes) -> cfg.ModelConfig:
    sizes = {"num_layers": LAYERS, "num_heads": 2, "norm_epsilon": EPSILON}
    return models.model(store, mixer=mixer, compute_dtype="float64", **sizes | changes)


def paths(tree) -> dict[str, np.ndarray]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in found}


@functools.cache
def with_weights_of_plain(config: cfg.ModelConfig) -> dict:
    """The plain model's weights by their paths, and the mixer's own as they start."""
    plain = paths(models.random_parameters(make(config.store.kind, cfg.Sum())))

    @jax.jit
    def own():
        drawn = paths(nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)))
        return {path: x for path, x in drawn.items() if path not in plain}

    weights = own() | plain
    shapes = nnx.to_pure_dict(nnx.state(models.abstract(config), nnx.Param))

    def take(path, like):
        weight = weights[jax.tree_util.keystr(path)]
        assert weight.shape == like.shape
        return np.asarray(weight, np.float64)

    return jax.tree_util.tree_map_with_path(take, shapes)


@functools.cache
def trained(config: cfg.ModelConfig, mesh: str = "data=1"):
    """A run's gradients and mean losses, with the weights of the plain model."""
    train = cfg.TrainConfig(batch_size=4, mesh=mesh)
    run_config = cfg.RunConfig(model=config, train=train, data=cfg.DataConfig(seq_len=11))
    count = int(np.prod([*sharding.parse_mesh(mesh).values()]))
    run = prepare(run_config, sharding.make_mesh(mesh, jax.devices()[:count]))
    params = jax.device_put(with_weights_of_plain(config), run.state_shardings.params)
    batch = jax.device_put(models.batch(), run.batch_sharding)
    return jax.jit(run.gradients)(params, batch)


def bound(config: cfg.ModelConfig) -> float:
    """How far results may be from the plain model's, relative to the largest.

    Each of the 2L + 1 reads is off by a share of `n^2 epsilon / (2 mean(S^2))`, n at most 2L + 1
    and the mean square at least 0.1: that of the embedding is of order 1, as a draw. A read goes
    into a result with the power 3 at most (queries, keys and values), and once more into its
    gradient. And 1e-11 of rounding, as everywhere in float64.
    """
    sites = config.num_sublayers + 1
    return 1e-11 + sites * 4 * sites**2 * EPSILON / (2 * 0.1)


def shared(config, gradients) -> dict:
    plain = paths(models.random_parameters(make(config.store.kind, cfg.Sum())))
    return {path: x for path, x in paths(gradients).items() if path in plain}


@pytest.mark.slow
@pytest.mark.parametrize(("store", "name", "remat"), EVERY)
def test_loss_and_gradients_at_the_start_are_the_plain_models(store, name, remat):
    """Of a whole training batch, with documents and padding."""
    config = make(store, STORES[store][name], remat=remat)
    plain = make(store, cfg.Sum())
    (got, loss), (expected, wanted) = trained(config), trained(plain)
    assert_close(loss, wanted, bound(config))
    assert_close(shared(config, got), shared(plain, expected), bound(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "mixer"),
    [
        ("vector", cfg.FullAttention()),
        ("matrix", cfg.BlockAttention(layers_per_block=1)),
    ],
)
def test_so_they_are_on_stages(store, mixer):
    config, plain = make(store, mixer), make(store, cfg.Sum())
    (got, loss), (expected, wanted) = trained(config, "stage=2"), trained(plain)
    assert_close(loss._replace(aux={}), wanted._replace(aux={}), bound(config))
    assert_close(shared(config, got), shared(plain, expected), bound(config))


@pytest.mark.slow
@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_after_five_steps_queries_have_moved_and_logits_differ(store):
    """By AdamW at a rate of 0.01, so that what was the bound at the start is left far behind."""
    config = make(store, cfg.BlockAttention(sublayers_per_block=3), remat="full")
    plain = make(store, cfg.Sum(), remat="full")
    logits = {}
    for one in (config, plain):
        tree = lambda name, one=one: metadata(models.abstract(one), name)
        params = with_weights_of_plain(one)
        given = {"roles": tree("role"), "axes": tree("axes"), "steps": 5}
        rates = jax.tree.map(lambda _: 1.0, params)
        optimizer = make_optimizer(cfg.AdamW(learning_rate=0.01), rates=rates, **given)
        update, state = jax.jit(optimizer.update), optimizer.init(params)
        run = checks.gradients_and_logits(one)
        for _ in range(5):
            gradients, _ = run(params)
            updates, state = update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        logits[one] = run(params)[1]
        queries = [x for path, x in paths(params).items() if "'query'" in path]
        assert bool(queries) == (one == config)
        assert all(np.abs(x).mean() > 1e-3 for x in queries)
    assert largest_error(logits[config], logits[plain]) > 1e-3 > 1e3 * bound(config)


ANOTHER = {
    "mhc-lite as its authors start it": cfg.MhcLite(streams=2),
    "wide, forgetting": cfg.WideStreams(forget=0.1),
    "scalars with x_0": cfg.ResidualScalars(embedding_scale=0.1),
    "delta as in its paper": cfg.DeltaAttention(sublayers_per_block=3, gate=1.0),
    "a window": cfg.FullAttention(window=2),
    "a bias": cfg.FullAttention(newest_bias=3.0),
    "cumulative": cfg.BlockAttention(sublayers_per_block=3, cumulative=True),
    "output newest": cfg.BlockAttention(sublayers_per_block=3, output_site="newest"),
    "normed embedding": cfg.FullAttention(normed_embedding=True),
    "highway": cfg.Highway(),
    "hierarchical": cfg.Hierarchical(hidden_dim=10),
}


def test_a_mixer_states_whether_it_begins_as_the_plain_model():
    """As the other tests measure it; a mixer that is not among them is found here."""
    measured = {True: BEGINS, False: ANOTHER | {"lstm": cfg.DepthLstm()}}
    for same, mixers in measured.items():
        for name, mixer in mixers.items():
            config = make("vector", mixer)
            stated = cfg.start_from(config, make("vector", cfg.Sum()))
            assert stated == mixer.plain_start(config) and stated.same is same, name
    kinds = {mixer.kind for mixers in measured.values() for mixer in mixers.values()}
    assert kinds == {mixer.kind for mixer in get_args(cfg.Mixer)} - {"sum"}


def test_a_start_from_another_config_is_stated():
    plain = make("vector", cfg.Sum())
    block = make("vector", cfg.BlockAttention(num_blocks=2))
    matrix, of_matrix = make("matrix", cfg.Sum()), make("matrix", cfg.FullAttention())
    dtypes = {"compute_dtype": "bfloat16", "remat": "full", "init_std": 0.5}
    cases = [
        (block, plain, True, "queries of zero"),
        (block, block.replace(**dtypes), True, "the config is the same"),
        (plain, block, None, "mixer is block_attention there and sum here"),
        (matrix, plain, False, "key vectors .* are random"),
        (plain, matrix, False, "matrices .* are random"),
        (of_matrix, matrix, True, "queries of zero"),
        (block.replace(norm="rmsnorm"), plain, None, 'model.norm is "layernorm" there, "rmsnorm"'),
        (make("vector", cfg.Sum(), norm_epsilon=1e-6), plain, None, "model.norm_epsilon is 1e-14"),
    ]
    for model, source, same, reason in cases:
        stated = cfg.start_from(model, source)
        assert stated.same is same and re.search(reason, stated.reason), (stated, reason)
        alike = reason == "the config is the same"
        assert cfg.is_same_model(model, source) == alike
    after = [dataclasses.replace(core, normed="output") for core in plain.stacks[0].cores]
    stacks = (cfg.Stack(tuple(after), LAYERS),)
    for mixer, same in (
        (cfg.HyperConnections(), True),
        (cfg.Mhc(), False),
        (BEGINS["mhc-lite"], False),
    ):
        model = dataclasses.replace(plain, stacks=stacks, mixer=mixer)
        assert cfg.start_from(model, dataclasses.replace(model, mixer=cfg.Sum())).same is same
    assert not cfg.is_same_model(matrix.replace(store=cfg.MatrixStore(key_dim=6)), matrix)


@pytest.mark.slow
@pytest.mark.parametrize("name", ANOTHER)
def test_other_mixers_begin_as_another_model(name):
    """mHC-lite as its authors start it, for example: home streams are written more than others."""
    remat = "full" if ANOTHER[name].banked else "none"
    config, plain = make("vector", ANOTHER[name], remat=remat), make("vector", cfg.Sum())
    assert (
        abs(trained(config)[1].objective / trained(plain)[1].objective - 1)
        > 1e-5
        > 1e4 * bound(config)
    )
