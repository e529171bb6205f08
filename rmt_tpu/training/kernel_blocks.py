"""Storage of the block sizes of a run's kernels in the run folder.

A run that resumes uses the block sizes with which it started, so that a new table of block sizes
does not change its loss curve.
"""

import contextlib
from collections.abc import Callable, Iterator

from pallas_kernels import tuned
from rmt_tpu import kernel_tables
from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError
from rmt_tpu.storage import Folder

FILE = "kernel_blocks.json"


class KernelBlocks:
    """A recorder that saves the block sizes of a run's kernels in the run folder.

    Args:
      folder: the run folder.
      log: a function that prints a line.
      own: the table of block sizes that is already in the run folder.
      looks: the list of look-ups of block sizes, which grows as kernels are traced.
    """

    def __init__(
        self,
        folder: Folder,
        log: Callable[[str], None],
        own: tuned.Table,
        looks: list[tuned.Look],
    ):
        self._folder, self._log, self._own, self._looks = folder, log, own, looks

    def write(self) -> None:
        """Save the block sizes that are not yet in the run folder, on the first process only.

        If the file cannot be written, a note is printed and the run continues.
        """
        known = {entry.identity for entry in self._own.entries}
        new = [e for e in (look.entry() for look in self._looks) if e.identity not in known]
        if not new or not processes.is_first():
            return
        self._own = self._own.merged(new)
        try:
            self._folder.write(FILE, self._own.text().encode())
        except RunError as error:
            self._log(f"note: kernel block sizes cannot be saved: {error}; the run continues")
        if found := [e for e in new if e.source != "heuristic"]:
            names = ", ".join(dict.fromkeys(f"{e.kernel} ({e.source})" for e in found))
            self._log(f"kernel block sizes from tables, saved in {self._folder}/{FILE}: {names}")


@contextlib.contextmanager
def pinned_block_sizes(
    folder: Folder, log: Callable[[str], None], *, restart: bool
) -> Iterator[KernelBlocks]:
    """Make kernels in the `with` body use the block sizes that are saved in the run folder.

    Args:
      folder: the run folder.
      log: a function that prints a line.
      restart: whether the run restarts from scratch, in which case saved block sizes are deleted.
    """
    kernel_tables.use_storage()
    text = ""
    if processes.is_first():
        if restart:
            folder.delete(FILE)
        text = _read(folder, log).text()
    own = tuned.parse(processes.from_first(text, "block sizes of kernels"), FILE, exact=True)
    with tuned.tuned(own), tuned.collecting() as looks:
        yield KernelBlocks(folder, log, own, looks)


def _read(folder: Folder, log: Callable[[str], None]) -> tuned.Table:
    found = folder.read(FILE)
    if found is None:
        return tuned.Table(FILE)
    table = tuned.parse(found.data, f"{folder}/{FILE}")
    for fault in table.faults[:1]:
        log(f"note: {fault}; those block sizes are chosen again")
    return table
