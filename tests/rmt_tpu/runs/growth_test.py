"""A grown checkpoint is the same function: in float64, for every norm, position and mixer."""

import dataclasses
import functools
import tempfile

import jax
import numpy as np
import pytest
from flax import nnx

import sharding
from rmt_tpu import config as cfg
from rmt_tpu import preset
from rmt_tpu.checkpoint import Checkpointer
from rmt_tpu.errors import UsageError
from rmt_tpu.layers.parameters import metadata
from rmt_tpu.runs.growth import KEY_AXES, growth_matrix, restore_grown
from rmt_tpu.training.run import prepare
from tests import models
from tests.models import random_parameters
from tests.tiers import later

SLOTS = 6
MIXERS = {
    "sum": cfg.Sum(),
    "blocks": cfg.BlockAttention(num_blocks=2),
    "full": cfg.FullAttention(),
    "input query": cfg.BlockAttention(num_blocks=2, query="input"),
    "scores without norm": cfg.FullAttention(weights="sigmoid", key_norm=False),
    "scalars": cfg.FullAttention(query="scalars", window=2),
    "heads": cfg.FullAttention(num_heads=2),
    "input query of heads": cfg.BlockAttention(num_blocks=2, query="input", num_heads=3),
    "open": cfg.BlockAttention(
        num_blocks=2, newest_bias=3.0, cumulative=True, output_site="newest"
    ),
    "marin": cfg.BlockAttention(
        num_blocks=2, key_gain=False, normed_embedding=True, output_site="sum"
    ),
    "delta": cfg.DeltaAttention(num_blocks=2),
    "dense": cfg.Dense(),
    "mudd": cfg.Mudd(),
    "residual scalars": cfg.ResidualScalars(),
}
PRESETS = (
    "rmt-tiny",
    "rmt-attnres-tiny",
    "rmt-attnres-full-tiny",
    "rmt-denseformer-tiny",
    "rmt-mudd-tiny",
    "rmt-kimi-tiny",
)


def model(mixer="sum", key_dim=SLOTS, **changes):
    changes = {"num_layers": 2, "compute_dtype": "float64"} | changes
    config = models.model(mixer=MIXERS[mixer], store=cfg.MatrixStore(key_dim), **changes)
    # So large an epsilon shows whether what is below it grows too.
    return dataclasses.replace(config, norm_epsilon=0.1)


def resized(config, key_dim):
    return dataclasses.replace(config, store=dataclasses.replace(config.store, key_dim=key_dim))


@functools.cache
def expected(config):
    """Logits of the model that grows, with its `random_parameters`."""
    return logits(config, random_parameters(config))


@functools.cache
def applied(config):
    graphdef = models.graph(config)
    return jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))


def logits(config, params):
    with jax.enable_x64(True):
        return np.asarray(applied(config)(params, models.tokens() % config.vocab_size))


def grown(tree, like, config):
    """Return what a run of `config` restores from a checkpoint of `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpointer(folder)
        checkpoints.save(5, tree, {})
        return restore_grown(checkpoints, like, config)[1]


def on_host(tree, dtype=None):
    """Return NumPy arrays with the shapes of a tree, to restore into; JAX keys stay as they are."""

    def array(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return np.broadcast_to(np.zeros((), dtype or x.dtype), x.shape)

    return jax.tree.map(array, tree)


def grow(params, after):
    """Return the parameters that a run of `after` restores from a checkpoint with `params`."""
    shapes = nnx.to_pure_dict(nnx.state(models.abstract(after), nnx.Param))
    like = on_host(shapes, jax.tree.leaves(params)[0].dtype)
    return grown({"params": params}, {"params": like}, after)["params"]


def assert_same_function(before, key_dim):
    after, params, wanted = resized(before, key_dim), random_parameters(before), expected(before)
    assert np.abs(wanted).max() > 0.1
    # Float64 rounding over some thousand sums; every term that counts is above 1e-6.
    np.testing.assert_allclose(logits(after, grow(params, after)), wanted, atol=1e-11)


SIZES = (2 * SLOTS, 3 * SLOTS, 2 * SLOTS + 1)
NORMS = [("layernorm", 2 * SLOTS + 1)]
NORMS += later(
    *(
        (norm, size)
        for norm in ("layernorm", "rmsnorm")
        for size in SIZES
        if (norm, size) not in NORMS
    )
)


@pytest.mark.parametrize("norm, key_dim", NORMS)
def test_logits_are_the_same(norm, key_dim):
    assert_same_function(model(norm=norm), key_dim)


@pytest.mark.parametrize("norm", ["layernorm", *later("rmsnorm")])
@pytest.mark.parametrize("positions", [cfg.Rope(), *later(cfg.Alibi())], ids=lambda p: p.kind)
def test_logits_are_the_same_without_learned_positions(norm, positions):
    assert_same_function(model(norm=norm, positions=positions), 2 * SLOTS)


NOW = ["dense"]


@pytest.mark.parametrize("mixer", NOW + later(*(m for m in MIXERS if m not in ("sum", *NOW))))
def test_logits_are_the_same_with_every_mixer(mixer):
    assert_same_function(model(mixer), 3 * SLOTS)


def test_tied_embeddings_stay_tied():
    before = model(tied_embeddings=True)
    assert_same_function(before, 2 * SLOTS)
    params = random_parameters(before)
    larger = grow(params, resized(before, 2 * SLOTS))
    assert "unembedding" not in larger
    np.testing.assert_array_equal(larger["embedding"]["tokens"], params["embedding"]["tokens"])


@pytest.mark.slow
def test_logits_are_the_same_of_a_residual_that_is_rebuilt():
    assert_same_function(model(remat="reversible"), 2 * SLOTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_logits_of_presets_are_the_same(name):
    config = dataclasses.replace(preset(name), vocab_size=64, compute_dtype="float64")
    assert_same_function(config, 3 * config.store.key_dim)


def test_new_gains_let_what_is_new_be_learned():
    """A gain of 0 beside a query of 0: neither would ever have a gradient."""
    assert {name: new for name, (_, new) in KEY_AXES.items() if "gain" in name} == {
        "gain": "ones",
        "key_gain": "ones",
    }


def with_empty_slots(params, before, after):
    """The way that the module's docstring rules out; its gain is right for the mean square."""
    smaller = (before.store.key_dim / after.store.key_dim) ** 0.5

    def empty(path, x):
        name = path[-1].key
        if name in ("store_keys", "position_keys"):
            x[..., SLOTS:] = 0
        return x * smaller if name == "gain" else x

    return jax.tree_util.tree_map_with_path(empty, grow(params, after))


