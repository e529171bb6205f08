"""What chats may ask for, and how they are answered."""

import json
import math
from dataclasses import replace

import pytest

from rmt_tpu.data import ByteTokenizer, ChatTemplate
from rmt_tpu.generation import Draft, NewTokens, Scores
from rmt_tpu.serving.answers import ChatAnswer
from rmt_tpu.serving.chat import parse_chat
from rmt_tpu.serving.fields import Refusal
from rmt_tpu.serving.protocol import ServedModel

SOURCE = """\
{% for m in messages %}
{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
{{ m.role }}{{ '(' + m.name + ')' if m.name }}: {{ m.content }}
{% endfor %}
{{ 'assistant:' if add_generation_prompt }}{{ '!' if loud }}"""
SERVED = ServedModel(
    name="tiny",
    tokenizer=ByteTokenizer(),
    max_length=64,
    max_tokens=50,
    max_texts=6,
    template=ChatTemplate(SOURCE, ByteTokenizer(), starts=True),
)
HI = [{"role": "user", "content": "Hi"}]


def ask(served: ServedModel = SERVED, **fields):
    return parse_chat(json.dumps({"messages": HI, **fields}).encode(), served, 7)


def test_the_prompt_is_what_the_template_writes():
    asked = ask()
    (request,) = asked.requests()
    assert request.tokens.tolist() == [ByteTokenizer.bos, *b"user: Hi\nassistant:"]
    assert asked.chat and not asked.echo and asked.prompts[0].client_tokens == 20
    assert ask(add_generation_prompt=False).prompts[0].text == "user: Hi\n"
    # Names of Python and Jinja are variables like others.
    more = {"loud": True, "self": 1, "loop": 2, "cls": 3, "args": 4}
    assert ask(chat_template_kwargs=more).prompts[0].text == "user: Hi\nassistant:!"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [
        {"role": "user", "name": "Zoë", "content": parts},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
    ]
    assert ask(messages=said).prompts[0].text == "user(Zoë): a\nb\nassistant: c\nassistant:"


def test_the_rest_is_as_for_completions():
    (request,) = ask(temperature=0.5, seed=3, stop="x", max_tokens=5).requests()
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 3)
    assert request.sampling.max_tokens == 5 and ask(stop="x").stop == ["x"]
    assert ask(max_completion_tokens=6, max_tokens=6).sampling.max_tokens == 6
    assert ask().sampling.max_tokens == 65 - 20, "as many as there is room for"
    assert ask(replace(SERVED, max_tokens=9)).sampling.max_tokens == 9
    assert ask(n=3).n == 3 and ask(stream=True).stream
    ranked = [ask(**how).requests()[0].ranked for how in ({}, {"logprobs": True})]
    assert ranked == [False, False] and ask(logprobs=True).logprobs == 0
    assert ask(logprobs=True, top_logprobs=2).requests()[0].ranked


def test_what_changes_nothing_is_taken():
    neutral = {"tools": [], "response_format": {"type": "text"}, "modalities": ["text"]}
    ask(tool_choice="auto", metadata={"a": "b"}, parallel_tool_calls=True, **neutral)
    ask(store=False, user="x", model="tiny", functions=[], top_p=1, service_tier="auto")


