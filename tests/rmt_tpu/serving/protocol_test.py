"""What clients may ask for, and the line that each mistake gets."""

import json
from dataclasses import replace

import pytest

from rmt_tpu.data import ByteTokenizer
from rmt_tpu.generation import Adjustment
from rmt_tpu.serving.fields import Refusal
from rmt_tpu.serving.protocol import ServedModel, parse

BOS = ByteTokenizer.bos
SERVED = ServedModel("tiny", ByteTokenizer(), max_length=64, max_tokens=50, max_texts=6)
HALF = "\ud800"


def ask(fresh: int = 7, **fields):
    return parse(json.dumps(fields).encode(), SERVED, fresh)


def test_what_is_left_out_is_as_openai_has_it():
    for left_out in (ask(), ask(**{name: None for name in ("prompt", "max_tokens", "n", "stop")})):
        (request,) = left_out.requests()
        assert request.tokens.tolist() == [BOS]
        assert request.sampling.max_tokens == 16 and request.sampling.seed == 7
        assert request.sampling.temperature == 1 and request.sampling.top_p == 1
        assert not request.ranked and not request.scored
        assert (left_out.stop, left_out.logprobs, left_out.stream) == ([], None, False)


def test_prompts_of_every_form():
    for prompt in ("ab", ["ab"], [97, 98], [[97, 98]], [BOS, 97, 98]):
        (request,) = ask(prompt=prompt).requests()
        assert request.tokens.tolist() == [BOS, 97, 98]
    many = ask(prompt=[[97], "b", ""], n=2, seed=2**32 - 2).requests()
    assert [r.tokens.tolist()[1:] for r in many] == [[97], [97], [98], [98], [], []]
    assert [r.sampling.seed for r in many] == [2**32 - 2, 2**32 - 1, 0, 1, 2, 3]
    assert ask(prompt=["é", [0xC3, 0xA9]]).prompts[1].text == "é"


def test_no_start_token_where_the_model_s_tokenizer_puts_none():
    """But for a prompt of no token at all, which could not be read."""
    tokenizer = ByteTokenizer()
    tokenizer.starts = False
    served = replace(SERVED, tokenizer=tokenizer)
    for prompt in ("ab", [97, 98], [BOS, 97, 98]):
        one = parse(json.dumps({"prompt": prompt}).encode(), served, 7).prompts[0]
        assert one.tokens.tolist() == [BOS] * (len(prompt) == 3) + [97, 98]
        assert one.client_tokens == len(one.tokens)
    assert parse(b"{}", served, 7).prompts[0].tokens.tolist() == [BOS]
    with pytest.raises(Refusal, match="prompt has 65 tokens; legal: at most 64"):
        parse(json.dumps({"prompt": "a" * 65}).encode(), served, 7)


def test_ids_that_the_tokenizer_leaves_out_are_refused():
    tokenizer = ByteTokenizer()
    tokenizer.gaps = (98,)
    served = replace(SERVED, tokenizer=tokenizer)
    with pytest.raises(Refusal, match="token 98; legal: 0 to 256, except ids that the tokenizer"):
        parse(b'{"prompt": [97, 98]}', served, 7)
    assert parse(b'{"prompt": [97, 99]}', served, 7).prompts[0].client_tokens == 2


def test_how_tokens_are_chosen():
    how = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2}
    (request,) = ask(max_tokens=5, seed=9, **how).requests()
    assert {name: getattr(request.sampling, name) for name in how} == how
    assert (request.sampling.max_tokens, request.sampling.seed) == (5, 9)


def test_seeds_of_64_bits():
    """Those of 32 bits are as they were, and of all others none is like another one here."""
    seed_of = lambda seed: ask(seed=seed).requests()[0].sampling.seed
    assert [seed_of(seed) for seed in (0, 5, 2**32 - 1)] == [0, 5, 2**32 - 1]
    large = [2**32, 2**32 + 1, 2**63 - 1, -1, -2, -(2**63), -(2**32), 2**40]
    drawn = [seed_of(seed) for seed in large]
    assert len(set(drawn)) == len(large) and drawn == [seed_of(seed) for seed in large]
    assert all(0 <= seed < 2**32 for seed in drawn) and drawn[0] == 1_438_993_947
    first, second = (request.sampling.seed for request in ask(seed=-1, n=2).requests())
    assert second == first + 1


def test_top_p_of_0_is_greedy():
    (request,) = ask(top_p=0, temperature=0.7).requests()
    assert (request.sampling.temperature, request.sampling.top_p) == (0, 1)


