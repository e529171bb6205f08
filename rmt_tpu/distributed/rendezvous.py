"""A check, made over TCP before JAX connects, for missing or mismatched processes.

If a process is missing or was started with a different number of processes, JAX's coordination
client aborts with a C++ stack trace. Therefore all processes first connect here, at the address of
JAX's coordination service. Process 0 listens, and every other process sends a description of
itself. Whenever the set of connected processes changes, process 0 sends the list of missing
processes to all of them. A message is one line of JSON.
"""

import contextlib
import json
import selectors
import socket
import time
from typing import Any, NamedTuple

from rmt_tpu.errors import RunError, UsageError

# All processes must connect within this number of seconds, unless a flag sets another timeout.
DEFAULT_TIMEOUT = 300.0

_LONGEST_LINE = 4096
_RETRY_SECONDS = 0.2
# The other processes wait this number of seconds longer than process 0, because process 0 may start
# after them.
_GRACE_SECONDS = 2.0


class Member(NamedTuple):
    """The place of one process in a run.

    Attributes:
      coordinator: the "host:port" of process 0, the same on all processes.
      num_processes: the number of processes in the run, the same on all processes.
      process_id: the number of this process, counting from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int

    def host_and_port(self) -> tuple[str, int]:
        """Return the host and port in `coordinator`, without the brackets of an IPv6 address."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def validate(member: Member) -> None:
    """Check that a member's fields are legal.

    Raises:
      UsageError: a field is not legal.
    """
    host, _, port = member.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--coordinator={member.coordinator} must be HOST:PORT, like 10.0.0.2:8476"
        )
    if member.num_processes < 1:
        raise UsageError(f"--num_processes={member.num_processes} must be at least 1")
    if not 0 <= member.process_id < member.num_processes:
        raise UsageError(
            f"--process_id={member.process_id} is out of range; legal with "
            f"--num_processes={member.num_processes}: 0 to {member.num_processes - 1}"
        )


class Tables(NamedTuple):
    """The tables of kernel block sizes that a process uses, which must be equal on all processes.

    Processes with different tables would compile different programs.

    Attributes:
      fingerprint: the hash of the tables.
      file: the path of the user's own table, or None.
    """

    fingerprint: str = ""
    file: str | None = None


_NO_TABLES = Tables()


def wait_for_all(
    member: Member, versions: str, timeout: int | float, tables: Tables = _NO_TABLES
) -> None:
    """Wait until all processes of the run are connected.

    Args:
      member: this process.
      versions: a text with the versions that must be the same on all processes.
      timeout: the maximum time to wait, in seconds from now.
      tables: the tables of block sizes, whose hash must be the same on all processes.

    Raises:
      RunError: some processes are missing after the timeout, or the processes are incompatible, or
        process 0 cannot listen or cannot be reached. Every process that is connected raises the
        error.
    """
    deadline = time.monotonic() + timeout
    hello = {
        "process": member.process_id,
        "of": member.num_processes,
        "versions": versions,
        "host": socket.gethostname(),
        "tables": tables,
    }
    if member.process_id == 0:
        _Host(member, hello, timeout).call(deadline)
    else:
        _join(member, hello, timeout, deadline)


def name_processes(processes: list[int]) -> str:
    """Return process numbers as text, such as "process 3" or "processes 1, 2 and 5"."""
    shown = [str(p) for p in processes[:8]]
    if len(processes) > len(shown):
        shown.append(f"{len(processes) - len(shown)} more")
    head, last = ", ".join(shown[:-1]), shown[-1]
    return f"processes {head} and {last}" if head else f"process {last}"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address refers to this host's loopback interface."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


