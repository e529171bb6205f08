"""What is asked of every mixer: its equations, its gradients, its cache."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rmt_tpu import config as cfg
from tests import models
from tests.closeness import assert_close
from tests.rmt_tpu import plain


def model(mixer: cfg.Mixer, **changes) -> cfg.ModelConfig:
    """A vector model of 3 layers in float64. Call within `jax.enable_x64(True)`."""
    changes = {"remat": "none"} | changes  # which compiles in half the time
    return models.model("vector", mixer=mixer, compute_dtype="float64", **changes)


def gradients_and_logits(config: cfg.ModelConfig):
    """A compiled function of the parameters: gradients of the logits' weighted sum, and logits."""
    graphdef, tokens = models.graph(config), models.tokens()

    def loss(params):
        logits = nnx.merge(graphdef, params)(tokens)
        return jnp.sum(_weights() * logits), logits

    return jax.jit(jax.grad(loss, has_aux=True))


def _weights():
    """Of each logit in the loss."""
    return np.random.default_rng(2).normal(size=(*models.tokens().shape, models.VOCAB))


@cache
def _expected(config: cfg.ModelConfig, reference):
    """Logits of `models.random_parameters`, and the loss's derivatives along `directions`."""
    params, tokens = models.random_parameters(config), np.asarray(models.tokens())
    loss = lambda params: np.sum(_weights() * reference(params, tokens, config))
    along = [plain.derivative(loss, params, direction) for direction in directions(params)]
    return reference(params, tokens, config), along


def directions(params):
    """A random one for each array, in which the others stay as they are."""
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(params)
    zeros = [np.zeros(p.shape) for p in leaves]
    moved = lambda i, p: tree.unflatten([*zeros[:i], rng.normal(size=p.shape), *zeros[i + 1 :]])
    return [moved(i, p) for i, p in enumerate(leaves)]


def logits(config: cfg.ModelConfig, params: dict) -> jax.Array:
    graphdef, tokens = models.graph(config), models.tokens()
    return jax.jit(lambda p: nnx.merge(graphdef, p)(tokens))(params)


def narrow_logits(config: cfg.ModelConfig, reference):
    """A decoder's logits at its own start, and those of the equations."""
    _, params = models.split(config)
    expected = reference(jax.tree.map(np.float64, params), np.asarray(models.tokens()), config)
    return logits(config, params), expected


def assert_logits_follow_equations(config: cfg.ModelConfig, reference) -> None:
    """Logits are those of `reference(params, tokens, config)`, which is of NumPy.

    float64: to 1e-11 of the largest, which is rounding over a few hundred operations in a row.
    """
    params = models.random_parameters(config)
    expected = reference(params, np.asarray(models.tokens()), config)
    assert_close(logits(config, params), expected, 1e-11)


def assert_follows_equations(
    config: cfg.ModelConfig, reference, *, tolerance=1e-11, unused=()
) -> None:
    """So do logits, to `tolerance`, and the gradients are theirs.

    Each array's gradient, times a random direction, is the derivative of the reference along it:
    to 1e-11 of the gradient's norm, or of 1 where that is less. Every array has an influence, but
    for those named in `unused`.
    """
    params = models.random_parameters(config)
    gradients, got = gradients_and_logits(config)(params)
    expected, derivatives = _expected(replace(config, remat="full"), reference)
    assert_close(got, expected, tolerance)
    gradients = jax.tree_util.tree_leaves_with_path(gradients)
    of_each = directions(params)
    for i, (path, gradient) in enumerate(gradients):
        direction = jax.tree.leaves(of_each[i])[i]
        gradient, name = np.asarray(gradient), jax.tree_util.keystr(path)
        norm = np.linalg.norm(gradient)
        assert norm > 0 or path[-1].key in unused, f"{name} has no influence"
        error = abs(np.sum(gradient * direction) - derivatives[i])
        assert error <= 1e-11 * max(1, norm), f"{name} is off by {error:g}, its norm is {norm:g}"


def assert_remat_changes_nothing(config: cfg.ModelConfig) -> None:
    """Recomputing a layer gives the same gradients, to float64 rounding."""
    params = models.random_parameters(config)
    kept, recomputed = (
        gradients_and_logits(replace(config, remat=policy))(params)[0]
        for policy in ("none", "full")
    )
    assert_close(recomputed, kept, 1e-11)


def assert_cached_equals_uncached(config: cfg.ModelConfig) -> None:
    """Two prompts in one batch, two tokens one by one, and three; to float32 rounding of order one.

    What fills up the shorter prompt is seen by nobody.
    """
    params, graphdef = models.random_parameters(config), models.graph(config)
    params = jax.tree.map(np.float32, params)
    tokens, rows = np.asarray(models.tokens(seq=11)), np.arange(2)[:, None]
    lengths = np.array([4, 6], np.int32)
    expected = jax.jit(lambda p, tokens: nnx.merge(graphdef, p)(tokens))(params, tokens)
    expected = np.asarray(expected)
    prefill = jax.jit(lambda p, *given: nnx.merge(graphdef, p).prefill(*given))
    decode = jax.jit(lambda p, tokens, cache: nnx.merge(graphdef, p).decode(tokens, cache))
    cache = jax.jit(lambda: nnx.merge(graphdef, params).empty_cache(2, 13))()
    logits, cache = prefill(params, tokens[:, :7], lengths, cache)
    logits = np.asarray(logits)
    pieces, places = [logits[:, None]], lengths[:, None] - 1 + np.arange(6)
    for start, end in [(1, 2), (2, 3), (3, 6)]:
        logits, cache = decode(params, tokens[rows, places[:, start:end]], cache)
        pieces.append(logits)
    got = np.concatenate(pieces, axis=1)
    np.testing.assert_allclose(got, expected[rows, places], rtol=0, atol=2e-5)
    assert cache.length.tolist() == [9, 11]


def normed_output(config: cfg.ModelConfig, params: dict) -> np.ndarray:
    """What the unembedding reads."""
    graphdef = models.graph(config)
    run = jax.jit(lambda p: nnx.merge(graphdef, p).features(models.tokens()).z)
    return np.asarray(run(params))


def plain_parameters(params: dict) -> dict:
    """The parameters that the plain model of `mixer=Sum()` has too."""
    return {
        name: plain_parameters(value) if isinstance(value, dict) else value
        for name, value in params.items()
        if name not in ("mix", "mixer")
    }


def sigmoid(x):
    return 1 / (1 + np.exp(-x))
