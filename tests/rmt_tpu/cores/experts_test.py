"""Experts: their equations, how tokens are spread over them, and what has no room."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharding
from pallas_kernels.platform import interpreting
from pallas_kernels.target import lowering_for
from rmt_tpu import config as cfg
from rmt_tpu.cores import experts
from rmt_tpu.cores.core import causal
from rmt_tpu.errors import UsageError
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.parameters import Seed
from rmt_tpu.training.optimizer import load_metrics, make_optimizer, zero_statistics
from tests import models
from tests.closeness import assert_close
from tests.rmt_tpu import plain
from tests.rmt_tpu.residual import checks, over_depth
from tests.tiers import later

MIX = cfg.Experts(
    6, 2, 5, shared_gate=True, scale=2.5, balance=cfg.SignRule(rate=0.4), groups=3, top_groups=2
)
ALONE = cfg.Experts(5, 3, 4, shared=0, balance=cfg.BalanceLoss())
ATTENTION = cfg.Attention(2, 4, cfg.Rope(), False)
SOFT = cfg.Experts(
    4, 2, 3, shared=0, scores="softmax", normalized=False, balance=cfg.BalanceLoss(0.0)
)
# The experts of Kimi K3, and those without a norm, without shared experts and without a bound.
LATENT = cfg.Experts(
    6,
    2,
    5,
    2,
    activation="situ",
    situ_beta=0.5,
    situ_linear_beta=0.3,
    latent_dim=7,
    latent_norm=True,
)
NARROW = cfg.Experts(
    5, 3, 4, 0, activation="situ", situ_linear_beta=None, latent_dim=6, balance=cfg.BalanceLoss()
)
STACKS = (cfg.Stack((ATTENTION, MIX, ALONE, SOFT), 2),)
LATENT_STACKS = (cfg.Stack((ATTENTION, LATENT, NARROW), 2),)
STORES = {"vector": cfg.VectorStore(12), "matrix": cfg.MatrixStore(6, vectors=3, vector_dim=4)}


@pytest.mark.parametrize(
    "store, mixer, remat",
    [
        ("matrix", cfg.Sum(), "reversible"),
        *later(
            ("matrix", cfg.Sum(), "reversible_dots"),
            ("vector", cfg.Sum(), "full"),
            ("vector", cfg.BlockAttention(sublayers_per_block=3), "blocks"),
            ("matrix", cfg.FullAttention(), "full"),
        ),
    ],
)
def test_a_model_of_experts_follows_their_equations(store, mixer, remat):
    assert_follows_equations(STACKS, store, mixer, remat)


@pytest.mark.slow
@pytest.mark.parametrize(
    "store, mixer, remat",
    [
        ("vector", cfg.BlockAttention(sublayers_per_block=3), "full"),
        ("matrix", cfg.Sum(), "reversible"),
    ],
)
def test_latent_experts_follow_their_equations(store, mixer, remat):
    assert_follows_equations(LATENT_STACKS, store, mixer, remat)


def assert_follows_equations(stacks, store, mixer, remat):
    with jax.enable_x64(True):
        config = cfg.ModelConfig(
            stacks, STORES[store], mixer, models.VOCAB, remat=remat, compute_dtype="float64"
        )
        plainly = plain.model if mixer.kind == "sum" else over_depth.reference
        checks.assert_follows_equations(config, plainly, unused=("load",))


# One layer alone, in float32 ---------------------------------------------------------------------

WIDTH, BATCH, SEQ = 12, 4, 16


def core_of(core: cfg.Experts):
    """Its graph and random parameters."""
    config = cfg.ModelConfig((cfg.Stack((ATTENTION, core)),), STORES["vector"])
    sizes = {"output_scale": 1.0, "input_width": WIDTH}
    make = lambda: experts.Experts(config, core, Seed(jax.random.key(0)), **sizes)
    graphdef, _ = nnx.split(nnx.eval_shape(make), nnx.Param)
    return graphdef, jax.jit(lambda: nnx.to_pure_dict(nnx.state(make(), nnx.Param)))()


def tokens(seed=0):
    """That like some experts more than others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, SEQ, 1, WIDTH)) + rng.normal(size=WIDTH)
    return jnp.asarray(x, jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef, params, x):
    core = nnx.merge(graphdef, params)
    return core.with_aux(Read(residual=x), causal(x.shape[1], None, None), 0)


