"""The choice of the next token, and the texts that are generated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.config.presets import preset as preset_of
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.decoder import Decoder
from rmt_tpu.errors import UsageError
from rmt_tpu.generation import (
    Engine,
    Request,
    Sampling,
    cast_once,
    choice,
    complete,
    fitting_tokens,
    programs,
    sample,
)
from rmt_tpu.generation.sampling import penalize
from rmt_tpu.generation.text import Text
from tests import models
from tests.tiers import later

PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.25, 0.2])
DRAWS = 20_000


def shares(**how) -> np.ndarray:
    """How often each token is drawn, of those with PROBABILITIES."""
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)), (DRAWS, 5))
    drawn = sample(logits, jnp.arange(DRAWS), choice([Sampling(**how)] * DRAWS))
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
        # Of 0.4 so much that 0.2 is in and 0.1 is not.
        ({"min_p": 0.45}, kept(1, 3, 4)),
        ({"min_p": 1.0}, kept(1)),
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
    drawn = sample(jnp.zeros((500, 4)), jnp.arange(500), choice([Sampling(**how)] * 500))
    assert set(drawn.tolist()) == set(range(count))


def test_numbers_that_float32_has_not_leave_the_likeliest():
    """Where nothing is left, token 0 is taken, which is NUL of bytes."""
    logits = jnp.array([[1.0, 2.0, 50.0, 3.0]])
    for how in (
        {"top_p": 1e-300},
        {"top_p": 1e-45},
        {"temperature": 1e-37},
        {"temperature": 1e-40},
    ):
        assert sample(logits, jnp.array([0]), choice([Sampling(**how)])) == 2
    how = choice([Sampling(repetition_penalty=1.2e-38)])
    seen = jnp.array([[False, False, True, False]])
    assert sample(penalize(logits, seen, how), jnp.array([0]), how) == 2


def test_a_penalty_is_for_the_tokens_that_a_row_has_seen():
    """Positive logits are divided by it and others multiplied; a penalty of 1 changes nothing."""
    logits = jnp.array([[2.0, -1.0, 3.0, -4.0]] * 3)
    seen = jnp.array([[True, True, False, False], [True, True, True, True], [False] * 4])
    how = choice([Sampling(repetition_penalty=penalty) for penalty in (2.0, 1.0, 2.0)])
    expected = [[1.0, -2.0, 3.0, -4.0], *logits[1:].tolist()]
    assert penalize(logits, seen, how).tolist() == expected


@pytest.mark.slow
def test_a_draw_is_of_its_row_alone():
    """Whatever is beside it, and in whichever slot."""
    rows = [Sampling(seed=n, **how) for n, how in enumerate([{}, {"top_k": 3}, {"top_p": 0.9}])]
    rows.append(Sampling(temperature=0.0))
    logits = jax.random.normal(jax.random.key(0), (4, 50))
    together = sample(logits, jnp.arange(4), choice(rows))
    alone = [
        int(sample(logits[n : n + 1], jnp.array([n]), choice(rows[n : n + 1]))[0]) for n in range(4)
    ]
    backwards = sample(logits[::-1], jnp.arange(4)[::-1], choice(rows[::-1]))[::-1]
    assert together.tolist() == alone == backwards.tolist()
    assert len({*alone}) > 1 and alone[3] == int(jnp.argmax(logits[3]))


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
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


@pytest.fixture(scope="module")
def rotated():
    return models.byte_decoder(positions=cfg.Rope())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_tokens_without_a_text_are_never_chosen(temperature):
    """But for one that ends texts."""

    class Few(ByteTokenizer):
        vocab_size, bos, ends, gaps = 6, 3, (3, 200), (0, 3, 4)

    (one,) = complete(
        models.byte_decoder(), Few(), [("", Sampling(temperature, max_tokens=40))], slots=2
    )
    assert {*one.tokens} <= {1, 2, 5}
    beyond = lambda text: np.array([257])
    monkeyed = Few()
    monkeyed.encode = beyond
    with pytest.raises(UsageError, match="has token 257, for which .* legal: 0 to 256"):
        next(complete(models.byte_decoder(), monkeyed, [("a", Sampling())]))
    engine = Engine(models.byte_decoder(), 256)
    for wrong in (-1, 257):
        with pytest.raises(UsageError, match=f"prompt has token {wrong}, for which .* 0 to 256"):
            engine.submit(Request(np.array([256, wrong]), Sampling()))
    assert not engine.open_requests


@pytest.mark.parametrize(
    "stop, text",
    [
        (["END"], "one END two EN"),
        (["two", "ne "], "one END two EN"),
        (["EN!"], "one END two EN"),
        (["€"], "a€b"),
        ([""], "one"),
    ],
)
def test_a_stop_string_is_not_told_nor_a_part_of_it(stop, text):
    wanted = text[: min([text.find(s) for s in stop if s and s in text], default=len(text))]
    for size in (1, 3, 100):
        told, tokens = Text(ByteTokenizer(), stop), list(text.encode())
        parts = [told.add(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        assert "".join(parts) + told.end() == wanted
        assert told.stopped == (wanted != text)


def prompts():
    """Of many lengths, chosen from in many ways."""
    how = [{"temperature": 0.0}, {}, {"top_k": 5, "repetition_penalty": 1.5}]
    how.append({"top_p": 0.5, "temperature": 2.0})
    for n in range(9):
        sampling = Sampling(max_tokens=3 + 5 * (n % 4), seed=n, **how[n % 4])
        yield "abcdefghijklmnopqrstuvw"[: 3 * n % 20], sampling


def test_many_at_a_time_are_each_alone(rotated):
    """Greedy and drawn, in any slot, beside whatever, with more of them than slots."""
    alone, together = (
        {one.number: one for one in complete(rotated, ByteTokenizer(), prompts(), slots=slots)}
        for slots in (1, 4)
    )
    assert alone.keys() == together.keys() == set(range(9))
    # A prompt may be its tokens, in a list, too.
    tokens = ByteTokenizer().with_bos(ByteTokenizer().encode("abcdef")).tolist()
    (listed,) = complete(rotated, ByteTokenizer(), [(tokens, list(prompts())[2][1])], slots=1)
    assert listed.tokens == alone[2].tokens
    for n, one in alone.items():
        assert one.tokens == together[n].tokens and one.finish == together[n].finish
        assert 0 < len(one.tokens) <= 3 + 5 * (n % 4)
        np.testing.assert_allclose(one.log_probabilities, together[n].log_probabilities, atol=1e-4)
    # Lengths and ways are numbers: of each size of cache there is one program.
    compiled = [f._cache_size() for f in (programs.prefill, programs.steps)]
    longer = [("p" * (n % 30), Sampling(max_tokens=1 + n % 3, seed=n)) for n in range(50)]
    assert len(list(complete(rotated, ByteTokenizer(), longer, slots=4))) == 50
    assert [f._cache_size() for f in (programs.prefill, programs.steps)] == compiled


@pytest.mark.slow
def test_caches_that_grow_keep_what_they_have(rotated):
    """Beyond the smallest size, twice; greedy tokens are those of no cache, with their logs."""
    (one,) = complete(rotated, ByteTokenizer(), [("abc", Sampling(0.0, max_tokens=80))])
    tokens = np.array([ByteTokenizer.bos, *b"abc", *one.tokens])
    log_probabilities = jax.nn.log_softmax(jax.jit(rotated)(tokens[None])[0])
    assert len(one.tokens) == 80 and one.finish == "length"
    assert one.tokens == jnp.argmax(log_probabilities, -1)[3:-1].tolist()
    wanted = np.asarray(log_probabilities)[np.arange(3, 83), one.tokens]
    np.testing.assert_allclose(one.log_probabilities, wanted, atol=1e-4)


@pytest.mark.slow
def test_what_a_text_has_is_less_likely(rotated):
    """The penalty counts tokens of the prompt and of the answer, but not the start token.

    The start token also ends a text. Log-probabilities are those of the model.
    """
    sampling = Sampling(0.0, max_tokens=20, repetition_penalty=1.4)
    (one,) = complete(rotated, ByteTokenizer(), [("abc", sampling)])
    tokens = np.array([ByteTokenizer.bos, *b"abc", *one.tokens])
    logits = np.asarray(jax.jit(rotated)(tokens[None])[0])
    wanted, own = [], np.asarray(jax.nn.log_softmax(logits))
    for end in range(4, len(tokens)):
        now, seen = logits[end - 1].copy(), np.unique(tokens[1:end])
        now[seen] = np.where(now[seen] > 0, now[seen] / 1.4, now[seen] * 1.4)
        wanted.append(int(np.argmax(now)))
    assert one.tokens == wanted
    assert wanted != np.argmax(logits, -1)[3:-1].tolist()
    logs = own[np.arange(3, len(tokens) - 1), wanted]
    np.testing.assert_allclose(one.log_probabilities, logs, atol=1e-4)


def narrow(decoder):
    """Names of the parameters that are not stored in float32."""
    params = nnx.to_flat_state(nnx.state(decoder, nnx.Param))
    return {path[-1] for path, x in params if x.dtype != jnp.float32}


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["llama-attnres-tiny", *later("rmt-llama-tiny", "highway-tiny", "kimi-tiny")]
)
def test_weights_cast_once_give_the_same_logits(preset):
    """In bfloat16, bit for bit; what is computed with in float32 is not cast."""
    changes = {} if preset == "kimi-tiny" else {"num_layers": 2}
    config = preset_of(preset).replace(compute_dtype="bfloat16", **changes)
    plain = Decoder(config, rngs=nnx.Rngs(0))
    cast, tokens = cast_once(plain), jnp.arange(6)[None]
    run = jax.jit(lambda decoder: decoder.decode(tokens, decoder.empty_cache(1, 8))[0])
    np.testing.assert_array_equal(run(cast), run(plain))
    names = narrow(cast)
    assert {"w_1", "w_2", "kernel", "tokens"} <= names
    assert not names & {"gain", "query", "read_keys", "store_keys", "gate_and_value", "w_router"}


def test_routers_are_not_cast():
    config = models.model("vector", compute_dtype="bfloat16")
    cores = config.stacks[0].cores[0], cfg.Experts(num_experts=6, top_k=2, hidden_dim=5)
    config = config.replace(stacks=(cfg.Stack(cores, 1),))
    names = narrow(nnx.eval_shape(lambda: cast_once(Decoder(config, rngs=nnx.Rngs(0)))))
    assert {"w_1", "w_2"} <= names and "w_router" not in names


@pytest.mark.parametrize("scale, is_cast", [(3.0, False), (4.0, True)])
def test_an_embedding_is_cast_if_its_scale_is_exact(scale, is_cast):
    config = models.model("vector", compute_dtype="bfloat16", embedding_scale=scale)
    params = jax.tree.map(jnp.float32, models.random_parameters(config))
    plain, tokens = nnx.merge(models.graph(config), params), jnp.arange(models.VOCAB)[None]
    cast = cast_once(plain)
    assert ("tokens" in narrow(cast)) == is_cast
    rows = [x.embedding(tokens, 0 * tokens, jnp.bfloat16)[0] for x in (cast, plain)]
    np.testing.assert_array_equal(*rows)


def test_what_has_ended_leaves_nothing_behind():
    """A text to the last learned position, and then a short one in its slot."""
    ended = models.byte_decoder(positions=cfg.Learned(27))
    to_the_end, short = ("a" * 20, Sampling(0.0)), ("b", Sampling(0.0, max_tokens=8))
    before, after = complete(ended, ByteTokenizer(), [to_the_end, short], slots=1)
    (alone,) = complete(ended, ByteTokenizer(), [short], slots=1)
    assert after.tokens == alone.tokens and len(after.tokens) == 8
    assert np.isfinite(before.log_probabilities + after.log_probabilities).all()
