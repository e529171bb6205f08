"""Frozen parameters stay the same bit for bit, and then learn like new ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

import sharding
from rmt_tpu.config import AdamW, DataConfig, Muon, RunConfig, TrainConfig, overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.errors import UsageError
from rmt_tpu.runs.workdir import open_checkpoints
from rmt_tpu.storage import open_folder
from rmt_tpu.training import freeze, memory_check, trainer
from rmt_tpu.training.optimizer import learning_rate, make_optimizer, near_orthogonal
from rmt_tpu.training.run import prepare
from tests import models
from tests.tiers import later

pytestmark = pytest.mark.xdist_group("freeze")  # one worker compiles the programs

STEPS, FROZEN_STEPS = 9, 3
KINDS = {"mix": "gain", "core": "hidden", "table": "embedding"}
ALL_BUT_MIXES = ("*", "!*/mix/*")


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (("stacks/*",), {"stacks/0/1/core/w_1", "stacks/0/1/site/mix/query"}),
        (("*/core/*",), {"stacks/0/1/core/w_1"}),
        (("stacks/*", "!*/mix/*"), {"stacks/0/1/core/w_1"}),
        (("!*/mix/*", "stacks/*"), {"stacks/0/1/core/w_1"}),
        (("!*/mix/*",), {"stacks/0/1/core/w_1", "embedding/tokens"}),
        (("*/W_1",), set()),
    ],
)
def test_patterns(patterns, frozen):
    paths = "stacks/0/1/core/w_1", "stacks/0/1/site/mix/query", "embedding/tokens"
    assert {path for path in paths if freeze.is_frozen(path, patterns)} == frozen


def test_a_freeze_that_begins_after_its_end_is_refused():
    """The run has done ten steps, so all its parameters would go on to learn."""
    patterns, steps = "train.freeze is [] there, [...] here", "train.freeze_steps is null there, 9"
    one_pattern = 'train.freeze.3 is "*/mix/*" there, "*/core/*" here'
    check = lambda count, *changes: freeze.check_change(
        TrainConfig(freeze=("*/core/*",), freeze_steps=count), changes, 10
    )
    for count, changes in ((9, (patterns, steps)), (10, (one_pattern,)), (9, (steps,))):
        with pytest.raises(UsageError, match=f"freeze_steps={count} counts from the first step"):
            check(count, *changes)
    check(11, patterns, steps)
    check(10, steps)  # Parameters that were frozen for the whole run learn from now on.
    check(None, patterns)
    check(9, "train.steps is 20 there, 30 here")  # The freeze is over as planned.


def test_mistakes_are_one_line():
    roles = {"embedding": {"tokens": "embedding"}, "mix": {"load": "load"}}

    def refusal(*patterns):
        with pytest.raises(UsageError) as error:
            freeze.freeze_of(TrainConfig(freeze=patterns), roles)
        return str(error.value)

    assert refusal("mix/*", "!nothing/*") == (
        "train.freeze=mix/*,!nothing/*: !nothing/* matches no parameter of this model; legal: a "
        "pattern of paths such as embedding/tokens, mix/load"
    )
    # The only other parameter is a load, which is no weight, so nothing would learn.
    assert refusal("embedding/*").startswith("train.freeze=embedding/* leaves no parameter to tr")
    with pytest.raises(UsageError, match="freeze_steps=3 requires train.freeze"):
        TrainConfig(freeze_steps=3)
    config = overrides.apply(preset_run("llama-tiny"), {"train.freeze": "*,!*/mix/*"})
    assert config.train.freeze == ALL_BUT_MIXES
    assert freeze.freeze_of(dataclasses.replace(config.train, freeze=()), roles) is None


def rule(config, frozen, steps):
    """Return the optimizer of three matrices; "core" and "table" may be frozen."""
    axes = {"mix": ("width", "x"), "core": ("embed", "ff"), "table": ("vocab", "embed")}
    train = TrainConfig(steps=STEPS, optimizer=config, freeze=frozen, freeze_steps=steps)
    return make_optimizer(
        config,
        steps=STEPS,
        roles=KINDS,
        axes=axes,
        rates={"mix": 1.0, "core": 0.5, "table": 1.0},
        freeze=freeze.freeze_of(train, KINDS),
    )


def trained(optimizer, count, seed=0):
    """The parameters before and after each of `count` updates, and their gradients."""
    rng = np.random.default_rng(seed)
    draw = lambda: {name: jnp.float32(rng.normal(size=(4, 6))) for name in KINDS}
    params = draw()
    params["core"] = params["core"].at[0, 0].set(-0.0)
    gradients, found, state = [draw() for _ in range(count)], [params], optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step, gradient in enumerate(gradients):
        updates, state = update(gradient, state, params, step=jnp.int32(step))
        params = optax.apply_updates(params, updates)
        found.append(params)
    return found, gradients


def bits(x):
    return np.asarray(x).view(np.uint32).tolist()


def expected_core(config, params, gradients):
    """Return `core` in float64, as if training began at the thaw, but with the run's rate."""
    core, warmup = np.float64(params[0]["core"]), round(config.warmup_fraction * STEPS)
    first = second = momentum = np.zeros_like(core)
    for n, gradient in enumerate(gradients[FROZEN_STEPS:], 1):
        norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in gradient.values()))
        g = np.float64(gradient["core"]) / max(1, norm / config.clip_norm)
        first = config.b1 * first + (1 - config.b1) * g
        second = config.b2 * second + (1 - config.b2) * g**2
        corrected = second / (1 - config.b2**n)
        change = first / (1 - config.b1**n) / (np.sqrt(corrected) + config.epsilon)
        if isinstance(config, Muon):
            momentum = config.momentum * momentum + g
            nesterov = jnp.float32(g + config.momentum * momentum)
            change = config.update_rms * 6**0.5 * near_orthogonal(nesterov, config.iterations)
        ramp = min(1, n / warmup)
        rate = ramp * float(learning_rate(config, STEPS)(FROZEN_STEPS + n - 1))
        decay = rate if not config.independent_weight_decay else ramp
        core = core - 0.5 * rate * np.float64(change) - decay * config.weight_decay * core
        if config.moment_dtype == "bfloat16":
            first, momentum = (x.astype(jnp.bfloat16).astype(np.float64) for x in (first, momentum))
    return core