def loads(params, x, bias):
    """How many tokens choose each expert, in NumPy."""
    scores = plain.sigmoid(np.float64(x[:, :, 0]) @ np.float64(params["w_router"]))
    chosen = np.argsort(-(scores + np.float64(bias)), axis=-1)[..., :2]
    return np.bincount(chosen.ravel(), minlength=6)


@pytest.mark.parametrize(
    "balance", [cfg.SignRule(rate=0.02), cfg.Quantiles()], ids=lambda b: b.kind
)
def test_the_bias_moves_load_towards_the_mean(balance):
    """Its gradient is the load, to the unit; the optimizer moves it and counts it in no norm."""
    graphdef, params = core_of(cfg.Experts(6, 2, 5, balance=balance))
    roles = nnx.to_pure_dict(
        jax.tree.map(
            lambda p: p.get_metadata("role"),
            nnx.state(nnx.merge(graphdef, params), nnx.Param),
            is_leaf=lambda p: isinstance(p, nnx.Variable),
        )
    )
    rates = jax.tree.map(lambda _: 1.0, roles)
    config = cfg.AdamW(learning_rate=1e-9)
    optimizer = make_optimizer(config, steps=99, roles=roles, axes=roles, rates=rates)
    x, state = tokens(), optimizer.init(params)

    @jax.jit
    def step(params, state):
        loss = lambda params: run(graphdef, params, x)[1]["loss"]
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        metrics = load_metrics(gradients, roles)
        norm = optax.tree.norm(zero_statistics(gradients, roles))
        return optax.apply_updates(params, updates), state, gradients, metrics, (value, norm)

    most = []
    for _ in range(16):
        if balance.kind == "sign":
            bias = 0.02 * params["load"]
        else:
            bias = experts._balancing_bias(params["seen"], 2 / 6)
        params, state, gradients, metrics, zeros = step(params, state)
        np.testing.assert_array_equal(gradients["load"], loads(params, x, bias))
        assert zeros == (0, 0) and not np.any(state[1].mu["load"])
        share = np.float64(gradients["load"]) / (2 * BATCH * SEQ)
        most.append(6 * share.max())
        assert_close(metrics["train/experts/max_load"], most[-1], 1e-6)
        entropy = -np.sum(share * np.log(np.maximum(share, 1e-30))) / np.log(6)
        assert_close(metrics["train/experts/entropy"], entropy, 1e-5)
    assert most[0] > 1.5
    assert most[-1] < 1.2


def test_the_load_of_a_single_expert_is_equal():
    metrics = load_metrics({"load": jnp.full((2, 1), 5.0)}, {"load": "load"})
    assert {float(value) for value in metrics.values()} == {1.0}


def test_metrics_of_loads_are_means_over_layers_but_the_worst_load_is_a_maximum():
    """A layer that uses 2 of 4 experts alike, and a layer that uses all of them alike."""
    loads = jnp.array([[3.0, 3.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]])
    roles = {"load": "load", "w": "hidden"}
    metrics = jax.jit(lambda x: load_metrics({"load": x, "w": x}, roles))(loads)
    expected = {"max_load": (2 + 1) / 2, "worst_load": 2, "entropy": (0.5 + 1) / 2}
    assert metrics == {f"train/experts/{k}": pytest.approx(v) for k, v in expected.items()}


def test_scores_are_counted_where_they_are():
    """The quantile between bins too: to a quarter of a bin of what NumPy finds."""
    above = np.random.default_rng(0).uniform(-0.6, 0.3, size=(4000, 3)).astype(np.float32)
    above += np.float32([0, 0.5, -0.2])
    seen = experts._histogram(jnp.asarray(above))
    edges = np.linspace(-2, 2, cfg.HISTOGRAM_BINS + 1)
    for e in range(3):
        np.testing.assert_array_equal(seen[e], np.histogram(above[:, e], edges)[0])
    want = -np.quantile(above, 1 - 0.25, axis=0)
    got = np.asarray(experts._balancing_bias(seen / len(above), 0.25))
    assert np.abs(got - (want - want.mean())).max() < 1 / cfg.HISTOGRAM_BINS


