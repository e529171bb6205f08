"""The network address of a server.

This module does not import JAX, so that an error in the address is reported at once.
"""

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator

from rmt_tpu.errors import UsageError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address but does not accept connections yet.

    Raises:
      UsageError: the host is not an address of this machine, or the port is not available.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise _bad_host(host) from None
    opened = socket.socket(family, kind, number)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with _address_errors(host, port):
            opened.bind(address)
    except UsageError:
        opened.close()
        raise
    return opened


def listen(opened: socket.socket) -> str:
    """Start accepting connections, and return the server's URL.

    Raises:
      UsageError: another server has taken the port in the meantime.
    """
    host, port = opened.getsockname()[:2]
    with _address_errors(host, port):
        opened.listen(128)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(opened: socket.socket) -> bool:
    """Return whether the socket is reachable only from this machine."""
    return ipaddress.ip_address(opened.getsockname()[0]).is_loopback


@contextlib.contextmanager
def _address_errors(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "is in use"
        elif error.errno == errno.EACCES:
            why = "needs rights that this user does not have"
        else:
            raise _bad_host(host) from None
        raise UsageError(
            f"--port={port} {why} on {host}; legal: another port, or 0 for any free port"
        ) from None


def _bad_host(host: str) -> UsageError:
    return UsageError(
        f"--host={host} is not an address of this machine; legal: 127.0.0.1, or 0.0.0.0 for all"
    )
