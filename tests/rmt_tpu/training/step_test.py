"""Loss, optimizer and the step, against plain arithmetic."""

import dataclasses
import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharding
from pallas_kernels.target import lowering_for
from rmt_tpu.analysis.step_cost import trace_config
from rmt_tpu.config import AdamW, DataConfig, Muon, MuP, RunConfig, TrainConfig, resume_rule
from rmt_tpu.config.presets import run as run_of
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.data.datasets import load_datasets
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import UsageError
from rmt_tpu.layers.data_vectors import concatenate
from rmt_tpu.training import loss as loss_module
from rmt_tpu.training.loss import next_token_loss
from rmt_tpu.training.optimizer import learning_rate, make_optimizer
from rmt_tpu.training.run import prepare
from rmt_tpu.training.step import initial_state, make_train_step
from tests import models
from tests.closeness import assert_close
from tests.tiers import later


def run_config(store="matrix", *, model=None, **train):
    defaults = dict(steps=20, batch_size=8, mesh="data=1", optimizer=AdamW(learning_rate=1e-2))
    return RunConfig(
        model=model or models.model(store),
        train=TrainConfig(**(defaults | train)),
        data=DataConfig(seq_len=11),
    )


@functools.cache
def prepared(config, devices=1):
    """A run, a state before the first step, and the compiled step."""
    mesh = sharding.make_mesh(config.train.mesh, jax.devices()[:devices])
    run = prepare(config, mesh)
    shapes = jax.eval_shape(run.init)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes._replace(params=(), key=()))
    params = jax.tree.map(np.float32, models.random_parameters(config.model))
    state = zeros._replace(params=params, key=jax.random.key(0))
    return run, jax.device_put(state, run.state_shardings), jax.jit(run.step)


def loss_arguments(batch=2, seq=6, vectors=3, size=5, vocab=11):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(batch, seq, vectors, size))
    kernel = rng.normal(size=(vectors * size, vocab))
    targets = rng.integers(0, vocab, (batch, seq))
    weights = rng.integers(0, 3, (batch, seq)) / 2.0
    return z, kernel, targets, weights


def plain_loss(z, kernel, targets, weights, multiplier, z_loss, cap=None):
    logits = multiplier * concatenate(z) @ kernel
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    log_z = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    cross_entropy = jnp.sum((log_z - chosen) * weights)
    return cross_entropy + z_loss * jnp.sum(log_z**2 * weights), cross_entropy


# One chunk, several, one a token, and three of 7 tokens, the last of which is filled. Programs for
# a GPU have padded logits.
@pytest.mark.parametrize(
    ("held_logits", "seq", "device", "cap"),
    [
        (2**27, 6, "cpu", None),
        (50, 6, "cpu", None),
        (1, 6, "cpu", None),
        (70, 7, "cpu", None),
        (50, 6, "NVIDIA H100 80GB HBM3", None),
        (50, 6, "cpu", 1.7),
        (50, 6, "NVIDIA H100 80GB HBM3", 1.7),
    ],
)
def test_loss_and_its_gradient_are_those_of_all_logits_at_once(
    held_logits, seq, device, cap, monkeypatch
):
    monkeypatch.setattr(loss_module, "LOGITS", held_logits)
    with jax.enable_x64(True):
        z, kernel, targets, weights = map(jnp.asarray, loss_arguments(seq=seq))
        chunked = lambda z, kernel: next_token_loss(
            z, kernel, targets, weights, multiplier=1.5, cap=cap, z_loss=0.1
        )
        plain = lambda z, kernel: plain_loss(z, kernel, targets, weights, 1.5, 0.1, cap)
        # Three times the objective: its cotangent is not always one.
        of = lambda loss: jax.grad(lambda *args: 3 * loss(*args)[0], argnums=(0, 1))

        @jax.jit
        def both(*args):
            return (chunked(*args), of(chunked)(*args)), (plain(*args), of(plain)(*args))

        with lowering_for(device):
            (got, grads), (expected, wanted) = both(z, kernel)
        assert got.objective == pytest.approx(float(expected[0]), rel=1e-13)
        assert got.cross_entropy == pytest.approx(float(expected[1]), rel=1e-13)
        assert got.objective == pytest.approx(float(got.cross_entropy + 0.1 * got.z), rel=1e-13)
        assert_close(grads, wanted, 1e-13)


