"""Loss and every gradient of a train step on a mesh are those of one device, to 1e-5 in float32.

Each store with each mixer, over each axis of the mesh alone and over each pair of axes. `make test`
takes all of them for the plain residual matrix, and for the other systems a few meshes of several
axes, in which every axis is; `make test-all` takes all.
"""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.training.run import prepare
from tests import models

AXES = ("data", "fsdp", "tensor", "sequence", "stage", "key")
MIXERS = {
    "sum": cfg.Sum(),
    "blocks": cfg.BlockAttention(num_blocks=2),
    "odd blocks": cfg.BlockAttention(sublayers_per_block=3),
    "full": cfg.FullAttention(),
    "input query": cfg.BlockAttention(num_blocks=2, query="input"),
    "scores without norm": cfg.FullAttention(weights="sigmoid", key_norm=False),
    "dense": cfg.Dense(),
    "hc": cfg.HyperConnections(streams=2),
    "mhc": cfg.Mhc(streams=2),
    "mhc-lite": cfg.MhcLite(streams=2),
    "highway": cfg.Highway(),
    "lstm": cfg.DepthLstm(),
    "hierarchical": cfg.Hierarchical(hidden_dim=10),
}
ON_MATRICES = ("sum", "reversible", "blocks", "odd blocks", "full", "scores without norm", "dense")
SYSTEMS = [("vector", name) for name in MIXERS] + [("matrix", name) for name in ON_MATRICES]
THOROUGH = ("matrix", "sum")
# These do not go with stages: their blocks or backward passes are not of one chunk of layers.
WITHOUT_STAGES = {"odd blocks", "input query", "scores without norm", "reversible"}


def meshes(store, name):
    """Meshes of `make test`, and those that are left to `make test-all`."""
    axes = [axis for axis in AXES if axis != "key" or store == "matrix"]
    if name in WITHOUT_STAGES:
        axes.remove("stage")
    every = axes + [",".join(pair) for pair in itertools.combinations(axes, 2)]
    if (store, name) == THOROUGH:
        return every, []
    few = ["fsdp,sequence,tensor"]
    few += ["data,stage,key" if "stage" in axes else "data,key"] if store == "matrix" else []
    few += ["data,stage"] if store == "vector" and "stage" in axes else []
    return few, [mesh for mesh in every if mesh not in few]


def cases():
    for store, name in SYSTEMS:
        now, later = meshes(store, name)
        yield from (pytest.param(store, name, mesh) for mesh in now)
        yield from (pytest.param(store, name, mesh, marks=pytest.mark.slow) for mesh in later)


def run_config(store, name, mesh):
    remat = {"remat": "reversible"} if name == "reversible" else {}
    model = models.model(
        store,
        num_layers=2,
        num_heads=4,
        head_dim=6,
        vocab_size=models.VOCAB + 1,
        store={"vector": cfg.VectorStore(dim=12), "matrix": cfg.MatrixStore(key_dim=6)}[store],
        feed_forward=cfg.FeedForward(hidden_dim=10),
        mixer=MIXERS.get(name, cfg.Sum()),
        **remat,
    )
    train = cfg.TrainConfig(steps=2, batch_size=8, mesh=mesh)
    return cfg.RunConfig(model=model, train=train, data=cfg.DataConfig(seq_len=12))


def gradients(store, name, mesh):
    devices = 2 ** mesh.count("=2")
    run = prepare(run_config(store, name, mesh), sharding.make_mesh(mesh, jax.devices()[:devices]))
    placed = jax.device_put(parameters(store, name), run.state_shardings.params)
    batch = jax.device_put(models.batch(8, 12), run.batch_sharding)
    return run, jax.tree.map(np.asarray, jax.jit(run.gradients)(placed, batch))


@cache
def parameters(store, name):
    """Those of a model that has learned something: none is zero."""
    run = prepare(run_config(store, name, ""), sharding.make_mesh("data=1", jax.devices()[:1]))
    params = jax.jit(run.init)().params
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    noise = [p + 0.05 * rng.normal(size=p.shape).astype(np.float32) for p in leaves]
    return jax.tree.map(np.asarray, tree.unflatten(noise))


