"""Norms, positions and the feed-forward layer on their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from rmt_tpu import config as cfg
from rmt_tpu import cores
from rmt_tpu.cores import positions
from rmt_tpu.cores.feed_forward import FeedForward
from rmt_tpu.errors import UsageError
from rmt_tpu.layers.activations import gelu_tanh
from rmt_tpu.layers.data_vectors import Read
from rmt_tpu.layers.norm import normalize
from rmt_tpu.layers.parameters import Seed, metadata
from tests import models
from tests.tiers import later


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_normalize(norm):
    x, gain = np.asarray(3 + draw(4, 7)), np.asarray(draw(7, seed=1))
    centred = x - x.mean(-1, keepdims=True) if norm == "layernorm" else x
    expected = gain * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.5)
    got = normalize(jnp.asarray(x), jnp.asarray(gain), norm=norm, epsilon=0.5, dtype=jnp.float32)
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_layernorm_of_float32_takes_the_mean_off_first():
    x = np.asarray(1000 + draw(4, 96))
    centred = np.float64(x) - np.float64(x).mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True))
    given = jnp.asarray(x), jnp.ones(96)
    got = normalize(*given, norm="layernorm", epsilon=0.0, dtype=jnp.float32)
    np.testing.assert_allclose(got, expected, atol=2e-4)


@pytest.mark.parametrize("mean", [30.0, *later(0.0, 200.0)])
def test_layernorm_of_bfloat16_in_one_pass(mean):
    """As near as the numbers are to what was rounded; also where all of a token are alike."""
    x = (draw(6, 96) + mean).astype(jnp.bfloat16).at[5].set(mean)
    gain, d_y = 1 + draw(96, seed=1), draw(6, 96, seed=2)

    def of(x):
        y = normalize(x, gain, norm="layernorm", epsilon=1e-6, dtype=jnp.float32)
        return jnp.sum(y * d_y), y

    with_gradient = jax.jit(jax.value_and_grad(of, has_aux=True))
    (_, y), d_x = with_gradient(x)
    exact = np.asarray(x, np.float64)
    centred = exact - exact.mean(-1, keepdims=True)
    expected = np.asarray(gain) * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    # A mean of 200 leaves two bits of the spread.
    np.testing.assert_allclose(y, expected, atol={0.0: 1e-5, 30.0: 1e-3, 200.0: 0.03}[mean])
    (_, _), wide = with_gradient(x.astype(jnp.float32))
    largest = np.abs(wide[:5]).max()
    error = np.abs(np.asarray(d_x, np.float32) - wide)[:5].max()
    assert error < 0.01 * largest


@pytest.mark.parametrize("num_heads", [1, 3, 8, 12])
def test_alibi_slopes_are_geometric_for_any_number_of_heads(num_heads):
    slopes = np.asarray(positions.alibi_slopes(num_heads))
    assert slopes.shape == (num_heads,)
    assert slopes[-1] == pytest.approx(2.0**-8)
    np.testing.assert_allclose(slopes[1:] / slopes[:-1], 2.0 ** (-8 / num_heads), rtol=1e-5)


def test_rope_turns_pairs_and_products_depend_on_distance_alone():
    q, k = draw(1, 1, 1, 6), draw(1, 1, 1, 6, seed=1)
    turn = lambda x, at: positions.rotate(x, jnp.asarray([[at]]), cfg.Rope(100.0))
    np.testing.assert_allclose(turn(q, 0), q, rtol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(turn(q, 9)), jnp.linalg.norm(q), rtol=1e-6)
    product = lambda a, b: float(jnp.sum(turn(q, a) * turn(k, b)))
    assert product(5, 2) == pytest.approx(product(25, 22), abs=1e-5)
    assert product(5, 2) != pytest.approx(product(5, 3), abs=1e-3)
    # The first pair is (x_0, x_3) at frequency 1.
    turned = np.asarray(turn(q, 1))[0, 0, 0]
    x = np.asarray(q)[0, 0, 0]
    assert turned[0] == pytest.approx(x[0] * np.cos(1) - x[3] * np.sin(1), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [None, 4])
def test_rope_of_the_first_vectors_in_place(dims):
    """As if they were taken apart; and so are its gradients, turned back."""
    x, d_y, at = draw(2, 5, 7, 6), draw(2, 5, 7, 6, seed=1), jnp.arange(5)[None] + 3
    rope = cfg.Rope(100.0, dims)

    def apart(x):
        return jnp.concatenate([positions.rotate(x[:, :, :4], at, rope), x[:, :, 4:]], axis=2)

    def in_place(x):
        return positions.rotate_first(x, at, heads=4, rope=rope)

    for got, want in zip(*(jax.vjp(f, x) for f in (in_place, apart)), strict=True):
        got, want = (f(d_y)[0] if callable(f) else f for f in (got, want))
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_low_frequencies_are_scaled_for_long_texts():
    """As Llama 3.1 writes it, by wavelengths."""
    rope = cfg.Rope(5e5, scaling=cfg.Llama3Scaling(8.0, 1.0, 4.0, 8192))
    want = []
    for f in 5e5 ** (-np.arange(0, 128, 2) / 128):
        wavelength = 2 * np.pi / f
        if wavelength < 8192 / 4.0:
            want.append(f)
        elif wavelength > 8192 / 1.0:
            want.append(f / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            want.append((1 - smooth) * f / 8.0 + smooth * f)
    assert 0 < sum(f / 8.0 < w < f for f, w in zip(5e5 ** (-np.arange(64) / 64), want, strict=True))
    got = positions.rope_frequencies(rope, 128, jnp.float32)
    np.testing.assert_allclose(got, want, rtol=2e-5)
    with pytest.raises(UsageError, match=r"^Llama3Scaling.low=4.0 must be below high=4.0"):
        cfg.Llama3Scaling(low=4.0)


@pytest.mark.parametrize(
    "yarn, base, dims",
    [
        (cfg.YarnScaling(8.0, 8192, magnitude=1.2), 5e5, 128),
        (cfg.YarnScaling(4.0, 64, fast=8.0, slow=2.0, whole=False), 1e4, 32),
        (cfg.YarnScaling(4.0, 4), 1e4, 32),  # no frequency makes a turn
    ],
)
def test_frequencies_of_yarn(yarn, base, dims):
    """Compare with YaRN's equations: a ramp over numbers of turns, and larger queries and keys."""
    turns = lambda number: yarn.original_length * base ** (-2 * number / dims) / (2 * np.pi)
    grid = np.linspace(-dims, 2 * dims, 3 * dims * 1000 + 1)
    first, last = (grid[np.argmin(np.abs(turns(grid) - n))] for n in (yarn.fast, yarn.slow))
    if yarn.whole:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    numbers = np.arange(dims // 2)
    ramp = np.clip((numbers - first) / max(last - first, 1e-3), 0, 1)
    wanted = base ** (-2 * numbers / dims) * (1 - ramp + ramp / yarn.factor)
    rope = cfg.Rope(base, scaling=yarn)
    got = positions.rope_frequencies(rope, dims, jnp.float32)
    np.testing.assert_allclose(got, wanted, rtol=1e-3)
    x = draw(1, 5, 2, dims)
    turned = positions.rotate(jnp.asarray(x), jnp.arange(5)[None], rope)
    longer = np.linalg.norm(turned, axis=-1) / np.linalg.norm(x, axis=-1)
    magnitude = yarn.magnitude or 0.1 * np.log(yarn.factor) + 1
    np.testing.assert_allclose(longer, magnitude, rtol=1e-5)


def test_linear_scaling_divides_positions():
    x = jnp.asarray(draw(1, 5, 2, 8))
    plain, scaled = cfg.Rope(), cfg.Rope(scaling=cfg.LinearScaling(4.0))
    at = jnp.arange(5)[None]
    got, want = positions.rotate(x, 4 * at, scaled), positions.rotate(x, at, plain)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_numbers_that_yarn_cannot_use_are_refused():
    with pytest.raises(UsageError, match=r"^YarnScaling.slow=32.0 must be below fast=32.0"):
        cfg.YarnScaling(4.0, 64, slow=32.0)
    for base in (1.0, 0.5):
        with pytest.raises(UsageError, match=rf"^Rope.base={base:g} must be above 1 with scaling="):
            cfg.Rope(base, scaling=cfg.YarnScaling(4.0, 64))


def test_gelu_exact_and_tanh():
    config = models.model("vector")
    z = draw(2, 1, 20)
    layers = {}
    for activation in ("gelu_exact", "gelu_tanh"):
        core = cfg.FeedForward(22, activation)
        layers[activation] = FeedForward(
            config, core, Seed(jax.random.key(0)), output_scale=1.0, input_width=config.width
        )
    layer = layers["gelu_exact"]
    hidden = np.asarray(z)[:, 0] @ np.asarray(layer.w_1[...])
    exact = hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
    expected = exact @ np.asarray(layer.w_2[...])
    context = cores.causal(1, None, None)
    given = {name: core(Read(residual=z[:, None]), context, 1) for name, core in layers.items()}
    np.testing.assert_allclose(given["gelu_exact"][:, 0, 0], expected, rtol=1e-4, atol=1e-5)
    gap = np.abs(given["gelu_tanh"] - given["gelu_exact"]).max()
    assert 0 < gap < 1e-2
    assert config.feed_forward.activation == "gelu_tanh"


@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_every_parameter_has_a_role_and_an_axis_name_a_dimension(store):
    decoder = models.abstract(models.model(store))
    params = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
    roles, axes = metadata(decoder, "role"), metadata(decoder, "axes")
    assert set(jax.tree.leaves(roles)) <= {"gain", "embedding", "unembedding", "keys", "hidden"}
    is_names = lambda leaf: isinstance(leaf, tuple)
    jax.tree.map(lambda names, p: np.testing.assert_equal(len(names), p.ndim), axes, params,
                 is_leaf=is_names)  # fmt: skip
    assert all(names[0] == "layer" for names in jax.tree.leaves(axes["stacks"], is_leaf=is_names))


def test_gelu_tanh_and_its_derivatives_are_jaxs():
    with jax.enable_x64(True):
        x = jnp.linspace(-30.0, 30.0, 601, dtype=jnp.float64)

        def three(function):
            slope = jax.grad(function)
            return [jax.vmap(f)(x) for f in (function, slope, jax.grad(slope))]

        for got, want in zip(three(gelu_tanh), three(jax.nn.gelu), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        value, tangent = jax.jvp(gelu_tanh, (x,), (3 * x,))
        np.testing.assert_allclose(value, jax.nn.gelu(x), rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(tangent, 3 * x * three(jax.nn.gelu)[1], rtol=1e-13, atol=1e-12)


def test_gelu_tanh_in_bfloat16_is_as_near_as_jaxs():
    x = draw(4096).astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    for derive in (lambda f: f, jax.grad):
        want = jax.vmap(derive(jax.nn.gelu))(wide)

        def error(function, derive=derive, want=want):
            got = jax.vmap(derive(function))(x)
            assert got.dtype == jnp.bfloat16
            return np.sqrt(np.mean(np.square(got.astype(jnp.float32) - want)))

        assert error(gelu_tanh) < 1.1 * error(jax.nn.gelu)
