"""Requests that come and go while others run, and what an engine tells of their tokens."""

import contextlib
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.data import Batch, ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.generation import RANKS, Engine, Request, Sampling, programs
from rmt_tpu.generation.programs import ModelSpec
from rmt_tpu.training.step import batch_loss
from sharding import MeshError
from tests import models
from tests.programs import kept_in


@pytest.fixture(scope="module")
def decoder():
    return models.byte_decoder(positions=cfg.Rope())


@pytest.fixture(scope="module")
def shared(decoder):
    return Engine(decoder, ByteTokenizer.bos, slots=2, steps=4)


@pytest.fixture
def two(shared):
    """An engine of two slots, as new."""
    shared.reset()
    return shared


def test_a_prompt_is_scored_with_the_logits_of_few_tokens_at_a_time(decoder):
    graphdef, params = nnx.split(decoder)
    tokens, lengths = np.zeros((1, 256), np.int32), np.array([256])
    program = programs.score.trace(ModelSpec(graphdef), params, tokens, lengths, np.bool_(True))
    assert "f32[64,257]" in str(program.jaxpr) and "[256,257]" not in str(program.jaxpr)


def request(prompt: str, max_tokens: int, seed: int = 0, **how) -> Request:
    tokens = np.array([ByteTokenizer.bos, *prompt.encode()])
    return Request(tokens, Sampling(max_tokens=max_tokens, seed=seed), **how)


def rest(two, *numbers: int) -> dict[int, list[int]]:
    """Steps until nothing is left; tokens of some requests, and of no others."""
    came = {number: [] for number in numbers}
    while two.open_requests:
        for said in two.step():
            came[said.number] += said.tokens
    return came


def test_requests_come_and_go_while_others_run(two):
    """What is told of each is what it would be alone."""
    requests = [request("ab", 14, 1), request("cdef", 9, 2), request("g", 11, 3)]
    alone = [rest(two, two.submit(one)).popitem()[1] for one in requests]
    assert len({*map(tuple, alone)}) == 3 and {*map(len, alone)} <= {9, 11, 14}
    first, gone = two.submit(requests[0]), two.submit(requests[1])
    came = [said for _ in range(3) for said in two.step()]
    assert [said.number for said in came] == [first, gone, first, gone]
    late, never = two.submit(requests[2]), two.submit(requests[1])
    two.forget(gone)
    two.forget(never)
    (said,) = two.step()  # it has the slot at once
    assert said.number == late and two.open_requests == [first, late]
    had = {n: [t for said in came if said.number == n for t in said.tokens] for n in (first, gone)}
    had[late] = said.tokens
    more = rest(two, first, late)
    assert had[first] + more[first] == alone[0] and had[late] + more[late] == alone[2]
    assert had[gone] == alone[1][: len(had[gone])]
    assert two.step() == []


def test_requests_that_end_at_once_do_not_keep_the_others_waiting(two):
    long = two.submit(request("ab", 9))
    short = [two.submit(request("c", 1, seed)) for seed in range(6)]
    order = [said.number for _ in range(9) for said in two.step()]
    assert order[:2] == [long, short[0]] and order[2] == long
    assert order[3:6] == [*short[1:3], long]


def test_rows_on_devices_of_other_processes_are_refused(decoder, monkeypatch):
    """Nobody reads them there, and jax's own error is about that."""
    theirs = np.array([SimpleNamespace(process_index=n) for n in (0, 0, 1)])
    mesh = SimpleNamespace(devices=theirs, shape={"data": 3, "fsdp": 1})
    monkeypatch.setattr(sys.modules[Engine.__module__], "mesh_of", lambda decoder: mesh)
    with pytest.raises(MeshError, match="devices of 2 processes; legal: only devices of one"):
        Engine(decoder, 256)


@pytest.mark.slow
def test_a_prompt_has_tokens_and_an_engine_has_slots(decoder, two):
    with pytest.raises(UsageError, match="the prompt has no tokens; legal: 1 or more"):
        two.submit(Request(np.zeros(0, np.int32), Sampling()))
    assert not two.open_requests
    with pytest.raises(UsageError, match="slots=0 is out of range; legal: 1 or more"):
        Engine(decoder, 0, slots=0)


def test_what_goes_wrong_is_gone(two, monkeypatch):
    two.submit(request("ab", 9))
    two.step()
    monkeypatch.setattr(programs, "steps", None)
    with pytest.raises(TypeError):
        two.step()
    monkeypatch.undo()
    two.reset()
    assert (
        two.open_requests == []
        and len(rest(two, number := two.submit(request("ab", 9)))[number]) == 9
    )


def test_room_that_nobody_needs_is_given_back(two):
    rest(two, two.submit(request("ab", 40)))
    assert two.capacity == 64
    rest(two, two.submit(request("ab", 2)))
    assert two.capacity == 32


