"""Functions that read and extend tables of kernel block sizes in local or gs:// folders.

The module `pallas_kernels.tuned` defines the tables.
"""

from collections.abc import Callable, Sequence

from pallas_kernels import tuned
from rmt_tpu.distributed.rendezvous import Tables
from rmt_tpu.errors import RunError
from rmt_tpu.storage import open_parent

# The maximum number of attempts to write a table. An attempt fails only if another process has
# written the table in the meantime.
_TRIES = 20


def tables_in_use() -> Tables:
    """Return a hash of all tables in use, and the path of the user's table if it has entries."""
    use_storage()
    path = tuned.user_path()
    # A missing table has no entries, so its path does not matter.
    return Tables(tuned.fingerprint(), path if tuned.user_table().entries else None)


def read(location: str) -> tuned.Table:
    """Return the table in a file, and its faults. If there is no file, the table is empty.

    Raises:
      UsageError: the location is illegal.
      Fault: the file cannot be read, because its storage does not answer or refuses access.
    """
    folder, name = open_parent(location)
    file = folder.read(name)
    return tuned.Table(location) if file is None else tuned.parse(file.data, location)


def add(location: str, entries: Sequence[tuned.Entry]) -> tuned.Table:
    """Add entries to the table in a file, replacing entries that have the same identity.

    No entry is lost if several processes add entries at the same time.

    Returns:
      The table after the entries were added.

    Raises:
      UsageError: the location is illegal.
      RunError: the file cannot be written, or contains something other than a table.
    """
    return _rewritten(location, lambda table: table.merged(entries))


def remove(location: str, entry: tuned.Entry) -> tuned.Table:
    """Remove the entry that has the identity of `entry` from the table in a file, if there is one.

    Returns:
      The table without the entry.

    Raises:
      UsageError: the location is illegal.
      RunError: the file cannot be written, or contains something other than a table.
    """
    return _rewritten(location, lambda table: table.without(entry))


def _rewritten(location: str, change: Callable[[tuned.Table], tuned.Table]) -> tuned.Table:
    """Write the changed table to its file, and return it; an unchanged table is not written."""
    folder, name = open_parent(location)
    for _ in range(_TRIES):
        file = folder.read(name)
        existing = tuned.Table(location) if file is None else tuned.parse(file.data, location)
        if existing.faults:  # The new file would not contain the faulty entries of the old one.
            raise RunError(
                f"{existing.faults[0]}; the file is not overwritten: correct it, or move it away"
            )
        table = change(existing)
        if table == existing:
            return table
        data = table.text().encode()
        if file is None:
            succeeded = folder.create(name, data)
        else:
            succeeded = folder.replace(name, data, generation=file.generation)
        if succeeded:
            return table
    raise RunError(
        f"{location} cannot be written: other processes keep writing to it; try again later"
    )


def _read_bytes(location: str) -> bytes | None:
    folder, name = open_parent(location)
    try:
        file = folder.read(name)
    except RunError as error:
        raise OSError(str(error)) from None
    return file and file.data


def use_storage() -> None:
    """Allow the environment variable RMT_TPU_TUNED to name a table on gs://."""
    tuned.READERS["gs"] = _read_bytes
