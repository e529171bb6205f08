"""Copies of weights in the compute dtype: what has one, and that steps are those of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.training.copies import substitute_copies
from rmt_tpu.training.run import prepare
from tests import models
from tests.tiers import later

BATCH, SEQ, VOCAB = 4, 12, models.VOCAB + 1
# Every kind of core.
CORES = (
    cfg.Attention(4, 6, cfg.Rope(), False, num_kv_heads=2, query_key_norm=True, bias=True),
    cfg.FeedForward(10, "swiglu"),
    cfg.Mla(num_heads=4, head_dim=6, kv_rank=4, rope_dim=2, query_rank=2),
    cfg.Experts(num_experts=6, top_k=2, hidden_dim=4),
    cfg.Kda(num_heads=4, head_dim=6),
    cfg.FeedForward(8),
)
PLAIN = (cfg.Attention(4, 6, cfg.Alibi()), cfg.FeedForward(10))
SYSTEMS = [("vector", mixer, PLAIN) for mixer in models.MIXERS]
SYSTEMS += [("matrix", mixer, PLAIN) for mixer in ("blocks", "full", "dense")]
SYSTEMS += [("vector", "sum", CORES), ("matrix", "sum", CORES)]


def prepared(store, mixer, cores, dtype="bfloat16", **train):
    size = {"vector": cfg.VectorStore(dim=12), "matrix": cfg.MatrixStore(key_dim=6)}[store]
    stacks = (cfg.Stack(cores, repeat=2),)
    model = models.model(store, store=size, mixer=models.MIXERS[mixer], vocab_size=VOCAB)
    model = model.replace(stacks=stacks, compute_dtype=dtype)
    train = cfg.TrainConfig(**(dict(steps=9, batch_size=BATCH, mesh="data=1") | train))
    config = cfg.RunConfig(model=model, train=train, data=cfg.DataConfig(seq_len=SEQ))
    devices = {"data=1": 1}.get(train.mesh, 2)
    return prepare(config, sharding.make_mesh(train.mesh, jax.devices()[:devices]))


def drawn(run):
    """Parameters in which no weight is a bfloat16."""
    rng = np.random.default_rng(0)

    def draw(path, p):
        x = rng.normal(size=p.shape) * p.shape[-1] ** -0.5
        return jnp.float32(1 + x if "gain" in path[-1].key else x)

    return jax.tree_util.tree_map_with_path(draw, run.abstract.params)


def state_of(run):
    """One before the first step."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), run.abstract._replace(key=()))
    state = zeros._replace(params=drawn(run), key=jax.random.key(0), copies={})
    shardings = run.state_shardings._replace(copies={})
    return run.with_copies(jax.device_put(state, shardings))


def as_it_says(f):
    """Jitted, with every cast done that is asked for."""
    return jax.jit(f, compiler_options={"xla_allow_excess_precision": False})


def names(copies):
    return {path.split("'")[-2] for path in copies}


@pytest.mark.slow
@pytest.mark.parametrize("store, mixer, cores", [("matrix", "sum", PLAIN), *later(*SYSTEMS)])
def test_gradients_at_copies_are_those_at_weights(store, mixer, cores):
    run = prepared(store, mixer, cores)
    params = drawn(run)
    copies = run.copies(params)
    assert copies and all(x.dtype == jnp.bfloat16 for x in copies.values())
    gradients, batch = as_it_says(run.gradients), models.batch(BATCH, SEQ)
    at_weights, loss = gradients(params, batch)
    at_copies, loss_of_copies = gradients(substitute_copies(params, copies), batch)
    assert loss.cross_entropy == loss_of_copies.cross_entropy
    assert jax.tree.leaves(at_copies)[0].dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, at_copies, at_weights)


@pytest.mark.slow
def test_what_is_read_in_more_bits_has_no_copy():
    of_cores = names(prepared("vector", "sum", CORES).abstract.copies)
    assert {"read", "write", "w_1", "w_2", "w_kv_up", "w_decay_up"} <= of_cores
    assert not of_cores & {"w_router", "bias", "gain", "taps", "load"}
    for mixer in ("hc", "mhc", "input query"):
        of_mixer = names(prepared("vector", mixer, PLAIN).abstract.copies)
        assert of_mixer == {"read", "write", "w_1", "w_2"}


def test_there_are_none_in_float32_nor_in_stages():
    wide = prepared("matrix", "sum", PLAIN, dtype="float32")
    assert wide.abstract.copies == state_of(wide).copies == {}
    assert prepared("matrix", "sum", PLAIN, mesh="stage=2").abstract.copies == {}


@pytest.mark.parametrize("accumulate", [1, *later(2)])
def test_a_step_reads_copies_and_leaves_those_of_what_it_leaves(accumulate):
    """Over a mesh, where each device has copies of its own weights."""
    run = prepared("matrix", "sum", PLAIN, mesh="fsdp=2", accumulate=accumulate)
    state = state_of(run)
    step, batch = jax.jit(run.step), jax.device_put(models.batch(BATCH, SEQ), run.batch_sharding)
    after, metrics = step(state, batch)
    assert int(metrics["train/skipped_steps"]) == 0
    for of in (state, after):
        jax.tree.map(np.testing.assert_array_equal, of.copies, run.copies(of.params))
    for path, x in after.copies.items():
        assert x.sharding.is_equivalent_to(run.state_shardings.copies[path], x.ndim)
        assert np.any(np.asarray(x) != np.asarray(state.copies[path]))
    others = state._replace(copies=jax.tree.map(jnp.zeros_like, state.copies))
    assert step(others, batch)[1]["train/loss"] != metrics["train/loss"]
    infinite = jax.tree.map(lambda x: x + jnp.inf, state.params["unembedding"])
    broken = state.params | {"unembedding": infinite}
    skipped, metrics = step(state._replace(params=broken), batch)
    assert int(metrics["train/skipped_steps"]) == 1
    jax.tree.map(np.testing.assert_array_equal, skipped.copies, state.copies)
