"""The HTTP front end, which passes requests to the worker thread.

This module needs the package starlette.
"""

import asyncio
import contextlib
import json
import secrets
import time
import traceback
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rmt_tpu.errors import unknown
from rmt_tpu.serving import tokens
from rmt_tpu.serving.answers import Answer, ChatAnswer
from rmt_tpu.serving.chat import parse_chat
from rmt_tpu.serving.fields import Refusal
from rmt_tpu.serving.metrics import Metrics, Stopwatch
from rmt_tpu.serving.protocol import CompletionRequest, ServedModel, parse
from rmt_tpu.serving.worker import Job, Piece, Worker
from rmt_tpu.streams import log_line

# A refused client is asked to retry after this number of seconds.
RETRY_AFTER = 1
# The body of a request must arrive within this number of seconds.
BODY_SECONDS = 60
# A body larger than max_body is still read, up to this multiple of max_body, and then discarded. If
# the server refused the request earlier, a client that is still sending might not read the error.
_READ_ON = 8


class Front:
    """The ASGI front end that answers clients.

    Args:
      worker: the thread that generates texts.
      served: the model.
      max_body: the maximum size of a request's body in bytes.
      log: whether to log a line for each request.

    Attributes:
      app: the application for an ASGI server.
      texts: the number of open texts, that is, of texts that are queued or being generated.
      draining: whether new requests are refused because the server is shutting down.
      metrics: the server's metrics; None if prometheus_client is not installed.
    """

    def __init__(self, worker: Worker, served: ServedModel, *, max_body: int, log: bool = False):
        self.worker, self.served = worker, served
        self.texts, self.draining = 0, False
        self.metrics = Metrics(worker, lambda: self.texts) if Metrics.installed() else None
        self._max_body, self.logs, self._created = max_body, log, int(time.time())
        self._waiting: set[asyncio.Queue] = set()
        self._reading: set[asyncio.Timeout] = set()
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/healthz", self._health),
                Route("/metrics", self._metrics),
                Route("/tokenize", self._tokens, methods=["POST"]),
                Route("/detokenize", self._tokens, methods=["POST"]),
            ],
            exception_handlers={
                Refusal: self.refused,
                HTTPException: _not_found,
                Exception: _failed,
            },
        )

    def open(self, requests: list) -> asyncio.Queue:
        """Add the texts of `requests` to the number of open texts, and return a new queue for them.

        The queue receives the pieces of the texts.
        """
        self.texts += len(requests)
        self._waiting.add(pieces := asyncio.Queue())
        return pieces

    def close(self, pieces: asyncio.Queue, texts: int) -> None:
        """Remove a client's queue, and subtract `texts` from the number of open texts."""
        self.texts -= texts
        self._waiting.discard(pieces)

    def end_all(self) -> None:
        """End all open texts, and send their clients an error: the server is shutting down."""
        for pieces in self._waiting:
            pieces.put_nowait(Refusal("the server is shutting down", status=503, code="ending"))
        for limit in self._reading:
            # A deadline in the past stops the reading immediately.
            limit.reschedule(0)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.description()]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self.served.name:
            message = unknown("model", name, [self.served.name])
            raise Refusal(message, "model", status=404, code="model_not_found")
        return JSONResponse(self.description())

    def description(self) -> dict:
        """Return the served model as an object of OpenAI's list of models."""
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rmt_tpu",
            "max_model_len": self.served.max_length,
        }

    async def _health(self, request: Request) -> Response:
        status = "draining" if self.draining else "ok" if self.worker.is_alive() else "failed"
        state = {"status": status, "model": self.served.name, "texts": self.texts}
        return JSONResponse(state, 200 if status == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        if self.metrics is None:
            raise Refusal(
                "metrics need prometheus_client on the server: pip install 'rmt_tpu[metrics]'",
                status=501,
                code="not_installed",
            )
        content, media_type = self.metrics.page()
        return Response(content, headers={"content-type": media_type})

    async def _completions(self, request: Request) -> Response:
        try:
            body = await self._body(request)
        except ClientDisconnect:
            # The client has disconnected, so it does not read this response.
            return Response(status_code=400)
        self._check_open()
        # Parse in another thread: tokenizing a long prompt would block the event loop.
        read = parse_chat if request.url.path.startswith("/v1/chat/") else parse
        parsed = await asyncio.to_thread(read, body, self.served, secrets.randbelow(2**32))
        self._check_open(len(parsed.prompts) * parsed.n)
        reply = _Reply(self, parsed, request.receive)
        if parsed.stream:
            return _Events(reply)
        with contextlib.closing(reply):
            async for _ in reply.chunks():
                pass
        return JSONResponse(reply.answer.response())

    async def _tokens(self, request: Request) -> Response:
        """Answer a request to /tokenize or /detokenize."""
        convert = tokens.tokenize if request.url.path == "/tokenize" else tokens.detokenize
        try:
            body = await self._body(request)
        except ClientDisconnect:
            # The client has disconnected, so it does not read this response.
            return Response(status_code=400)
        return JSONResponse(await asyncio.to_thread(convert, body, self.served))

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS) as limit:
                self._reading.add(limit)
                async for part in request.stream():
                    size += len(part)
                    if size <= self._max_body:
                        parts.append(part)
                    elif size > _READ_ON * self._max_body:
                        break
        except TimeoutError:
            self._check_open()
            raise Refusal(
                f"the request body did not arrive within {BODY_SECONDS} s",
                status=408,
                code="timeout",
            ) from None
        finally:
            self._reading.discard(limit)
        if size > self._max_body:
            raise Refusal(
                f"the request body is too large; legal: at most {self._max_body} bytes",
                status=413,
                code="body_too_large",
            )
        return b"".join(parts)

    def _check_open(self, texts: int = 0) -> None:
        """Raise Refusal if the server is shutting down, or has no room for `texts` more texts."""
        if self.draining:
            raise Refusal(
                "the server is shutting down and accepts no new requests",
                status=503,
                code="ending",
                retry_after=RETRY_AFTER,
            )
        if self.texts + texts > self.served.max_texts:
            raise Refusal(
                f"{self.texts} of at most {self.served.max_texts} texts are in progress; try again "
                "later",
                status=429,
                code="queue_full",
                retry_after=RETRY_AFTER,
            )

    async def refused(self, request: Request, refusal: Refusal) -> Response:
        """Return the response to a refused request; the refusal is logged and counted."""
        self.log(f"{request.method} {request.url.path} {refusal.status}: {refusal}")
        if self.metrics is not None:
            self.metrics.refused.labels(str(refusal.status)).inc()
        headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
        return JSONResponse(refusal.to_json(), refusal.status, headers)

    def log(self, line: str) -> None:
        """Log a line, if logging is enabled."""
        if self.logs:
            log_line(line)


