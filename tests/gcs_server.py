"""An object server on loopback that answers as Google Cloud Storage documents.

    with gcs_server.running("bucket") as server:
        os.environ |= server.environment()

It is the package `gcp-storage-emulator` (pinned exactly, for its handlers are no public interface)
with what that lacks. The package's: uploads (media, multipart, resumable), metadata, the buckets.
From here: the transport, which requests exist, conditions on generations, downloads (ranges,
generations), lists (offsets, pages), the limits of compose, errors, and faults on demand.
Everything is kept in memory. There are no permissions: a test says what is forbidden.
"""

import base64
import bisect
import contextlib
import io
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from email.message import Message
from typing import Any
from urllib.parse import unquote

from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.server import HANDLERS, Request, Response

from tests.gcs_objects import Storage
from tests.gcs_transport import Answer, HttpServer

_APIS = ("^/storage/v1", "^/upload/storage/v1", "^/download/storage/v1")
# The package has more: aliases for other clients, and requests that wipe everything.
_ROUTES = tuple(
    (re.compile(pattern), methods)
    for pattern, methods in HANDLERS
    if pattern.replace("\\", "").startswith(_APIS)
)

_LARGEST_PAGE = 1000  # entries of a list
_MOST_SOURCES = 32  # of one compose

for _name in ("gcp_storage_emulator", "api.object", "api.bucket"):
    _logger = logging.getLogger(_name)
    _logger.addHandler(logging.NullHandler())
    _logger.propagate = False


# What a fault may be beside (status, message).
LOST_REQUEST = "lost request"  # the connection ends before anything is done
LOST_ANSWER = "lost answer"  # the connection ends after all is done

Outcome = tuple[int, str] | str | None
Fault = Callable[[str, str], Outcome]


def fault(outcome: Outcome, *, method: str = "", url: str = "", times: int | None = None) -> Fault:
    """A fault of the first `times` requests (None: of all) that match.

    Args:
      outcome: (status, message), `LOST_REQUEST` or `LOST_ANSWER`.
      method: of the requests; empty matches all.
      url: a regular expression that is searched for in path and query, both unquoted.
    """
    left = times
    lock = threading.Lock()

    def happens(request_method: str, request_url: str) -> Outcome:
        nonlocal left
        if method not in ("", request_method) or not re.search(url, request_url):
            return None
        with lock:
            if left == 0:
                return None
            if left is not None:
                left -= 1
            return outcome

    return happens


