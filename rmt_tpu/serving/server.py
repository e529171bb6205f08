"""Startup and graceful shutdown of the HTTP server, which needs starlette and uvicorn."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import h11_impl

from rmt_tpu.errors import RunError, one_line
from rmt_tpu.serving.app import RETRY_AFTER, Front
from rmt_tpu.serving.fields import Refusal
from rmt_tpu.streams import log_line

# At shutdown, slow clients have this number of seconds to receive their responses.
_SLOW_READERS = 5
# The headers of a request must arrive within this number of seconds.
HEADER_SECONDS = 30
# The server accepts at most this number of connections by default.
CONNECTIONS = 1000
# During shutdown, the server checks for unfinished texts at intervals of this number of seconds.
_POLL_SECONDS = 0.05


def serve(
    front: Front,
    opened: socket.socket,
    *,
    drain_seconds: float,
    ready: Callable[[], None],
    max_connections: int = CONNECTIONS,
) -> None:
    """Answer requests until SIGTERM or SIGINT, then finish the open requests and return.

    A second signal stops the server immediately. Signals are handled only in the main thread.

    Args:
      front: the front end that answers requests.
      opened: the socket that clients connect to.
      drain_seconds: how many seconds open texts have to finish after the signal. Texts that take
        longer get an error that says that the server is shutting down.
      ready: a function that is called when the server accepts requests and handles signals.
      max_connections: the maximum number of connections. Requests on further connections are
        answered with status 503, because the number of files that a process may open is limited.

    Raises:
      RunError: the worker has failed and could not be restarted.
    """
    server = Server(front, drain_seconds, ready, max_connections)
    front.worker.start()
    server.run(sockets=[opened])
    front.worker.stop()
    if error := front.worker.error:
        raise RunError(f"the model failed: {one_line(error)}")


class Protocol(h11_impl.H11Protocol):
    """A uvicorn HTTP protocol that also closes a connection whose headers arrive too slowly.

    Without this class, uvicorn closes only connections that are idle between two requests. The
    error for bytes that are not HTTP has OpenAI's format, like all others.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the deadline for the first headers."""
        super().connection_made(transport)
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        """Process bytes, and start or cancel the deadline for headers."""
        super().data_received(data)
        self._update_deadline()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error, and close the connection."""
        body = json.dumps(Refusal(msg).to_json()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        h11 = h11_impl.h11
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline for headers."""
        self._cancel_deadline()
        super().connection_lost(exc)

    def _update_deadline(self) -> None:
        """Start or cancel the deadline for headers.

        More bytes of the same headers do not extend the deadline.
        """
        if self.conn.their_state is not h11_impl.h11.IDLE:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """A uvicorn server that lets open texts finish before it shuts down."""

    def __init__(
        self,
        front: Front,
        drain_seconds: float,
        ready: Callable[[], None],
        max_connections: int = CONNECTIONS,
    ):
        config = uvicorn.Config(
            # uvicorn's own limit, `limit_concurrency`, would answer with plain text.
            self._answer,
            loop="asyncio",
            http=Protocol,
            interface="asgi3",  # uvicorn takes a method for an older interface
            ws="none",
            lifespan="off",
            log_config=None,
            # uvicorn logs nothing, because `Front` logs requests and failures.
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_SLOW_READERS,
        )
        super().__init__(config)
        self.front, self.drain_seconds, self.ready = front, drain_seconds, ready
        self._end_at_once, self._max_connections = False, max_connections

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with the front end, or with an error if it is on too many connections.

        This method is an ASGI application.
        """
        if len(self.server_state.connections) <= self._max_connections:
            await self.front.app(scope, receive, send)
            return
        refusal = Refusal(
            f"more than {self._max_connections} connections are open; try again later",
            status=503,
            code="too_many_connections",
            retry_after=RETRY_AFTER,
        )
        response = await self.front.refused(Request(scope), refusal)
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting requests, and then call `ready`."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.ready()

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server has to exit, for example because the worker has failed."""
        return await super().on_tick(counter) or not self.front.worker.is_alive()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin a graceful shutdown at the first signal, and shut down immediately at the second.

        A signal may interrupt the event loop at any point, so the work is scheduled in the loop.
        """
        if self.front.draining:
            self._end_at_once = True
        self.front.draining = True
        self._loop.call_soon_threadsafe(self._begin_to_drain, signal.Signals(sig).name)

    def _begin_to_drain(self, name: str) -> None:
        if not hasattr(self, "_draining"):
            self._draining = asyncio.ensure_future(self._drain(name))

    async def _drain(self, name: str) -> None:
        until = time.monotonic() + self.drain_seconds
        if self.front.texts:
            texts = self.front.texts
            log_line(f"{name}: finishing {texts} texts first; repeat the signal to stop at once")
        while self.front.texts and time.monotonic() < until and not self._end_at_once:
            await asyncio.sleep(_POLL_SECONDS)
        self.front.end_all()
        self.should_exit = True
