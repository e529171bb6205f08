"""Coordination of processes that train together: how they connect, agree and shut down.

Every process runs the same program on its own devices. `initialize` connects the processes before
any device is used. Later they agree through the key-value store of JAX's coordination service,
which runs in process 0, and never through the devices. After a timeout, the numbers of missing
processes are therefore reported. A collective operation on devices would hang instead. With one
process, all functions return immediately.
"""

import atexit
import contextlib
import json
import os
import platform
import threading
import time
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

# The coordination service's client has no public name. JAX's own checkpointing code imports it from
# this module.
from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rmt_tpu.distributed import gloo, rendezvous
from rmt_tpu.distributed.rendezvous import DEFAULT_TIMEOUT, Member
from rmt_tpu.errors import RunError, UsageError
from rmt_tpu.streams import flush_stdout, log_line

# A process checks for failures of other processes once in this number of seconds.
LOOK_SECONDS = 1.0
# After a failure, process 0, which hosts the key-value store, waits at most this number of seconds
# before it exits.
_FAREWELL_SECONDS = 10.0
_FAILED, _ENDED = "rmt/failed/", "rmt/ended/"

join_timeout: int | float = DEFAULT_TIMEOUT
_watch: "_FailureWatcher | None" = None


def find_member(timeout: int | float) -> tuple[Member, list[int] | None]:
    """Return this process's place in a job on a cluster, and the numbers of its local devices.

    The cluster is a TPU slice, or runs SLURM, Open MPI or Kubernetes. If the second value is None,
    the process uses all devices of its host.

    Raises:
      UsageError: the process does not run in any of these clusters.
    """
    try:
        coordinator, num_processes, process_id, local_device_ids = (
            ClusterEnv.auto_detect_unset_distributed_params(
                None, None, None, None, None, int(timeout)
            )
        )
        if None in (coordinator, num_processes, process_id):
            raise LookupError("the environment variables of such a job are not set")
    except Exception as error:  # Each kind of cluster raises its own exceptions.
        raise UsageError(
            "--distributed finds no TPU slice and no SLURM, Open MPI or Kubernetes job here "
            f"({' '.join(str(error).split())}); give --coordinator=HOST:PORT --num_processes=N "
            "--process_id=I instead"
        ) from None
    devices = None if local_device_ids is None else list(local_device_ids)
    return Member(coordinator, num_processes, process_id), devices


def initialize(
    member: Member,
    *,
    timeout: int | float = DEFAULT_TIMEOUT,
    local_device_ids: list[int] | None = None,
) -> None:
    """Connect the processes of a run; call this before any device is used.

    Args:
      member: this process's place in the run.
      timeout: the time in seconds within which all processes must connect, and later must reach
        each synchronisation point.
      local_device_ids: the devices of this process; None means all devices of the host.

    Raises:
      UsageError: `member` is not legal, or the timeout is not positive.
      RunError: some processes have not connected within the timeout, or the processes are
        incompatible.
    """
    from rmt_tpu import kernel_tables

    global join_timeout, _watch
    rendezvous.validate(member)
    if not timeout > 0:
        raise UsageError(
            f"--distributed_timeout={timeout:g} is out of range; legal: above 0 seconds"
        )
    started = time.monotonic()
    versions = f"Python {platform.python_version()} with jax {jax.__version__}"
    rendezvous.wait_for_all(member, versions, timeout, kernel_tables.tables_in_use())
    # JAX's preemption service would intercept SIGTERM, to which the training loop must respond with
    # a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    loopback = rendezvous.is_loopback(member.host_and_port()[0])
    jax.distributed.initialize(
        *member,
        local_device_ids=local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=max(10, int(timeout - (time.monotonic() - started))),
        coordinator_bind_address=member.coordinator if loopback else None,
    )
    gloo.scatter_sums_by_all_reduce()
    join_timeout = timeout
    _watch = _FailureWatcher()
    # Exit handlers run in reverse order of registration. The watcher is therefore stopped before
    # JAX's handler removes the client that the watcher uses.
    atexit.register(_watch.stop)


