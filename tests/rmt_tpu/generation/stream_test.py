"""Streams of text from tokens, and what ends them; a table gives tokens in place of a model."""

from itertools import chain, repeat

import jax
import numpy as np
import pytest

from rmt_tpu.data import ByteTokenizer
from rmt_tpu.generation import Sampling, complete, generate, programs
from tests import models


@pytest.fixture(scope="module")
def table():
    """The token at each position, which programs read as they run, so they are compiled once."""
    found = np.full(64, ord("."), np.int32)
    read = lambda at: found[np.asarray(at)]

    def sample(logits, at, how):
        return jax.pure_callback(read, jax.ShapeDtypeStruct(at.shape, np.int32), at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "sample", sample)
        yield found


@pytest.fixture
def say(table):
    """A function that makes the model give these tokens after any prompt of three tokens."""

    def say(tokens) -> None:
        said = list(tokens)
        table[:] = ord(".")
        table[3 : 3 + len(said)] = said

    return say


def pieces(max_tokens: int = 16, **how) -> list[str]:
    return list(
        generate(
            models.byte_decoder(), ByteTokenizer(), "ab", Sampling(max_tokens=max_tokens), **how
        )
    )


def test_streams_as_tokens_come(say):
    """The first token comes at once, and then as many as a dispatch makes."""
    say(b"xyzuvw")
    assert pieces(max_tokens=6) == ["x", "yzuv", "w"]


def test_stops_at_the_start_of_another_document(say):
    say([*b"hi", ByteTokenizer.bos, *b"there"])
    assert "".join(pieces()) == "hi"


@pytest.mark.slow
def test_stops_at_whichever_token_ends_a_text(say):
    tokenizer = ByteTokenizer()
    tokenizer.ends = (7, 9)
    for end, first in ((7, b"one"), (9, b"")):
        say([*first, end, ByteTokenizer.bos, *b"more"])
        (one,) = complete(models.byte_decoder(), tokenizer, [("ab", Sampling())])
        assert (one.text, one.finish) == (first.decode(), "stop")


def test_stops_at_once(say):
    say([ByteTokenizer.bos, *b"there"])
    assert pieces() == []


def test_stops_after_max_tokens(say):
    say(repeat(ord("x"), 30))
    assert "".join(pieces(max_tokens=5)) == "xxxxx"
    assert pieces(max_tokens=1) == ["x"]


def test_characters_come_whole(say):
    text = "é€😀"
    say(text.encode())
    told = pieces(max_tokens=len(text.encode()))
    assert "".join(told) == text and "\ufffd" not in told


def test_half_a_character_at_the_end(say):
    say(chain(b"a", "€".encode()[:2], [ByteTokenizer.bos]))
    assert "".join(pieces()) == "a\ufffd"


def test_a_stop_string_ends_a_text(say):
    say(b"one END two")
    assert "".join(pieces(stop=["END"])) == "one "
    (one,) = complete(models.byte_decoder(), ByteTokenizer(), [("ab", Sampling())], stop=["END"])
    assert (one.text, one.finish) == ("one ", "stop")