REFUSED = [
    ({"max_completion_tokens": math.nan}, "max_completion_tokens", "max_completion_tokens=nan mu"),
    ({"messages": None}, "messages", "messages=None must be a list with at least one message"),
    ({"messages": []}, "messages", "messages=[] must be a list with at least one message"),
    ({"messages": "Hi"}, "messages", "messages='Hi' must be a list with at least one message"),
    ({"messages": ["Hi"]}, "messages", """messages[0]='Hi' must be an object with "role\""""),
    ({"messages": [{}]}, "messages", "messages[0].role=None must be text, like user"),
    ({"messages": [*HI, {"role": "user"}]}, "messages", "messages[1].content=None must be text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content=5 must be"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "messages[0].content has part {'type': 'image_url'}; legal: {\"type\": \"text\", ",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
        "messages",
        "field of messages[0] 'tool_calls' is unknown; legal: role, content, name, reasoning_",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "unpaired surrogate"),
    (
        {"messages": [{"role": "tool", "content": "a"}]},
        "messages",
        "the chat template refuses the messages: no tools",
    ),
    (
        {"messages": [{"role": "user", "content": "a" * 60}]},
        "messages",
        "messages have 78 tokens (with the start token); legal: at most 64",
    ),
    ({"prompt": "a"}, "prompt", "field 'prompt' is unknown"),
    ({"tools": [{}]}, "tools", "tools=[{}] is not supported; legal: [], or leave it out"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice='required' must be \"none\" or"),
    ({"store": True}, "store", "store=True is not supported; legal: False"),
    ({"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
    ({"logprobs": 1}, "logprobs", "logprobs=1 must be true or false"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs=2 needs logprobs=true"),
    ({"logprobs": True, "top_logprobs": 6}, "top_logprobs", "a whole number from 0 to 5"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0 must be a whole number from 1 to 50"),
    (
        {"max_completion_tokens": 46},
        "max_completion_tokens",
        "max_completion_tokens=46 is too many after a prompt of 20 tokens",
    ),
    (
        {"max_completion_tokens": 5, "max_tokens": 6},
        "max_completion_tokens",
        "max_completion_tokens=5 and max_tokens=6 differ; legal: only one of them",
    ),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "must be true or false"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "=[] must be a JSON object"),
    (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
        "chat_template_kwargs sets messages, which is a field of the request",
    ),
    ({"temperature": -1}, "temperature", "temperature=-1.0 must be at least 0"),
]


@pytest.mark.parametrize("fields, param, words", REFUSED, ids=lambda x: str(x)[:40])
def test_what_is_refused(fields, param, words):
    with pytest.raises(Refusal) as refused:
        ask(**fields)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert (refused.value.param, refused.value.status) == (param, 400)


def test_a_model_without_a_template():
    with pytest.raises(Refusal, match="^the model has no chat template; legal: /v1/comp") as error:
        ask(replace(SERVED, template=None))
    assert (error.value.status, error.value.code) == (400, "no_chat_template")


def test_a_server_without_the_extra(monkeypatch):
    monkeypatch.setattr(ChatTemplate, "installed", staticmethod(lambda: False))
    line = r"^chats need jinja2 on the server: pip install 'rmt_tpu\[chat\]'$"
    with pytest.raises(Refusal, match=line) as error:
        ask()
    assert (error.value.status, error.value.code) == (501, "not_installed")


def test_tokens_of_a_template_that_the_model_has_not():
    with pytest.raises(Refusal, match="messages has token 115; legal: 0 to 99"):
        ask(replace(SERVED, vocab_size=100, template=ChatTemplate("s", ByteTokenizer())))


def said(text: bytes, ended: bool = False) -> NewTokens:
    """Tokens of which the n-th has -n / 8, and the likeliest of all is always z."""
    logs = [-n / 8 for n in range(len(text))]
    ranks = [{ord("z"): -0.5, ord("y"): -1.0, ord("x"): -2.0} for _ in text]
    return NewTokens(0, list(text), Scores(logs, ranks), ended, False)


def told(parts: list[NewTokens], **fields) -> tuple[dict, list[dict]]:
    """The whole answer and the chunks of the first text."""
    asked = ask(**fields)
    answer = ChatAnswer(asked, SERVED, "chatcmpl-1", 5)
    draft = Draft(0, ByteTokenizer(), asked.stop)
    chunks = [answer.add(0, draft.add(part), None) for part in parts]
    assert answer.ended
    return answer.response(), chunks


def test_the_whole_and_its_chunks():
    parts = [said("aé".encode()[:2]), said("é".encode()[1:] + b"c"), said(b"", ended=True)]
    whole, chunks = told(parts)
    message = {"role": "assistant", "content": "aéc", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 5, "model": "tiny"}
    usage = {"prompt_tokens": 20, "completion_tokens": 4, "total_tokens": 24}
    assert whole == head | {"choices": [choice], "usage": usage}
    assert chunks[0] == head | {
        "object": "chat.completion.chunk",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "a"},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:]] == [{"content": "éc"}, {}]
    assert chunks[2]["choices"][0]["finish_reason"] == "length"


def test_a_first_chunk_without_text_names_the_role():
    _, chunks = told([said(b"\xc3"), said(b"\xa9", ended=True)])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_logarithms():
    whole, chunks = told(
        [said("aé".encode()[:2]), said("é".encode()[1:], ended=True)],
        logprobs=True,
        top_logprobs=2,
    )
    content = whole["choices"][0]["logprobs"]["content"]
    assert content == [c for chunk in chunks for c in chunk["choices"][0]["logprobs"]["content"]]
    best = [
        {"token": "z", "logprob": -0.5, "bytes": [122]},
        {"token": "y", "logprob": -1.0, "bytes": [121]},
    ]
    assert content[0] == {"token": "a", "logprob": 0, "bytes": [97], "top_logprobs": best}
    assert content[1]["token"] == "bytes:\\xc3" and content[1]["bytes"] == [0xC3]
    assert len(content) == 3 and len(chunks[0]["choices"][0]["logprobs"]["content"]) == 1
    (choice,) = told([said(b"a", ended=True)], logprobs=True)[0]["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_tokens_without_text_or_number():
    part = NewTokens(0, [300], Scores([float("-inf")], [{}]), True, False)
    (choice,) = told([part], logprobs=True)[0]["choices"]
    wanted = {"token": "token:300", "logprob": -9999.0, "bytes": None, "top_logprobs": []}
    assert choice["logprobs"]["content"] == [wanted]