def num_processes() -> int:
    """Return the number of processes of the run; it is 1 if `initialize` was not called."""
    return global_state.num_processes


def process_id() -> int:
    """Return the number of this process, counting from 0."""
    return global_state.process_id


def is_first() -> bool:
    """Return whether this is process 0, which prints and writes for all processes."""
    return process_id() == 0


def check_runtime() -> None:
    """Check that the runtime of the devices has as many processes as have connected.

    The runtime of a TPU slice connects all hosts of the slice by itself. A process that was started
    without --distributed would therefore train with all devices, and would write the run folder
    like the processes of the other hosts.

    Raises:
      UsageError: the numbers of processes differ.
    """
    if (count := jax.process_count()) != num_processes():
        raise UsageError(
            f"the devices here belong to {count} processes, but this run has {num_processes()}; "
            f"start it on all {count} hosts, and give --distributed to each"
        )


class Channel:
    """An ordered series of synchronisation points for all processes.

    All processes must make the same calls on a channel in the same order. Each thread that
    communicates with other processes has its own channel, so that calls from other threads do not
    interfere.
    """

    def __init__(self, name: str):
        """Make a channel.

        Args:
          name: the channel's name, which is the same on all processes and unique among channels.
        """
        self._name, self._calls = name, 0

    def exchange(self, value: str, what: str, *, timeout: int | float | None = None) -> list[str]:
        """Wait until all processes have called this method; return their values in process order.

        Args:
          value: a short text from this process.
          what: a description of this synchronisation point, used in error messages.
          timeout: the time in seconds; None means the timeout given to `initialize`.

        Raises:
          RunError: some processes did not arrive within the timeout (the message names them), or
            process 0, which stores the values, cannot be reached.
        """
        count = num_processes()
        if count == 1:
            return [value]
        timeout = join_timeout if timeout is None else timeout
        self._calls += 1
        client, folder = global_state.client, self._folder(self._calls)
        try:
            client.key_value_set(f"{folder}{process_id()}", value)
            self._wait_at_barrier(client, folder, what, timeout)
            values = _read(client, folder)
            # By now, all processes have read the values from two calls ago, so they can be deleted.
            if is_first():
                client.key_value_delete(self._folder(self._calls - 2))
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RunError(f"process 0 cannot be reached at '{what}': {reason}") from None
        return [values[p] for p in range(count)]

    def _wait_at_barrier(self, client: Any, folder: str, what: str, timeout: int | float) -> None:
        barrier, count = f"rmt/barrier/{self._name}/{self._calls}", num_processes()
        try:
            client.wait_at_barrier(barrier, round(timeout * 1000))
        except jax.errors.JaxRuntimeError:
            there = _read(client, folder)
            missing = [p for p in range(count) if p not in there]
            if missing:
                raise RunError(
                    f"{rendezvous.name_processes(missing)} of {count} did not reach '{what}' "
                    f"within {timeout:g} s; see their logs"
                ) from None
            # All processes have stored their values, but at least one waited at the barrier for
            # longer than the timeout.
            raise RunError(
                f"the {count} processes did not meet at '{what}': one arrived later than "
                f"{timeout:g} s, or died while it waited; see their logs"
            ) from None

    def from_first(self, value: Any, what: str) -> Any:
        """Return process 0's `value`, a JSON value, on every process."""
        if num_processes() == 1:
            return value
        return json.loads(self.exchange(json.dumps(value) if is_first() else "", what)[0])

    def _folder(self, call: int) -> str:
        return f"rmt/exchange/{self._name}/{call}/"


# The channel that the main thread of every process uses.
_main = Channel("main")
exchange = _main.exchange
from_first = _main.from_first


