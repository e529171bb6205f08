"""A group of processes that work in parallel and rarely synchronise, without using any device."""

import time

import jax

# JAX has no public name for the client of its coordination service; see `processes`.
from jax._src.distributed import global_state

from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError

# The time between two polls grows from `_FIRST_SECONDS` to `_LONGEST_SECONDS`.
_FIRST_SECONDS, _LONGEST_SECONDS = 0.02, 1.0


class ConnectedProcesses:
    """All processes connected by `processes.initialize`, as a `data.prepare.ProcessGroup`.

    Unlike a `Channel`, a process group has no timeout. A process waits for another as long as that
    one is alive, because one share of the work may take hours longer than another. A process that
    fails reports its failure to all others, and JAX's coordination service detects a process that
    is killed. In both cases the remaining processes are stopped.
    """

    def __init__(self, name: str):
        """Make a process group.

        Args:
          name: the group's name, which is the same on all processes and unique among groups.
        """
        self._name, self._calls = name, 0

    @property
    def number(self) -> int:
        """The number of this process."""
        return processes.process_id()

    @property
    def count(self) -> int:
        """The total number of processes."""
        return processes.num_processes()

    def gather(self, value: str, what: str) -> list[str]:
        """Wait until all processes have called this method; return their values in process order.

        Args:
          value: a short text from this process.
          what: a description of this synchronisation point, used in error messages.

        Raises:
          RunError: process 0, which stores the values, cannot be reached.
        """
        if self.count == 1:
            return [value]
        self._calls += 1
        folder, seconds = f"rmt/group/{self._name}/{self._calls}/", _FIRST_SECONDS
        try:
            global_state.client.key_value_set(f"{folder}{self.number}", value)
            # Poll, because a signal such as Ctrl-C cannot interrupt a wait inside the client.
            while len(found := global_state.client.key_value_dir_get(folder)) < self.count:
                time.sleep(seconds)
                seconds = min(2 * seconds, _LONGEST_SECONDS)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RunError(f"process 0 cannot be reached at '{what}': {reason}") from None
        values = {int(key.rpartition("/")[2]): value for key, value in found}
        return [values[number] for number in range(self.count)]
