"""What clients of OpenAI's API send, and whether they take what they get.

`clients.json` has requests that the official client, litellm and langchain-openai have sent, and
took their answers. They are sent again here, and get answers of the same shape. The official client
itself is asked by night.
"""

import json
from pathlib import Path

import pytest

from tests.rmt_tpu.serving.running import SERVED, Running, make_engine

RECORDED = json.loads((Path(__file__).parent / "clients.json").read_text(encoding="utf-8"))
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def running():
    server = Running(make_engine())
    yield server
    server.end()


def shape(value, name: str | None = None):
    """A value of JSON with its names and types alone, and the first of each list."""
    if isinstance(value, dict):
        if name == "top_logprobs" and "token" not in value:
            return "logarithms by token"
        return {key: shape(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0], name)] if value else []
    if value is None or isinstance(value, bool):
        return value
    return "text" if isinstance(value, str) else "number"


def name_of(recorded: dict) -> str:
    body = recorded["body"] or {}
    fields = [name for name in body if name not in ("model", "messages", "prompt", "max_tokens")]
    return f"{recorded['client']} {recorded['path']} {' '.join(fields)}"


def test_the_recording_has_every_client():
    kinds = {(r["client"], r["path"], r["status"] < 400) for r in RECORDED["requests"]}
    for client in RECORDED["versions"]:
        assert (client, "/v1/chat/completions", True) in kinds
        assert (client, "/v1/completions", True) in kinds
        assert (client, "/v1/chat/completions", False) in kinds
        assert any(r["body"].get("stream") for r in RECORDED["requests"] if r["body"])


@pytest.mark.parametrize("recorded", RECORDED["requests"], ids=name_of)
def test_what_a_client_sends_gets_what_it_took(running, recorded):
    body = recorded["body"]
    if body is not None:  # one drawn anew would end a text early now and then
        body = json.dumps(body | {"seed": body.get("seed") or 0}).encode()
    connection, response = running.request(body, recorded["path"])
    text = response.read().decode()
    connection.close()
    assert response.status == recorded["status"]
    if response.status >= 400:
        assert json.loads(text)["error"] == recorded["error"]
        return
    if not (recorded["body"] or {}).get("stream"):
        assert shape(json.loads(text)) == recorded["reply"]
        return
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert shape(chunks[0]) == recorded["reply"]
    (last,) = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1:]
    assert last in ("length", "stop")
    if "stream_options" in recorded["body"]:
        assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.fixture
def client(running):
    import openai

    url = f"http://127.0.0.1:{running.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.slow
def test_a_conversation_of_the_official_client(client):
    """Completions, chats, chunks and errors."""
    import openai

    assert [model.id for model in client.models.list()] == [SERVED.name]
    how = {"model": "tiny", "max_tokens": 8, "seed": 2**40}
    create = client.chat.completions.create
    whole = create(messages=HELLO, **how)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (23, 8)
    prompt = "s:Be brief.\nu:Hello\na:"
    written = client.completions.create(prompt=prompt, **how)
    assert written.choices[0].text == choice.message.content
    with create(messages=HELLO, stream=True, stream_options={"include_usage": True}, **how) as told:
        chunks = list(told)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert chunks[-1].usage == whole.usage
    with client.completions.create(prompt=prompt, stream=True, **how) as told:
        assert "".join(chunk.choices[0].text for chunk in told) == choice.message.content

    again = [*HELLO, choice.message, {"role": "user", "content": "x"}]
    assert create(messages=again, model="tiny", max_tokens=2).usage.completion_tokens == 2
    scored = create(messages=HELLO, logprobs=True, top_logprobs=2, **how).choices[0].logprobs
    assert len(scored.content) == 8 and all(len(each.top_logprobs) == 2 for each in scored.content)
    biased = create(messages=HELLO, logit_bias={"120": 100}, extra_body={"min_tokens": 3}, **how)
    assert biased.choices[0].message.content == "x" * 8
    with pytest.raises(openai.BadRequestError, match="temperature=-1.0 must be at lea") as refused:
        create(messages=HELLO, temperature=-1, **how)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="model 'huge' is unknown; legal: tiny"):
        create(messages=HELLO, model="huge")
    with pytest.raises(openai.BadRequestError, match="messages have 106 tokens"):
        create(messages=[{"role": "user", "content": "a" * 100}], model="tiny")
