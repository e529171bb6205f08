"""Loss and every gradient of a train step on a mesh are those of one device, in float64.

A mesh of eight devices has three axes of two, and so three pairs of axes: six meshes have all
fifteen. They are compiled for one system of each kind; every other system meets all its axes in two
meshes. `make test` takes one mesh for each way to run layers (stages are in `pipelined_test`);
`make test-all` takes all, and each axis alone for the systems that have the six.
"""

import dataclasses
import itertools
from functools import cache

import jax
import numpy as np
import pytest

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.training.run import prepare
from tests import models
from tests.tiers import later

# Of an array's largest gradient, or of 0.01: rounding over a few hundred operations in a row.
TOLERANCE = 1e-11
AXES = ("data", "fsdp", "tensor", "sequence", "stage", "key")
COVERING = [
    ("fsdp", "stage", "key"),
    ("tensor", "sequence", "key"),
    ("data", "fsdp", "tensor"),
    ("data", "fsdp", "sequence"),
    ("data", "stage", "key"),
    ("tensor", "sequence", "stage"),
]
# All axes in two meshes, the first with `fsdp` and one that divides tokens. Taken in turn.
HALVES = [
    [("fsdp", "sequence", "stage"), ("data", "tensor", "key")],
    [("fsdp", "tensor", "stage"), ("data", "sequence", "key")],
]
HALVES_WITHOUT_STAGES = [
    [("data", "fsdp", "tensor"), ("sequence", "key")],
    [("fsdp", "sequence", "key"), ("data", "tensor")],
]
MIXERS = models.MIXERS | {
    "odd blocks": cfg.BlockAttention(sublayers_per_block=3),
    "delta, null": cfg.DeltaAttention(sublayers_per_block=1, null_source=0.0),
    "mean": cfg.BlockAttention(num_blocks=2, query="none"),
    "scores without norm": cfg.FullAttention(weights="sigmoid", key_norm=False),
    "open": cfg.BlockAttention(
        num_blocks=2, newest_bias=3.0, cumulative=True, output_site="newest"
    ),
    "marin": cfg.BlockAttention(
        num_blocks=2, key_gain=False, normed_embedding=True, output_site="sum"
    ),
}
HEADS = {"heads": cfg.FullAttention(num_heads=2)}
# One period of every core, on a standard residual.
CORES = (
    cfg.Attention(8, 6, cfg.Rope(), False, num_kv_heads=4, query_key_norm=True, bias=True),
    cfg.FeedForward(10, "swiglu"),
    cfg.Mla(num_heads=4, head_dim=6, kv_rank=4, rope_dim=2, query_rank=2),
    cfg.FeedForward(6, "relu2"),
)
LINEAR = (cfg.Kda(num_heads=4, head_dim=6), cfg.FeedForward(8))
NET = cfg.Kda(8, 6, num_key_heads=4, decays="heads", gates="full", gate_activation="silu")
EXPERTS = (CORES[0], cfg.Experts(num_experts=6, top_k=2, hidden_dim=4, shared_gate=True))
BALANCED = cfg.Experts(
    6, 3, 4, shared=0, scores="softmax", normalized=False, balance=cfg.BalanceLoss(0.1)
)
# The attention and the experts of Kimi K3.
K3 = (
    dataclasses.replace(CORES[2], output_gate=True),
    cfg.Experts(6, 2, 4, activation="situ", latent_dim=8, latent_norm=True),
)
BIASED = (
    dataclasses.replace(
        CORES[0],
        output_bias=True,
        output_gate=True,
        normed="both",
        query_key_norm_over="heads",
    ),
    cfg.FeedForward(10, "swiglu", bias=True, normed="output"),
)
ON_MATRICES = ("sum", "reversible", "blocks", "odd blocks", "full", "scores without norm", "dense")
ON_MATRICES += ("delta", "delta, null", "mean", "mudd", "wide", "scalars", "open", "marin")
ON_MATRICES += ("kept products",)
WINDOWS = (
    cfg.Attention(8, 6, cfg.Rope(), False, num_kv_heads=4, window=5),
    cfg.FeedForward(10),
    cfg.Attention(4, 6, cfg.Alibi(), window=2, output_gate=True),
    cfg.FeedForward(10),
    CORES[0],
    cfg.FeedForward(10),
)
SYSTEMS = [("vector", name) for name in (*MIXERS, "cores")]
SYSTEMS += [("matrix", name) for name in (*ON_MATRICES, "cores")]
# One of each kind: what is carried from layer to layer, a bank, an ablation of it, and what is
# rebuilt.
LEADERS = [
    ("matrix", "sum"),
    ("vector", "mhc-lite"),
    ("matrix", "full"),
    ("matrix", "scores without norm"),
    ("matrix", "reversible"),
]
FAST = {("matrix", "reversible"): ("fsdp", "sequence", "key")}
# The policies of systems whose backward pass rebuilds the residual.
REBUILT = {"reversible": "reversible", "kept products": "reversible_dots"}
# These do not go with stages: their blocks or backward passes are not of one chunk of layers.
WITHOUT_STAGES = {"odd blocks", "input query", "scores without norm", "open", *REBUILT}