def test_how_logits_are_changed():
    how = {"presence_penalty": 1, "frequency_penalty": -0.5, "min_tokens": 2}
    asked = ask(n=2, logit_bias={"5": 1, "256": -100}, stop_token_ids=[97, 5], **how)
    wanted = Adjustment(1.0, -0.5, {5: 1.0, 256: -100.0}, (97, 5), 2)
    assert [request.adjustment for request in asked.requests()] == [wanted, wanted]


def test_logprobs_and_echo():
    given = [ask(logprobs=k, echo=echo).requests()[0] for k in (0, 3) for echo in (False, True)]
    assert [(r.ranked, r.scored) for r in given] == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    assert not ask(echo=True).requests()[0].scored
    silent = ask(echo=True, max_tokens=0)
    assert silent.silent and silent.requests()[0].sampling.max_tokens == 1


def test_what_fits():
    """The last token is never read."""
    assert ask(prompt="a" * 63, max_tokens=1).requests()[0].sampling.max_tokens == 1
    assert ask(prompt=["a", "a" * 60]).requests()[0].sampling.max_tokens == 4
    assert ask(prompt="a" * 14, max_tokens=50).requests()[0].sampling.max_tokens == 50


def test_tokens_that_the_model_has_not_are_refused():
    """A model may have fewer than its tokenizer, or more."""
    for size, legal in ((100, 99), (300, 256)):
        served = replace(SERVED, vocab_size=size)
        body = json.dumps({"prompt": [legal]}).encode()
        assert parse(body, served, 0).prompts[0].tokens[-1] == legal
        for given in ([legal + 1], "\x7f" if size == 100 else [257]):
            with pytest.raises(Refusal, match=f"prompt has token .*; legal: 0 to {legal}$"):
                parse(json.dumps({"prompt": given}).encode(), served, 0)


def test_what_changes_nothing_is_taken():
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "suffix": ""}
    neutral |= {"stop_token_ids": [], "min_tokens": 0}
    assert ask(**neutral).adjustment == Adjustment()
    ask(n=2, best_of=2, user="someone", model="tiny", **neutral)
    streamed = ask(stream=True, stream_options={"include_usage": True})
    assert streamed.stream and streamed.include_usage
    assert ask(stop="a").stop == ["a"] and ask(stop=["a", "b"]).stop == ["a", "b"]


