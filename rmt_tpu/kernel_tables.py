"""Tables of block sizes (`pallas_kernels.tuned`) in folders, local or gs://: read, and added to."""

from collections.abc import Sequence

from pallas_kernels import tuned
from rmt_tpu.distributed.roll_call import Tables
from rmt_tpu.errors import RunError
from rmt_tpu.storage import open_parent

_TRIES = 20  # each is lost to another writer who has succeeded


def known() -> Tables:
    """A hash of all tables that are looked into, and the user's file."""
    use_storage()
    path = tuned.user_path()
    # One that is not there holds nothing, wherever it would be.
    return Tables(tuned.fingerprint(), path if tuned.user_table().entries else None)


def read(location: str) -> tuned.Table:
    """The table of a file, with its faults; empty if there is none.

    Raises:
      UsageError: the location cannot be.
      Fault: its store does not answer or refuses.
    """
    folder, name = open_parent(location)
    found = folder.read(name)
    return tuned.Table(location) if found is None else tuned.parse(found.data, location)


def add(location: str, entries: Sequence[tuned.Entry]) -> tuned.Table:
    """Puts entries into a file, in place of those of the same identity; others stay.

    Of several writers at a time none loses what it wrote.

    Returns:
      The table as it is now.

    Raises:
      UsageError: the location cannot be.
      RunError: the file cannot be written, or holds something else than a table.
    """
    folder, name = open_parent(location)
    for _ in range(_TRIES):
        found = folder.read(name)
        before = tuned.Table(location) if found is None else tuned.parse(found.data, location)
        if before.faults:  # would be lost
            raise RunError(f"{before.faults[0]}; it is not written over: mend it, or move it away")
        table = before.merged(entries)
        data = table.text().encode()
        if found is None:
            written = folder.create(name, data)
        else:
            written = folder.replace(name, data, generation=found.generation)
        if written:
            return table
    raise RunError(f"{location} cannot be written: others write to it all the time")


def _read_bytes(location: str) -> bytes | None:
    folder, name = open_parent(location)
    try:
        found = folder.read(name)
    except RunError as error:
        raise OSError(str(error)) from None
    return found and found.data


def use_storage() -> None:
    """From here on $RMT_TPU_TUNED may be at gs://."""
    tuned.READERS["gs"] = _read_bytes