class Server:
    """A running server; see `running`.

    Attributes:
      url: where it is, `http://127.0.0.1:PORT`.
      requests: (method, url) of every request so far. A url is path and query, unquoted; that of
        an upload always has `name=`. Those within a batch are listed one by one.
      faults: functions of (method, url), asked in order for each request until one returns
        something other than None; see `fault` and `delay`. They may also just wait.
    """

    def __init__(self):
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self._storage = Storage()
        self._finished: dict[str, dict] = {}  # resumable uploads, to what they became
        self._lock = threading.RLock()
        self._http = HttpServer(self.answer)
        self.url = self._http.url

    @property
    def errors(self) -> list[str]:
        """Tracebacks of errors of the server's own; `running` raises them at its end."""
        return self._http.errors

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment for `gs://` to mean this server."""
        return {"STORAGE_EMULATOR_HOST": self.url}

    def create_bucket(self, name: str) -> None:
        with self._lock:
            if not buckets.create_bucket(name, self._storage):
                raise ValueError(f"bucket {name!r} exists")

    def new_bucket(self) -> str:
        """The name of a bucket that is new, for a test of which the server knows nothing yet."""
        self.faults.clear()
        self.requests.clear()
        name = f"bucket-{time.time_ns()}"
        self.create_bucket(name)
        return name

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """The objects of a bucket whose names begin with `prefix`, sorted."""
        with self._lock:
            return [n for n in self._storage.names[bucket] if n.startswith(prefix)]

    def read(self, bucket: str, name: str) -> bytes:
        with self._lock:
            return self._storage.get_file(bucket, name)

    def replace(self, bucket: str, name: str, data: bytes) -> None:
        """What a test damages: the object is another generation, with checksums of its own."""
        kind = "application/octet-stream"
        with self._lock:
            made = objects._make_object_resource(self.url, bucket, name, kind, len(data))
            self._storage.create_file(bucket, name, data, objects._checksums(data, made))

    def remove(self, bucket: str, name: str) -> None:
        with self._lock:
            self._storage.delete_file(bucket, name)

    def start(self) -> None:
        # `stop` takes as long as one look for new connections.
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Closes its connections too, as a server that dies does."""
        self._http.shutdown()
        self._http.close()

    def answer(self, method: str, path: str, headers: Message, body: bytes) -> Answer | None:
        """The answer to one request; None: the connection ends without one."""
        request = Request(_Received(path, headers, body, self._http), method)
        try:
            if request.query.get("uploadType") == ["media"]:
                request._data = body  # whatever its type says
            data = request.data
        except (ValueError, LookupError, TypeError, AttributeError):
            return _error(400, "Parse Error")
        url = unquote(path)
        if "/upload/" in url and (name := _named(data)):
            url += f"&name={name}"
        self.requests.append((method, url))

        outcome = next((o for f in tuple(self.faults) if (o := f(method, url)) is not None), None)
        if outcome == LOST_REQUEST:
            return None
        if isinstance(outcome, tuple):
            return _error(*outcome)
        with self._lock:
            answer = self._route(request)
        return None if outcome == LOST_ANSWER else answer

    def _route(self, request: Request) -> Answer:
        found = ((p.fullmatch(request.path), methods) for p, methods in _ROUTES)
        match, methods = next(((m, methods) for m, methods in found if m), (None, {}))
        if match is None:
            return _error(404, "Not Found")
        request.set_match(match)
        handler = methods.get(request.method)
        if handler is None:
            return _error(405, "Method Not Allowed")

        bucket, name = request.params.get("bucket_name"), request.params.get("object_id")
        if bucket is not None and bucket not in self._storage.buckets:
            return _error(404, "The specified bucket does not exist.")
        if handler in (objects.insert, objects.upload_partial):
            return self._upload(request, handler, bucket)
        if handler is objects.ls:
            return self._list(request, bucket)
        if name is None:  # of a bucket
            return self._handled(request, handler)

        found = self._storage.resource(bucket, name)
        if handler is objects.compose:
            return _refusal(request, found) or self._compose(request, bucket, name)
        wanted = request.query.get("generation", [None])[0]
        if found is None or wanted not in (None, found["generation"]):
            return _error(404, f"No such object: {bucket}/{name}")
        if refusal := _refusal(request, found):
            return refusal
        media = request.query.get("alt") == ["media"] or handler is objects.download
        if media and request.method == "GET":
            data = self._storage.get_file(bucket, name)
            return _download(found, data, request.get_header("Range"))
        return self._handled(request, handler)

    def _handled(self, request: Request, handler: Callable) -> Answer:
        """What the package answers, with the JSON that it leaves out of errors."""
        response = Response(None)
        handler(request, response, self._storage)
        content = response._content
        body = content.encode() if isinstance(content, str) else content
        if response.status >= 400 and not body:
            where = "/".join(v for k, v in request.params.items() if "dest" not in k)
            return _error(response.status.value, f"{response.status.phrase}: {where}")
        if request.method == "DELETE" and response.status == 200:
            return Answer(204, {}, b"")
        return Answer(response.status.value, dict(response._headers), body)

    def _upload(self, request: Request, handler: Callable, bucket: str) -> Answer:
        upload = request.query.get("upload_id", [None])[0]
        if upload in self._finished:
            # Asked again because an answer was lost.
            return _json(self._finished[upload])
        if upload is not None and upload not in self._storage.resumable:
            return _error(404, "No such upload")
        name = request.query.get("name", [None])[0] or _named(request.data)
        if upload is not None:
            name = self._storage.resumable[upload]["name"]
        if not name:
            return _error(400, "Required")
        if refusal := _refusal(request, self._storage.resource(bucket, name)):
            return refusal
        answer = self._handled(request, handler)
        if upload is not None and answer.status == 200:
            self._finished[upload] = json.loads(answer.body)
        return answer

    def _compose(self, request: Request, bucket: str, name: str) -> Answer:
        sources = request.data["sourceObjects"]
        if not 1 <= len(sources) <= _MOST_SOURCES:
            return _error(400, f"The number of source components must be 1 to {_MOST_SOURCES}.")
        for source in sources:
            found = self._storage.resource(bucket, source["name"])
            wanted = source.get("generation")
            if found is None or wanted is not None and str(wanted) != found["generation"]:
                return _error(404, f"No such object: {bucket}/{source['name']}")
            condition = source.get("objectPreconditions", {}).get("ifGenerationMatch")
            if condition is not None and str(condition) != found["generation"]:
                return _error(412, _FAILED)
        answer = self._handled(request, objects.compose)
        if answer.status != 200:
            return answer
        made = self._storage.resource(bucket, name)
        made["componentCount"] = len(sources)
        made.pop("md5Hash", None)  # which no composed object has
        return _json(made)

    def _list(self, request: Request, bucket: str) -> Answer:
        def asked(name: str) -> str:
            return request.query.get(name, [""])[0]

        for unserved in ("matchGlob", "softDeleted", "versions", "includeTrailingDelimiter"):
            if asked(unserved) not in ("", "false"):
                return _error(501, f"{unserved} is not served")
        prefix, delimiter, end = asked("prefix"), asked("delimiter"), asked("endOffset")
        try:
            token = base64.urlsafe_b64decode(asked("pageToken")).decode()
            size = min(int(asked("maxResults") or _LARGEST_PAGE), _LARGEST_PAGE)
        except ValueError:
            return _error(400, "Invalid argument.")

        names = self._storage.names[bucket]
        place = bisect.bisect_left(names, max(prefix, asked("startOffset"), token))
        page: dict[str, Any] = {"kind": "storage#objects"}
        while place < len(names):
            name = names[place]
            if not name.startswith(prefix) or (end and name >= end):
                break
            if size == 0:
                page["nextPageToken"] = base64.urlsafe_b64encode(name.encode()).decode()
                break
            size -= 1
            head, found, _ = name[len(prefix) :].partition(delimiter or "\0")
            if found:
                folder = prefix + head + delimiter
                page.setdefault("prefixes", []).append(folder)
                # The first name that is not in it.
                place = bisect.bisect_left(names, folder[:-1] + chr(ord(folder[-1]) + 1))
            else:
                page.setdefault("items", []).append(self._storage.objects[bucket][name])
                place += 1
        return _json(page)


