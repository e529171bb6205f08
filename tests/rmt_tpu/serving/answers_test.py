"""What clients are told of what comes: whole, in chunks, with logarithms and prompts."""

import json
from dataclasses import replace

import pytest
import tokenizers

from rmt_tpu.data import ByteTokenizer
from rmt_tpu.data.bpe import BpeTokenizer
from rmt_tpu.generation import Draft, NewTokens, Scores
from rmt_tpu.serving.answers import Answer
from rmt_tpu.serving.protocol import ServedModel, parse

BOS = ByteTokenizer.bos
SERVED = ServedModel("tiny", ByteTokenizer(), max_length=64, max_tokens=50, max_texts=8)


def said(text: bytes, ended: bool = False, prompt: Scores | None = None) -> NewTokens:
    """Tokens of which the n-th has -n / 8, and the likeliest of all is always z."""
    logs = [-n / 8 for n in range(len(text))]
    ranks = [{ord("z"): -0.5, ord("y"): -1.0, ord("x"): -2.0} for _ in text]
    return NewTokens(0, list(text), Scores(logs, ranks), ended, False, prompt)


def told(parts: list[NewTokens], served: ServedModel = SERVED, **fields) -> tuple[dict, list[dict]]:
    """The whole answer and the chunks of the first text."""
    ask = parse(json.dumps(fields).encode(), served, 0)
    answer = Answer(ask, served, "cmpl-1", 5)
    draft = Draft(0, served.tokenizer, ask.stop)
    chunks = [answer.add(0, draft.add(part), part.prompt) for part in parts]
    assert answer.ended
    return answer.response(), chunks


def added(chunks: list[dict]) -> dict:
    """Chunks as one text."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    whole = {"index": 0, "text": "".join(c["text"] for c in choices), "logprobs": None}
    whole["finish_reason"] = choices[-1]["finish_reason"]
    assert all(c["finish_reason"] is None for c in choices[:-1])
    if choices[0]["logprobs"] is not None:
        names = choices[0]["logprobs"]
        whole["logprobs"] = {n: sum((c["logprobs"][n] for c in choices), []) for n in names}
    return whole


def test_the_whole_and_its_chunks():
    whole, chunks = told([said(b"a"), said(b"bc"), said(b"d", ended=True)], prompt="xy")
    choice = {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "tiny"}
    assert whole == head | {"choices": [choice], "usage": usage}
    assert added(chunks) == choice and "usage" not in chunks[0]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "bc", "d"]


def test_logarithms_of_characters_that_come_in_parts():
    """A token is told with its text: not when it comes, nor if a stop string swallows it."""
    parts = [said("aé".encode()[:2]), said("é€".encode()[1:] + b"EN"), said(b"D!!", ended=True)]
    whole, chunks = told(parts, stop="END", logprobs=2)
    (choice,) = whole["choices"]
    assert choice == added(chunks)
    assert (choice["text"], choice["finish_reason"]) == ("aé€", "stop")
    logs = choice["logprobs"]
    euro = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert logs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", *euro]
    assert logs["text_offset"] == [0, 1, 1, 2, 2, 2]
    assert logs["token_logprobs"] == [0, -1 / 8, 0, -1 / 8, -2 / 8, -3 / 8]
    assert logs["top_logprobs"][0] == {"z": -0.5, "y": -1.0, "a": 0}
    assert [len(c["choices"][0]["logprobs"]["tokens"]) for c in chunks] == [1, 5, 0]
    assert whole["usage"]["completion_tokens"] == 9  # of which a stop string took three


@pytest.mark.parametrize("end, stop", [([], "END"), ([*b"EN", BOS, *b"D"], "END"), ([300], None)])
def test_special_tokens_at_the_end_of_a_text_have_logarithms(end, stop):
    """They have no text, so that a stop string after them has none of them, but one within has."""
    tokens = [97, BOS, BOS, *end]
    logs = Scores([-1.0] * len(tokens), [{}] * len(tokens))
    parts = [NewTokens(0, tokens, logs, not stop or not end, True)]
    whole, _ = told(parts, logprobs=0, **({"stop": stop} if stop else {}))
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    told_tokens = ["a", "", "", *(["token:300"] if end == [300] else [])]
    assert choice["logprobs"]["tokens"] == told_tokens
    assert choice["logprobs"]["text_offset"] == [0, *[1] * (len(told_tokens) - 1)]


def test_tokens_that_no_text_has():
    """The model may have more of them than its tokenizer."""
    part = NewTokens(0, [97], Scores([-1.0], [{300: -0.5}]), True, False)
    whole, _ = told([part], logprobs=1)
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [{"token:300": -0.5, "a": -1.0}]


def test_of_tokens_with_the_same_text_the_likeliest_is_told():
    """Clients look for the likeliest text of all, and special tokens all have an empty one."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
    library.decoder = tokenizers.decoders.Fuse()
    library.add_special_tokens(["<s>", "</s>"])
    served = replace(SERVED, tokenizer=BpeTokenizer.from_json("x", library.to_str()))
    part = NewTokens(0, [0], Scores([-2.0], [{2: -0.5, 0: -2.0, 1: -3.0}]), True, False)
    whole, _ = told([part], served, logprobs=3)
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [{"": -0.5, "a": -2.0}]


