"""How fast what weighs sources over depth learns: nothing is drawn or compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.data import Batch
from rmt_tpu.errors import UsageError
from rmt_tpu.layers.parameters import metadata
from rmt_tpu.training import depth_rate
from rmt_tpu.training import run as training_run
from rmt_tpu.training.optimizer import make_optimizer
from tests import models
from tests.tiers import later

FULL = cfg.FullAttention()


def run(store="vector", mixer=FULL, rate=0.028, tokens=1024, sizes=None, optimizer=None, **train):
    of_store = {"vector": cfg.VectorStore(24), "matrix": cfg.MatrixStore(key_dim=16)}[store]
    model = models.model(store, mixer=mixer, store=sizes or of_store)
    optimizer = optimizer or cfg.AdamW(learning_rate=rate)
    train = cfg.TrainConfig(batch_size=tokens // 32, optimizer=optimizer, **train)
    return cfg.RunConfig(model=model, train=train, data=cfg.DataConfig(seq_len=32))


PAPERS = cfg.VectorStore(1168)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        (run(), 0.104),  # the small runs that it is taken from
        (run("matrix"), 0.026),  # of 16 x 6 numbers
        (run(tokens=4096), 0.208),  # a batch of four times the tokens
        (run(rate=0.014), 0.208),
        (run(mixer=cfg.FullAttention(num_heads=3)), 0.3125),  # logits of 8 numbers each
        (run(rate=2e-3, tokens=192 * 8192, sizes=PAPERS), 1.0),
        (run(rate=2e-3, tokens=2**18, sizes=PAPERS), 0.479),
        (run(rate=6e-4, tokens=2**18, sizes=cfg.VectorStore(512)), 1.0),
        (run(depth_rate=0.3), 0.3),
    ],
)
def test_queries(config, factor):
    found = depth_rate.factors(config)
    assert found["query"] == found["key_gain"] == pytest.approx(factor, rel=0.01)


def test_other_ways_to_weigh():
    projected = depth_rate.factors(run(mixer=cfg.FullAttention(query="input")))
    assert projected["project"] == pytest.approx(projected["query"] / 24)
    assert depth_rate.factors(run(mixer=cfg.FullAttention(query="scalars"))) == {"logits": 1.0}
    assert list(depth_rate.factors(run(mixer=cfg.FullAttention(key_gain=False)))) == ["query"]
    assert depth_rate.factors(run(mixer=cfg.Dense())) == {}
    assert depth_rate.describe(run(mixer=cfg.Sum())) == ""
    assert depth_rate.describe(run()) == "query x0.104, key_gain x0.104"


@pytest.mark.parametrize("query", ["static", "input"])
def test_under_mup_a_logit_moves_as_the_bases_does(query):
    """Its rate falls with the width already, and a rule beside it does not count that twice."""
    mixer = cfg.FullAttention(query=query)
    base = run(mixer=mixer)
    wide = run(mixer=mixer, sizes=cfg.VectorStore(96))
    mup = wide.model.replace(parametrization=cfg.MuP(("store.dim=24",)))
    wide = dataclasses.replace(wide, model=mup)
    of_base, of_wide = depth_rate.factors(base), depth_rate.factors(wide)
    assert of_wide["query"] == pytest.approx(of_base["query"])
    assert of_wide["key_gain"] == pytest.approx(of_base["key_gain"] / 4)
    if query == "input":  # 16 times the terms, of which muP has a quarter
        assert of_wide["project"] == pytest.approx(of_base["project"] / 4)


def test_the_papers_models_learn_at_the_full_rate():
    for name in ("attnres-194m", "attnres-528m", "attnres-kimi-48b", "llama-attnres-153m"):
        assert set(depth_rate.factors(preset_run(name)).values()) == {1.0}, name


@pytest.mark.parametrize(
    ("query", "optimizer"),
    [
        ("static", cfg.AdamW(0.5, decay_exclude=())),
        *later(("scalars", cfg.AdamW(0.5, decay_exclude=())), ("input", cfg.Muon(0.5))),
    ],
)
def test_they_alone_are_scaled_and_do_not_decay(query, optimizer):
    """Also where everything else decays, with a decay of its own or not."""
    for independent in (False, True):
        optimizer = dataclasses.replace(
            optimizer, weight_decay=0.1, independent_weight_decay=independent
        )
        config = run(mixer=cfg.FullAttention(query=query), optimizer=optimizer, depth_rate=0.25)
        abstract = models.abstract(config.model)
        roles, axes = (metadata(abstract, name) for name in ("role", "axes"))
        rates, over = depth_rate.scale_rates(config, jax.tree.map(lambda _: 2.0, roles))
        names = {"static": {"query", "key_gain"}, "scalars": {"logits"}}
        names["input"] = names["static"] | {"project"}
        found = jax.tree_util.tree_leaves_with_path(rates)
        # A projection has as many times a query's terms as the residual has numbers.
        size = config.model.residual_size
        assert {path[-1].key for path, rate in found if rate < 2} == names[query]
        assert {rate for path, rate in found if path[-1].key == "project"} <= {0.5 / size}
        assert all(rate in (0.5, 0.5 / size, 2.0) for _, rate in found)
        rule = {"roles": roles, "axes": axes, "rates": rates, "steps": 1}
        updated = {}
        for one in (optimizer, dataclasses.replace(optimizer, weight_decay=0.0)):
            params = jax.tree.map(
                lambda p: np.ones(p.shape, np.float32), models.random_parameters(config.model)
            )
            made = make_optimizer(one, over_depth=over, **rule)
            update = lambda of, made=made: made.update(
                jax.tree.map(jnp.zeros_like, of), made.init(of), of
            )[0]
            updated[one.weight_decay] = jax.jit(update)(params)
        decayed = jax.tree.map(
            lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), updated[0.1], updated[0.0]
        )
        for path, decays in jax.tree_util.tree_leaves_with_path(decayed):
            mine = path[-1].key in names[query] and "core" not in str(path)
            assert not (mine and decays), path
        assert any(np.any(x) for x in jax.tree.leaves(updated[0.1]))


def test_the_optimizers_state_is_what_it_was():
    """So that a checkpoint of a run without these rates opens."""
    for optimizer in (cfg.AdamW(), cfg.Muon()):
        config = run(mixer=cfg.FullAttention(query="input"), optimizer=optimizer)
        roles, axes = (metadata(models.abstract(config.model), n) for n in ("role", "axes"))
        ones = jax.tree.map(lambda _: 1.0, roles)
        rates, over = depth_rate.scale_rates(config, ones)
        params = models.random_parameters(config.model)
        rule = {"roles": roles, "axes": axes, "steps": 1}
        before = make_optimizer(optimizer, rates=ones, **rule)
        after = make_optimizer(optimizer, rates=rates, over_depth=over, **rule)
        shapes = [jax.eval_shape(one.init, params) for one in (before, after)]
        assert shapes[0] == shapes[1]


def test_a_run_is_made_with_them_beside_mup(monkeypatch):
    config = run(depth_rate=0.5)
    config = dataclasses.replace(
        config, model=config.model.replace(parametrization=cfg.MuP(("store.dim=6",)))
    )
    given = {}

    def recorded(optimizer, **how):
        given.update(how)
        return make_optimizer(optimizer, **how)

    monkeypatch.setattr(training_run, "make_optimizer", recorded)
    training_run.prepare(config, sharding.make_mesh("data=1", jax.devices()[:1]))
    mix = given["rates"]["final_site"]["mix"]
    assert (mix["query"], mix["key_gain"]) == (0.5 * 6 / 24, 0.5)
    assert given["rates"]["final_site"]["gain"] == 1.0
    assert set(given["over_depth"]["final_site"]["mix"].values()) == {True}
    assert not given["over_depth"]["final_site"]["gain"]


@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_how_large_logits_are_is_the_length_of_scaled_queries(store):
    config = run(store, mixer=cfg.BlockAttention(num_heads=2))
    params = models.random_parameters(config.model)
    found = depth_rate.metrics(config, params)
    lengths = []
    sites = [params["final_site"]["mix"]]
    for stack in params["stacks"].values():
        for sublayer in stack.values():
            mix = sublayer["site"]["mix"]
            sites += [jax.tree.map(lambda x, i=i: x[i], mix) for i in range(len(mix["query"]))]
    for mix in sites:
        scaled = np.asarray(mix["query"]) * np.asarray(mix["key_gain"])
        lengths.append(np.linalg.norm(scaled) / np.sqrt(2))
    assert len(lengths) == config.model.num_sublayers + 1
    assert found["train/depth/logit"] == pytest.approx(np.mean(lengths), rel=1e-5)
    assert found["train/depth/largest_logit"] == pytest.approx(np.max(lengths), rel=1e-5)
    assert depth_rate.metrics(run(mixer=cfg.Sum()), {}) == {}


@pytest.mark.slow
def test_a_step_tells_them():
    config = run()
    made = training_run.prepare(config, sharding.make_mesh("data=1", jax.devices()[:1]))
    ids = jnp.ones((config.train.batch_size, 32), jnp.int32)
    batch = Batch(ids, ids, ids, ids.astype(jnp.float32))
    _, metrics = jax.eval_shape(made.step, made.abstract, batch)
    assert "train/depth/largest_logit" in metrics


def test_what_is_no_rate_is_refused_in_one_line():
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="TrainConfig.depth_rate=.* must be positive"):
            run(depth_rate=value)
    config = overrides.apply(preset_run("attnres-tiny"), {"train.depth_rate": 0.1})
    assert config.train.depth_rate == 0.1
    assert overrides.apply(config, {"train.depth_rate": "none"}).train.depth_rate is None
    assert cfg.resume_rule(config, "train.depth_rate") == "change"