@contextlib.contextmanager
def running(*bucket_names: str) -> Iterator[Server]:
    """A server on a free port of 127.0.0.1, with these buckets, until the end of the block."""
    running_server = Server()
    for name in bucket_names:
        running_server.create_bucket(name)
    running_server.start()
    try:
        yield running_server
    finally:
        running_server.stop()
    if running_server.errors:
        raise AssertionError("\n".join(running_server.errors))


class _Received:
    """A request that has arrived, as the package's `Request` reads one."""

    def __init__(self, path: str, headers: Message, body: bytes, http: HttpServer):
        self.path, self.headers, self.server = path, headers, http
        self.rfile = io.BytesIO(body)


_FAILED = "At least one of the pre-conditions you specified did not hold."
_REASONS = {401: "authError", 403: "forbidden", 404: "notFound", 412: "conditionNotMet"}


def _json(value: Any, status: int = 200) -> Answer:
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    return Answer(status, headers, json.dumps(value).encode())


def _error(status: int, message: str) -> Answer:
    if status in (204, 304):
        return Answer(status, {}, b"")
    reason = _REASONS.get(status, "backendError" if status >= 500 else "invalid")
    one = {"message": message, "domain": "global", "reason": reason}
    return _json({"error": {"code": status, "message": message, "errors": [one]}}, status)


def _named(upload: Any) -> str | None:
    """The object's name, where it is told in the metadata."""
    return upload.get("meta", upload).get("name") if isinstance(upload, dict) else None


def _refusal(request: Request, found: dict | None) -> Answer | None:
    """Whether the request's conditions forbid it, given the object that is there now.

    Generation 0 stands for no object.
    """
    for what in ("Generation", "Metageneration"):
        now = found[what.lower()] if found else "0"
        match = request.query.get(f"if{what}Match")
        if match and match[0] != now:
            return _error(412, _FAILED)
        other = request.query.get(f"if{what}NotMatch")
        if other and other[0] == now:
            return _error(304 if request.method == "GET" else 412, _FAILED)
    return None


def _download(found: dict, data: bytes, wanted: str | None) -> Answer:
    """An object's bytes, or those of a range `bytes=first-last`, `bytes=first-`, `bytes=-count`."""
    headers = {
        "Content-Type": found.get("contentType") or "application/octet-stream",
        "ETag": found["etag"],
        "X-Goog-Generation": found["generation"],
        "X-Goog-Metageneration": found["metageneration"],
        "X-Goog-Stored-Content-Length": found["size"],
        "X-Goog-Storage-Class": found["storageClass"],
    }
    match = re.fullmatch(r"\s*bytes=(\d*)-(\d*)\s*", wanted or "")
    if not match or match.group(1, 2) == ("", ""):
        hashes = {"crc32c": found.get("crc32c"), "md5": found.get("md5Hash")}
        headers["X-Goog-Hash"] = ",".join(f"{k}={v}" for k, v in hashes.items() if v)
        return Answer(200, headers, data)
    first, last = match.groups()
    if first:
        start, stop = int(first), min(int(last or len(data)) + 1, len(data))
    else:
        start, stop = max(0, len(data) - int(last)), len(data)
    if start >= stop:
        answer = _error(416, "The requested range cannot be satisfied.")
        return answer._replace(headers=answer.headers | {"Content-Range": f"bytes */{len(data)}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    return Answer(206, headers, data[start:stop])
