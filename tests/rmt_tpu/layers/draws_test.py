"""Weights are drawn by the seed, their place and their name, and by nothing else."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import Decoder, preset, presets, residual
from rmt_tpu import config as cfg
from tests import models
from tests.tiers import later


def weights(config: cfg.ModelConfig) -> dict[tuple, np.ndarray]:
    """Drawn by path, those of layers one by one: (sublayer, names..)."""
    return by_path(config, models.split(config)[1])


def by_path(config: cfg.ModelConfig, params: dict) -> dict[tuple, np.ndarray]:
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        names = tuple(part.key for part in path)
        if names[0] != "stacks":
            found[names] = np.asarray(x)
            continue
        _, stack, k, *rest = names
        first = sum(of.num_sublayers for of in config.stacks[:stack])
        for repeat, layer in enumerate(np.asarray(x)):
            found[first + repeat * len(config.stacks[stack].cores) + k, *rest] = layer
    return found


@pytest.fixture(scope="module")
def of_presets() -> dict[str, dict[tuple, np.ndarray]]:
    """By preset and path; each draw is of one number a weight, its key's, so that none compiles."""

    def drawn(key, shape, dtype=jnp.float32, **bounds):
        words = jax.random.key_data(key)
        return jnp.broadcast_to((words[0] ^ words[1]) / jnp.float32(2**32), shape)

    found = {}
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(jax.random, "normal", drawn)
        patch.setattr(jax.random, "uniform", drawn)
        for name in tiny():
            config = replace(preset(name), vocab_size=32)
            params = nnx.state(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)
            found[name] = by_path(config, nnx.to_pure_dict(params))
    return found


def decay_bounds(name: str) -> set[float | None]:
    """Return the lower bounds of the log decays in the KDA cores of a preset."""
    cores = (core for stack in preset(name).stacks for core in stack.cores)
    return {core.lower_bound for core in cores if isinstance(core, cfg.Kda)}


def tiny() -> list[str]:
    return [name for name in presets() if name.endswith("-tiny")]


def assert_shared(a: dict, b: dict, but: tuple[str, ...] = ()) -> int:
    """Weights of equal path and shape are equal to the bit; returns how many there are."""
    common = [p for p in a if p in b and a[p].shape == b[p].shape and "mix" not in p]
    common = [p for p in common if p[-1] not in but]
    for path in common:
        np.testing.assert_array_equal(a[path], b[path], err_msg=str(path))
    return len(common)


@pytest.mark.slow
def test_systems_of_one_seed_share_the_weights_that_they_have_in_common(of_presets):
    for name, other in itertools.combinations(of_presets, 2):
        scales = {residual.output_scale(preset(one)) for one in (name, other)}
        # What writes starts larger where keys scale it, or writes are not added up.
        apart = ("write", "w_2") if len(scales) > 1 else ()
        # The rate of a bounded decay is another number.
        if decay_bounds(name) != decay_bounds(other):
            apart += ("log_rate",)
        assert assert_shared(of_presets[name], of_presets[other], but=apart) > 0


@pytest.mark.slow
def test_a_mixer_changes_none_of_the_weights_beside_its_own(of_presets):
    for base, others in {
        "gpt2-tiny": ("highway", "hierarchical", "hc", "mhc", "mhc-lite", "attnres",
                      "attnres-full", "denseformer", "mudd", "delta", "wide", "scalars"),
        "rmt-tiny": ("rmt-attnres", "rmt-attnres-full", "rmt-denseformer",
                     "rmt-mudd", "rmt-delta", "rmt-wide", "rmt-scalars"),
        "llama-tiny": ("llama-attnres", "llama-attnres-open", "llama-attnres-marin"),
        "kimi-tiny": ("attnres-kimi", "attnres-full-kimi"),
    }.items():  # fmt: skip
        paths = of_presets[base].keys()
        for other in others:
            found = assert_shared(of_presets[base], of_presets[f"{other}-tiny"])
            # Sites of a Highway Transformer norm nothing.
            without = sum("gain" in path for path in paths) if other == "highway" else 0
            assert found >= len(paths) - without, (base, other)


@pytest.mark.slow
def test_no_two_weights_have_the_same_draw():
    mixers = {"matrix": "blocks", "vector": "hierarchical"}
    for store, mixer in mixers.items():
        seen = {}
        for path, x in weights(models.model(store, mixer=models.MIXERS[mixer])).items():
            first = x.reshape(-1)[:8]
            if np.ptp(first) == 0:  # a start that is not drawn
                continue
            ratios = tuple(np.round(first / first[0], 3).tolist())  # whatever its std
            assert seen.setdefault(ratios, path) == path
        assert len(seen) > 15


@pytest.mark.parametrize("store", ["vector", *later("matrix")])
def test_a_stack_divided_otherwise_and_another_mixer_leave_every_layer_as_it_was(store):
    config = models.model(store)
    (one,) = config.stacks
    divided = replace(config, stacks=(replace(one, repeat=1), replace(one, repeat=2)))
    whole, apart = weights(config), weights(divided)
    assert whole.keys() == apart.keys()
    assert assert_shared(whole, apart) == len(whole)
    assert assert_shared(whole, weights(config.replace(mixer=cfg.FullAttention()))) == len(whole)