OPTIONS = {"learning_rate": 0.1, "weight_decay": 0.3, "warmup_fraction": 0.4, "clip_norm": 2.0}


@pytest.mark.parametrize(
    "config",
    [
        AdamW(**OPTIONS, b2=0.999),
        AdamW(**OPTIONS, moment_dtype="bfloat16", independent_weight_decay=True),
        Muon(**OPTIONS),
        *later(Muon(**OPTIONS, moment_dtype="bfloat16")),
    ],
    ids=["adamw", "independent", "muon", "muon-bfloat16"],
)
def test_frozen_ones_stay_and_then_learn_like_new_ones(config):
    found, gradients = trained(rule(config, ("core", "table"), FROZEN_STEPS), STEPS)
    for name in ("core", "table"):
        kept = [bits(params[name]) == bits(found[0][name]) for params in found]
        assert kept == [True] * (FROZEN_STEPS + 1) + [False] * (STEPS - FROZEN_STEPS)
    expected = expected_core(config, found, gradients)
    np.testing.assert_allclose(found[-1]["core"], expected, rtol=2e-5, atol=2e-5)
    assert np.max(np.abs(expected - found[0]["core"])) > 0.05
    # Gradients of frozen parameters have no part in the clipping of others.
    alone, _ = trained(rule(config, ("core", "table"), None), STEPS)
    for own, other in zip(found[: FROZEN_STEPS + 1], alone, strict=False):
        np.testing.assert_allclose(own["mix"], other["mix"], atol=1e-6)
    clipped, _ = trained(rule(config, (), None), 2)
    assert np.max(np.abs(clipped[2]["mix"] - found[2]["mix"])) > 1e-4
    assert bits(alone[-1]["core"]) == bits(found[0]["core"])


