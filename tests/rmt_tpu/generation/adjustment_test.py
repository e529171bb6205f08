"""Logits that a request changes, tokens that end it, and programs that know nothing of either."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.generation import (
    Adjustment,
    Draft,
    Engine,
    NewTokens,
    Request,
    Sampling,
    Scores,
    choice,
    programs,
)
from rmt_tpu.generation.adjustment import change_logits, changes_of, count_tokens
from tests import models

BOS, PROMPT, NEW = ByteTokenizer.bos, "abca", 12


@pytest.fixture(scope="module")
def engine():
    decoder = models.byte_decoder(positions=cfg.Rope())
    return Engine(decoder, BOS, slots=2, steps=4, part=16)


def request(prompt: str = PROMPT, how: dict | None = None, **adjusted) -> Request:
    tokens = np.array([BOS, *prompt.encode()])
    sampling = Sampling(**{"max_tokens": NEW, "temperature": 0.0, **(how or {})})
    return Request(tokens, sampling, adjustment=Adjustment(**adjusted))


def said(engine, *requests: Request) -> list[list[int]]:
    """The tokens of each, which run together."""
    came = {engine.submit(one): [] for one in requests}
    while engine.open_requests:
        for new in engine.step():
            came[new.number] += new.tokens
    return list(came.values())


@pytest.fixture(scope="module")
def forward(engine):
    """The next token's logits after any tokens, by a model without a cache."""
    decoder = nnx.merge(engine.model.graphdef, engine.params)
    run = jax.jit(lambda tokens: decoder(tokens)[0])
    padded = lambda tokens: np.array([[*tokens, *[0] * (32 - len(tokens))]])
    return lambda tokens: np.array(run(padded(tokens)))[len(tokens) - 1].astype(np.float64)


def by_hand(forward, adjustment: Adjustment) -> list[int]:
    """OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias[j], greedily."""
    prompt, new = [BOS, *PROMPT.encode()], []
    while len(new) < NEW:
        logits = forward([*prompt, *new])
        counts = np.bincount(new, minlength=len(logits))
        logits -= adjustment.frequency_penalty * counts + adjustment.presence_penalty * (counts > 0)
        for token, bias in adjustment.logit_bias.items():
            logits[token] += bias
        new.append(int(np.argmax(logits)))
    return new


ADJUSTED = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.5, "frequency_penalty": 2.0, "logit_bias": {98: 1.0, 99: -3.5}},
    {"logit_bias": {token: 2.5 for token in range(40, 70)}},
]


@pytest.mark.parametrize("adjusted", ADJUSTED, ids=str)
def test_text_is_that_of_the_formula(engine, forward, adjusted):
    """In a prompt at once and in parts, alone and beside a text that nothing changes."""
    (plain,) = said(engine, request())
    wanted = by_hand(forward, Adjustment(**adjusted))
    assert wanted != plain == by_hand(forward, Adjustment())
    assert said(engine, request(**adjusted)) == [wanted]
    assert said(engine, request(**adjusted), request()) == [wanted, plain]
    assert engine.rows.changes is not None
    assert said(engine, request(), request(**adjusted)) == [plain, wanted]


def test_a_row_forgets_the_text_before(engine):
    """And the whole batch its changes, as soon as nothing needs them."""
    how = {"logit_bias": {120: 100.0}}
    longer = request("q", {"max_tokens": 30}, **how)
    together = said(engine, longer, request(**how), request(), request("q"))
    assert together[0] == [120] * 30 and together[1] == [120] * NEW
    assert together[2:] == said(engine, request(), request("q"))
    assert engine.rows.changes is None


def test_a_long_prompt_is_adjusted_from_its_first_token(engine):
    tokens = said(engine, request("a" * 40, logit_bias={120: 100.0}))
    assert tokens == [[120] * NEW]


def test_own_tokens_end_a_text(engine):
    (plain,) = said(engine, request())
    late = next(n for n, token in enumerate(plain) if token not in plain[:n] and n > 1)
    number = engine.submit(request(stop_tokens=(300, plain[late])))
    came = []
    while engine.open_requests:
        came += engine.step()
    assert [token for new in came for token in new.tokens] == plain[:late]
    assert {new.number for new in came} == {number}
    assert [(new.ended, new.stopped) for new in came][-1] == (True, True)
    assert not any(new.ended for new in came[:-1])
    assert sum(len(new.scores.log_probabilities) for new in came) == late
    first = engine.submit(request(stop_tokens=(plain[0],)))
    (new,) = engine.step()
    assert (new.number, new.tokens, new.ended, new.stopped) == (first, [], True, True)
    assert not engine.open_requests
    assert said(engine, request()) == [plain], "the row that was left runs no further"