def axes_of(store, name):
    axes = [axis for axis in AXES if axis != "key" or store == "matrix"]
    return [axis for axis in axes if axis != "stage" or name not in WITHOUT_STAGES]


def halves(number):
    store, name = SYSTEMS[number]
    turns = HALVES_WITHOUT_STAGES if name in WITHOUT_STAGES else HALVES
    axes = axes_of(store, name)
    return [tuple(axis for axis in mesh if axis in axes) for mesh in turns[number % 2]]


def covering(axes):
    """Meshes in which every pair of some axes is."""
    meshes = [tuple(axis for axis in mesh if axis in axes) for mesh in COVERING]
    inside = lambda mesh: any(set(mesh) < set(other) for other in meshes)
    return [mesh for mesh in dict.fromkeys(meshes) if not inside(mesh)]


def cases():
    for number, (store, name) in enumerate(SYSTEMS):
        leads, axes = (store, name) in LEADERS, axes_of(store, name)
        alone = [(axis,) for axis in axes]
        now = [FAST[store, name]] if (store, name) in FAST else []
        rest = covering(axes) + alone if leads else halves(number)
        for mesh in dict.fromkeys(now + rest):
            marks = [pytest.mark.xdist_group(f"{store} {name}")]  # the program of one device
            marks += [] if mesh in now else [pytest.mark.slow]
            yield pytest.param(store, name, ",".join(mesh), marks=marks)


def test_every_pair_of_axes_is_in_a_mesh():
    for leader in LEADERS:
        axes = axes_of(*leader)
        pairs = {pair for mesh in covering(axes) for pair in itertools.permutations(mesh, 2)}
        assert pairs == set(itertools.permutations(axes, 2))
    for number, system in enumerate(SYSTEMS):
        assert {axis for mesh in halves(number) for axis in mesh} == set(axes_of(*system))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def run_config(store, name, mesh, seq_len=12):
    remat = {"remat": REBUILT[name]} if name in REBUILT else {}
    model = models.model(
        store,
        num_layers=2,
        num_heads=4,
        head_dim=6,
        vocab_size=models.VOCAB + 1,
        store={"vector": cfg.VectorStore(dim=12), "matrix": cfg.MatrixStore(key_dim=6)}[store],
        feed_forward=cfg.FeedForward(hidden_dim=10),
        mixer=(MIXERS | HEADS).get(name, cfg.Sum()),
        compute_dtype="float64",
        **remat,
    )
    if name == "cores":
        model = model.replace(stacks=(cfg.Stack(CORES + LINEAR, repeat=2),))
    if name == "experts":
        model = model.replace(stacks=(cfg.Stack((*EXPERTS, CORES[2], BALANCED), repeat=2),))
    if name == "k3":
        model = model.replace(stacks=(cfg.Stack(K3, repeat=2),))
    if name == "biases":
        norm = {"norm": "layernorm", "norm_bias": True}
        model = model.replace(stacks=(cfg.Stack(BIASED, repeat=2),), **norm)
    if name == "nets":
        model = model.replace(stacks=(cfg.Stack((NET, cfg.FeedForward(8)), repeat=2),))
    if name == "tied":
        model = model.replace(tied_embeddings=True)
    if name == "windows":
        model = model.replace(stacks=(cfg.Stack(WINDOWS, repeat=2),))
    if name == "attention":
        model = model.replace(stacks=(cfg.Stack(CORES[::2], repeat=1),))
    if name == "grouped values":
        model = model.replace(
            stacks=(cfg.Stack(CORES[:2], repeat=2),), mixer=cfg.ResidualScalars(scalars=False)
        )
    if name == "passed round":
        model = model.replace(stacks=(cfg.Stack(CORES, repeat=2),))
    train = cfg.TrainConfig(steps=2, batch_size=8, mesh=mesh)
    return cfg.RunConfig(model=model, train=train, data=cfg.DataConfig(seq_len=seq_len))