def test_quantiles_are_of_scores_above_that_of_the_first_expert_not_chosen():
    core = cfg.Experts(6, 2, 5, balance=cfg.Quantiles())
    graphdef, params = core_of(core)
    scores = np.random.default_rng(0).uniform(size=(1, 40, 6)).astype(np.float32)

    def told(seen):
        made = nnx.merge(graphdef, params | {"seen": seen})
        routing = made._route(scores, jnp.asarray(scores))
        return made._balance_loss(jnp.asarray(scores), jnp.asarray(scores), routing)

    third = np.sort(scores, axis=-1)[..., -3:-2]
    want = jax.jit(experts._histogram)((scores - third).reshape(-1, 6))
    np.testing.assert_array_equal(jax.jit(jax.grad(told))(params["seen"]), want)


def test_quantiles_balance_the_small_scores_of_a_softmax_over_many_experts():
    """Scores are near 1 / 128, and bins of equal width would be half as wide."""
    core = cfg.Experts(128, 4, 1, shared=0, scores="softmax", balance=cfg.Quantiles())
    graphdef, params = core_of(core)
    rng = np.random.default_rng(0)
    scores = jax.nn.softmax(jnp.float32(rng.normal(size=(1, 4000, 128)) + rng.normal(size=128)))

    def told(params):
        made = nnx.merge(graphdef, params)
        biased = scores + made._bias()
        return made._balance_loss(scores, biased, made._route(scores, biased))

    step, most = jax.jit(jax.grad(told)), []
    for _ in range(6):
        gradients = step(params)
        params = params | {"seen": gradients["seen"] / 4000}
        most.append(128 * float(gradients["load"].max()) / (4 * 4000))
    assert most[0] > 5
    assert most[-1] < 1.2


def test_the_loss_of_balance_is_one_where_loads_are_even():
    graphdef, params = core_of(cfg.Experts(6, 2, 5, balance=cfg.BalanceLoss(0.5)))
    x = tokens()
    loss = run(graphdef, params, x)[1]["loss"]
    scores = plain.sigmoid(np.float64(x[:, :, 0]) @ np.float64(params["w_router"]))
    shares = scores / scores.sum(-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1)[..., :2]
    of_rows = np.stack([np.bincount(row.ravel(), minlength=6) for row in chosen]) / (2 * SEQ)
    expected = 0.5 * 6 * SEQ * np.sum(of_rows * shares.mean(1))
    assert_close(loss, expected, 1e-5)
    even = run(graphdef, params | {"w_router": 0 * params["w_router"]}, x)[1]["loss"]
    assert_close(even, 0.5 * BATCH * SEQ, 1e-5)


@pytest.mark.slow
def test_shares_of_the_loss_of_balance_are_as_exact_as_the_scores():
    """In float64, over 11 tokens: shares are no binary fractions."""
    with jax.enable_x64(True):
        graphdef, params = core_of(cfg.Experts(6, 2, 5, balance=cfg.BalanceLoss(0.5)))
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        x = np.random.default_rng(0).normal(size=(1, 11, 1, WIDTH))
        scores = plain.sigmoid(x[:, :, 0] @ params["w_router"])
        of_rows = np.bincount(np.argsort(-scores)[..., :2].ravel(), minlength=6) / 22
        shares = scores / scores.sum(-1, keepdims=True)
        expected = 0.5 * 6 * 11 * np.sum(of_rows * shares.mean((0, 1)))
        assert_close(run(graphdef, params, jnp.asarray(x))[1]["loss"], expected, 1e-13)


@contextlib.contextmanager
def on_a_tpu(chip):
    """Experts' rows as on this chip, with interpreted kernels; None for those of a CPU."""
    if chip is None:
        yield
        return
    with lowering_for(chip), interpreting():
        yield


