"""Connections whose headers do not come, or are not HTTP."""

import asyncio
import json
import time

import uvicorn
from uvicorn.server import ServerState

from rmt_tpu.serving import server


async def answer(scope, receive, send) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body"})


async def held(*sent: bytes, pause: float = 0.0) -> tuple[bytes, float]:
    """What a server says, and the seconds until it closes the connection."""
    config = uvicorn.Config(answer, http=server.Protocol, lifespan="off", timeout_keep_alive=60)
    config.load()
    made = lambda: server.Protocol(config, ServerState(), {})
    listening = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    async with listening:
        address = listening.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address)
        begun = time.monotonic()
        for part in sent:
            if not reader.at_eof():
                writer.write(part)
                await asyncio.sleep(pause)
        told = await asyncio.wait_for(reader.read(), 30)
        writer.transport.abort()
        return told, time.monotonic() - begun


def test_headers_that_do_not_come_are_not_waited_for(monkeypatch):
    """Nothing sent, half of them, a byte now and then, and behind a request that was answered."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.5)
    whole, half = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost:"
    for sent in ((), (half,), (half, b"a")):
        assert asyncio.run(held(*sent, pause=0.1))[0] == b""
    told, _ = asyncio.run(held(whole, half, pause=0.1))
    assert told.count(b"200 OK") == 1


def test_what_is_not_http_gets_an_error_in_the_same_format():
    told, _ = asyncio.run(held(b"no http\r\n\r\n"))
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