def prepared(store, name, spec, seq_len=12):
    devices = 2 ** spec.count("=2") * 4 ** spec.count("=4") * 8 ** spec.count("=8")
    mesh = sharding.make_mesh(spec, jax.devices()[:devices])
    return prepare(run_config(store, name, spec, seq_len), mesh)


def gradients(store, name, spec, seq_len=12):
    run = prepared(store, name, spec, seq_len)
    placed = jax.device_put(parameters(store, name), run.state_shardings.params)
    batch = jax.device_put(models.batch(8, seq_len), run.batch_sharding)
    return jax.tree.map(np.asarray, jax.jit(run.gradients)(placed, batch))


def parameters(store, name):
    return models.random_parameters(run_config(store, name, "").model)


@cache
def alone(store, name):
    return gradients(store, name, "data=1")


def assert_same(got, expected, tolerance=TOLERANCE):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-2, np.abs(b).max()))


@pytest.mark.parametrize("store, name, mesh", list(cases()))
def test_gradients_on_a_mesh_are_those_of_one_device(store, name, mesh):
    spec = ",".join(f"{axis}=2" for axis in mesh.split(","))
    assert_same(gradients(store, name, spec), alone(store, name))


# Four heads, or two of keys: keys go round the devices along `sequence`. Attention and MLA at once.
RINGS = [("vector", "attention", "sequence=4,tensor=2")]
RINGS += later(
    ("vector", "passed round", "sequence=4,tensor=2"),
    ("vector", "passed round", "sequence=8"),
    ("matrix", "blocks", "sequence=4,tensor=2"),
    ("vector", "sum", "sequence=8"),
    ("matrix", "reversible", "sequence=8"),
    ("matrix", "dense", "sequence=4,key=2"),
    ("vector", "mudd", "sequence=4,tensor=2"),
    ("matrix", "mudd", "sequence=4,key=2"),
    ("vector", "windows", "sequence=4,tensor=2"),
    ("matrix", "windows", "sequence=8"),
    ("matrix", "windows", "fsdp=2,tensor=2,sequence=2"),
    ("vector", "grouped values", "sequence=4,tensor=2"),
    ("matrix", "grouped values", "sequence=4,tensor=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("store, name, mesh", RINGS)
def test_more_devices_than_heads_share_a_sequence(store, name, mesh):
    assert_same(gradients(store, name, mesh, seq_len=16), gradients(store, name, "data=1", 16))


# A loss of balance over sequences that are divided, and loads as gradients, once for every token.
@pytest.mark.slow
@pytest.mark.xdist_group("experts")
@pytest.mark.parametrize(
    "store, mesh",
    [
        ("vector", ("fsdp", "expert", "tensor")),
        *later(
            ("vector", ("expert", "sequence", "stage")),
            ("vector", ("data", "tensor", "stage")),
            ("matrix", ("expert", "sequence", "key")),
        ),
    ],
)
def test_experts_on_a_mesh_are_those_of_one_device(store, mesh):
    spec = ",".join(f"{axis}=2" for axis in mesh)
    assert_same(gradients(store, "experts", spec), alone(store, "experts"))


@pytest.mark.slow
@pytest.mark.xdist_group("k3")
@pytest.mark.parametrize(
    "store, mesh",
    [
        ("vector", ("fsdp", "expert", "tensor")),
        *later(("vector", ("data", "sequence", "stage")), ("matrix", ("expert", "key", "tensor"))),
    ],
)
def test_latent_experts_and_gated_latents_on_a_mesh_are_those_of_one_device(store, mesh):
    spec = ",".join(f"{axis}=2" for axis in mesh)
    assert_same(gradients(store, "k3", spec), alone(store, "k3"))


@pytest.mark.slow
@pytest.mark.xdist_group("biases")
@pytest.mark.parametrize(
    "mesh", [("fsdp", "tensor", "sequence"), *later((("data", "tensor", "stage"),))]
)
def test_biases_and_norms_of_outputs_on_a_mesh_are_those_of_one_device(mesh):
    spec = ",".join(f"{axis}=2" for axis in mesh)
    assert_same(gradients("vector", "biases", spec), alone("vector", "biases"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "store, mesh", [("vector", "fsdp=2,tensor=2,stage=2"), ("matrix", "fsdp=2,sequence=2,key=2")]
)
def test_tied_embeddings_on_a_mesh_have_the_gradients_of_one_device(store, mesh):
    assert_same(gradients(store, "tied", mesh), alone(store, "tied"))


@pytest.mark.slow
@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_gated_delta_net_on_a_mesh_is_that_of_one_device(store):
    assert_same(gradients(store, "nets", "fsdp=2,tensor=2,sequence=2"), alone(store, "nets"))


def test_a_sequence_that_has_no_two_parts_a_device_is_refused():
    with pytest.raises(
        sharding.MeshError, match="--seq_len=24 is .* and 2 parts per device, .* 16 or 32"
    ):
        prepared("vector", "sum", "sequence=8", seq_len=24)


def test_linear_attention_has_no_more_devices_than_heads():
    with pytest.raises(sharding.MeshError, match="model.kda.num_heads=4 is not .*; .*legal: 8"):
        prepared("vector", "cores", "sequence=8", seq_len=16)


def test_each_device_has_its_part_of_the_parameters():
    run = prepared("matrix", "sum", "fsdp=2,tensor=2,key=2")
    shapes = jax.tree.map(lambda p: p.shape, parameters("matrix", "sum"))
    sizes = jax.tree.map(
        lambda s, shape: s.shard_shape(shape),
        run.state_shardings.params,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.Sharding),
    )
    attention, feed_forward = sizes["stacks"][0].values()
    assert feed_forward["core"]["w_1"] == (2, 12, 5)  # [layers, width / fsdp, ff / tensor]
    assert attention["site"]["gain"] == (2, 3, 6)  # [layers, D_k / key, D_v]
    assert attention["site"]["read_keys"] == (2, 12, 3)
    assert sizes["unembedding"]["kernel"] == (12, models.VOCAB + 1)
    moments = run.state_shardings.optimizer[1]
    assert jax.tree.leaves(moments.mu) == jax.tree.leaves(run.state_shardings.params)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_weights_begin_as_on_one_device_and_as_with_another_mixer(store):
    one, many = (drawn(store, "sum", mesh) for mesh in ("data=1", "fsdp=2,tensor=2,data=2"))
    jax.tree.map(np.testing.assert_array_equal, many, one)
    mixed = drawn(store, "blocks", "data=1")
    core, of_mixed = (params["stacks"][0][1]["core"] for params in (one, mixed))
    assert np.ptp(core["w_1"]) > 0
    jax.tree.map(np.testing.assert_array_equal, of_mixed, core)


def drawn(store, mixer, mesh):
    return prepared(store, mixer, mesh).jitted_init()().params


@pytest.mark.slow
def test_accumulated_parts_are_added_before_devices_add_theirs():
    mesh = sharding.make_mesh("data=2,fsdp=2", jax.devices()[:4])
    config = run_config("vector", "sum", "")
    model = dataclasses.replace(config.model, compute_dtype="float32")
    args = jax.tree.map(np.float32, parameters("vector", "sum")), models.batch(8, 12)
    gradients, sums = [], []
    with jax.enable_x64(False):
        for accumulate in (1, 2):
            train = cfg.TrainConfig(steps=2, batch_size=8, accumulate=accumulate)
            run = prepare(cfg.RunConfig(model=model, train=train, data=config.data), mesh)
            program = jax.jit(run.gradients).lower(*args)
            sums.append(program.as_text().count("stablehlo.all_reduce"))
            gradients.append(program.compile()(*args))
    assert sums[0] == sums[1] > 0
    assert_same(*gradients, tolerance=1e-5)


@pytest.mark.parametrize(
    "mesh, changes, message",
    [
        ("data=3", {}, "--batch_size=8 is not divisible over mesh axes data=3; .*: 6 or 9"),
        ("key=3", {}, "--batch_size=8 is not divisible over mesh axes key=3"),
        ("sequence=8", {}, "--seq_len=12 .* mesh axes sequence=8; nearest legal: 8 or 16"),
        ("tensor=3", {}, "model.attention.num_heads=4 .* mesh axes tensor=3; .*: 3 or 6"),
        ("key=4", {}, "key=4 does not divide the parameter axis 'key' of size 6; legal: 1, 2"),
        ("key=2", {"store": "vector"}, "key=2 divides D_k, which a vector store does not have"),
        ("key=2", {"name": "heads"}, "not support with num_heads=2; legal: num_heads=1, or key=1"),
        ("key=2", {"name": "input query"}, "with query='input'; legal: query=static, scalars or"),
        (
            "expert=2",
            {},
            "expert=2 divides experts, which the model does not have; legal: expert=1",
        ),
        ("expert=4", {"name": "experts"}, "expert=4 does not divide .* 'expert' of size 6; legal"),
        ("stage=8", {}, "model.num_layers=2 is not divisible by stage=8 x .*: 8"),
        ("stage=2", {"name": "reversible"}, "stage=2 does not support .*; legal policies: none"),
    ],
    ids=lambda x: x if isinstance(x, str) and "=" in x and len(x) < 12 else "",
)
def test_what_does_not_divide_is_said_in_one_line(mesh, changes, message):
    config = run_config(changes.get("store", "matrix"), changes.get("name", "sum"), mesh)
    devices = int(mesh[-1])
    with pytest.raises(sharding.MeshError, match=message) as caught:
        prepare(config, sharding.make_mesh(mesh, jax.devices()[:devices]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("window", [None, 5])
def test_a_ring_within_a_stage_is_refused(window):
    cores = cfg.Attention(8, 6, cfg.Rope(), num_kv_heads=2, window=window), cfg.FeedForward(10)
    config = run_config("vector", "sum", "", 16)
    model = config.model.replace(stacks=(cfg.Stack(cores, repeat=2),))
    message = "sequence=4 with model.attention.num_kv_heads=2 .*: stage=1, or a multiple of 4 heads"
    with pytest.raises(sharding.MeshError, match=message):
        prepare(dataclasses.replace(config, model=model), sharding.make_mesh("stage=2,sequence=4"))


@pytest.mark.xdist_group("matrix sum")
def test_the_objective_counts_every_token_once():
    """Each device has the loss of its own tokens: the sum over all of them is the whole batch's."""
    run = prepare(run_config("matrix", "sum", ""), sharding.make_mesh("data=2,sequence=2,key=2"))
    batch = models.batch(8, 12)
    sums = jax.jit(run.loss)(parameters("matrix", "sum"), batch)
    _, mean = alone("matrix", "sum")
    found = sums.cross_entropy / np.sum(batch.weights)
    np.testing.assert_allclose(found, mean.cross_entropy, rtol=1e-12)
