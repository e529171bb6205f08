"""Every known way for storage to fail: the last good step is restored, or a line says what is bad.

A trial that ends otherwise is an AssertionError.
"""

import contextlib
import random
import resource
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rmt_tpu.errors import RunError
from tests import gcs_server
from tests.storage_kills import Place, forked, on_devices, restore


class Failure(NamedTuple):
    """One way for storage to fail.

    Attributes:
      places: where it is tried.
      outcome: what happens, in words.
      trial: `(place, rng)`, of a place with steps 1 and 2; raises AssertionError if it does not.
    """

    places: tuple[str, ...]
    outcome: str
    trial: Callable[[Place, random.Random], None]


PASSED_OVER = "step 1 is restored, one line names the step and the array or file"
NOT_SAVED = "the save fails in one line, step 2 is restored"
SAVED = "step 3 is saved and restored"


def save(place: Place, step: int, **options: Any) -> None:
    place.checkpoints().save(step, on_devices(step), {"step": step}, **options)


def damaged(damage: Callable[[Place, list[str], random.Random], str]) -> Callable:
    """A trial: `damage` gets the files of step 2, and returns what the line must name."""

    def trial(place: Place, rng: random.Random) -> None:
        files = [n for n in place.names() if n.startswith("2/") and not n.endswith("__lock")]
        named = damage(place, files, rng)
        told = []
        assert restore(place.checkpoints(told)) == 1
        (line,) = told
        assert "\n" not in line and "step 2: " in line and named in line, line
        try:
            restore(place.checkpoints(), 2)
        except RunError as error:
            assert "\n" not in str(error) and named in str(error)
        else:
            raise AssertionError("step 2 was restored")
        # The run goes on, and in time what is damaged goes.
        checkpoints = place.checkpoints()
        restore(checkpoints)
        checkpoints.save(2, on_devices(2), {"step": 2})
        assert restore(place.checkpoints()) == 2

    return trial


def _change(place: Place, name: str, change: Callable[[bytes], bytes]) -> str:
    """Changes a file; returns the name of the array that it is of, or its own."""
    content = place.files.read(name).result().value
    place.files.write(name, change(content)).result()
    return _array_of(name)


def _array_of(name: str) -> str:
    parts = name.split("/")
    return f"array {parts[3]}" if parts[2:3] == ["arrays"] else parts[-1]


def _chunk(files: list[str], rng: random.Random) -> str:
    return rng.choice([name for name in files if "/c/" in name or name.endswith("/c")])