@pytest.mark.parametrize("norm", ["layernorm", *later("rmsnorm")])
def test_empty_slots_are_another_function(norm):
    before = model(norm=norm)
    after, params = resized(before, 2 * SLOTS), random_parameters(before)
    difference = logits(after, with_empty_slots(params, before, after)) - expected(before)
    assert np.abs(difference).max() > 1e-3  # of epsilon for rmsnorm, and of the mean for layernorm


def test_growing_twice_is_the_same_function():
    before, params = model(), random_parameters(model())
    middle, after = resized(before, 12), resized(before, 25)
    twice = grow(grow(params, middle), after)
    np.testing.assert_allclose(logits(after, twice), expected(before), atol=1e-11)


@pytest.mark.parametrize(("slots", "new"), [(1, 1), (5, 5), (6, 13), (64, 64), (64, 448)])
def test_turn_keeps_mean_and_mean_square(slots, new):
    a = growth_matrix(slots, new)
    np.testing.assert_allclose(a.T @ a, new / slots * np.eye(slots), atol=1e-12)
    np.testing.assert_allclose(a.sum(axis=0), new / slots, atol=1e-12)
    np.testing.assert_allclose(a.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_array_equal(a, growth_matrix(slots, new))


@pytest.mark.slow
def test_all_axes_of_slots_are_known():
    """By what parameters say of their axes, and by which shapes differ between two sizes."""
    configs = [*map(model, MIXERS), preset(PRESETS[0]), preset("rmt-kimi-tiny")]
    for config in configs:
        small, large = (
            models.abstract(config),
            models.abstract(resized(config, 2 * config.store.key_dim)),
        )
        shapes = lambda module: nnx.to_pure_dict(nnx.state(module, nnx.Param))
        leaves = jax.tree_util.tree_leaves_with_path(shapes(small))
        axes = jax.tree.leaves(metadata(small, "axes"), is_leaf=lambda x: isinstance(x, tuple))
        others = jax.tree.leaves(shapes(large))
        assert len(leaves) == len(axes) == len(others)
        for (path, leaf), names, other in zip(leaves, axes, others, strict=True):
            name = path[-1].key
            keyed = name in KEY_AXES and "core" not in [getattr(part, "key", None) for part in path]
            assert (leaf.shape != other.shape) == keyed, path
            if keyed and name != "project":
                assert [i - len(names) for i, n in enumerate(names) if n == "key"] == list(
                    KEY_AXES[name][0]
                )
        after = resized(config, 2 * config.store.key_dim)
        larger = jax.tree.leaves(grow(random_parameters(config), after))
        assert [x.shape for x in larger] == [x.shape for x in others]


# Training goes on ---------------------------------------------------------------------------------


def run_config(key_dim, mesh="data=1", mixer="sum", **model_changes):
    optimizer = cfg.AdamW(learning_rate=1e-2, weight_decay=0.0)
    return cfg.RunConfig(
        model=dataclasses.replace(model(mixer, key_dim, **model_changes), compute_dtype="float32"),
        train=cfg.TrainConfig(steps=100, batch_size=8, mesh=mesh, optimizer=optimizer),
        data=cfg.DataConfig(seq_len=12),
    )


def prepared(config):
    mesh = sharding.make_mesh(
        config.train.mesh, jax.devices()[: 1 if "=1" in config.train.mesh else 8]
    )
    return prepare(config, mesh)


def trained(run, state, steps, first=0):
    """After some steps, and the loss of each."""
    step, losses = jax.jit(run.step), []
    for seed in range(first, first + steps):
        batch = jax.device_put(models.batch(8, 12, seed), run.batch_sharding)
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))
    return state, losses


