"""What a decoder makes of arguments at the edge, and beyond it."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rmt_tpu
from rmt_tpu import Decoder
from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from tests import models
from tests.closeness import assert_close


@pytest.mark.parametrize(
    ("config", "rngs", "message"),
    [
        ("rmt-tiny", nnx.Rngs(0), r"a ModelConfig, like rmt_tpu\.preset\(.*, not 'rmt-tiny'$"),
        (rmt_tpu.presets, nnx.Rngs(0), r"a ModelConfig, like .*, not <function presets"),
        (models.model(), 0, r"nnx\.Rngs, such as rngs=nnx\.Rngs\(0\), not 0$"),
    ],
    ids=["name", "function", "seed"],
)
def test_a_decoder_takes_a_config_and_streams_of_random_numbers(config, rngs, message):
    make = inspect.unwrap(Decoder.__init__)  # without the types that only tests check
    with pytest.raises(TypeError, match=f"^Decoder needs {message}"):
        make(object.__new__(Decoder), config, rngs=rngs)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([[1, 2]], TypeError, r"must be an array of integers, \[batch, seq\], not \[\[1, 2\]\]$"),
        (np.zeros((1, 2)), TypeError, r"must be an array of integers"),
        (
            np.zeros(3, np.int32),
            ValueError,
            r"has shape \[3\], but must be .* pass tokens\[None\]$",
        ),
    ],
    ids=["list", "float", "one axis"],
)
def test_tokens_are_integers_of_two_axes(tokens, error, message, unannotated):
    decoder = models.decoder(models.model())
    lengths, cache = np.ones(1, np.int32), decoder.empty_cache(1, 4)
    for use in (
        decoder,
        decoder.features,
        partial(decoder.decode, cache=cache),
        partial(decoder.prefill, lengths=lengths, cache=cache),
        partial(decoder.extend, lengths=lengths, cache=cache),
    ):
        with pytest.raises(error, match=f"^tokens {message}"):
            use(tokens)


@pytest.mark.parametrize("folder", [None, 3, b"runs/a"])
def test_a_folder_is_given_as_text(folder, unannotated):
    with pytest.raises(
        UsageError, match="^workdir=.* is not a string; legal: a local path, or gs://"
    ):
        rmt_tpu.load(folder)


@pytest.mark.slow
def test_a_decoder_has_no_forward_mode():
    graph, params = models.split(models.model("vector", remat="full"))
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(
        TypeError, match="^Decoder supports derivatives in reverse mode only; legal: jax.grad"
    ):
        jax.jvp(lambda params: nnx.merge(graph, params)(tokens), (params,), (params,))


@pytest.mark.parametrize("kind", ["vector", "matrix"])
def test_an_empty_batch_has_no_logits(kind):
    decoder = models.decoder(models.model(kind))
    logits = jax.eval_shape(decoder, jnp.zeros((0, 5), jnp.int32))
    assert logits.shape == (0, 5, models.VOCAB)


def test_what_the_tables_do_not_have_is_nan_and_not_a_row_from_the_end():
    embedding = models.decoder(models.model()).embedding
    tokens = jnp.array([[0, models.VOCAB - 1, -1, models.VOCAB]])
    positions = jnp.array([[0, 31, -1, 32]])
    for rows in jax.jit(lambda *at: embedding(*at, jnp.float32))(tokens, positions):
        assert np.isnan(rows).all(axis=(2, 3)).tolist() == [[False, False, True, True]]


def test_a_cache_is_filled_with_64_bit_integers_about():
    with jax.enable_x64(True):
        decoder = models.decoder(models.model())
        tokens = jnp.zeros((2, 3), jnp.int32)
        logits, cache = jax.eval_shape(decoder.decode, tokens, decoder.empty_cache(2, 8))
    assert (logits.shape, cache.length.dtype) == ((2, 3, models.VOCAB), jnp.int32)


@pytest.mark.parametrize(
    "mixer, remat",
    [("sum", "reversible"), ("sum", "reversible_dots"), ("blocks", "full"), ("blocks", "dots")],
)
def test_gradients_with_positions_of_the_caller_can_be_traced(mixer, remat):
    """Attention then has an explicit mask, and no kernel whose results are kept."""
    config = models.model(mixer=models.MIXERS[mixer], remat=remat, num_layers=2)
    graphdef, params = models.split(config)
    positions = jnp.arange(1, 12)[None]
    loss = lambda p: jnp.sum(nnx.merge(graphdef, p)(models.tokens(), positions=positions))
    shapes = jax.eval_shape(jax.grad(loss), params)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["reversible", "reversible_dots"])
def test_a_reversible_model_takes_positions_of_the_caller(policy):
    """Its gradients are those of any other policy."""
    tokens, positions = models.tokens(seq=6), jnp.array([[3, 1, 4, 2, 6, 5]])

    def gradients(remat):
        config = models.model(remat=remat, num_layers=2, positions=cfg.Alibi())
        graphdef, params = models.split(config)
        loss = lambda params: jnp.sum(nnx.merge(graphdef, params)(tokens, positions=positions) ** 2)
        return jax.jit(jax.grad(loss))(params)

    assert_close(gradients(policy), gradients("none"), 1e-4)
