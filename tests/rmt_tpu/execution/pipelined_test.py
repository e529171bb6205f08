"""Decoders on a mesh with stages: losses and gradients of one device."""

import functools

import jax
import numpy as np
import pytest

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.config import DataConfig, RunConfig, TrainConfig
from rmt_tpu.execution import pipelined
from rmt_tpu.training.run import prepare
from tests import models
from tests.closeness import assert_close

# A row's tokens do not divide over stages.
BATCH, SEQ = 8, 6
MATRIX = {"num_layers": 4, "num_heads": 2, "store": cfg.MatrixStore(key_dim=4)}
VECTOR = {"num_layers": 4, "num_heads": 2}


def prepared(model, mesh, **train):
    """A run on a mesh, parameters that are not the first ones as it has them, and a batch."""
    train = TrainConfig(batch_size=BATCH, mesh=mesh, **train)
    sizes = (part.split("=")[1] for part in mesh.split(","))
    on = sharding.make_mesh(mesh, jax.devices()[: int(np.prod([int(size) for size in sizes]))])
    run = prepare(RunConfig(model=model, train=train, data=DataConfig(seq_len=SEQ)), on)
    base = models.random_parameters(model)
    chunked = lambda x, like: np.reshape(x, like.shape)
    params = jax.tree.map(chunked, base, jax.eval_shape(run.init).params)
    params = jax.device_put(params, run.state_shardings.params)
    return run, params, jax.device_put(models.batch(BATCH, SEQ), run.batch_sharding)


def gradients(model, mesh, **train):
    """In float64, with the losses; in the shapes of one device's."""
    run, params, batch = prepared(model, mesh, **train)
    of_params, loss = jax.jit(run.gradients)(params, batch)
    like = models.random_parameters(model)
    return loss, jax.tree.map(lambda g, like: np.reshape(g, like.shape), of_params, like)


@functools.cache
def on_one_device(model):
    return gradients(model, "data=1")


def check(kind, mixer, mesh, **train):
    with jax.enable_x64(True):
        options = MATRIX if kind == "matrix" else VECTOR
        model = models.model(kind, mixer=mixer, compute_dtype="float64", **options)
        got, expected = gradients(model, mesh, **train), on_one_device(model)
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(expected))
    # Of each array's largest; rounding over a few hundred operations in a row.
    assert_close(got, expected, 1e-11)


# More microbatches than a stage has in flight.
SOME = [
    ("matrix", cfg.Dense(), "stage=2,tensor=2", {"virtual_stages": 2, "microbatches": 8}),
]
MORE = [
    ("matrix", cfg.Sum(), "stage=2,data=2", {"microbatches": 4}),
    ("vector", cfg.Hierarchical(hidden_dim=5), "stage=2", {"virtual_stages": 2}),
    ("vector", cfg.Dense(), "stage=4,fsdp=2", {}),
    ("vector", cfg.Mudd(), "stage=2,tensor=2", {}),
    ("matrix", cfg.Mudd(), "stage=2,key=2", {"virtual_stages": 2, "microbatches": 4}),
    ("vector", cfg.FullAttention(), "stage=2,tensor=2", {}),
    ("vector", cfg.Sum(), "stage=4,sequence=2", {"microbatches": 8}),
    ("vector", cfg.Highway(form="gated"), "stage=2,fsdp=2", {"virtual_stages": 2}),
    ("vector", cfg.DepthLstm(), "stage=2,data=2", {}),
    ("matrix", cfg.WideStreams(forget=0.1), "stage=2,key=2", {}),
    ("matrix", cfg.ResidualScalars(), "stage=2,key=2", {}),
    ("vector", cfg.ResidualScalars(), "stage=2,tensor=2", {"virtual_stages": 2}),
    ("vector", cfg.Mhc(), "stage=2", {"virtual_stages": 2}),
    ("vector", cfg.BlockAttention(num_blocks=2), "stage=2,sequence=2", {"microbatches": 4}),
    ("matrix", cfg.FullAttention(), "stage=2,key=2,fsdp=2", {"virtual_stages": 2}),
    ("matrix", cfg.BlockAttention(num_blocks=4), "stage=2,key=2", {"virtual_stages": 2}),
    ("matrix", cfg.DeltaAttention(num_blocks=4), "stage=2,key=2", {"virtual_stages": 2}),
    (
        "matrix",
        cfg.BlockAttention(num_blocks=4, newest_bias=3.0, cumulative=True),
        "stage=2,key=2",
        {"virtual_stages": 2, "microbatches": 4},
    ),
    ("vector", cfg.FullAttention(query="scalars"), "stage=4", {}),
    ("vector", cfg.FullAttention(query="input", num_heads=2), "stage=2,fsdp=2", {}),
    (
        "vector",
        cfg.FullAttention(window=2, weights="sigmoid", output_site="sum", key_norm=False),
        "stage=2,tensor=2",
        {"virtual_stages": 2},
    ),
]