def run_config(mesh="data=1", steps=2, **train):
    return RunConfig(
        model=models.model("vector", mixer=models.MIXERS["blocks"]),
        train=TrainConfig(
            steps=6, batch_size=8, mesh=mesh, freeze=ALL_BUT_MIXES, freeze_steps=steps, **train
        ),
        data=DataConfig(seq_len=12),
    )


@functools.cache
def prepared(config, devices=1):
    """Return a run, its state before step 1 with random parameters, and its compiled step."""
    run = prepare(config, sharding.make_mesh(config.train.mesh, jax.devices()[:devices]))
    shapes = jax.eval_shape(run.init)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes._replace(params=(), key=()))
    params = jax.tree.map(np.float32, models.random_parameters(config.model))
    state = zeros._replace(params=params, key=jax.random.key(0))
    return run, jax.device_put(state, run.state_shardings), jax.jit(run.step)


def after_each_step(config, devices=1, count=3):
    run, state, step = prepared(config, devices)
    params, norms = [state.params], []
    for n in range(count):
        batch = jax.device_put(models.batch(8, 12, seed=n), run.batch_sharding)
        state, metrics = step(state, batch)
        params.append(state.params)
        norms.append(float(metrics["optim/grad_norm"]))
    return list(map(by_path, params)), norms


def by_path(params):
    return {"/".join(map(str, path)): x for path, x in traverse_util.flatten_dict(params).items()}


def check_two_frozen_steps(params):
    """Exactly the mixes move in steps 0 and 1, and everything in step 2."""
    for path in params[0]:
        moved = [
            bits(new[path]) != bits(old[path]) for old, new in zip(params, params[1:], strict=False)
        ]
        assert moved == ([True] * 3 if "/mix/" in path else [False, False, True]), path


def test_a_run_trains_the_mixes_alone_at_first():
    params, norms = after_each_step(run_config(optimizer=AdamW(learning_rate=0.01)))
    check_two_frozen_steps(params)
    everything = dataclasses.replace(run_config().train, freeze=(), freeze_steps=None)
    run, state, step = prepared(dataclasses.replace(run_config(), train=everything))
    _, metrics = step(state, models.batch(8, 12))
    assert 0 < norms[0] < 0.5 * metrics["optim/grad_norm"]


