"""How the harness's requests are drawn."""

import pytest

from rmt_tpu.errors import UsageError
from rmt_tpu.evaluation.draws import request_sampling

HOW = {"until": ["x"], "max_gen_toks": 9, "do_sample": True, "temperature": 1.0, "top_k": 5}


def test_repeats_of_a_request_have_seeds_of_their_own():
    drawn = [request_sampling(HOW, number) for number in range(4)]
    assert [how.seed for how in drawn] == [0, 1, 2, 3]
    assert (drawn[0].top_k, drawn[0].max_tokens, drawn[0].temperature) == (5, 9, 1.0)
    assert request_sampling(HOW | {"seed": 2**32 - 1}, 2).seed == 1
    for changes, temperature in (
        ({}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"temperature": 0.7}, 0.7),
    ):
        assert request_sampling({"max_gen_toks": 3} | changes, 0).temperature == temperature


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": -1}, "gen_kwargs: seed=-1 must be a whole number from 0 to 4294967295"),
        ({"seed": 1.5}, "gen_kwargs: seed=1.5 must be"),
        ({"top_p": 2.0}, "gen_kwargs: top_p=2.0 must be above 0, at most 1"),
    ],
)
def test_what_is_not_legal_is_told(changes, message):
    with pytest.raises(UsageError, match=message):
        request_sampling(HOW | changes, 0)


@pytest.mark.parametrize(
    "changes, legal",
    [
        ({"num_beams": 4}, "1"),
        ({"typical_p": 0.5}, "until, max_gen_toks, do_sample, temperature, top_k, top_p, min_p"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(changes, legal):
    ((name, value),) = changes.items()
    with pytest.raises(UsageError, match=f"^gen_kwargs: {name}={value} is not .*; legal: {legal}"):
        request_sampling(HOW | changes, 0)


def test_what_changes_nothing_is_accepted():
    same = HOW | {"seed": 3, "num_beams": 1, "use_cache": True, "typical_p": None}
    assert request_sampling(same, 0) == request_sampling(HOW | {"seed": 3}, 0)