class _Host:
    """The server in process 0, which accepts the connections of all other processes."""

    def __init__(self, member: Member, hello: dict[str, Any], timeout: int | float):
        self._member, self._hello, self._timeout = member, hello, timeout
        self._members: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
        self._buffers: dict[socket.socket, bytes] = {}

    def call(self, deadline: float) -> None:
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            listener = stack.enter_context(_listen(self._member))
            stack.callback(lambda: [connection.close() for connection in self._buffers])
            selector.register(listener, selectors.EVENT_READ)
            while missing := self._missing():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._fail(
                        f"{name_processes(missing)} of {self._member.num_processes} did not "
                        f"connect to {self._member.coordinator} within {self._timeout:g} s; start "
                        "all processes with the same --coordinator, or wait longer with "
                        "--distributed_timeout"
                    )
                for key, _ in selector.select(remaining):
                    if key.fileobj is listener:
                        connection, _ = listener.accept()
                        self._buffers[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                    elif not self._receive(key.fileobj):
                        selector.unregister(key.fileobj)
                        self._drop(key.fileobj)
            self._send({"go": True})

    def _missing(self) -> list[int]:
        return [p for p in range(1, self._member.num_processes) if p not in self._members]

    def _receive(self, connection: socket.socket) -> bool:
        """Read what has arrived on a connection.

        Returns:
          Whether the connection is open and may be from another process of the run.
        """
        try:
            piece = connection.recv(_LONGEST_LINE)
        except OSError:
            return False
        self._buffers[connection] += piece
        line, newline, _ = self._buffers[connection].partition(b"\n")
        is_member = any(connection is other for other, _ in self._members.values())
        if newline and not is_member:
            hello = _parsed(line)
            if hello is None or hello.keys() != self._hello.keys():
                return False
            self._admit(connection, hello)
        return bool(piece) and len(self._buffers[connection]) < _LONGEST_LINE

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        process, count = hello["process"], self._member.num_processes
        if hello["of"] != count:
            self._fail(
                f"process {process} on {hello['host']} was started as one of {hello['of']} "
                f"processes and process 0 as one of {count}; give all processes the same "
                "--num_processes",
                connection,
            )
        if process == 0 or process in self._members:
            other = self._members[process][1] if process else self._hello
            self._fail(
                f"two processes were started as process {process}, on {other['host']} and on "
                f"{hello['host']}; each needs its own --process_id",
                connection,
            )
        if hello["versions"] != self._hello["versions"]:
            self._fail(
                f"process {process} on {hello['host']} runs {hello['versions']} and process 0 "
                f"{self._hello['versions']}; install the same versions on all hosts",
                connection,
            )
        other_tables, own_tables = Tables(*hello["tables"]), Tables(*self._hello["tables"])
        if other_tables.fingerprint != own_tables.fingerprint:
            self._fail(
                f"process {process} on {hello['host']} has other kernel block sizes (from "
                f"{other_tables.file or 'no file'}) than process 0 (from "
                f"{own_tables.file or 'no file'}); give all processes the same RMT_TPU_TUNED and "
                "the same version of rmt_tpu",
                connection,
            )
        self._members[process] = connection, hello
        self._send({"missing": self._missing()})

    def _drop(self, connection: socket.socket) -> None:
        self._members = {p: m for p, m in self._members.items() if m[0] is not connection}
        del self._buffers[connection]
        connection.close()
        self._send({"missing": self._missing()})

    def _send(self, message: dict[str, Any], *others: socket.socket) -> None:
        line = json.dumps(message).encode() + b"\n"
        for connection in (*(other for other, _ in self._members.values()), *others):
            # Ignore a lost connection here: the next read from it reports the loss.
            with contextlib.suppress(OSError):
                connection.sendall(line)

    def _fail(self, reason: str, *others: socket.socket) -> None:
        self._send({"error": reason}, *others)
        raise RunError(reason)


def _join(member: Member, hello: dict[str, Any], timeout: int | float, deadline: float) -> None:
    """Connect a process other than process 0, and wait until all processes are connected.

    Raises:
      RunError: process 0 cannot be reached within the timeout, or reports an error.
    """
    where, reason = member.coordinator, "no connection was tried"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(member.host_and_port(), min(remaining, 5)) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                if _wait_for_go(connection, where, timeout, deadline):
                    return
            reason = "it closed the connection"
        # The host's name may be unknown until the host has started.
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(_RETRY_SECONDS)
    raise RunError(
        f"process 0 cannot be reached at {where} within {timeout:g} s: {reason}; is it running, is "
        "this its address, and can this host connect to that port?"
    )


def _wait_for_go(
    connection: socket.socket, where: str, timeout: int | float, deadline: float
) -> bool:
    """Return True when all processes are connected, and False if process 0 closed the connection.

    Raises:
      RunError: the timeout is over, process 0 reports an error, or another program answers.
    """
    missing, unread = None, b""
    deadline += _GRACE_SECONDS
    while (remaining := deadline - time.monotonic()) > 0:
        connection.settimeout(remaining)
        try:
            piece = connection.recv(_LONGEST_LINE)
        except TimeoutError:
            break
        if not piece:
            return False
        *lines, unread = (unread + piece).split(b"\n")
        if any(not line.startswith(b"{") for line in (*lines, unread or b"{")):
            raise RunError(f"the program that answers at {where} is not process 0 of a new run")
        for message in map(json.loads, lines):
            if "error" in message:
                reason = message["error"]
                raise RunError(reason)
            if "go" in message:
                return True
            missing = message["missing"]
    if missing is None:
        raise RunError(
            f"process 0 does not answer at {where} within {timeout:g} s; does --coordinator "
            "name process 0 of this run?"
        )
    raise RunError(
        f"{name_processes(missing)} did not connect to {where} within {timeout:g} s; start all "
        "processes"
    )


def _listen(member: Member) -> socket.socket:
    """Listen on all addresses, as JAX's coordinator does later; a local run uses only loopback.

    Raises:
      RunError: the port cannot be used.
    """
    host, port = member.host_and_port()
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise RunError(
            f"process 0 cannot listen on port {port} of --coordinator={member.coordinator}: "
            f"{error.strerror}; is another run using it? Give all processes another port"
        ) from None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