@cache
def alone(store, name):
    return gradients(store, name, "data=1")[1]


@pytest.mark.parametrize("store, name, mesh", list(cases()))
def test_gradients_on_a_mesh_are_those_of_one_device(store, name, mesh):
    spec = ",".join(f"{axis}=2" for axis in mesh.split(","))
    _, got = gradients(store, name, spec)
    expected = alone(store, name)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1e-2, np.abs(b).max()))


def test_each_device_has_its_part_of_the_parameters():
    mesh = "fsdp=2,tensor=2,key=2"
    run, _ = gradients("matrix", "sum", mesh)
    shapes = jax.tree.map(lambda p: p.shape, parameters("matrix", "sum"))
    sizes = jax.tree.map(
        lambda s, shape: s.shard_shape(shape),
        run.state_shardings.params,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.Sharding),
    )
    layers = sizes["layers"]
    assert layers["feed_forward"]["w_1"] == (2, 12, 5)  # [layers, width / fsdp, ff / tensor]
    assert layers["attention_site"]["gain"] == (2, 3, 6)  # [layers, D_k / key, D_v]
    assert layers["attention_site"]["read_keys"] == (2, 12, 3)
    assert sizes["unembedding"]["kernel"] == (12, models.VOCAB + 1)
    moments = run.state_shardings.optimizer[1]
    assert jax.tree.leaves(moments.mu) == jax.tree.leaves(run.state_shardings.params)


def test_accumulated_parts_are_added_before_devices_add_theirs():
    mesh = sharding.make_mesh("data=2,fsdp=2", jax.devices()[:4])
    config = run_config("vector", "sum", "")
    results = []
    for accumulate in (1, 2):
        train = cfg.TrainConfig(steps=2, batch_size=8, accumulate=accumulate)
        run = prepare(cfg.RunConfig(model=config.model, train=train, data=config.data), mesh)
        step = jax.jit(run.gradients)
        args = (parameters("vector", "sum"), models.batch(8, 12))
        results.append(step(*args))
        program = step.lower(*args).as_text()
        results[-1] = (results[-1], program.count("stablehlo.all_reduce"))
    (one, once), (two, again) = results
    assert again == once
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1e-2, np.abs(b).max()))


@pytest.mark.parametrize(
    "mesh, changes, message",
    [
        ("data=3", {}, "--batch_size=8 is not divisible over mesh axes data=3; .*: 6 or 9"),
        ("key=3", {}, "--batch_size=8 is not divisible over mesh axes key=3"),
        ("sequence=8", {}, "--seq_len=12 .* mesh axes sequence=8; nearest legal: 8 or 16"),
        ("tensor=3", {}, "model.attention.num_heads=4 .* mesh axes tensor=3; .*: 3 or 6"),
        ("key=4", {}, "key=4 does not divide the parameters' axis 'key' of size 6; legal: 1, 2"),
        ("key=2", {"store": "vector"}, "key=2 divides D_k, which a vector store does not have"),
        ("stage=8", {}, "model.num_layers=2 is not divisible over stage=8 x .*: 8"),
        ("stage=2", {"name": "reversible"}, "stage=2 does not go with .*'reversible'; legal: none"),
    ],
)
def test_what_does_not_divide_is_said_in_one_line(mesh, changes, message):
    config = run_config(changes.get("store", "matrix"), changes.get("name", "sum"), mesh)
    devices = int(mesh[-1])
    with pytest.raises(sharding.MeshError, match=message) as caught:
        prepare(config, sharding.make_mesh(mesh, jax.devices()[:devices]))
    assert "\n" not in str(caught.value)


def test_the_objective_counts_every_token_once():
    """Each device has the loss of its own tokens: the sum over all of them is the whole batch's."""
    run = prepare(run_config("matrix", "sum", ""), sharding.make_mesh("data=2,sequence=2,key=2"))
    batch = models.batch(8, 12)
    sums = jax.jit(run.loss)(parameters("matrix", "sum"), batch)
    _, mean = alone("matrix", "sum")
    np.testing.assert_allclose(sums.cross_entropy / jnp.sum(batch.weights), mean.cross_entropy,
                               rtol=1e-6)  # fmt: skip