def label(x):
    """Of an argument in the name of a test."""
    if isinstance(x, dict):
        return " ".join(f"{name}={value}" for name, value in x.items())
    return x if isinstance(x, str) else x.kind


@pytest.mark.parametrize("kind, mixer, mesh, train", SOME, ids=label)
def test_loss_and_gradients_are_those_of_one_device(kind, mixer, mesh, train):
    check(kind, mixer, mesh, **train)


@pytest.mark.slow
@pytest.mark.parametrize("kind, mixer, mesh, train", MORE, ids=label)
def test_and_of_the_other_mixers(kind, mixer, mesh, train):
    check(kind, mixer, mesh, **train)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [cfg.Sum(), cfg.BlockAttention(num_blocks=4)], ids=label)
def test_the_loss_alone_is_that_of_the_gradient(mixer):
    """Of an evaluation, which no microbatch goes back for."""
    with jax.enable_x64(True):
        model = models.model("matrix", mixer=mixer, compute_dtype="float64", **MATRIX)
        train = {"virtual_stages": 2, "microbatches": 8}
        run, params, batch = prepared(model, "stage=2", **train)
        got, total = jax.jit(run.loss)(params, batch), np.sum(models.batch(BATCH, SEQ).weights)
        expected, _ = on_one_device(model)
    got = (np.asarray(got.cross_entropy) / total, np.asarray(got.z) / total)
    assert_close(got, (expected.cross_entropy, expected.z), 1e-11)


REFUSED = [
    ({"num_layers": 6}, (4, 1, 4), 8, "num_layers=6 .* stage=4 .* nearest legal: 4 or 8"),
    (
        {"stacks": (cfg.Stack(2 * (cfg.Attention(3, 6), cfg.FeedForward(22)), 3),)},
        (2, 1, 2),
        2,
        r"model.stacks.0.repeat=3 is not divisible by stage=2 .*; nearest legal: 2 or 4",
    ),
    ({"num_layers": 4}, (2, 1, 4), 6, "microbatches=4 does not divide the 6 sequences"),
    ({"num_layers": 4}, (2, 1, 2), 3, r"microbatches=2 \(0 means stage=2\) does not .* 2 or 4"),
    ({"num_layers": 4, "remat": "reversible"}, (2, 1, 2), 2, "'reversible'; legal policies: none"),
    (
        {"num_layers": 8, "mixer": cfg.BlockAttention(num_blocks=4)},
        (4, 2, 4),
        4,
        "2 sublayers, which is not a multiple of the 4 sublayers of .* chunks: 2, 4, or stage=1$",
    ),
    (
        {"num_layers": 4, "mixer": cfg.BlockAttention(sublayers_per_block=3)},
        (2, 1, 2),
        2,
        "4 sublayers, which is not a multiple of the 3 sublayers of a block; legal: stage=1$",
    ),
]


@pytest.mark.parametrize("options, sizes, sequences, message", REFUSED)
def test_what_has_no_pipeline_is_one_line(options, sizes, sequences, message):
    with pytest.raises(sharding.MeshError, match=message):
        pipelined.check(models.model("matrix", **options), sharding.Schedule(*sizes), sequences)