@pytest.mark.parametrize("part", [32, 2])
def test_a_start_token_that_ends_texts_gets_no_repetition_penalty(two, monkeypatch, part):
    """Whether a prompt is read as a whole or in parts."""
    monkeypatch.setattr(two, "part", part)
    two.submit(request("aba", 2))
    two.step()
    assert np.flatnonzero(two.rows.seen[0]).tolist() == [*b"ab"]


@pytest.mark.slow
def test_programs_can_be_made_beforehand(two):
    made = (programs.prefill, programs.steps, programs.score, programs.insert, programs.grow)
    programs.steps.clear_cache()
    two.compile(1)
    assert programs.steps._cache_size() == 1  # also of a text of a single token
    two.compile(62)
    compiled = [program._cache_size() for program in made]
    rest(two, two.submit(request("ab", 3)))
    rest(two, two.submit(request("a" * 40, 20)))
    rest(two, two.submit(request("a" * 40, 2, scored=True)))
    long = two.submit(request("a" * 60, 2))
    rest(two, long, two.submit(request("ab", 9, scored=True)))
    # The longest prompt, which with the start token is longer than a power of two.
    two.compile(33)
    compiled = [program._cache_size() for program in made]
    rest(two, two.submit(request("a" * 32, 1, scored=True)))
    assert [program._cache_size() for program in made] == compiled


def test_the_scores_of_a_text_are_its_loss(decoder, two):
    """Nats of a window as training counts them."""
    text = b"a window of text"
    two.submit(request(text.decode(), 1, scored=True))
    (said,) = two.step()
    two.reset()
    graphdef, params = nnx.split(decoder)
    targets = np.array([[*text]], np.int32)
    inputs = np.concatenate([[[ByteTokenizer.bos]], targets[:, :-1]], axis=1)
    ones = np.ones(targets.shape, np.int32)
    window = Batch(inputs.astype(np.int32), targets, ones, ones.astype(np.float32))
    loss = jax.jit(batch_loss, static_argnums=0)(graphdef, params, window)
    assert -sum(said.prompt.log_probabilities) == pytest.approx(float(loss.cross_entropy), rel=1e-5)


def test_the_likeliest_tokens_and_the_scores_of_a_prompt(decoder, two):
    """Against the logits of the whole; rows beside it that ask for nothing get nothing."""
    two.submit(request("xyz", 6))
    number = two.submit(request("abcdef", 6, ranked=True, scored=True))
    tokens, told, likeliest, prompt = [], [], [], None
    while two.open_requests:
        for said in two.step():
            if said.number != number:
                assert said.prompt is None and said.scores.likeliest == []
                continue
            prompt = prompt or said.prompt
            tokens += said.tokens
            told += said.scores.log_probabilities
            likeliest += said.scores.likeliest
    whole = np.array([ByteTokenizer.bos, *b"abcdef", *tokens])
    logs = np.asarray(jax.nn.log_softmax(jax.jit(decoder)(whole[None])[0]))[:-1]
    told, likeliest = prompt.log_probabilities + told, prompt.likeliest + likeliest
    assert len(told) == len(likeliest) == len(whole) - 1 == 12
    np.testing.assert_allclose(told, logs[np.arange(12), whole[1:]], atol=1e-4)
    for row, of_place in zip(logs, likeliest, strict=True):
        assert list(of_place) == np.argsort(-row)[:RANKS].tolist()
        np.testing.assert_allclose(list(of_place.values()), -np.sort(-row)[:RANKS], atol=1e-4)


@pytest.mark.slow
def test_what_is_kept_of_programs_is_all_that_a_next_start_needs(decoder, tmp_path):
    """Nothing in a program is of one process or engine alone, for which it would be made anew."""
    made_or_read = "/jax/core/compile/backend_compile_duration"
    read = "/jax/compilation_cache/cache_hits"
    told = []
    listen = lambda event, *values, **more: told.append(event)
    jax.monitoring.register_event_listener(listen)
    jax.monitoring.register_event_duration_secs_listener(listen)
    counts = []
    # The tests' own folder, where there is one, for it has them from earlier runs.
    keeps = jax.config.jax_enable_compilation_cache
    with contextlib.nullcontext() if keeps else kept_in(tmp_path):
        for _ in range(2):
            jax.clear_caches()  # as in a process that begins
            told.clear()
            Engine(decoder, ByteTokenizer.bos, slots=1, steps=2).compile(1, scored=False)
            counts.append((told.count(made_or_read), told.count(read)))
    jax.monitoring.unregister_event_listener(listen)
    jax.monitoring.unregister_event_duration_listener(listen)
    (made, _), second = counts
    assert made > 0 and second == (made, made)
