"""Processes that work side by side and seldom meet; no device is touched."""

import time

import jax

# See `processes` for this private import.
from jax._src.distributed import global_state

from rmt_tpu.distributed import processes
from rmt_tpu.errors import RunError

_FIRST_SECONDS, _LONGEST_SECONDS = 0.02, 1.0  # between looks


class ProcessTeam:
    """All processes that `processes.initialize` joined; a `Team` of `rmt_tpu.data.prepare`.

    A `Channel` gives up after a time. Here a process waits for another as long as that one lives,
    because shares of work may differ by hours. A process that fails reports it to all, and JAX's
    coordination service notices one that is killed; both end the others.
    """

    def __init__(self, name: str):
        """Make a team.

        Args:
          name: the team's name, the same on all processes, and of no other team.
        """
        self._name, self._calls = name, 0

    @property
    def number(self) -> int:
        """The number of this process."""
        return processes.process_id()

    @property
    def count(self) -> int:
        """The number of all processes."""
        return processes.num_processes()

    def gather(self, value: str, what: str) -> list[str]:
        """Return the `value` of every process, in order, when all have come.

        Args:
          value: a short text of this process.
          what: what all processes do here, for the message.

        Raises:
          RunError: process 0, which holds the values, is gone.
        """
        if self.count == 1:
            return [value]
        self._calls += 1
        folder, seconds = f"rmt/team/{self._name}/{self._calls}/", _FIRST_SECONDS
        try:
            global_state.client.key_value_set(f"{folder}{self.number}", value)
            # The code polls, because no signal would end a wait within the client.
            while len(found := global_state.client.key_value_dir_get(folder)) < self.count:
                time.sleep(seconds)
                seconds = min(2 * seconds, _LONGEST_SECONDS)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RunError(f"process 0 is not to be reached at '{what}': {reason}") from None
        values = {int(key.rpartition("/")[2]): value for key, value in found}
        return [values[number] for number in range(self.count)]