@pytest.mark.parametrize("chip, alignment", [(None, 1), ("TPU v5 lite", 16)])
def test_what_has_no_room_is_dropped_and_counted(chip, alignment):
    """Two devices of three experts each, with room for 0.25 or 0.75 of an even load each."""
    core = cfg.Experts(6, 2, 5, shared=0, capacity=0.75 if chip is None else 0.25)
    graphdef, params = core_of(core)
    x = tokens()
    mesh = sharding.make_mesh("expert=2", jax.devices()[:2])
    specs = {"load": (), "w_router": (), "w_1": ("expert",), "w_2": ("expert",)}
    specs = {name: jax.sharding.PartitionSpec(*spec) for name, spec in specs.items()}
    rows = jax.sharding.PartitionSpec("expert")

    def on_mesh(params, x):
        y, aux = run(graphdef, params, x)
        return y, sharding.add_up(aux)

    of_all = sharding.per_device(on_mesh, mesh, (specs, rows), (rows, jax.sharding.PartitionSpec()))
    with on_a_tpu(chip):
        y, aux = jax.jit(of_all)(params, x)

    flat = np.float64(x).reshape(-1, WIDTH)
    scores = plain.sigmoid(flat @ np.float64(params["w_router"]))
    chosen = np.argsort(-scores, axis=-1)[:, :2]
    weights = np.take_along_axis(scores, chosen, -1)
    weights /= weights.sum(-1, keepdims=True)
    # A device has rows for its capacity and for those that fill up three experts' rows.
    room = int(core.capacity * len(flat)) + 3 * (alignment - 1)
    room += -room % (2 * alignment) if alignment > 1 else 0
    expected, dropped = np.zeros_like(flat), 0
    for first in (0, 3):
        start = 0
        for e in range(first, first + 3):
            own = np.nonzero(chosen == e)[0]
            kept = own[: max(0, room - start)]
            start += -(-len(own) // alignment) * alignment
            dropped += len(own) - len(kept)
            for t in kept:
                gate, up = (flat[t] @ np.float64(params["w_1"][e, :, i]) for i in (0, 1))
                weight = weights[t][chosen[t] == e][0]
                expected[t] += weight * (plain.silu(gate) * up) @ np.float64(params["w_2"][e])
    assert dropped == aux["dropped"] > 10
    assert_close(y.reshape(-1, WIDTH), expected, 1e-5)


@pytest.mark.parametrize("chip", ["TPU v5 lite", *later("TPU v5")])
def test_rows_that_fill_up_experts_change_no_gradient(chip):
    """Rows of a TPU's experts, of which one has no token, and those of a CPU."""
    graphdef, params = core_of(cfg.Experts(6, 2, 5, balance=cfg.SignRule(rate=1.0)))
    params["load"] = params["load"].at[1].set(-100.0)
    x, d_y = tokens(), tokens(1)

    @jax.jit
    def gradients(params, x):
        y, pull_back = jax.vjp(lambda *given: run(graphdef, *given)[0], params, x)
        return y, pull_back(d_y)

    wanted = gradients(params, x)
    with on_a_tpu(chip):
        found = gradients(params, x)
    assert not np.any(wanted[1][0]["w_2"][1])
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), found, wanted)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"top_k": 7}, "top_k=7 must be at most num_experts=6"),
        ({"top_groups": 2}, "top_groups=2 must be at most groups=1"),
        ({"groups": 4}, "groups=4 must divide num_experts=6 into groups of at least 2"),
        ({"groups": 6}, "groups=6 must divide num_experts=6 into groups of at least 2"),
        (
            {"groups": 3, "top_k": 3},
            "top_k=3 must be at most the 2 experts of top_groups=1 groups",
        ),
        ({"groups": 3, "balance": cfg.Quantiles()}, "groups=3 cannot be balanced by quantiles"),
        (
            {"latent_norm": True},
            "latent_norm=True requires latent_dim; set latent_dim, or set latent_norm=false",
        ),
        (
            {"situ_linear_beta": None},
            "situ_linear_beta=None requires activation='situ', not 'swiglu'; set",
        ),
    ],
)
def test_choices_that_experts_do_not_allow_are_refused(changes, message):
    with pytest.raises(UsageError, match=f"Experts.{message}"):
        cfg.Experts(**{"num_experts": 6, "top_k": 2, "hidden_dim": 5} | changes)
