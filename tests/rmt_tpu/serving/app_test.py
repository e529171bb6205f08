"""A server within this process, asked over a socket."""

import concurrent.futures
import json
import signal
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rmt_tpu.data import ByteTokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.serving import address, app
from tests.rmt_tpu.serving.running import CHAT, COMPLETIONS, SECONDS, Running, make_engine


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture
def running(engine):
    server = Running(engine)
    yield server
    server.end()


def until(holds) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def requests() -> list[dict]:
    """Of every kind, more than there are slots."""
    return [
        {"prompt": "ab", "max_tokens": 9, "seed": 1},
        {"prompt": [97, 98], "max_tokens": 9, "seed": 1, "stream": True},
        {"prompt": "", "max_tokens": 13, "n": 2, "seed": 3, "stream": True, "top_k": 20},
        {"prompt": "xyz", "max_tokens": 6, "temperature": 0, "echo": True},
    ]


def test_clients_at_the_same_time_are_told_what_each_is_told_alone(running):
    alone = [running.choices(**fields) for fields in requests()]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda fields: running.choices(**fields), requests()))
    assert together == alone
    assert alone[0] == alone[1], "the same tokens, in chunks"
    assert alone[2][0]["text"] != alone[2][1]["text"]
    (one,) = running.choices(prompt="", max_tokens=13, seed=4, top_k=20)
    assert one["text"] == alone[2][1]["text"], "the second of n has the seed that follows"
    assert alone[3][0]["text"].startswith("xyz")