def test_chunks_are_equal_where_a_length_allows_it_and_few_where_not():
    million = 2**20  # of logits a token; 128 of them fit
    chunks = lambda seq: loss_module._chunks(1, seq, million)
    assert [chunks(seq) for seq in (1, 128, 256, 384)] == [1, 1, 2, 3]
    assert [chunks(seq) for seq in (192, 200, 1000, 2048)] == [2, 2, 8, 16]
    assert [chunks(seq) for seq in (131, 1009, 8191)] == [2, 8, 64]  # primes
    assert loss_module._chunks(0, 7, million) == 1


def test_loss_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS", 50)
    z, kernel, targets, weights = (
        jnp.asarray(a, jnp.float32 if a.dtype == np.float64 else None) for a in loss_arguments()
    )
    loss = lambda z, kernel: next_token_loss(z, kernel, targets, weights).objective
    program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(z, kernel))
    assert "f32[4,11]" in program  # two of six tokens of both rows at a time
    assert "f32[2,6,11]" not in program and "f32[12,11]" not in program


def test_products_with_logits_on_a_gpu_have_aligned_rows():
    z, kernel, targets, weights = (
        jnp.asarray(a, jnp.float32 if a.dtype == np.float64 else None) for a in loss_arguments()
    )
    loss = lambda z, kernel: next_token_loss(z, kernel, targets, weights).objective
    with lowering_for("NVIDIA H100 80GB HBM3"):
        program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(z, kernel)
    shapes = {
        v.aval.shape
        for e in equations(program.jaxpr)
        if e.primitive.name == "dot_general"
        for v in e.invars + e.outvars
    }
    assert {size for shape in shapes for size in shape} == {12, 15, 128}


def equations(jaxpr):
    """Yield all equations of a program, and those of the programs that it contains."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_learning_rate_warms_up_from_the_first_step_and_falls_to_a_tenth():
    schedule = learning_rate(AdamW(learning_rate=2.0, warmup_fraction=0.1), steps=100)
    rates = np.asarray(jax.jit(jax.vmap(schedule))(np.arange(100)))
    np.testing.assert_allclose(rates[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
    assert np.all(np.diff(rates[9:]) < 0)
    # The middle between the only step at the peak and the last one of all.
    assert rates[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[99] == schedule(100) == pytest.approx(0.2)


def test_a_stable_learning_rate_decays_in_the_last_steps():
    config = AdamW(learning_rate=2.0, warmup_fraction=0.1, schedule="wsd", decay_fraction=0.25)
    rates = np.asarray(jax.jit(jax.vmap(learning_rate(config, steps=100)))(np.arange(101)))
    np.testing.assert_allclose(rates[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(rates[9:75], 2.0, rtol=1e-6)
    falling = 2.0 - (2.0 - 0.2) * np.arange(1, 26) / 25
    np.testing.assert_allclose(rates[75:100], falling, rtol=1e-5)
    assert rates[100] == pytest.approx(0.2)
    # A longer run has the same rates up to the beginning of this run's decay.
    longer = learning_rate(dataclasses.replace(config, warmup_fraction=0.05), steps=200)
    np.testing.assert_allclose(jax.vmap(longer)(np.arange(75)), rates[:75], rtol=1e-6)
    never = learning_rate(dataclasses.replace(config, decay_fraction=0.0), steps=100)
    assert never(99) == 2.0


ROLES = {"a": "gain", "b": "hidden", "c": "embedding", "d": "keys"}


def one_update(config, gradient, params, **rates):
    axes, rates = dict.fromkeys(ROLES, ()), dict.fromkeys(ROLES, 1.0) | rates
    optimizer = make_optimizer(config, steps=1, roles=ROLES, axes=axes, rates=rates)

    @jax.jit
    def update(gradient, params):
        updates, _ = optimizer.update(gradient, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    return update(gradient, params)


def test_update_is_adamw_and_spares_what_is_excluded_from_decay():
    """Adam's first step is the sign of the gradient; the rate of a one-step run is the peak."""
    params = dict.fromkeys(ROLES, np.float32(2.0))
    gradient = dict.fromkeys(ROLES, np.float32(-0.1))
    config = AdamW(learning_rate=0.5, weight_decay=0.1, epsilon=1e-12)
    new = one_update(config, gradient, params)
    for name, role in ROLES.items():
        decay = 0.0 if role in config.decay_exclude else 0.5 * 0.1 * 2.0
        assert new[name] == pytest.approx(2.0 + 0.5 - decay, rel=1e-5)
    independent = dataclasses.replace(config, independent_weight_decay=True)
    # The parameter's factor is one of its rate, and not of its decay.
    slower = one_update(independent, gradient, params, d=0.5)["d"]
    assert slower == pytest.approx(2.0 + 0.5 * 0.5 - 0.1 * 2, rel=1e-5)
    everything = dataclasses.replace(config, decay_exclude=())
    assert one_update(everything, gradient, params)["a"] == pytest.approx(2.4, rel=1e-5)