def test_no_end_before_so_many_tokens(engine):
    """Of the tokens that end every text, and of the request's own."""
    likely = {BOS: 50.0, 120: 49.0}
    assert said(engine, request(logit_bias=likely)) == [[]]
    (text,) = said(engine, request(logit_bias=likely, min_tokens=5))
    assert text == [120] * 5
    both = {"logit_bias": likely, "stop_tokens": (120,)}
    (text,) = said(engine, request(min_tokens=7, **both))
    assert len(text) == 7 and 120 not in text
    assert said(engine, request(**both | {"logit_bias": {120: 49.0}})) == [[]]


def test_a_token_without_text_is_not_made_possible(engine):
    """Whatever its bias."""
    before, engine.ends = engine.ends, engine.ends._replace(text_vocab_size=np.int32(100))
    try:
        (text,) = said(engine, request(logit_bias={120: 100.0}))
    finally:
        engine.ends = before
    assert 120 not in text


def test_stop_strings_wait_for_so_many_tokens():
    def text(min_tokens: int, *parts: bytes) -> str:
        draft = Draft(0, ByteTokenizer(), ["END", "Z"], min_tokens)
        scores = [Scores([0.0] * len(part), []) for part in parts]
        told = zip(parts, scores, [*parts[1:], None], strict=True)
        new = [NewTokens(0, list(part), logs, after is None, False) for part, logs, after in told]
        return "".join(draft.add(one).text for one in new)

    assert text(0, b"aE", b"NDb") == "a"
    assert text(2, b"aE", b"NDb") == "aENDb", "it began too early"
    assert text(1, b"aE", b"NDb") == "a"
    assert text(3, b"ZZZ", b"bZc") == "ZZZb"
    assert text(1, "é".encode()[:1], "é".encode()[1:] + b"Z") == "é"


def test_changes_by_hand():
    """Against the formula in float64; a position decides who may end."""
    rng = np.random.default_rng(0)
    vocab = 7
    how = Adjustment(0.5, -1.25, {2: 3.5, 6: -100.0}, (1,), 2)
    changes = jax.tree.map(jnp.asarray, changes_of(how, [5, -1, 9], 10, vocab))
    for token in (3, 3, 0):
        changes = count_tokens(changes, jnp.array([token]))
    assert changes.counts.tolist() == [[1, 0, 0, 2, 0, 0, 0]]
    logits = rng.normal(size=(1, vocab)).astype(np.float32)
    wanted = logits[0].astype(np.float64)
    wanted -= [0.5 - 1.25, 0, 0, 0.5 - 2.5, 0, 0, 0]
    wanted += [0, 0, 3.5, 0, 0, 0, -100]
    for position in (10, 11, 12):
        found = np.asarray(change_logits(jnp.array(logits), changes, jnp.array([position])))[0]
        late = [1, 5] if position < 12 else []
        assert np.flatnonzero(np.isneginf(found)).tolist() == late
        kept = np.isfinite(found)
        np.testing.assert_allclose(found[kept], wanted[kept], rtol=1e-6)


def test_what_is_no_adjustment():
    for name, value in (("presence_penalty", 2.1), ("frequency_penalty", -3.0), ("min_tokens", -1)):
        with pytest.raises(UsageError, match=f"Adjustment.{name}={value} must be at least"):
            Adjustment(**{name: value})
    assert not Adjustment(stop_tokens=(5,)).changes_logits
    assert all(Adjustment(**how).changes_logits for how in [*ADJUSTED, {"min_tokens": 1}])


def traced(engine, changed: bool) -> str:
    """The program of decode steps."""
    rows = programs.empty_rows(engine.model, engine.params, 2, 32)
    if changed:
        rows = rows._replace(changes=programs.unchanged(engine.model, engine.params, 2))
    sampling = choice([Sampling()] * 2)
    arguments = rows, np.ones(2, bool), sampling, engine.ends, np.bool_(False), 4
    return str(programs.steps.trace(engine.model, engine.params, *arguments).jaxpr)


def test_steps_without_changes_are_another_program(engine, monkeypatch):
    """Which has no operation of theirs: it is traced where there is none."""
    plain, changed = traced(engine, False), traced(engine, True)
    assert len(changed) > len(plain)
    for name in ("change_logits", "count_tokens"):
        monkeypatch.setattr(programs, name, None)
    jax.clear_caches()
    assert traced(engine, False) == plain
    with pytest.raises(TypeError, match="not callable"):
        traced(engine, True)


@pytest.mark.slow
def test_programs_that_change_logits_are_compiled_in_advance():
    decoder = models.byte_decoder(positions=cfg.Rope())
    engine = Engine(decoder, BOS, slots=2, steps=4, part=32)
    engine.compile(40, scored=False, adjusted=True)
    compiled = [programs.prefill, programs.first, programs.steps, programs.insert, programs.grow]
    sizes = [program._cache_size() for program in compiled]
    said(engine, request(min_tokens=2), request("a" * 20), request("a" * 33, min_tokens=1))
    assert sizes == [program._cache_size() for program in compiled]
