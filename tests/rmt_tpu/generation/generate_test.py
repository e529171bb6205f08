"""How the next token is chosen, and how tokens become a stream of text."""

import importlib
from itertools import chain, repeat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.generation import Sampling, fitting_tokens, generate, sample
from tests import models

# The package has the function under the name of the module.
module = importlib.import_module("rmt_tpu.generation.generate")

PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.25, 0.2])
DRAWS = 20_000


def shares(**how) -> np.ndarray:
    """How often each token is drawn, of those with PROBABILITIES."""
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)), (DRAWS, 5))
    drawn = sample(logits, jax.random.key(0), Sampling(**how))
    return np.bincount(drawn, minlength=5) / DRAWS


def kept(*tokens: int) -> np.ndarray:
    """PROBABILITIES of some tokens, and none of the others."""
    only = np.where(np.isin(np.arange(5), tokens), PROBABILITIES, 0)
    return only / only.sum()


@pytest.mark.parametrize(
    "how, wanted",
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.0}, kept(1)),
        ({"temperature": 0.5}, PROBABILITIES**2 / np.sum(PROBABILITIES**2)),
        ({"temperature": 2.0}, PROBABILITIES**0.5 / np.sum(PROBABILITIES**0.5)),
        ({"top_k": 1}, kept(1)),
        ({"top_k": 3}, kept(1, 3, 4)),
        ({"top_k": 9}, PROBABILITIES),
        ({"top_p": 0.3}, kept(1)),
        # 0.4 does not reach it, 0.4 + 0.25 does.
        ({"top_p": 0.6}, kept(1, 3)),
        ({"top_p": 0.7}, kept(1, 3, 4)),
        # Of the three that top-k leaves, two have 0.65 / 0.85 = 0.76.
        ({"top_k": 3, "top_p": 0.7}, kept(1, 3)),
        # At temperature 0.5 the first has 0.58 of all.
        ({"temperature": 0.5, "top_p": 0.5}, kept(1)),
    ],
)
def test_distribution(how, wanted):
    got = shares(**how)
    assert (got[wanted == 0] == 0).all()
    np.testing.assert_allclose(got, wanted, atol=4 * 0.5 / DRAWS**0.5)


@pytest.mark.parametrize("how, count", [({"top_k": 1}, 1), ({"top_k": 2}, 2), ({"top_p": 0.4}, 2)])
def test_equal_logits_let_in_no_more(how, count):
    drawn = sample(jnp.zeros((500, 4)), jax.random.key(0), Sampling(**how))
    assert set(drawn.tolist()) == set(range(count))


def test_rows_are_drawn_on_their_own():
    logits = jnp.log(jnp.array([[0.9, 0.1, 0.0], [0.0, 0.1, 0.9]]))
    tokens = sample(logits, jax.random.key(0), Sampling(top_k=1))
    assert tokens.tolist() == [0, 2]


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("seed", 2**32),
        ("temperature", np.nan),
    ],
)
def test_illegal_sampling(field, value):
    with pytest.raises(UsageError, match=f"Sampling.{field}={value} must be"):
        Sampling(**{field: value})


def test_fitting_tokens():
    # The 32nd position reads the token before the last one generated.
    learned = models.model(positions=cfg.Learned(32))
    assert fitting_tokens(learned, 30, 9) == 3
    assert fitting_tokens(learned, 30, 2) == 2
    assert fitting_tokens(learned, 32, 9) == 1
    with pytest.raises(UsageError, match="33 tokens .* at most 32 tokens"):
        fitting_tokens(learned, 33, 9)
    assert fitting_tokens(models.model(positions=cfg.Rope()), 1000, 9) == 9


@pytest.fixture
def say(monkeypatch):
    """Has the model say the tokens given, whatever it is; returns how often it was asked."""

    def say(tokens) -> list:
        asked, tokens = [], iter(tokens)

        def next_token(graphdef, params, new, cache, key, sampling):
            asked.append(new.shape)
            return jnp.array([next(tokens)], jnp.int32), cache

        monkeypatch.setattr(module, "_next_token", next_token)
        return asked

    return say


def pieces(max_tokens: int = 16):
    config = models.model(vocab_size=257)
    params = jax.tree.map(np.float32, models.random_parameters(config))
    decoder = nnx.merge(models.graph(config), params)
    return generate(decoder, ByteTokenizer(), "ab", Sampling(max_tokens=max_tokens))


def test_streams_one_token_a_step(say):
    asked = say(b"xyz" + b"." * 13)
    stream = pieces()
    assert next(stream) == "x"
    # The prompt with its start token, and nothing beyond what was asked for.
    assert asked == [(1, 3)]
    assert next(stream) == "y"
    assert asked == [(1, 3), (1, 1)]


def test_stops_at_the_start_of_another_document(say):
    asked = say([*b"hi", ByteTokenizer.bos, *b"there"])
    assert list(pieces()) == ["h", "i"]
    assert len(asked) == 3


def test_stops_after_max_tokens(say):
    asked = say(repeat(ord("x")))
    assert list(pieces(max_tokens=5)) == ["x"] * 5
    assert len(asked) == 5


def test_characters_come_whole(say):
    text = "é€😀"
    say(text.encode())
    assert list(pieces(max_tokens=len(text.encode()))) == list(text)


def test_half_a_character_at_the_end(say):
    say(chain(b"a", "€".encode()[:2], [ByteTokenizer.bos]))
    assert "".join(pieces()) == "a\ufffd"