def _read(client: Any, folder: str) -> dict[int, str]:
    return {int(k.rpartition("/")[2]): value for k, value in client.key_value_dir_get(folder)}


class DelayedMax:
    """A function that takes a number from each process and returns the maximum one call later.

    All processes get the same result in the same training step. A call starts a program on the
    devices that computes the maximum, and returns the result of the previous call's program. That
    program is complete by then, because the metrics of its step have been read. Therefore no call
    waits. With one process, there is no delay.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._shape = (mesh.size,)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._max = jax.jit(jnp.max, out_shardings=everywhere)
        self._previous: jax.Array | None = None

    def __call__(self, number: int) -> int:
        """Return the maximum of the previous call's numbers, or 0 in the first call.

        The next call returns the maximum of this call's numbers. With one process, return `number`.
        """
        if num_processes() == 1:
            return number
        own = lambda index: np.full(len(range(*index[0].indices(*self._shape))), number, np.int32)
        votes = jax.make_array_from_callback(self._shape, self._sharding, own)
        previous, self._previous = self._previous, self._max(votes)
        return 0 if previous is None else int(previous)


def finish(timeout: int | float = 3600.0) -> None:
    """Wait until all processes have reached the end of a run that did not fail.

    Without the wait, processes that finish early would regard a slower process as dead.

    Args:
      timeout: the time in seconds; it is long because process 0 may still have to write a
        sample.
    """
    exchange("", "the end of the run", timeout=timeout)


def fail(line: str, code: int) -> NoReturn:
    """Print a line to standard error, and stop this process and all others.

    The process exits immediately, because JAX's own shutdown would wait for processes that may
    never arrive.

    Args:
      line: the line to print.
      code: the exit code of this process. 0 means that everything is saved; the other processes
        then also exit with 0.
    """
    _end(line, code, broadcast={"line": f"process {process_id()}: {line}", "code": code})


ending = threading.Lock()


def _end(line: str, code: int, broadcast: dict[str, Any] | None = None) -> NoReturn:
    """Print `line` and exit with `code`; only the first thread that calls this function does so.

    Args:
      line: the line to print.
      code: the exit code.
      broadcast: the line and code for the other processes, which stop when they read it; or None.
    """
    # From now on, any other thread that calls this function waits until the process exits.
    ending.acquire()
    client = global_state.client
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if broadcast:
            client.key_value_set(f"{_FAILED}{process_id()}", json.dumps(broadcast))
    flush_stdout()
    log_line(f"error: {line}" if code else line)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{_ENDED}{process_id()}", "")
        until = time.monotonic() + _FAREWELL_SECONDS
        # Process 0 hosts the store, so it stays until the other processes have read the reason.
        # Without the store their clients would abort.
        while is_first() and time.monotonic() < until:
            if len(client.key_value_dir_get(_ENDED)) == num_processes():
                break
            time.sleep(LOOK_SECONDS / 10)
    os._exit(code)


def fail_after_device_error(reason: str) -> NoReturn:
    """Stop all processes after communication between devices failed with the error `reason`.

    The usual cause is that another process has died.
    """
    # Wait first, because a process that is about to exit may still report the cause itself.
    time.sleep(3 * LOOK_SECONDS)
    fail(
        f"the computation on devices failed, probably because another process died: {reason}",
        RunError.exit_code,
    )


class _FailureWatcher:
    """A thread that stops this process within seconds after another process reports a failure."""

    def __init__(self):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="failures", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        # Poll, because a long wait in the client could not be interrupted when the process exits.
        while not self._stop.wait(LOOK_SECONDS):
            try:
                failed = global_state.client.key_value_dir_get(_FAILED)
            except jax.errors.JaxRuntimeError:
                return  # JAX's client reports that process 0 cannot be reached.
            if failed and not self._stop.is_set():
                first = json.loads(min(failed)[1])
                _end(first["line"], RunError.exit_code if first["code"] else 0)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