def like(run):
    make = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(make, jax.eval_shape(run.init), run.state_shardings)


@pytest.fixture(scope="module")
def small():
    """A run of few steps, and its state on the host; the key as it is."""
    run = prepared(run_config(SLOTS))
    state, _ = trained(run, jax.jit(run.init)(), 5)
    return run, state


def host(state):
    return jax.device_get(state._replace(key=np.zeros(())))


@pytest.mark.xdist_group("grown run")
def test_moments_of_new_entries(small):
    _, state = small
    after = run_config(2 * SLOTS)
    adam = grown(state, on_host(like(prepared(after))), after.model).optimizer[1]
    old = host(state).optimizer[1]
    a = growth_matrix(SLOTS, SLOTS)
    for name, axis in (("store_keys", -1), ("read_keys", -1), ("gain", -2)):
        at = lambda tree, name=name, axis=axis: np.moveaxis(
            tree["stacks"][0][0]["site"][name], axis, -1
        )
        np.testing.assert_array_equal(at(adam.mu)[..., :SLOTS], at(old.mu))
        np.testing.assert_array_equal(at(adam.nu)[..., :SLOTS], at(old.nu))
        assert np.all(at(adam.mu)[..., SLOTS:] == 0) and np.any(at(old.mu))
        # Of float32 numbers, rounded once.
        np.testing.assert_allclose(at(adam.nu)[..., SLOTS:], at(old.nu) @ (a * a).T, rtol=1e-6)
    assert adam.count == old.count == 5


def size(x):
    return np.sqrt(np.mean(np.square(x)))


@pytest.mark.slow
@pytest.mark.xdist_group("grown run")
def test_new_slots_are_trained(small):
    after = run_config(2 * SLOTS)
    _, state = small
    run = prepared(after)
    larger = grown(state, like(run), after.model)
    first, _ = trained(run, larger, 1, first=5)
    read = lambda state: np.asarray(state.optimizer[1].mu["stacks"][0][0]["site"]["read_keys"])
    gradient = (read(first) - 0.9 * read(larger)) / 0.1
    new, old = gradient[..., SLOTS:], gradient[..., :SLOTS]
    assert 0.5 < size(new) / size(old) < 2  # turned, not smaller
    later, _ = trained(run, first, 19, first=6)
    stored = lambda state: np.asarray(state.params["stacks"][0][0]["site"]["store_keys"])
    moved = np.abs(stored(later) - stored(larger))[..., SLOTS:]
    # Twenty steps at a rate of 1e-2; the least of all entries has moved.
    assert moved.min() > 1e-5 and np.median(moved) > 1e-3
    # What the new slots hold is no longer a copy of the old ones.
    copies = stored(later)[..., :SLOTS] @ growth_matrix(SLOTS, SLOTS).T
    assert size(stored(later)[..., SLOTS:] - copies) > 1e-2


@pytest.mark.slow
def test_new_queries_of_depth_attention_have_gradients():
    before = model("full", num_layers=1)
    after = resized(before, 2 * SLOTS)
    graphdef = models.graph(after)
    loss = lambda params: (nnx.merge(graphdef, params)(models.tokens()) ** 2).mean()
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(loss))(grow(random_parameters(before), after))
    query = np.asarray(gradient["stacks"][0][1]["site"]["mix"]["query"])
    # The old ones are times a random gain.
    assert 0.1 < size(query[:, SLOTS:]) / size(query[:, :SLOTS]) < 10


def assert_state_is(state, wanted):
    for (path, got), value in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(wanted), strict=True
    ):
        if jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, value = jax.random.key_data(got), jax.random.key_data(value)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(value), err_msg=str(path))


@pytest.mark.xdist_group("grown run")
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,key=2", *later("data=1", "data=4,key=2")])
def test_restore_onto_any_mesh(small, mesh, tmp_path):
    _, state = small
    after = run_config(2 * SLOTS, mesh)
    checkpoints = Checkpointer(str(tmp_path))
    checkpoints.save(5, state, {"windows_read": 40})
    run = prepared(after)
    step, placed, meta = restore_grown(checkpoints, like(run), after.model)
    assert step == 5 and meta == {"windows_read": 40}
    assert_state_is(placed, restore_grown(checkpoints, on_host(like(run)), after.model)[1])
    at = jax.tree.map(lambda x: x.sharding, placed)
    assert jax.tree.all(
        jax.tree.map(lambda a, b, x: a.is_equivalent_to(b, x.ndim), at, run.state_shardings, placed)
    )