def _flip(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(8 * len(content))
    changed = bytearray(content)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


def _flip_chunk(place: Place, files: list[str], rng: random.Random) -> str:
    return _change(place, _chunk(files, rng), lambda content: _flip(content, rng))


def _flip_manifest(place: Place, files: list[str], rng: random.Random) -> str:
    (name,) = (name for name in files if name.endswith("manifest.json"))
    # In what it says: spaces between that say nothing.
    content = place.files.read(name).result().value
    at = rng.choice([i for i, byte in enumerate(content) if chr(byte).isalnum()])
    return _change(place, name, lambda c: c[:at] + bytes([c[at] ^ 1]) + c[at + 1 :])


def _truncate(place: Place, files: list[str], rng: random.Random) -> str:
    return _change(place, _chunk(files, rng), lambda c: c[: rng.randrange(len(c))])


def _lose_chunk(place: Place, files: list[str], rng: random.Random) -> str:
    name = _chunk(files, rng)
    place.files.write(name, None).result()
    return _array_of(name)


def _lose_manifest(place: Place, files: list[str], rng: random.Random) -> str:
    (name,) = (name for name in files if name.endswith("manifest.json"))
    place.files.write(name, None).result()
    return "manifest.json is missing"


def _lose_attempt(place: Place, files: list[str], rng: random.Random) -> str:
    for name in files:
        if not name.endswith("COMMIT"):
            place.files.write(name, None).result()
    return "manifest.json is missing"


def _two_writers(place: Place, rng: random.Random) -> None:
    """Both have written all but COMMIT when either may write that."""
    both, ends = threading.Barrier(2), []

    def write() -> None:
        try:
            save(place, 3, before_commit=both.wait)
            ends.append("saved")
        except RunError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends.count("saved") == 1, ends
    (line,) = (end for end in ends if end != "saved")
    assert (
        "\n" not in line and "step 3" in line and "another writer committed the step first" in line
    ), line
    assert restore(place.checkpoints()) == 3


def _refused(answer: Any, *, method: str, url: str, times: int | None = None) -> Callable:
    """A trial in which the server answers some requests of a save so, and the save fails."""

    def trial(place: Place, rng: random.Random) -> None:
        fault = gcs_server.fault(answer, method=method, url=url, times=times)
        with _faulty(place, fault):
            line = _fails(lambda: save(place, 3))
        assert "step 3" in line and place.url in line, line
        assert restore(place.checkpoints()) == 2
        save(place, 3)
        assert restore(place.checkpoints()) == 3

    return trial


def _overcome(answer: Any, *, method: str, url: str, times: int) -> Callable:
    """A trial in which the server answers so a few times, and the save succeeds."""

    def trial(place: Place, rng: random.Random) -> None:
        with _faulty(place, gcs_server.fault(answer, method=method, url=url, times=times)):
            save(place, 3)
        assert restore(place.checkpoints()) == 3

    return trial


@contextlib.contextmanager
def _faulty(place: Place, fault: gcs_server.Fault) -> Iterator[None]:
    place.server.faults.append(fault)
    try:
        yield
    finally:
        place.server.faults.remove(fault)


def _fails(action: Callable[[], None]) -> str:
    try:
        action()
    except RunError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("the save succeeded")


def _save_on_full_disk(told: Connection, place: Place, limit: int) -> None:
    # The system refuses to write files of more bytes, as it does when the disk is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    told.send(_fails(lambda: save(place, 3)))


def _full_disk(place: Place, rng: random.Random) -> None:
    read, write = forked.Pipe(duplex=False)
    limit = rng.choice([0, 200, 800])  # nothing; no array; no manifest
    process = forked.Process(target=_save_on_full_disk, args=(write, place, limit))
    process.start()
    write.close()
    line = read.recv()
    process.join()
    read.close()
    assert "step 3" in line and "File too large" in line, line
    assert restore(place.checkpoints()) == 2


_EVERYWHERE = ("local", "gs")
FAILURES = {
    "flipped bit in a chunk": Failure(_EVERYWHERE, PASSED_OVER, damaged(_flip_chunk)),
    "flipped bit in a manifest": Failure(_EVERYWHERE, PASSED_OVER, damaged(_flip_manifest)),
    "truncated chunk": Failure(_EVERYWHERE, PASSED_OVER, damaged(_truncate)),
    "missing chunk": Failure(_EVERYWHERE, PASSED_OVER, damaged(_lose_chunk)),
    "missing manifest": Failure(_EVERYWHERE, PASSED_OVER, damaged(_lose_manifest)),
    "stale COMMIT": Failure(_EVERYWHERE, PASSED_OVER, damaged(_lose_attempt)),
    "two writers": Failure(
        _EVERYWHERE, "one of them commits, the other one's save fails in one line", _two_writers
    ),
    "full disk": Failure(("local",), NOT_SAVED, _full_disk),
    "403 midway": Failure(
        ("gs",), NOT_SAVED, _refused((403, "no access"), method="POST", url="3/.*arrays/w1/c")
    ),
    "404 midway": Failure(
        ("gs",), NOT_SAVED, _refused((404, "no bucket"), method="POST", url="3/.*arrays/w1/c")
    ),
    "403 of COMMIT": Failure(
        ("gs",), NOT_SAVED, _refused((403, "no access"), method="POST", url="3/COMMIT")
    ),
    "503, then ok": Failure(
        ("gs",), SAVED, _overcome((503, "busy"), method="POST", url="3/", times=3)
    ),
    "503 of COMMIT, then ok": Failure(
        ("gs",), SAVED, _overcome((503, "busy"), method="POST", url="3/COMMIT", times=2)
    ),
    "lost answer of COMMIT": Failure(
        ("gs",),
        SAVED,
        _overcome(gcs_server.LOST_ANSWER, method="POST", url="3/COMMIT", times=1),
    ),
}


def fail(name: str, new: Callable[[str], Place], kind: str, trials: int, seed: int = 0) -> None:
    """Does the trial of a failure in as many new places."""
    rng = random.Random(f"{seed} {kind} {name}")
    for _ in range(trials):
        place = new(kind)
        for step in (1, 2):
            save(place, step)
        FAILURES[name].trial(place, rng)


def failure_table(trials: dict[tuple[str, str], int]) -> str:
    """Of the trials done, by failure and kind of place."""
    lines = ["| what | place | trials | outcome of each |", "|---|---|---|---|"]
    for (name, kind), count in trials.items():
        lines.append(f"| {name} | {kind} | {count} | {FAILURES[name].outcome} |")
    return "\n".join(lines)