def test_a_request_without_a_seed_has_its_own(running):
    body = b'{"prompt": "ab", "max_tokens": 24}'  # which a request keeps as it is
    texts = {running.ask(body)[1]["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1


def test_a_stop_string_frees_the_row(running, monkeypatch, capfd):
    (whole,) = running.choices(prompt="ab", max_tokens=24, seed=1)
    stop = whole["text"][4:7]
    running.wait_before_steps(monkeypatch)
    running.steps.release(5)  # the prompt and 16 tokens
    (cut,) = running.choices(prompt="ab", max_tokens=24, seed=1, stop=[stop], stream=True)
    assert cut["text"] == whole["text"].partition(stop)[0] and cut["finish_reason"] == "stop"
    until(lambda: not running.engine.open_requests)
    assert capfd.readouterr().err == "", "nothing came of it any more"


def test_changed_logits_and_tokens_that_end_a_text(running):
    (whole,) = running.choices(prompt="ab", max_tokens=9, seed=1)
    (biased,) = running.choices(prompt="ab", max_tokens=9, logit_bias={"120": 100})
    assert biased["text"] == "x" * 9
    stop = [ord(next(c for c in whole["text"] if c.isascii()))]
    (cut,) = running.choices(prompt="ab", max_tokens=9, seed=1, stop_token_ids=stop, stream=True)
    assert cut["text"] == whole["text"].partition(chr(stop[0]))[0]
    assert cut["finish_reason"] == "stop"
    how = {"stop": "x", "logit_bias": {"120": 100}, "max_tokens": 9}
    assert running.choices(prompt="ab", min_tokens=3, **how)[0]["text"] == "xxx"
    assert running.choices(prompt="ab", max_tokens=9, seed=1) == [whole]


def test_a_client_that_goes_frees_its_rows(running, monkeypatch):
    running.wait_before_steps(monkeypatch)
    connection, response = running.request({"max_tokens": 60, "n": 3, "stream": True})
    running.steps.release(2)  # two of the prompts
    assert response.readline().startswith(b"data: ")
    assert running.front.texts == 3
    response.close()
    connection.close()
    until(lambda: running.front.texts == 0)
    running.steps.release()  # what was under way
    until(lambda: not running.engine.open_requests)


def test_more_than_may_wait_are_refused(running, monkeypatch):
    running.wait_before_steps(monkeypatch)
    connection, response = running.request({"n": 4, "max_tokens": 1, "stream": True})
    other, refused = running.request({"n": 2, "max_tokens": 1})
    told = json.loads(refused.read())["error"]
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert told["type"] == "rate_limit_error" and told["code"] == "queue_full"
    assert told["message"] == "4 of at most 5 texts are in progress; try again later"
    running.steps.release(100)
    assert response.read().endswith(b"data: [DONE]\n\n")
    assert running.ask({"n": 5, "max_tokens": 1})[0] == 200
    connection.close()
    other.close()


def test_what_is_refused(running):
    message = lambda *how: (lambda told: (told[0], told[1]["error"]["message"]))(running.ask(*how))
    assert message({"n": 9}) == (400, "n=9 must be a whole number from 1 to 5")
    assert message({"model": "x"}) == (404, "model 'x' is unknown; legal: tiny")
    status, words = message(b"x" * 3000)
    assert status == 413 and words == "the request body is too large; legal: at most 2000 bytes"
    assert message({}, "/v1/embeddings")[0] == 404
    status, words = message(None, COMPLETIONS)
    assert status == 405
    assert words == (
        "GET /v1/completions does not exist; legal: POST /v1/completions, "
        "POST /v1/chat/completions, GET /v1/models, GET /v1/models/NAME, GET /health, "
        "GET /healthz, GET /metrics, POST /tokenize, POST /detokenize"
    )
    assert message(None, "/v1/models/x")[0] == 404


def test_what_there_is(running):
    status, models_told = running.ask(path="/v1/models")
    (model,) = models_told["data"]
    assert status == 200 and (model["id"], model["max_model_len"]) == ("tiny", 64)
    assert running.ask(path="/v1/models/tiny") == (200, model)
    told = {"status": "ok", "model": "tiny", "texts": 0}
    assert running.ask(path="/healthz") == running.ask(path="/health") == (200, told)


def test_tokens_of_texts_and_back(running):
    status, told = running.ask('{"model": "tiny", "prompt": "hé"}'.encode(), "/tokenize")
    tokens = [ByteTokenizer.bos, *"hé".encode()]
    assert (status, told) == (200, {"count": 4, "max_model_len": 64, "tokens": tokens})
    bare = running.ask(b'{"prompt": "h", "add_special_tokens": false}', "/tokenize")
    assert bare[1]["tokens"] == [ord("h")]
    body = json.dumps({"tokens": tokens}).encode()
    assert running.ask(body, "/detokenize") == (200, {"prompt": "hé"})
    assert running.ask(b'{"tokens": []}', "/detokenize") == (200, {"prompt": ""})


def test_what_is_counted(running):
    """Of texts that are answered, of those that are not, and without the extra as well."""

    def counted() -> dict[str, str]:
        connection, response = running.request(path="/metrics")
        lines = response.read().decode().splitlines()
        connection.close()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    running.choices(prompt="ab", max_tokens=9, n=2, seed=1)
    running.choices(prompt="ab", max_tokens=1, stream=True)
    running.ask({"n": 9})
    until(lambda: running.front.texts == 0)
    names = counted()
    assert names["rmt_slots"] == "2.0" and names["rmt_queued_texts"] == "0.0"
    assert names["rmt_new_tokens_total"] == "19.0" and names["rmt_prompt_tokens_total"] == "6.0"
    assert names["rmt_first_token_seconds_count"] == "3.0"
    assert names["rmt_token_seconds_count"] == "16.0"
    assert names['rmt_texts_total{finish="length"}'] == "3.0"
    assert names['rmt_refused_requests_total{status="400"}'] == "1.0"
    assert float(names["rmt_tokens_per_second"]) > 0
    running.front.metrics = None
    assert running.choices(prompt="ab", max_tokens=1) and running.ask({"n": 9})[0] == 400
    assert running.ask(path="/metrics")[0] == 501


def test_a_chat_is_the_completion_of_what_its_template_writes(running):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    how = {"max_tokens": 9, "seed": 1, "n": 2}
    wanted = running.choices(prompt="s:x\nu:hi\na:", **how)
    status, told = running.ask({"messages": messages, **how}, CHAT)
    assert status == 200 and told["object"] == "chat.completion" and told["id"][:9] == "chatcmpl-"
    assert told["usage"] == {"prompt_tokens": 12, "completion_tokens": 18, "total_tokens": 30}
    for choice, one in zip(told["choices"], wanted, strict=True):
        assert choice["message"] == {"role": "assistant", "content": one["text"], "refusal": None}
        assert choice["finish_reason"] == one["finish_reason"] == "length"
    tokens = running.ask({"seed": None, "messages": messages}, "/tokenize")
    assert tokens[0] == 400  # no seed belongs there
    body = json.dumps({"messages": messages}).encode()
    assert running.ask(body, "/tokenize")[1]["tokens"] == [256, *b"s:x\nu:hi\na:"]

    connection, response = running.request({"messages": messages, "stream": True, **how}, CHAT)
    lines = response.read().decode().split("\n\n")
    connection.close()
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    for index, one in enumerate(wanted):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(delta.get("content", "") for delta in deltas) == one["text"]
    assert sum(choice["finish_reason"] == "length" for choice in choices) == 2


@pytest.mark.parametrize(
    "path, body, words",
    [
        ("/tokenize", "{}", "prompt=None must be text"),
        ("/tokenize", '{"prompt": [1]}', "prompt=[1] must be text"),
        (
            "/tokenize",
            r'{"prompt": "\ud800"}',
            "prompt is not legal: the text has an unpaired",
        ),
        ("/tokenize", '{"prompt": "a", "add_special_tokens": 1}', "must be true or false"),
        ("/tokenize", '{"messages": [], "prompt": ""}', "messages and prompt are both set; legal"),
        ("/tokenize", '{"messages": []}', "messages=[] must be a list with at least one message"),
        ("/tokenize", '{"add_generation_prompt": true}', "add_generation_prompt needs messages"),
        ("/tokenize", '{"tokens": [1]}', "field 'tokens' is unknown"),
        ("/tokenize", '{"model": "x", "prompt": "a"}', "model 'x' is unknown; legal: tiny"),
        ("/detokenize", "{}", "tokens=None must be a list of tokens"),
        ("/detokenize", '{"tokens": [true]}', "tokens=[True] must be a list of tokens"),
        ("/detokenize", '{"tokens": [257]}', "tokens has token 257; legal: 0 to 256"),
        ("/detokenize", '{"tokens": [-1]}', "tokens has token -1; legal: 0 to 256"),
    ],
)
def test_tokens_that_are_refused(running, path, body, words):
    status, told = running.ask(body.encode(), path)
    assert status == (404 if "model" in words else 400) and words in told["error"]["message"]


def test_connections_are_limited(engine):
    """The last one that may be is answered, and one more is not, until one goes."""
    running = Running(engine, max_connections=2)
    try:
        first, _ = running.request(path="/health")
        second, response = running.request(path="/health")
        assert response.status == 200
        third, response = running.request(path="/health")
        assert response.status == 503 and response.headers["connection"] == "close"
        told = json.loads(response.read())["error"]
        assert (told["type"], told["code"]) == ("server_error", "too_many_connections")
        assert told["message"] == "more than 2 connections are open; try again later"
        third.close()
        second.close()
        until(lambda: len(running.server.server_state.connections) == 1)
        assert running.ask(path="/health")[0] == 200
        first.close()
    finally:
        running.end()


def test_a_model_that_fails_begins_anew(running, monkeypatch, capfd):
    def fails():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(running.engine, "step", fails)
    status, told = running.ask({"max_tokens": 2})
    assert status == 500 and told["error"]["message"] == "the model failed: out of memory"
    monkeypatch.undo()
    assert running.ask({"max_tokens": 2})[0] == 200
    assert capfd.readouterr().err == "error: out of memory: all requests in progress failed\n"


def test_a_request_that_the_engine_refuses_ends_nothing(running, monkeypatch):
    submit, refused = running.engine.submit, [False, True]

    def submit_one(request):
        if refused and refused.pop(0):
            raise UsageError("the prompt has token 256; legal: 0 to 249")
        return submit(request)

    monkeypatch.setattr(running.engine, "submit", submit_one)
    status, told = running.ask({"n": 2, "max_tokens": 2})
    assert status == 500 and "the prompt has token 256" in told["error"]["message"]
    assert running.ask({"max_tokens": 2})[0] == 200
    assert not running.engine.open_requests


def test_a_token_that_no_text_has_is_told_as_nothing(running, monkeypatch):
    waiting = running.engine.step
    changed = lambda said: said._replace(tokens=[999 for _ in said.tokens])
    monkeypatch.setattr(running.engine, "step", lambda: [changed(said) for said in waiting()])
    status, told = running.ask({"prompt": "c", "max_tokens": 9, "logprobs": 0})
    (choice,) = told["choices"]
    assert status == 200 and choice["text"] == "" and not running.engine.open_requests
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["token:999"] * 9


def test_a_model_that_cannot_begin_anew_ends_the_server(running, monkeypatch, capfd):
    def fails():
        raise RuntimeError("no device")

    monkeypatch.setattr(running.engine, "step", fails)
    monkeypatch.setattr(running.engine, "reset", fails)
    status, told = running.ask({"max_tokens": 2})
    assert status == 500 and told["error"]["message"] == "the model failed: RuntimeError: no device"
    running.thread.join(SECONDS)
    assert not running.thread.is_alive() and str(running.front.worker.error) == "no device"
    assert "no device" in capfd.readouterr().err


def test_prompts_are_scored_as_a_harness_asks_for(running):
    """Of tokens without a start token, many at a time, with one more that is not looked at."""
    prompts = [[*b"abcd"], [*b"wxyz"]]
    logits = jax.jit(nnx.merge(running.engine.model.graphdef, running.engine.params))
    how = {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 1}
    for choice, prompt in zip(running.choices(prompt=prompts, **how), prompts, strict=True):
        tokens = jnp.array([[ByteTokenizer.bos, *prompt]])
        logs = np.asarray(jax.nn.log_softmax(logits(tokens)[0]))
        wanted = logs[np.arange(4), prompt]
        told = choice["logprobs"]
        np.testing.assert_allclose(told["token_logprobs"][:-1], wanted, atol=1e-4)
        assert told["tokens"][:-1] == [chr(token) for token in prompt]
        best = [max(top.values()) for top in told["top_logprobs"]]
        np.testing.assert_allclose(best, logs.max(axis=-1), atol=1e-4)


def test_a_line_of_each_request(running, capfd):
    running.front.logs = True
    running.choices(prompt="ab", max_tokens=9, seed=1)
    running.ask({"n": 9})
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("1 texts, 3 + 9 tokens, ") and first.endswith(" s: ok")
    assert second == "POST /v1/completions 400: n=9 must be a whole number from 1 to 5"


def test_a_signal_lets_what_is_open_finish(running, monkeypatch):
    running.wait_before_steps(monkeypatch)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        open_one = pool.submit(running.ask, {"max_tokens": 9, "seed": 1})
        until(lambda: running.front.texts)
        running.server.handle_exit(signal.SIGTERM, None)
        status, told = running.ask({"max_tokens": 9})
        assert status == 503 and told["error"]["code"] == "ending"
        assert running.ask(path="/healthz") == (
            503,
            {"status": "draining", "model": "tiny", "texts": 1},
        )
        running.steps.release(100)
        status, told = open_one.result(SECONDS)
    assert status == 200 and told["usage"]["completion_tokens"] == 9
    running.thread.join(SECONDS)
    assert not running.thread.is_alive() and not running.server._captured_signals


def test_what_takes_too_long_is_told_that_the_server_ends(running, monkeypatch):
    running.wait_before_steps(monkeypatch)
    connection, response = running.request({"max_tokens": 9, "stream": True})
    until(lambda: running.front.texts)
    for _ in range(2):  # the second does not wait
        running.server.handle_exit(signal.SIGINT, None)
    (line, done, _) = response.read().decode().split("\n\n")
    assert (
        json.loads(line.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
    )
    assert done == "data: [DONE]"
    connection.close()
    running.thread.join(SECONDS)
    assert not running.thread.is_alive()


def test_half_a_request_keeps_no_server(running, capfd):
    with socket.create_connection(("127.0.0.1", running.port), SECONDS) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        until(lambda: running.front._reading)
        running.server.handle_exit(signal.SIGTERM, None)
        assert half.recv(2000).startswith(b"HTTP/1.1 503 ")
        running.thread.join(SECONDS)
    assert not running.thread.is_alive() and capfd.readouterr().err == ""


def test_a_request_that_does_not_come_in_time(running, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.01)
    with socket.create_connection(("127.0.0.1", running.port), SECONDS) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        assert half.recv(2000).startswith(b"HTTP/1.1 408 ")


def test_what_should_not_be_is_told_where(running, monkeypatch, capfd):
    monkeypatch.setattr(running.front, "description", None)
    status, told = running.ask(path="/v1/models")
    assert status == 500 and told["error"]["type"] == "server_error"
    assert "TypeError: 'NoneType' object is not callable" in capfd.readouterr().err


def test_addresses(running):
    with pytest.raises(UsageError, match=f"^--port={running.port} is in use on 127.0.0.1; legal:"):
        address.bind("127.0.0.1", running.port)
    with pytest.raises(
        UsageError, match="^--host=192.0.2.1 is not an address of this machine; legal"
    ):
        address.bind("192.0.2.1", 0)
    with address.bind("0.0.0.0", 0) as everywhere, address.bind("localhost", 0) as here:
        assert address.is_loopback(here) and not address.is_loopback(everywhere)
