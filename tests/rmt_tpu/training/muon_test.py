"""Muon against plain arithmetic, of each matrix by itself, and on meshes."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import traverse_util

import sharding
from rmt_tpu import config as cfg
from rmt_tpu.config import AdamW, Muon, overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.training.optimizer import make_optimizer
from rmt_tpu.training.run import prepare
from tests import models

MUON = Muon(
    learning_rate=0.1, weight_decay=0.5, clip_norm=1e9, warmup_fraction=0.0, final_fraction=1.0
)

# Role, axes and shape of each: what is Muon's, and what is AdamW's.
MATRICES = {
    "layers": ("hidden", ("layer", "projection", "embed", "heads"), (2, 3, 6, 4)),
    "experts": ("hidden", ("layer", "expert", "embed", "projection", "ff"), (2, 3, 4, 2, 5)),
    "plain": ("hidden", ("embed", "hidden"), (3, 7)),
    "chunks": ("hidden", ("layer", "ff", "embed"), (2, 2, 5, 3)),  # of virtual stages
}
OTHERS = {
    "small": ("hidden", ("layer", "width", "coefficient"), (2, 6, 3)),
    "keys": ("keys", ("layer", "head", "key"), (2, 5, 4)),
    "embedding": ("embedding", ("vocab", "embed"), (9, 4)),
    "gain": ("gain", ("layer", "width"), (2, 6)),
}


def optimizer(config, kinds):
    roles, axes = ({name: kind[n] for name, kind in kinds.items()} for n in (0, 1))
    return make_optimizer(config, steps=2, roles=roles, axes=axes, rates=dict.fromkeys(kinds, 1.0))


def draws(kinds, seed):
    rng = np.random.default_rng(seed)
    return {n: np.float32(rng.normal(size=s)) for n, (_, _, s) in kinds.items()}


def quintic(x):
    """Of one matrix, in float64, by its singular values."""
    u, s, v = np.linalg.svd(np.float64(x) / np.linalg.norm(x), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ v


def of_each(x, name):
    """`quintic` of each matrix, times what the config says."""
    if name == "experts":
        return np.moveaxis(of_each(np.moveaxis(x, 3, 2), ""), 2, 3)
    flat = x.reshape(-1, *x.shape[-2:])
    return 0.2 * max(x.shape[-2:]) ** 0.5 * np.stack(list(map(quintic, flat))).reshape(x.shape)


def test_two_updates_of_each_kind_of_parameter():
    kinds = MATRICES | OTHERS
    rule, plain = optimizer(MUON, kinds), optimizer(AdamW(**adamw_fields()), OTHERS)
    params, gradients = draws(kinds, 0), [draws(kinds, n) for n in (1, 2)]
    state, of_others = jax.jit(rule.init)(params), plain.init({n: params[n] for n in OTHERS})
    update, plain_update = jax.jit(rule.update), jax.jit(plain.update)
    buffers = dict.fromkeys(MATRICES, 0.0)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        wanted, of_others = plain_update(
            {n: gradient[n] for n in OTHERS}, of_others, {n: params[n] for n in OTHERS}
        )
        for name in OTHERS:
            np.testing.assert_allclose(updates[name], wanted[name], rtol=1e-6, atol=1e-7)
        for name in MATRICES:
            buffers[name] = 0.95 * buffers[name] + gradient[name]
            step = of_each(gradient[name] + 0.95 * buffers[name], name) + 0.5 * params[name]
            np.testing.assert_allclose(updates[name], -0.1 * step, atol=2e-5)
        params = jax.tree.map(lambda p, u: p + np.asarray(u), params, updates)


def adamw_fields():
    return {field.name: getattr(MUON, field.name) for field in dataclasses.fields(AdamW)}


def step(mesh):
    stack = overrides.apply(preset_run("kimi-tiny"), {}).model.stacks[1]
    model = models.model("vector", compute_dtype="float64").replace(
        stacks=(cfg.Stack(stack.cores, repeat=2),), store=cfg.VectorStore(dim=16), norm="rmsnorm"
    )
    train = cfg.TrainConfig(steps=2, batch_size=8, mesh=mesh, optimizer=MUON)
    config = cfg.RunConfig(model=model, train=train, data=cfg.DataConfig(seq_len=12))
    sizes = sharding.parse_mesh(mesh).values()
    devices = jax.devices()[: int(np.prod([*sizes]))]
    run = prepare(config, sharding.make_mesh(mesh, devices))
    shapes = jax.eval_shape(run.init)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes._replace(params=(), key=()))
    state = zeros._replace(params=models.random_parameters(model), key=jax.random.key(0))
    state = jax.device_put(state, run.state_shardings)
    batch = jax.device_put(models.batch(8, 12), run.batch_sharding)
    return run, jax.jit(run.step)(state, batch)[0]


@pytest.mark.slow
def test_on_a_mesh_it_is_that_of_one_device():
    """Experts, fsdp and tensor divide matrices and their momentum."""
    with jax.enable_x64(True):
        _, alone = step("data=1")
        run, state = step("expert=2,fsdp=2,tensor=2")
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(state), strict=True):
        if one.dtype == np.float64:
            np.testing.assert_allclose(one, other, atol=1e-9)
    placed = traverse_util.flatten_dict(run.state_shardings.params)
    kept = run.state_shardings.optimizer[1].inner_states["muon-2-1"].inner_state[0].trace
    kept = traverse_util.flatten_dict(kept)
    (w_2,) = (path for path in placed if "expert" in placed[path].spec and path[-1] == "w_2")
    assert kept[w_2] == placed[w_2]


def test_configs():
    config = overrides.apply(preset_run("llama-tiny"), {"train.optimizer": "muon"})
    assert config.train.optimizer == Muon()
    values = overrides.to_json(config)
    assert values["train"]["optimizer"]["kind"] == "muon"
    assert overrides.from_json(cfg.RunConfig, values) == config
    # Before there was a choice, it was AdamW.
    del values["train"]["optimizer"]
    values["train"]["optimizer"] = {"learning_rate": 0.5}
    found = overrides.from_json(cfg.RunConfig, values).train.optimizer
    assert found == AdamW(learning_rate=0.5)
    assert cfg.resume_rule(config, "train.optimizer.kind") == "fixed"
    assert cfg.resume_rule(config, "train.optimizer.momentum") == "change"