class _Reply:
    """The texts that one client is waiting for.

    They count as open, and may occupy slots of the engine, until `close` is called.

    Args:
      front: the front end.
      parsed: the request.
      receive: the ASGI function that reports when the client has disconnected.
    """

    def __init__(self, front: Front, parsed: CompletionRequest, receive: Receive):
        kind, prefix = (ChatAnswer, "chatcmpl") if parsed.chat else (Answer, "cmpl")
        name, self._began = f"{prefix}-{secrets.token_hex(12)}", time.monotonic()
        self.include_usage = parsed.include_usage
        self.answer = kind(parsed, front.served, name, int(time.time()))
        self._front, self._outcome = front, "the client has disconnected"
        self._pieces = front.open(requests := parsed.requests())
        prompts = sum(len(prompt.tokens) for prompt in parsed.prompts)
        self._stopwatch = front.metrics and Stopwatch(front.metrics, len(requests), prompts)
        loop = asyncio.get_running_loop()

        def deliver(piece: Piece | Exception) -> None:
            if self._stopwatch is not None and isinstance(piece, Piece):
                self._stopwatch.add(piece)
            # The call raises RuntimeError if the event loop is already closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

        self._job = Job(requests, parsed.stop, deliver)
        self._disconnect = asyncio.create_task(self._watch_disconnect(receive))
        front.worker.submit(self._job)

    async def chunks(self) -> AsyncIterator[dict]:
        """Yield the chunks of the response as they are generated.

        Raises:
          Refusal: the model failed, the server is shutting down, or the client has disconnected.
        """
        while not self.answer.ended:
            piece = await self._pieces.get()
            if isinstance(piece, Exception):
                self._outcome = str(piece)
                if isinstance(piece, Refusal):
                    raise piece
                raise Refusal(f"the model failed: {piece}", status=500, code="failed")
            yield self.answer.add(piece.index, piece.completion, piece.prompt)
        self._outcome = "ok"

    def close(self) -> None:
        self._disconnect.cancel()
        self._front.worker.cancel(self._job)
        self._front.close(self._pieces, len(self._job.requests))
        if self._stopwatch is not None:
            self._stopwatch.close()
        usage, seconds = self.answer.usage()["usage"], time.monotonic() - self._began
        tokens = f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
        texts = f"{len(self._job.requests)} texts"
        self._front.log(f"{texts}, {tokens}, {seconds:.2f} s: {self._outcome}")

    async def _watch_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._pieces.put_nowait(Refusal("the client has disconnected", status=400, code="gone"))


class _Events:
    """An ASGI response that sends chunks as server-sent events while they are generated."""

    def __init__(self, reply: _Reply):
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        # An OSError means that the client has disconnected.
        with contextlib.closing(self._reply), contextlib.suppress(OSError):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async for chunk in self._reply.chunks():
                    await _event(send, json.dumps(chunk))
                if self._reply.include_usage:
                    await _event(send, json.dumps(self._reply.answer.usage()))
            except Refusal as refusal:
                await _event(send, json.dumps(refusal.to_json()))
            await _event(send, "[DONE]")
            await send({"type": "http.response.body", "body": b""})


async def _event(send: Send, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _not_found(request: Request, error: HTTPException) -> Response:
    """Answer a request whose path or method does not exist."""
    path = f"{request.method} {request.url.path}"
    legal = ", ".join(
        f"{method} {route.path.replace('{name:path}', 'NAME')}"
        for route in request.app.routes
        for method in sorted(route.methods - {"HEAD"})
    )
    refusal = Refusal(f"{path[:200]} does not exist; legal: {legal}", status=error.status_code)
    return JSONResponse(refusal.to_json(), error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer a request for which the server raised an unexpected error."""
    traceback.print_exception(error)
    refusal = Refusal("the server failed; its log says why", status=500, code="failed")
    return JSONResponse(refusal.to_json(), 500)