@pytest.mark.slow
@pytest.mark.xdist_group("grown run")
def test_a_grown_run_goes_on_over_a_mesh(small, tmp_path):
    run, state = small
    after = run_config(2 * SLOTS, "data=2,fsdp=2,key=2")
    told = []
    checkpoints = Checkpointer(str(tmp_path), report=told.append)
    checkpoints.save(5, state, {})
    large = prepared(after)
    _, larger, _ = restore_grown(checkpoints, like(large), after.model)
    _, (wanted,) = trained(run, state, 1, first=5)
    later, losses = trained(large, larger, 2, first=5)
    np.testing.assert_allclose(losses[0], wanted, rtol=1e-5)
    # From here on it is a checkpoint like others.
    checkpoints.save(7, later, {})
    step, again, _ = restore_grown(checkpoints, like(large), after.model)
    assert step == 7 and not told
    assert_state_is(again, later)
    # Which is passed over for the one before it, if it is damaged.
    (chunk,) = tmp_path.glob("7/*/arrays/params/store/position_keys/c/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    step, again, _ = restore_grown(checkpoints, like(large), after.model)
    assert step == 5 and len(told) == 1
    assert_state_is(again, larger)


@pytest.mark.xdist_group("grown run")
def test_parameters_alone_of_a_grown_checkpoint(small, tmp_path):
    _, state = small
    before, after = run_config(SLOTS).model, run_config(3 * SLOTS).model
    checkpoints = Checkpointer(str(tmp_path))
    checkpoints.save(5, state, {})
    wanted = {"params": nnx.to_pure_dict(nnx.state(models.abstract(after), nnx.Param))}
    _, tree, _ = restore_grown(checkpoints, wanted, after, partial=True)
    assert isinstance(tree["params"]["final_site"]["gain"], jax.Array)
    apply = lambda config, params: jax.jit(
        lambda params: nnx.merge(models.graph(config), params)(models.tokens())
    )(params)
    # Float32 rounding; the logits are about 1.
    np.testing.assert_allclose(apply(after, tree["params"]), apply(before, state.params), atol=2e-5)


@pytest.mark.xdist_group("grown run")
def test_layers_saved_in_stacks_of_virtual_stages_grow(small):
    _, state = small
    after = run_config(2 * SLOTS)
    stacked = lambda x: x.reshape(2, 1, *x.shape[1:])
    params = host(state).params
    saved = {"params": params | {"stacks": jax.tree.map(stacked, params["stacks"])}}
    wanted = {"params": like(prepared(after)).params}
    found = grown(saved, wanted, after.model)
    assert_state_is(found["params"], grow(params, after.model))


@pytest.mark.xdist_group("grown run")
def test_what_cannot_grow_is_refused_in_a_line(small, tmp_path):
    _, state = small
    checkpoints = Checkpointer(str(tmp_path))
    checkpoints.save(5, state, {})
    for key_dim, line in ((SLOTS + 1, "legal: 6, or 12 and more"), (SLOTS - 1, "legal: 6, or 12")):
        config = run_config(key_dim)
        with pytest.raises(UsageError, match=line):
            restore_grown(checkpoints, like(prepared(config)), config.model)
    # Of another system altogether, the arrays are listed.
    vector = models.model("vector", num_layers=2)
    wanted = {"params": nnx.to_pure_dict(nnx.state(models.abstract(vector), nnx.Param))}
    with pytest.raises(UsageError, match=r"params/embedding/tokens: checkpoint float32\[61,18\]"):
        restore_grown(checkpoints, wanted, vector, partial=True)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "after", "line"),
    [
        (SLOTS, model(key_dim=11), "key_dim=11 cannot .* checkpoint's 6; legal: 6, or 12 and more"),
        (SLOTS, model(key_dim=5), "key_dim=5 cannot .* checkpoint's 6; legal: 6, or 12 and more"),
        (
            SLOTS,
            model("heads", 13, head_dim=6),
            "legal: 6, or 12 and more in multiples of 2",
        ),
        (
            7,
            model("input query of heads", 21),
            "key_dim=7 cannot grow with model.mixer.num_heads=3, because 7 is not a multiple of 3",
        ),
    ],
)
def test_what_is_not_exact_is_refused(size, after, line):
    keys = {"params": {"final_site": {"store_keys": np.zeros((1, size))}}}
    with pytest.raises(UsageError, match=line) as caught:
        grown(keys, {}, after)
    assert "\n" not in str(caught.value)
