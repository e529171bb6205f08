"""What is asked of every mixer: its equations, its gradients, its cache."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rmt_tpu import config as cfg
from tests import models


def model(mixer: cfg.Mixer, **changes) -> cfg.ModelConfig:
    """A vector model of 3 layers in float64. Call within `jax.enable_x64(True)`."""
    changes = {"remat": "none"} | changes  # which compiles in half the time
    return models.model("vector", mixer=mixer, compute_dtype="float64", **changes)


def moved_parameters(config: cfg.ModelConfig) -> dict:
    """Random and away from the symmetric start, which would hide what is in the wrong place."""
    _, params = models.split(config)
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda p: np.asarray(p, np.float64) + 0.1 * rng.normal(size=p.shape), params
    )


def logits_and_gradients(config: cfg.ModelConfig):
    """A compiled function of the parameters: loss, logits, and the loss's gradients."""
    graphdef, _ = models.split(config)
    tokens = models.tokens()
    weights = np.random.default_rng(2).normal(size=(*tokens.shape, models.VOCAB))

    def loss(params):
        logits = nnx.merge(graphdef, params)(tokens)
        return jnp.sum(weights * logits), logits

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def unpacked(params):
        (loss, logits), gradients = run(params)
        return float(loss), np.asarray(logits), gradients

    return unpacked


def assert_logits_follow_equations(config: cfg.ModelConfig, reference) -> None:
    """Logits are those of `reference(params, tokens, config)`.

    float64: to 1e-11 of the largest, which is rounding over a few hundred operations in a row.
    """
    params, (graphdef, _) = moved_parameters(config), models.split(config)
    tokens = models.tokens()
    _assert_close(
        jax.jit(lambda p: nnx.merge(graphdef, p)(tokens))(params), params, reference, config
    )


def assert_follows_equations(config: cfg.ModelConfig, reference) -> None:
    """So do logits, and the gradients are theirs.

    Every parameter has one; and a directional derivative is, to 1e-6, the central difference over
    2e-6, whose own error is the step squared times a third derivative, and rounding divided by the
    step.
    """
    params = moved_parameters(config)
    run = logits_and_gradients(config)
    _, logits, gradients = run(params)
    _assert_close(logits, params, reference, config)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, f"{path} has no influence"
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda p: rng.normal(size=p.shape), params)
    step = 1e-6
    moved = lambda by: run(jax.tree.map(lambda p, d: p + by * d, params, direction))[0]
    difference = (moved(step) - moved(-step)) / (2 * step)
    products = jax.tree.map(lambda g, d: np.sum(np.asarray(g) * d), gradients, direction)
    np.testing.assert_allclose(sum(jax.tree.leaves(products)), difference, rtol=1e-6)


def _assert_close(logits, params, reference, config):
    expected = reference(params, np.asarray(models.tokens()), config)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


def assert_remat_changes_nothing(config: cfg.ModelConfig) -> None:
    """Recomputing a layer gives the same gradients, to float64 rounding."""
    params = moved_parameters(config)
    kept, recomputed = (
        logits_and_gradients(replace(config, remat=policy))(params)[2]
        for policy in ("none", "full")
    )
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * np.abs(a).max())


def assert_cached_equals_uncached(mixer: cfg.Mixer) -> None:
    """A prompt, two tokens one by one, and the rest; to float32 rounding of order-one logits."""
    decoder = models.decoder(models.model("vector", mixer=mixer, positions=cfg.Rope()))
    tokens = models.tokens(seq=9)
    expected = jax.jit(decoder)(tokens)
    cache, pieces = decoder.empty_cache(2, 12), []
    decode = jax.jit(decoder.decode)
    for start, end in [(0, 4), (4, 5), (5, 6), (6, 9)]:
        logits, cache = decode(tokens[:, start:end], cache)
        pieces.append(logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), expected, atol=2e-5)


def normed_output(config: cfg.ModelConfig, params: dict) -> np.ndarray:
    """What the unembedding reads."""
    graphdef, _ = models.split(config)
    return np.asarray(jax.jit(lambda p: nnx.merge(graphdef, p).features(models.tokens()))(params))


def plain_parameters(params: dict) -> dict:
    """The parameters that the plain model of `mixer=Sum()` has too."""
    return {
        name: plain_parameters(value) if isinstance(value, dict) else value
        for name, value in params.items()
        if name not in ("mix", "mixer")
    }


def sigmoid(x):
    return 1 / (1 + np.exp(-x))
