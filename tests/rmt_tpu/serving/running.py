"""A server within this process, asked over a socket, and the tiny model that it runs."""

import http.client
import json
import threading

from rmt_tpu import config as cfg
from rmt_tpu.data import ByteTokenizer, ChatTemplate
from rmt_tpu.generation import Engine
from rmt_tpu.serving import address
from rmt_tpu.serving.app import Front
from rmt_tpu.serving.protocol import ServedModel
from rmt_tpu.serving.server import Server
from rmt_tpu.serving.worker import Worker
from tests import models

TEMPLATE = """\
{% for m in messages %}{{ m.role[0] }}:{{ m.content }}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""
SERVED = ServedModel(
    name="tiny",
    tokenizer=ByteTokenizer(),
    max_length=64,
    max_tokens=60,
    max_texts=5,
    template=ChatTemplate(TEMPLATE, ByteTokenizer(), starts=True),
)
CHAT = "/v1/chat/completions"
SECONDS = 60.0  # for whatever takes none
COMPLETIONS = "/v1/completions"


def make_engine() -> Engine:
    """Of two slots."""
    decoder = models.byte_decoder(positions=cfg.Rope())
    return Engine(decoder, ByteTokenizer.bos, slots=2, steps=4)


class Running:
    """A server of two slots in a thread, whose engine can be made to wait before each step."""

    def __init__(self, engine: Engine, drain_seconds: float = SECONDS, **limits):
        engine.reset()
        self.engine, self.steps = engine, threading.Semaphore(0)
        self.front = Front(Worker(engine, SERVED.tokenizer), SERVED, max_body=2000)
        self.opened = address.bind("127.0.0.1", 0)
        self.port = int(address.listen(self.opened).rpartition(":")[2])
        ready = threading.Event()
        self.server = Server(self.front, drain_seconds, ready.set, **limits)
        self.thread = threading.Thread(target=self.server.run, args=([self.opened],))
        self.front.worker.start()
        self.thread.start()
        assert ready.wait(SECONDS)

    def wait_before_steps(self, monkeypatch) -> None:
        step = self.engine.step

        def waiting():
            assert self.steps.acquire(timeout=3 * SECONDS)
            return step()

        monkeypatch.setattr(self.engine, "step", waiting)

    def request(self, body: dict | bytes | None = None, path: str = COMPLETIONS):
        """A connection and the response, as soon as it begins.

        A request without a seed gets 0: with one drawn anew, a text ends early now and then.
        """
        if isinstance(body, dict):
            body = {"seed": 0, **body}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, content)
        return connection, connection.getresponse()

    def ask(self, body: dict | bytes | None = None, path: str = COMPLETIONS) -> tuple[int, dict]:
        connection, response = self.request(body, path)
        with connection.sock or response, response:
            told = json.loads(response.read())
        connection.close()
        return response.status, told

    def choices(self, **fields) -> list[dict]:
        """Of an answer, whole or in chunks."""
        if not fields.get("stream"):
            status, told = self.ask(fields)
            assert status == 200, told
            return told["choices"]
        connection, response = self.request(fields)
        lines = [line for line in response.read().decode().split("\n\n") if line]
        connection.close()
        assert lines.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        texts = [
            {"index": index, "text": "", "logprobs": None} for index in range(fields.get("n", 1))
        ]
        for chunk in chunks:
            texts[chunk["index"]]["text"] += chunk["text"]
            texts[chunk["index"]]["finish_reason"] = chunk["finish_reason"]
        return texts

    def end(self) -> None:
        for _ in range(1000):
            self.steps.release()
        self.server.should_exit = True
        self.thread.join(SECONDS)
        self.front.worker.stop()
        self.opened.close()