@pytest.mark.parametrize("config", [AdamW(), Muon()], ids=lambda config: config.kind)
def test_optimizers_that_may_change_on_resume_keep_what_is_saved(config):
    other = {
        bool: lambda x: not x,
        float: lambda x: (x + 0.5) / 2,
        int: lambda x: x + 1,
        str: lambda x: {"cosine": "wsd", "float32": "bfloat16"}[x],
        tuple: lambda x: x[1:],
    }

    def saved(config):
        params, axes = {"w": jnp.zeros((4, 4))}, {"w": ("dim", "hidden")}
        of = {"roles": {"w": "hidden"}, "axes": axes, "rates": {"w": 1.0}}
        state = jax.eval_shape(make_optimizer(config, steps=4, **of).init, params)
        return [(jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(state)]

    data = DataConfig(seq_len=8)
    run = RunConfig(model=models.model(), train=TrainConfig(optimizer=config), data=data)
    rules, before = {}, saved(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        changed = dataclasses.replace(config, **{field.name: other[type(value)](value)})
        rules[field.name] = resume_rule(run, f"train.optimizer.{field.name}")
        assert (saved(changed) == before) == (rules[field.name] == "change"), field.name
    fixed = {name for name, rule in rules.items() if rule == "fixed"}
    assert fixed == {"independent_weight_decay", "moment_dtype"}


def test_a_bfloat16_moment_is_only_stored_in_bfloat16():
    """The products of a step are those of float32; what is kept for the next step is rounded."""
    config = AdamW(learning_rate=0.5, b1=0.7, clip_norm=1e9, moment_dtype="bfloat16")
    gradients = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    roles, axes, rates = {"w": "gain"}, {"w": ("dim",)}, {"w": 1.0}
    optimizer = make_optimizer(config, steps=4, roles=roles, axes=axes, rates=rates)
    params = {"w": jnp.zeros(5)}
    state = optimizer.init(params)
    first, second, expected = np.zeros(5), np.zeros(5), np.zeros(5)
    for step, gradient in enumerate(gradients, 1):
        updates, state = optimizer.update({"w": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        first = config.b1 * first + (1 - config.b1) * gradient
        second = config.b2 * second + (1 - config.b2) * gradient**2
        corrected = second / (1 - config.b2**step)
        rate = float(learning_rate(config, 4)(step - 1))
        expected -= rate * first / (1 - config.b1**step) / (np.sqrt(corrected) + config.epsilon)
        first = first.astype(jnp.bfloat16).astype(np.float64)
    np.testing.assert_allclose(params["w"], expected, rtol=1e-5)
    moments = {str(x.dtype) for x in jax.tree.leaves(state) if x.shape}
    assert moments == {"bfloat16", "float32"}


def test_rates_of_their_own_and_one_weight_decay():
    params = dict.fromkeys(ROLES, np.float32(2.0))
    gradient = dict.fromkeys(ROLES, np.float32(-0.1))
    config = AdamW(learning_rate=0.5, weight_decay=0.1, epsilon=1e-12)
    new = one_update(config, gradient, params, b=0.25, d=0.5)
    assert [float(new[name]) for name in "abcd"] == pytest.approx([2.5, 2.025, 2.5, 2.15])


def test_gradients_are_clipped_to_a_global_norm():
    config = AdamW(learning_rate=1.0, weight_decay=0.0, clip_norm=1.0, epsilon=1.0)
    params = dict.fromkeys(ROLES, np.float32(0.0))
    new = one_update(config, dict.fromkeys(ROLES, np.float32(100.0)), params)
    # Clipped to 0.5 each; epsilon 1 makes Adam's first step g / (|g| + 1).
    assert float(new["a"]) == pytest.approx(-0.5 / 1.5, rel=1e-5)


@pytest.mark.slow
def test_each_weight_learns_by_its_own_fan_in():
    """R 3 and width 18, D_FF 22, D_k 5."""
    sizes = ("attention.num_heads=1", "feed_forward.hidden_dim=11", "store.key_dim=2")
    small = models.model("matrix", parametrization=MuP(sizes))
    standard, scaled = (prepared(run_config(model=m)) for m in (models.model("matrix"), small))
    moved = {}
    for name, (_, state, step) in {"standard": standard, "scaled": scaled}.items():
        new, _ = step(state, models.batch(8))
        delta = jax.tree.map(lambda a, b: np.abs(a - b).max(), new.params, state.params)
        moved[name] = delta["stacks"][0][1] | {"unembedding": delta["unembedding"]}
    ratio = lambda *path: np.divide(*(leaf(moved[n], path) for n in ("scaled", "standard")))
    leaf = lambda tree, path: leaf(tree[path[0]], path[1:]) if path else tree
    assert ratio("core", "w_1") == pytest.approx(1 / 3, rel=0.02)
    assert ratio("core", "w_2") == pytest.approx(1 / 2, rel=0.02)
    assert ratio("site", "store_keys") == pytest.approx(1 / 3, rel=0.02)
    assert ratio("site", "read_keys") == pytest.approx(2 / 5, rel=0.02)
    assert ratio("site", "gain") == pytest.approx(1.0, rel=0.02)
    assert ratio("unembedding", "kernel") == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    ("base", "optimizer", "message"),
    [
        (("store.dim=8",), AdamW(), "parametrization.base: field of store 'dim' is unknown"),
        (("store.key_dim",), AdamW(), "parametrization.base: 'store.key_dim' must be path=value"),
        (
            ("mixer=dense",),
            AdamW(),
            "parametrization.base: mixer='dense' is not a size; legal: whole",
        ),
        (("norm_bias=true",), AdamW(), "parametrization.base: norm_bias=True is not a size"),
        (
            ("store.key_dim=2",),
            Muon(),
            "optimizer=muon cannot be used with model.parametrization=mup",
        ),
    ],
)
def test_mup_that_cannot_be_is_told(base, optimizer, message):
    with pytest.raises(UsageError, match=message):
        run_config(model=models.model("matrix", parametrization=MuP(base)), optimizer=optimizer)


@pytest.mark.parametrize("store", ["matrix", *later("vector")])
def test_accumulated_parts_are_the_whole_batch(store):
    """Parts have different numbers of real tokens: weighting parts alike would be wrong."""
    batch = models.batch(8)
    batch = batch._replace(weights=np.where(np.arange(8)[:, None] % 3 == 0, 0, batch.weights))
    batch = batch._replace(weights=batch.weights.astype(np.float32))
    results = []
    for accumulate in (1, 4):
        _, state, step = prepared(run_config(store, accumulate=accumulate))
        results.append(step(state, batch))
    (one, metrics_one), (four, metrics_four) = results
    assert metrics_one["train/loss"] == pytest.approx(float(metrics_four["train/loss"]), rel=1e-5)
    assert metrics_one["optim/grad_norm"] == pytest.approx(
        float(metrics_four["optim/grad_norm"]), rel=1e-4
    )
    for a, b in zip(jax.tree.leaves(one.optimizer), jax.tree.leaves(four.optimizer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)


def test_an_evaluation_holds_no_more_rows_than_a_part_of_a_step():
    """A run that accumulates has no memory for the activations of a whole batch."""
    batch = models.batch(8)
    whole, state, _ = prepared(run_config())
    parts = prepare(run_config(accumulate=4), whole.mesh)
    program = str(jax.make_jaxpr(parts.loss)(state.params, batch))
    assert "f32[2,11," in program and "f32[8,11," not in program
    one, four = (jax.jit(run.loss)(state.params, batch) for run in (whole, parts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, four)


@pytest.mark.slow
def test_parts_add_up_in_float64_too():
    with jax.enable_x64(True):
        config = run_config(model=models.model(compute_dtype="float64"), accumulate=2)
        run = prepare(config, sharding.make_mesh("data=1", jax.devices()[:1]))
        _, metrics = jax.eval_shape(run.step, jax.eval_shape(run.init), models.batch(8))
    assert metrics["train/loss"].dtype == np.float64


def test_loss_metric_leaves_out_the_z_loss_and_padding():
    run, state, step = prepared(run_config(z_loss=0.5))
    batch = models.batch(8)
    _, metrics = step(state, batch)
    inputs, segment_ids = jnp.asarray(batch.inputs), jnp.asarray(batch.segment_ids)
    decoder = nnx.merge(run.graphdef, state.params)
    logits = np.asarray(jax.jit(decoder)(inputs, segment_ids=segment_ids))
    log_z = np.log(np.exp(logits).sum(-1))
    chosen = np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    mean = lambda x: (x * batch.weights).sum() / batch.weights.sum()
    assert metrics["train/loss"] == pytest.approx(mean(log_z - chosen), rel=1e-5)
    assert metrics["train/z_loss"] == pytest.approx(0.5 * mean(log_z**2), rel=1e-5)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    _, state, step = prepared(run_config())
    poisoned = state._replace(
        params=state.params | {"unembedding": {"kernel": jnp.full((18, models.VOCAB), jnp.nan)}}
    )
    once, metrics = step(poisoned, models.batch(8))
    twice, _ = step(once, models.batch(8))
    assert not np.isfinite(metrics["train/loss"])
    assert (twice.step, twice.skipped, twice.skipped_in_a_row) == (2, 2, 2)
    for new, old in zip(
        jax.tree.leaves((once.params, once.optimizer)),
        jax.tree.leaves((poisoned.params, poisoned.optimizer)),
        strict=True,
    ):
        np.testing.assert_array_equal(new, old)
    good, after = step(twice._replace(params=state.params), models.batch(8))
    assert (good.step, good.skipped, good.skipped_in_a_row) == (3, 2, 0)
    # The first update has the first rate.
    rates = [float(of["optim/learning_rate"]) for of in (metrics, after)]
    assert rates[0] == rates[1] == learning_rate(run_config().train.optimizer, 2)(0)


@pytest.mark.parametrize(
    ("loss", "gradient"), [(1.0, np.inf), (np.inf, 1.0), (np.nan, 1.0), (1.0, 1.0)]
)
def test_a_loss_or_a_gradient_that_is_not_finite_skips_a_step(loss, gradient):
    config, roles = run_config(), {"w": "hidden"}
    of = {"roles": roles, "axes": {"w": ("dim", "hidden")}, "rates": {"w": 1.0}}
    optimizer, params = make_optimizer(AdamW(), steps=4, **of), {"w": jnp.ones((2, 3))}
    found = {"w": jnp.full((2, 3), gradient)}, loss_module.Loss(*map(jnp.float32, (loss, loss, 0)))
    step = make_train_step(config, lambda *_: found, optimizer, roles, lambda params: {})
    before = initial_state(params, optimizer, jax.random.key(0), {})
    after, _ = jax.jit(step)(before, models.batch(8))
    skips = not np.isfinite(loss + gradient)
    assert int(after.skipped) == skips and bool((after.params["w"] == 1).all()) == skips


def test_weights_and_the_order_of_text_follow_from_the_seed(tmp_path):
    """Each on its own: either would make two runs differ."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
    found = []
    for seed in (0, 1, 1):
        config = run_config("vector", model=models.model("vector", vocab_size=257), seed=seed)
        config = dataclasses.replace(config, data=DataConfig(seq_len=11, source=str(path)))
        run = prepare(config, sharding.make_mesh("data=1", jax.devices()[:1]))
        tokens = jax.jit(lambda run=run: run.init().params["embedding"]["tokens"])()
        batch = load_datasets(config, ByteTokenizer()).train.batch_at(0)
        found.append((np.asarray(tokens), batch.inputs))
    for first, second, third in zip(*found, strict=True):
        assert (first != second).mean() > 0.5
        np.testing.assert_array_equal(second, third)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["matrix", *later("vector")])
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", *later("data=8", "fsdp=2")])
def test_sharded_step_is_the_step_of_one_device(store, mesh):
    devices = {"data=8": 8, "data=2,fsdp=2": 4, "fsdp=2": 2}[mesh]
    model = models.model(store, num_heads=2, vocab_size=models.VOCAB + 1)
    results = []
    for spec, count in (("data=1", 1), (mesh, devices)):
        run, state, step = prepared(run_config(model=model, mesh=spec), count)
        batch = jax.device_put(models.batch(8), run.batch_sharding)
        results.append(step(state, batch))
        if "fsdp" in spec:
            kernel = state.params["unembedding"]["kernel"]
            assert kernel.addressable_shards[0].data.shape[0] == kernel.shape[0] // 2
    (one, metrics_one), (many, metrics_many) = results
    for name in ("train/loss", "optim/grad_norm"):  # which counts no replica twice
        assert metrics_one[name] == pytest.approx(float(metrics_many[name]), rel=1e-5)
    for a, b in zip(jax.tree.leaves(one.optimizer), jax.tree.leaves(many.optimizer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kernels, wanted", [("pallas", {"tpu", "cuda"}), *later(("xla", set()))])
def test_a_config_names_the_implementation_of_its_ops(kernels, wanted):
    """A forward pass has the kernels of both platforms, but a step on CPUs has only a CPU's ops."""
    config = run_of("rmt-tiny")
    model = config.model.replace(kernels=kernels, num_layers=1)
    traced = trace_config(dataclasses.replace(config, model=model), jax.devices()[:1])
    decoder = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(decoder)
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    forward = jax.make_jaxpr(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
    text = str(forward(params, tokens))
    assert ("pallas_call" in text) == bool(wanted)
    assert {platform for platform in ("tpu", "cuda") if f"'{platform}'" in text} == wanted
    assert "pallas_call" not in str(traced.jaxpr)