@pytest.mark.slow
def test_skipped_steps_do_not_count():
    run, state, step = prepared(run_config(optimizer=AdamW(learning_rate=0.01)))
    skipped = state._replace(step=state.step + 2, skipped=state.skipped + 2)
    for start in (state, skipped):
        new, _ = step(start, models.batch(8, 12))
        assert bits(new.params["embedding"]["tokens"]) == bits(start.params["embedding"]["tokens"])
    late, _ = step(state._replace(step=state.step + 2), models.batch(8, 12))
    assert bits(late.params["embedding"]["tokens"]) != bits(state.params["embedding"]["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "optimizer"), [("data=2,fsdp=2,tensor=2", Muon()), ("stage=2,fsdp=2", AdamW())]
)
def test_on_a_mesh_it_is_that_of_one_device(mesh, optimizer):
    model = models.model("vector", mixer=models.MIXERS["blocks"], num_layers=4)
    model = model.replace(compute_dtype="float64", store=dataclasses.replace(model.store, dim=16))
    attention = {"attention.num_heads": 4, "attention.head_dim": 4, "feed_forward.hidden_dim": 24}
    model = overrides.apply(model, attention)
    config = lambda mesh: dataclasses.replace(run_config(mesh, optimizer=optimizer), model=model)
    devices = int(np.prod([*sharding.parse_mesh(mesh).values()]))
    with jax.enable_x64(True):
        alone, _ = after_each_step(config("data=1"))
        divided, _ = after_each_step(config(mesh), devices)
    check_two_frozen_steps(divided)
    for one, other in zip(alone, divided, strict=True):
        for path in one:
            np.testing.assert_allclose(one[path], other[path], atol=1e-6)


def test_frozen_for_the_whole_run_they_have_no_memory_of_gradients():
    def gradients(**changes):
        train = dataclasses.replace(run_config().train, **changes)
        config = dataclasses.replace(run_config(), train=train)
        run = prepare(config, sharding.make_mesh("data=1", jax.devices()[:1]))
        paths = jax.tree_util.tree_leaves_with_path(run.abstract.params)
        sizes = {freeze.path_of(path): 4 * x.size for path, x in paths}
        return memory_check.lower_bound(config, run).gradients, sizes

    whole, sizes = gradients(freeze=(), freeze_steps=None)
    assert whole == sum(sizes.values()) == gradients()[0]
    mixes = sum(size for path, size in sizes.items() if "/mix/" in path)
    assert 0 < gradients(freeze_steps=None)[0] == mixes < whole / 10


@pytest.mark.slow
def test_a_whole_run_computes_no_gradients_of_frozen_weights():
    """The compiled step has fewer FLOPs than without frozen weights."""

    def flops(**changes):
        train = dataclasses.replace(run_config().train, **changes)
        run = prepare(
            dataclasses.replace(run_config(), train=train),
            sharding.make_mesh("data=1", jax.devices()[:1]),
        )
        batch = jax.eval_shape(lambda: models.batch(8, 12))
        return jax.jit(run.step).lower(run.abstract, batch).compile().cost_analysis()["flops"]

    assert flops(freeze_steps=None) < 0.85 * flops(freeze=(), freeze_steps=None)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_the_run_that_was_not_stopped(optimizer, tmp_path, monkeypatch, capsys):
    """It resumes while parameters are frozen, and in their warm-up."""
    one = sharding.make_mesh("data=1", jax.devices()[:1])
    monkeypatch.setattr(trainer.sharding, "make_mesh", lambda spec: one)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
    changes = {
        "model.mixer": "block_attention",
        "model.num_layers": 1,
        "model.feed_forward.hidden_dim": 32,
        "data.source": str(tmp_path / "text.txt"),
        "data.seq_len": 16,
        "train.optimizer": {"kind": optimizer, "warmup_fraction": 0.5},
        "train.batch_size": 2,
        "train.steps": 6,
        "train.checkpoint_every": 1,
        "train.keep_checkpoints": 9,
        "train.eval_every": 0,
        "train.eval_batches": 1,
        "train.sample_tokens": 0,
        "train.freeze": list(ALL_BUT_MIXES),
        "train.freeze_steps": 3,
    }
    config = overrides.apply(preset_run("llama-tiny"), changes)
    trainer.train(config, tmp_path / "run")
    said = capsys.readouterr().err
    assert "are frozen for the first 3 steps; these learn: final_site/mix/key_gain, " in said

    def params(step):
        like = prepare(config, one).abstract._replace(copies={})
        _, state, _ = open_checkpoints(open_folder(tmp_path / "run")).restore(like, step)
        return by_path(state.params)

    through = [params(step) for step in range(1, 7)]
    moved = lambda old, new: {path for path in old if bits(old[path]) != bits(new[path])}
    mixes = {path for path in through[0] if "/mix/" in path}
    assert moved(through[0], through[2]) and moved(through[0], through[2]) <= mixes
    assert moved(through[2], through[3]) >= {*through[0]} - mixes
    late = overrides.apply(config, {"train.freeze_steps": 5, "train.steps": 7})
    with pytest.raises(UsageError, match="train.freeze_steps=5 counts from .* has done 6, so that"):
        trainer.train(late, tmp_path / "run", change_config=True)
    for step in (2, 4):
        trainer.train(config, tmp_path / "run", from_step=step)
        for path, x in params(6).items():
            assert bits(x) == bits(through[-1][path]), path
