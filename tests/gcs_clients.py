"""What tests against the object server share: where clients find it, and plain requests."""

import concurrent.futures
import contextlib
import http.client
import threading

import tensorstore as ts
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

# What sends clients elsewhere, or makes them look for credentials, unless a test says so.
_ELSEWHERE = ("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING")


def lead_to(server, monkeypatch):
    """`gs://` is on the server, and nothing in the environment says otherwise.

    This process asks again at once: what is repeated is the same after 20 ms as after a second.
    """
    from rmt_tpu.storage import gcs

    at_once = gcs.DEFAULT_RETRY.with_delay(initial=0.02, maximum=0.1)
    monkeypatch.setattr(gcs, "DEFAULT_RETRY", at_once)
    for name in _ELSEWHERE:
        monkeypatch.setenv(name, "")  # so that what was there comes back at the end
        monkeypatch.delenv(name)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def lead_bare_clients_to(server, monkeypatch):
    """The same for clients that `rmt_tpu.storage` has not told where it is."""
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    # A request of the client's own, at any time, would be counted.
    monkeypatch.setenv("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")


@contextlib.contextmanager
def client():
    """The library's own."""
    with storage.Client(project="project", credentials=AnonymousCredentials()) as client:
        yield client


def kvstore(server, path="", **options):
    context = ts.Context({"gcs_request_retries": {"initial_delay": "10ms", "max_delay": "50ms"}})
    spec = {"driver": "gcs", "bucket": server.bucket, "path": path}
    return ts.KvStore.open(spec | options, context=context).result()


def ask(server, method, path, body=None, **headers):
    """One request as it is on the wire: status, headers, body."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=600)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body=body, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, response.headers, content


def at_once(function, count):
    """What `count` threads that begin together return."""
    start = threading.Barrier(count)

    def begin(index):
        start.wait()
        return function(index)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))
