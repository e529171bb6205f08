"""A folder in a Google Cloud Storage bucket.

The google-cloud-storage package lists objects and transfers small files. Where two writers might
conflict, requests are conditional on the object's generation. Tensorstore transfers arrays with
its own client, which finds the same credentials (Application Default Credentials).
"""

import atexit
import concurrent.futures
import contextlib
import fnmatch
import functools
import io
import mimetypes
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import tensorstore as ts
from google.api_core.exceptions import (
    Forbidden,
    GoogleAPICallError,
    NotFound,
    PreconditionFailed,
    RetryError,
    Unauthorized,
)
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError, TransportError
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption
from google.cloud.storage.retry import DEFAULT_RETRY

from rmt_tpu.errors import UsageError
from rmt_tpu.storage.folder import SMALL, Fault, Folder, Found, Object, Unavailable, faults, join

_BUCKET = re.compile(r"(?!goog)[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# Time limit in seconds for the check that a folder can be accessed, including retries.
_CHECK_SECONDS = 9.0
# Time limit in seconds for a request to the service, including retries.
_SECONDS = 120.0
# How often an object that is replaced while it is read is read again.
_READS = 10
_EMULATOR = "STORAGE_EMULATOR_HOST"
_KEY_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
# Matches the name of the object that `append` uploads before it composes two objects. A killed
# process may leave such an object.
_TAIL = re.compile(r"\.tail-[0-9a-f]{8}$")


class GcsFolder(Folder):
    """A folder that consists of all objects in a bucket whose names have a common prefix."""

    def __init__(self, bucket: str, prefix: str):
        """Create a `Folder` for a prefix of names in a bucket; nothing is stored in the bucket.

        Args:
          bucket: the bucket's name.
          prefix: the prefix of all names in the folder; empty, or ending with a slash.
        """
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self._bucket_name, self._prefix = bucket, prefix
        self._bucket = _client(self.url).bucket(bucket)

    @classmethod
    def open(cls, url: str) -> "GcsFolder":
        """Return the folder at a `gs://` URL.

        Raises:
          UsageError: `url` has no bucket or an illegal bucket name, or there are no credentials.
        """
        bucket, path = _parts(url)
        path = path.rstrip("/")
        return cls(bucket, join(path) + "/" if path else "")

    def child(self, name: str) -> "GcsFolder":
        """Return the folder of the objects whose names continue with `name` and a slash."""
        return GcsFolder(self._bucket_name, f"{self._prefix}{join(name)}/")

    def check(self, *, write: bool = False) -> None:
        """Check within ten seconds that objects can be listed and, if `write` is true, written.

        Raises:
          UsageError: objects cannot be listed or written; the message has the reason.
        """
        with _one_line_errors(self.url, UsageError):
            _with_deadline(_CHECK_SECONDS, lambda: self._probe(write))

    def _probe(self, write: bool) -> None:
        retry_options = _retry_options(_CHECK_SECONDS / 2)
        found = self._client.list_blobs(
            self._bucket_name, prefix=self._prefix, max_results=1, **retry_options
        )
        next(iter(found), None)
        if write:
            probe = self._blob(f".write_probe-{uuid.uuid4().hex[:8]}")
            probe.upload_from_string(b"", **retry_options)
            # If the response to the first request was lost, the repeated one finds no object.
            with contextlib.suppress(NotFound):
                probe.delete(**retry_options)

    def kvstore(self) -> dict[str, Any]:
        """Return the spec of tensorstore's `gcs` driver."""
        return {"driver": "gcs", "bucket": self._bucket_name, "path": self._prefix}

    def context(self) -> ts.Context:
        """Return a context without a cache, in which tensorstore retries a request ten times."""
        retries = {"max_retries": 10, "initial_delay": "50ms", "max_delay": "10s"}
        return ts.Context(
            # Each chunk of an array is read only once, so a cache would waste memory.
            {"cache_pool": {"total_bytes_limit": 0}, "gcs_request_retries": retries}
        )

    def read(self, name: str, *, limit: int = SMALL) -> Found | None:
        """Return an object's bytes as stored and its generation; None if there is no object.

        Raises:
          Fault: the object has more than `limit` bytes.
          Unavailable: the object was replaced again and again while it was read.
        """
        with _one_line_errors(self._url_of(name)):
            for _ in range(_READS):
                blob = self._bucket.get_blob(self._key(name), **_retry_options())
                if blob is None:
                    return None
                # Check the size before the download allocates memory.
                if blob.size > limit:
                    raise Fault(
                        f"{self._url_of(name)} has {blob.size} bytes; legal: at most {limit}"
                    )
                # If the object was deleted or replaced after its size was read, read it again.
                with contextlib.suppress(NotFound, PreconditionFailed):
                    # Download the bytes as stored: decompressed, they could exceed `limit`.
                    data = blob.download_as_bytes(
                        if_generation_match=blob.generation, raw_download=True, **_retry_options()
                    )
                    return Found(data, blob.generation)
        raise Unavailable(f"{self._url_of(name)} changes while it is read")

    def write(self, name: str, data: bytes) -> None:
        """Upload an object, replacing any earlier one."""
        with _one_line_errors(self._url_of(name)):
            self._upload(self._blob(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Upload an object unless one exists under this name; see `Folder.create`."""
        with _one_line_errors(self._url_of(name)):
            try:
                self._upload(self._blob(name), data, if_generation_match=0)
                return True
            # An earlier attempt of this call may have created the object, although its response was
            # lost.
            except PreconditionFailed:
                found = self.read(name)
                return found is not None and found.data == data

    def replace(self, name: str, data: bytes, *, generation: Any) -> bool:
        """Upload an object if the stored one has the given generation; see `Folder.replace`."""
        with _one_line_errors(self._url_of(name)):
            try:
                self._upload(self._blob(name), data, if_generation_match=generation)
                return True
            # An earlier attempt of this call may have replaced the object, although its response
            # was lost.
            except PreconditionFailed:
                found = self.read(name)
                return found is not None and found.data == data

    def append(self, name: str, data: bytes) -> None:
        """Upload the bytes as an object, and compose it with the earlier object.

        Raises:
          Fault: another process changes the object at the same time.
        """
        with _one_line_errors(self._url_of(name)):
            whole = self._bucket.get_blob(self._key(name), **_retry_options())
            if whole is None:
                if not self.create(name, data):
                    raise Fault(f"{self._url_of(name)}: another process is writing to this file")
                return
            tail = self._blob(f"{name}.tail-{uuid.uuid4().hex[:8]}")
            self._upload(tail, data)
            longer = self._blob(name)
            longer.content_type = whole.content_type
            try:
                longer.compose(
                    [whole, tail], if_generation_match=whole.generation, **_retry_options()
                )
            except (NotFound, PreconditionFailed):
                now = self._bucket.get_blob(self._key(name), **_retry_options())
                # If the first request succeeded but its response was lost, the retry was refused,
                # and the object has the size of the two composed objects. Otherwise another process
                # has appended.
                if now is None or now.size != whole.size + len(data):
                    raise Fault(
                        f"{self._url_of(name)}: another process is writing to this file"
                    ) from None
            finally:
                # An object that cannot be deleted does no harm: `names` leaves it out.
                with contextlib.suppress(Exception):
                    tail.delete(**_retry_options())

    def delete(self, name: str, *, generation: Any = None) -> bool:
        """Delete an object; return whether the object no longer exists."""
        with _one_line_errors(self._url_of(name)):
            try:
                self._blob(name).delete(if_generation_match=generation, **_retry_options())
            except NotFound:
                return True
            except PreconditionFailed:
                return False
        return True

    def names(self, name: str = "") -> list[str]:
        """Return the sorted names of objects and subfolders, without objects left by `append`."""
        prefix = self._key(name) + "/" if name else self._prefix
        with _one_line_errors(self._url_of(name)):
            listing = self._client.list_blobs(
                self._bucket_name, prefix=prefix, delimiter="/", **_retry_options()
            )
            files = [blob.name for blob in listing]
        found = (n.removeprefix(prefix) for n in (*files, *listing.prefixes) if n != prefix)
        return sorted(n for n in found if not _TAIL.search(n))

    def delete_folder(self, name: str) -> None:
        """Delete all objects whose names continue with `name` and a slash."""
        with _one_line_errors(self._url_of(name)):
            # List the objects here, because tensorstore's `delete_range` deletes nothing, without
            # an error, if it lacks the permission to list.
            listing = self._client.list_blobs(
                self._bucket_name, prefix=self._key(name) + "/", **_retry_options()
            )
            keys = [blob.name for blob in listing]
        with faults(f"{self._url_of(name)}: "):
            spec = {"driver": "gcs", "bucket": self._bucket_name}
            store = ts.KvStore.open(spec, context=self.context()).result()
            for deleted in [store.write(key, None) for key in keys]:
                deleted.result()

    @property
    def _client(self) -> Any:
        return self._bucket.client

    def _key(self, name: str) -> str:
        return self._prefix + join(name)

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._key(name))

    def _url_of(self, name: str) -> str:
        return f"{self.url}/{name}".rstrip("/")

    def _upload(self, blob: Any, data: bytes, **conditions) -> None:
        kind = mimetypes.guess_type(blob.name)[0] or "application/octet-stream"
        blob.upload_from_string(data, content_type=kind, **conditions, **_retry_options())


def find_objects(url: str) -> list[Object]:
    """Return the objects that match a name or glob; see `rmt_tpu.storage.find_objects`."""
    bucket, pattern = _parts(url)
    client = _client(url)
    with _one_line_errors(url, UsageError):
        # Look for an object with this exact name before globbing: a name may contain brackets.
        retry_options = _retry_options(_CHECK_SECONDS / 2)
        look = lambda: client.bucket(bucket).get_blob(pattern, **retry_options) if pattern else None
        if (blob := _with_deadline(_CHECK_SECONDS, look)) is not None:
            return [_object(bucket, blob)]
        parts, prefix = pattern.split("/"), re.split(r"[*?\[]", pattern)[0]
        # If only the last part of the name is a glob, subfolders need not be listed.
        flat = not any(re.search(r"[*?\[]", part) for part in parts[:-1]) and parts[-1] != "**"
        listed = client.list_blobs(
            bucket, prefix=prefix, delimiter="/" if flat else None, **_retry_options()
        )
        return [_object(bucket, b) for b in listed if _matches(b.name.split("/"), parts)]


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Return whether a name matches a glob, part by part; `**` matches any number of parts."""
    # The last part is empty in the name of a folder's placeholder, which ends with a slash.
    if not parts or not pattern or not parts[0]:
        return parts == pattern
    if pattern[0] == "**":
        visible = not parts[0].startswith(".")
        rest = pattern[1:] or ["*"]
        return _matches(parts, rest) or (visible and _matches(parts[1:], pattern))
    hidden = parts[0].startswith(".") and not pattern[0].startswith(".")
    return (
        not hidden
        and fnmatch.fnmatchcase(parts[0], pattern[0])
        and _matches(parts[1:], pattern[1:])
    )


def _object(bucket: str, blob: Any) -> Object:
    url = f"gs://{bucket}/{blob.name}"
    return Object(url, blob.size, blob.crc32c, blob.generation, blob.content_encoding or "")


class ObjectReader(io.RawIOBase):
    """A stream of an object's bytes; see `rmt_tpu.storage.open_object`."""

    def __init__(self, url: str, size: int, generation: int):
        bucket, name = _parts(url)
        self._url, self._size, self._generation = url, size, generation
        self._blob = _client(url).bucket(bucket).blob(name)
        self._at = 0

    def readable(self) -> bool:
        """Return True, because the stream can be read."""
        return True

    def seekable(self) -> bool:
        """Return True, because the position in the stream can be set."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position in the stream, in bytes, and return it; negative positions become 0."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into `buffer`, and return their number, which is 0 at the end.

        Raises:
          Fault: the object was replaced or deleted since it was opened, or GCS does not answer.
        """
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        with _one_line_errors(self._url):
            try:
                data = DEFAULT_RETRY.with_timeout(_SECONDS)(self._read)(count)
            except (NotFound, PreconditionFailed):
                raise Fault(f"{self._url} was replaced or deleted while it was read") from None
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, count: int) -> bytes:
        try:
            return self._blob.download_as_bytes(
                start=self._at,
                end=self._at + count - 1,
                if_generation_match=self._generation,
                raw_download=True,
                # Skip the checksum test, because the stored checksum is for the whole object and
                # not for this range.
                checksum=None,
                retry=None,
                timeout=_retry_options()["timeout"],
            )
        except GoogleAPICallError as error:
            if error.response is not None:
                # A response that is not read would keep its connection open.
                error.response.close()
            raise


def _parts(url: str) -> tuple[str, str]:
    """Return the bucket and the object name in a URL.

    Raises:
      UsageError: the URL has no bucket or an illegal bucket name.
    """
    bucket, _, name = url.removeprefix("gs://").partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(
            f"{url!r} has an illegal bucket name; legal: gs://bucket/path, with a bucket name of 3 "
            "to 222 lower-case letters, digits, dots, dashes and underscores"
        )
    return bucket, name


def _client(url: str) -> Any:
    """Return the google-cloud-storage client that this process shares.

    Args:
      url: the URL that the client will open, used in error messages.

    Raises:
      UsageError: the client finds no credentials.
    """
    # Turn off the client's telemetry request, which the user did not ask for and which may
    # be forbidden.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    emulator = os.environ.get(_EMULATOR)
    if emulator:
        # Make tensorstore use the emulator too, so that no part of a run goes to the real service.
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = emulator
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "emulator")
    try:
        return _client_of(emulator)
    except UsageError as error:
        raise UsageError(f"{url}: {error}") from None


@functools.cache
def _client_of(emulator: str | None) -> Any:
    try:
        if emulator:
            client = storage.Client(project="emulator", credentials=AnonymousCredentials())
        else:
            # If no credentials are configured, the client asks the machine's metadata server, which
            # may take a long time to answer.
            client = _with_deadline(_CHECK_SECONDS, lambda: storage.Client(project=None))
    except (GoogleAuthError, TimeoutError):
        file = os.environ.get(_KEY_FILE)
        instead = f"{_KEY_FILE}={file} cannot be used" if file else "none were found"
        raise UsageError(
            f"Google Cloud Storage needs credentials, and {instead}: run `gcloud auth "
            f"application-default login`, or name a key file in {_KEY_FILE}"
        ) from None
    atexit.register(client.close)
    return client


def _retry_options(seconds: float = _SECONDS) -> dict[str, Any]:
    """Return the options of a request that is retried for at most `seconds`.

    Every request of this module may be repeated: a repeated write stores the same bytes under the
    same name, and after a refused conditional write the stored bytes are compared.
    """
    return {"retry": DEFAULT_RETRY.with_timeout(seconds), "timeout": min(seconds, 60.0)}


def _with_deadline(seconds: float, function: Callable[[], Any]) -> Any:
    """Call `function` with a time limit, and return its result or raise its error.

    The function runs in a thread, because some operations of the client, such as host name
    look-ups, accept no timeout. After a timeout, the thread continues to run.

    Raises:
      TimeoutError: the function has not returned within `seconds`.
    """
    outcome = concurrent.futures.Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    # Use a daemon thread, because at exit the process would wait for an executor's thread.
    threading.Thread(target=call, daemon=True).start()
    return outcome.result(seconds)


@contextlib.contextmanager
def _one_line_errors(what: str, kind: type[Exception] = Fault) -> Iterator[None]:
    """Turn the client's errors in the `with` body into one-line errors without credentials.

    Args:
      what: the URL that is accessed, with which each message begins.
      kind: class of the errors. If it is Fault, a failed access raises Unavailable instead.
    """
    try:
        yield
    except RetryError as error:
        reason = _reason(error.cause, what)
    except DataCorruption:
        raise kind(f"{what}: the data received do not match the stored checksum") from None
    except (GoogleAPICallError, GoogleAuthError, OSError) as error:
        reason = _reason(error, what)
    else:
        return
    raise (Unavailable if kind is Fault else kind)(f"{what}: {reason}")


def _reason(error: Any, what: str) -> str:
    match error:
        case NotFound():
            bucket = what.removeprefix("gs://").partition("/")[0]
            return (
                f"there is no bucket gs://{bucket}; is its name right? `gcloud storage ls` lists "
                "the buckets of your project"
            )
        case Forbidden() | Unauthorized():
            return f"no permission: {_message(error)}"
        case GoogleAPICallError():
            return f"the service answers {error.code}: {_message(error)}"
        case GoogleAuthError() if not isinstance(error, TransportError):
            return (
                f"the credentials do not work ({type(error).__name__}); run `gcloud auth "
                "application-default login` again"
            )
    return f"the service cannot be reached ({type(error).__name__})"


def _message(error: Any) -> str:
    """Return the service's message without the request, because an upload's URL is a credential."""
    try:
        message = error.response.json()["error"]["message"]
    except (AttributeError, ValueError, LookupError, TypeError):
        message = getattr(error.response, "text", "") or "no message"
    return " ".join(message.split())[:300]
