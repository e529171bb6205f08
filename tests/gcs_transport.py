"""HTTP for `gcs_server`: many connections, kept alive; half a request is none."""

import contextlib
import socket
import sys
import traceback
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus, server
from typing import NamedTuple


class Answer(NamedTuple):
    """What a request is answered."""

    status: int
    headers: dict[str, str]
    body: bytes


# (method, path and query, headers, body); None: the connection ends without an answer.
Answering = Callable[[str, str, Message, bytes], Answer | None]


def phrase(status: int) -> str:
    return "Resume Incomplete" if status == 308 else HTTPStatus(status).phrase


class HttpServer(server.ThreadingHTTPServer):
    """On a free port of 127.0.0.1, with a thread for each connection.

    Attributes:
      errors: tracebacks, of what `answering` raised above all.
    """

    request_queue_size = 128  # tensorstore opens many connections at once
    daemon_threads = True

    def __init__(self, answering: Answering):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.answering = answering
        self.errors: list[str] = []
        self._open: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        """Of its connections too, as when a server dies."""
        self.server_close()
        for connection in tuple(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request, client_address):
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        # Of a client that went away, or was killed, there is nothing to say.
        if not isinstance(sys.exception(), ConnectionError):
            self.errors.append(traceback.format_exc())


class _Connection(server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # its client died
            self.close_connection = True
            return
        try:
            answer = self.server.answering(self.command, self.path, self.headers, body)
        except Exception:
            self.server.errors.append(traceback.format_exc())
            answer = Answer(500, {}, b"")
        if answer is None:
            self.close_connection = True
            return
        self.send_response(answer.status, phrase(answer.status))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def log_message(self, format, *args):
        """Nothing."""