def test_the_chosen_token_alone():
    whole, _ = told([said(b"az", ended=True)], logprobs=0)
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [{"a": 0}, {"z": -1 / 8}]


@pytest.mark.parametrize("given", ["é!", [*"é!".encode()], [BOS, *"é!".encode()]])
def test_the_prompt_is_told_first(given):
    prompt = Scores([-1.0, -2.0, float("nan")], [{97: -1.5}] * 3)
    whole, chunks = told(
        [said(b"a", prompt=prompt), said(b"b", ended=True)], prompt=given, echo=True, logprobs=1
    )
    (choice,) = whole["choices"]
    assert choice == added(chunks) and choice["text"] == "é!ab"
    logs = {name: values[-5:] for name, values in choice["logprobs"].items()}
    assert logs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "a", "b"]
    assert logs["text_offset"] == [0, 0, 1, 2, 3]
    assert logs["token_logprobs"] == [-1.0, -2.0, None, 0, 0]  # no NaN in JSON
    assert logs["top_logprobs"][1] == {"a": -1.5, "bytes:\\xa9": -2.0}
    start = {name: values[:-5] for name, values in choice["logprobs"].items()}
    if given[0] == BOS:
        wanted = {"tokens": [""], "token_logprobs": [None], "top_logprobs": [None]}
        assert start == wanted | {"text_offset": [0]}
    else:
        assert not any(start.values())


def sentence_pieces() -> BpeTokenizer:
    """Return a tokenizer like Llama's, which puts U+2581, for a space, before a text."""
    names = ["<s>", "▁", "a", "b", "▁a", "▁ab"]
    model = tokenizers.models.BPE({n: k for k, n in enumerate(names)}, [("▁", "a"), ("▁a", "b")])
    library = tokenizers.Tokenizer(model)
    normal, back = tokenizers.normalizers, tokenizers.decoders
    library.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
    library.decoder = back.Sequence([back.Replace("▁", " "), back.Fuse(), back.Strip(" ", 1, 0)])
    library.add_special_tokens(["<s>"])
    return BpeTokenizer.from_json("x", library.to_str())


@pytest.mark.parametrize(
    "text, tokens, offsets",
    [
        ("ab a", [" ab", " a"], [0, 2]),
        (" ab a", [" ", " ab", " a"], [0, 0, 3]),
    ],
)
@pytest.mark.parametrize("bos", [True, False])
def test_the_space_that_sentencepiece_puts_first_does_not_count(bos, text, tokens, offsets):
    library = sentence_pieces()
    encoded = library.encode(text).tolist()
    given = [library.bos, *encoded] if bos else text
    scores = Scores([-1.0] * len(encoded), [{}] * len(encoded))
    part = NewTokens(0, library.encode("a").tolist(), Scores([-1.0], [{}]), True, False, scores)
    served = replace(SERVED, tokenizer=library)
    whole, _ = told([part], served, prompt=given, echo=True, logprobs=0)
    (choice,) = whole["choices"]
    assert choice["text"] == f"{text} a"
    assert choice["logprobs"]["tokens"] == [*[""] * bos, *tokens, " a"]
    assert choice["logprobs"]["text_offset"] == [*[0] * bos, *offsets, len(text)]


def test_nothing_but_the_prompt():
    prompt = Scores([-1.0], [{}])
    fields = {"prompt": "p", "echo": True, "logprobs": 0, "max_tokens": 0}
    whole, chunks = told([said(b"a", ended=True, prompt=prompt)], **fields)
    (choice,) = whole["choices"]
    assert choice == added(chunks)
    assert (choice["text"], choice["finish_reason"]) == ("p", "length")
    assert choice["logprobs"]["token_logprobs"] == [-1.0]
    assert whole["usage"]["completion_tokens"] == 0


def test_an_echo_without_logarithms():
    whole, _ = told([said(b"a", ended=True)], prompt=[[112, 113]], echo=True)
    assert whole["choices"][0]["text"] == "pqa" and whole["choices"][0]["logprobs"] is None


def test_usage_of_many_texts():
    ask = parse(json.dumps({"prompt": ["a", "bc"], "n": 2}).encode(), SERVED, 0)
    answer = Answer(ask, SERVED, "cmpl-1", 5)
    for index in (3, 0, 2, 1):
        draft = Draft(0, ByteTokenizer(), ())
        assert not answer.ended
        answer.add(index, draft.add(said(b"xyz"[: 1 + index % 2], ended=True)), None)
    assert [c["text"] for c in answer.response()["choices"]] == ["x", "xy", "x", "xy"]
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert answer.ended and answer.usage() == answer.response() | {"choices": [], "usage": usage}


def test_every_chunk_has_a_place_for_usage():
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    _, chunks = told([said(b"a"), said(b"", ended=True)], **fields)
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1]