REFUSED = [
    ({"max_token": 5}, "max_token", "'max_token' is unknown; did you mean 'max_tokens' or"),
    ({f"n{HALF}": 5}, "n?", r"field 'n\ud800' is unknown"),
    ({"prompt": 5}, "prompt", "prompt=5 must be text, a list of tokens, a list of texts, or a"),
    ({"prompt": []}, "prompt", "prompt=[] must be text"),
    ({"prompt": [[]]}, "prompt", "prompt=[] must be text"),
    ({"prompt": [1, "a"]}, "prompt", "prompt=1 must be text"),
    ({"prompt": [True]}, "prompt", "prompt=True must be text"),
    ({"prompt": [1, 257]}, "prompt", "prompt has token 257; legal: 0 to 256"),
    ({"prompt": [-1]}, "prompt", "prompt has token -1; legal: 0 to 256"),
    (
        {"prompt": HALF},
        "prompt",
        r"prompt is not legal: the text has an unpaired surrogate, '\ud800'",
    ),
    ({"prompt": "a" * 64}, "prompt", "prompt has 65 tokens (with the start token); legal: at most"),
    ({"prompt": ["a", "a" * 64]}, "prompt", "prompt number 2 has 65 tokens"),
    (
        {"prompt": ["a"] * 7},
        "prompt",
        "prompt has 7 prompts, which with n=1 make 7 texts; legal: at most 6",
    ),
    (
        {"prompt": ["a"] * 4, "n": 2},
        "prompt",
        "4 prompts, which with n=2 make 8 texts; legal: at most 6",
    ),
    (
        {"max_tokens": 0},
        "max_tokens",
        "max_tokens=0 must be a whole number from 1 to 50, or 0 with echo",
    ),
    ({"max_tokens": 51}, "max_tokens", "max_tokens=51 must be a whole number from 1 to 50"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens='5' must be a whole number"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "max_tokens=-1 must be a whole number from 0"),
    (
        {"prompt": "a" * 40, "max_tokens": 25},
        "max_tokens",
        "max_tokens=25 is too many after a prompt of 41 tokens (with the start token); legal: at "
        "most 24",
    ),
    ({"n": 0}, "n", "n=0 must be a whole number from 1 to 6"),
    ({"n": 7}, "n", "n=7 must be"),
    ({"best_of": 2}, "best_of", "best_of=2 must be 1"),
    ({"temperature": -1}, "temperature", "temperature=-1.0 must be at least 0"),
    ({"temperature": float("nan")}, "temperature", "temperature=nan must be at least 0"),
    ({"temperature": 10**400}, "temperature", "temperature=inf must be at least 0"),
    ({"temperature": "hot"}, "temperature", "temperature='hot' must be a number"),
    ({"temperature": True}, "temperature", "temperature=True must be a number"),
    ({"top_p": -0.5}, "top_p", "top_p=-0.5 must be above 0, at most 1"),
    ({"top_k": 1.5}, "top_k", "top_k=1.5 must be a whole number"),
    ({"min_p": 2}, "min_p", "min_p=2.0 must be at least 0, at most 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty=0.0 must be positive"),
    ({"seed": 2**63}, "seed", f"a whole number from {-(2**63)} to {2**63 - 1}"),
    ({"seed": -(2**63) - 1}, "seed", f"a whole number from {-(2**63)} to {2**63 - 1}"),
    ({"seed": 0.5}, "seed", "seed=0.5 must be a whole number"),
    ({"stop": ["a"] * 5}, "stop", "must be text, or a list of at most 4 texts, each of 1 to 256"),
    ({"stop": ""}, "stop", "stop='' must be text, or a list of at most 4"),
    ({"stop": [5]}, "stop", "stop=[5] must be text"),
    ({"stop": "x" * 257}, "stop", "each of 1 to 256 characters"),
    ({"logprobs": 6}, "logprobs", "logprobs=6 must be a whole number from 0 to 5"),
    ({"logprobs": True}, "logprobs", "logprobs=True must be a whole number"),
    ({"echo": 1}, "echo", "echo=1 must be true or false"),
    ({"stream": "yes"}, "stream", "stream='yes' must be true or false"),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options",
        "stream_options={'include_usage': True} needs stream=true",
    ),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options", '{"include_usage": true}'),
    (
        {"presence_penalty": 2.5},
        "presence_penalty",
        "presence_penalty=2.5 must be a number from -2",
    ),
    ({"frequency_penalty": True}, "frequency_penalty", "frequency_penalty=True must be a number"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty", "=nan must be a number from -2 to"),
    ({"logit_bias": [5]}, "logit_bias", 'logit_bias=[5] must be an object, like {"50": -100}'),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias has '5': 101; legal: the number of a"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "and a bias from -100 to 100"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias has '-1': 1; legal"),
    ({"logit_bias": {"257": 1}}, "logit_bias", "logit_bias has token 257; legal: 0 to 256"),
    ({"stop_token_ids": 5}, "stop_token_ids", "stop_token_ids=5 must be a list of at most 64"),
    ({"stop_token_ids": [True]}, "stop_token_ids", "must be a list of at most 64 tokens"),
    ({"stop_token_ids": [0] * 65}, "stop_token_ids", "must be a list of at most 64 tokens"),
    ({"stop_token_ids": [257]}, "stop_token_ids", "has token 257; legal: 0 to 256"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens=-1 must be a whole number from 0 to 16"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens=9 must be a whole number"),
    ({"suffix": "x"}, "suffix", "suffix='x' is not supported"),
]


@pytest.mark.parametrize("fields, param, words", REFUSED, ids=lambda x: str(x)[:40])
def test_what_is_refused(fields, param, words):
    with pytest.raises(Refusal) as refused:
        ask(**fields)
    told = refused.value.to_json()["error"]
    assert words in told["message"] and told["param"] == param
    assert told["type"] == "invalid_request_error" and refused.value.status == 400
    assert len(told["message"]) < 500 and "\n" not in told["message"]


@pytest.mark.parametrize(
    "body, words",
    [
        (b"", "the request body is not JSON: Expecting value"),
        (b"\xff", "the request body is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[1]", "the request body is [1]; legal: a JSON object"),
        (b"[" * 100_000, "the request body is not JSON: it is nested too deeply"),
    ],
)
def test_bodies_that_are_no_requests(body, words):
    with pytest.raises(Refusal) as refused:
        parse(body, SERVED, 0)
    assert words in str(refused.value) and refused.value.param is None


def test_another_model_is_not_there():
    with pytest.raises(Refusal, match="model 'tinny' is unknown; did you mean 'tiny'") as refused:
        ask(model="tinny")
    assert refused.value.status == 404 and refused.value.code == "model_not_found"


def test_an_error_that_quotes_half_a_character_can_be_sent():
    """A chat template's refusal may quote any text of the request."""
    told = Refusal(f"unknown role {HALF}").to_json()
    assert told["error"]["message"] == r"unknown role \ud800"
