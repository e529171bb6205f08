"""Attention over depth where it must equal something simpler; decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.layers import stacks
from tests import models

MIXERS = {
    "full": cfg.FullAttention(),
    "blocks of 2": cfg.BlockAttention(layers_per_block=1),
    "blocks of 3": cfg.BlockAttention(sublayers_per_block=3),
    "dense": cfg.Dense(),
    "input query": cfg.BlockAttention(num_blocks=2, query="input"),
}
BANKED = [("vector", name) for name in MIXERS] + [("matrix", "full"), ("matrix", "blocks of 2")]


def decoder(store, mixer, **changes):
    return models.decoder(models.model(store, mixer=mixer, **changes))


def features(decoder, tokens):
    graphdef, state = nnx.split(decoder)
    return jax.jit(lambda state: nnx.merge(graphdef, state).features(tokens))(state)


def with_parameters_of(decoder, plain):
    """`decoder` with the plain one's parameters where it has the same."""
    flat = dict(nnx.to_flat_state(nnx.state(plain, nnx.Param)))
    state = nnx.state(decoder, nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        if path in flat:
            variable.set_value(flat[path].get_value())
    nnx.update(decoder, state)
    return decoder


@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_one_block_starts_as_the_plain_residual(store):
    """With queries of zero a site reads the mean of embedding and running sum: the norm of it is
    that of their sum, but for its epsilon."""
    plain = decoder(store, cfg.Sum(), norm_epsilon=1e-20)
    blocks = decoder(store, cfg.BlockAttention(num_blocks=1), norm_epsilon=1e-20)
    got = features(with_parameters_of(blocks, plain), models.tokens())
    np.testing.assert_allclose(got, features(plain, models.tokens()), rtol=0, atol=2e-5)


@pytest.mark.parametrize("store", ["vector", "matrix"])
def test_blocks_of_one_sublayer_are_full_attention(store):
    full = decoder(store, cfg.FullAttention())
    blocks = decoder(store, cfg.BlockAttention(sublayers_per_block=1))
    np.testing.assert_array_equal(
        features(with_parameters_of(blocks, full), models.tokens()),
        features(full, models.tokens()),
    )


def test_the_first_query_is_never_used():
    """Its one source is the embedding, whatever it is."""
    config = models.model("vector", mixer=cfg.BlockAttention(layers_per_block=1))
    graphdef, params = models.split(config)
    noise = lambda p: p + 0.1 * jax.random.normal(jax.random.key(1), p.shape)
    objective = lambda p: jnp.sum(jnp.sin(nnx.merge(graphdef, p)(models.tokens())))
    gradient = jax.jit(jax.grad(objective))(jax.tree.map(noise, params))
    of_layers = gradient["layers"]["attention_site"]["mix"]["query"]
    assert (of_layers[0] == 0).all()
    assert (jnp.abs(of_layers[1:]).max(axis=1) > 1e-4).all()


@pytest.mark.parametrize(("store", "name"), BANKED)
def test_cached_logits_equal_uncached(store, name):
    graphdef, params = models.split(models.model(store, mixer=MIXERS[name]))
    tokens = models.tokens(2, 12)
    expected = jax.jit(lambda p: nnx.merge(graphdef, p)(tokens))(params)
    decode = jax.jit(lambda p, tokens, cache: nnx.merge(graphdef, p).decode(tokens, cache))
    cache, start = nnx.merge(graphdef, params).empty_cache(2, 15), 0
    for end in (7, 8, 12):
        logits, cache = decode(params, tokens[:, start:end], cache)
        np.testing.assert_allclose(logits, expected[:, start:end], rtol=0, atol=2e-5)
        start = end


def test_a_taken_slice_gives_its_gradient_to_the_stack():
    stack = jnp.arange(12.0).reshape(4, 3)

    def objective(stack):
        total = 0.0
        for i in (2, 0, 1, 3):
            stack, row = stacks.take(stack, jnp.int32(i))
            total = total + jnp.sum((i + 1) * jnp.sin(row))
        return total

    expected = (jnp.arange(4.0)[:, None] + 1) * jnp.cos(stack)
    np.testing.assert_allclose(jax.grad(objective)(stack), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (cfg.BlockAttention(num_blocks=5), "num_blocks=5 does not divide 6 .* legal: 3 or 6"),
        (cfg.BlockAttention(sublayers_per_block=7), "sublayers_per_block=7 .* legal: 1 to 6"),
        (cfg.BlockAttention(layers_per_block=4), "layers_per_block=4 .* legal: 1 to 3"),
        (cfg.FullAttention(window=7), "window=7 is more than the 6 sublayers .* legal: 1 to 6"),
        (cfg.FullAttention(phase_layers=4), "phase_layers=4 is more than num_layers=3"),
        (cfg.FullAttention(num_heads=3), "num_heads=3 does not divide the residual's 20 numbers"),
    ],
)
def test_what_does_not_fit_the_depth_is_refused_in_one_line(mixer, message):
    with pytest.raises(UsageError, match=message) as error:
        models.model("vector", mixer=mixer)
    assert "\n" not in str(error.value)


def test_two_block_sizes_are_refused():
    with pytest.raises(UsageError, match="num_blocks=2 and layers_per_block=1 both set"):
        cfg.BlockAttention(num_blocks=2, layers_per_block=1)


def test_mixers_and_policies_that_do_not_go_together_are_refused():
    with pytest.raises(UsageError, match="mixer=mhc is defined for a vector store only; legal"):
        models.model("matrix", mixer=cfg.Mhc())
    with pytest.raises(
        UsageError, match="remat='dots' is not for mixer=dense; legal: full, blocks"
    ):
        models.model("vector", mixer=cfg.Dense(), remat="dots")
    with pytest.raises(UsageError, match="remat='blocks' is not for mixer=sum; legal: none, dots"):
        models.model("vector", remat="blocks")


def test_blocks_can_be_counted_in_layers_or_sublayers():
    sizes = [
        cfg.BlockAttention(**{name: size}).sublayers_a_block(24)
        for name, size in [("num_blocks", 8), ("sublayers_per_block", 6), ("layers_per_block", 3)]
    ]
    assert sizes == [6, 6, 6]
    assert cfg.BlockAttention().sublayers_a_block(24) == 6
    # 93 layers in blocks of 12: seven full ones after the embedding, and 9 layers in the last.
    config = dataclasses.replace(
        models.model("vector"), num_layers=93, mixer=cfg.BlockAttention(layers_per_block=12)
    )
    assert -(-2 * 93 // config.mixer.sublayers_a_block(93)) == 8
