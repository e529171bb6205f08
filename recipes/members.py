"""The flags for training one run with several processes.

This module does not import jax, because the import is slow.
"""

import os
import sys

from absl import flags

from rmt_tpu import streams
from rmt_tpu.distributed.rendezvous import DEFAULT_TIMEOUT, Member, validate
from rmt_tpu.errors import UsageError

# The flags defined here count as flags of the recipe that calls these functions, so that its --help
# lists them.
flags.disclaim_key_flags()


def define_distributed_flags() -> None:
    """Define the flags that connect several processes to one run."""
    flags.DEFINE_bool(
        "distributed",
        False,
        "train one run with several processes; the number of this process is detected on TPU "
        "slices and in SLURM, Open MPI and Kubernetes jobs; elsewhere, set --coordinator, "
        "--num_processes and --process_id",
    )
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, the same for all processes")
    flags.DEFINE_integer("num_processes", None, "number of processes, the same for all processes")
    flags.DEFINE_integer("process_id", None, "number of this process, from 0")
    flags.DEFINE_float(
        "distributed_timeout",
        DEFAULT_TIMEOUT,
        "seconds to wait for other processes, at the start and at each checkpoint",
    )


def check_member() -> Member | None:
    """Return the process described by --coordinator, --num_processes and --process_id, or None.

    Raises:
      UsageError: only some of these flags are given, or their values are not valid.
    """
    values = {name: flags.FLAGS[name].value for name in Member._fields}
    missing = [f"--{name}" for name, value in values.items() if value is None]
    if not missing:
        member = Member(**values)
        validate(member)
        return member
    if len(missing) < len(values):
        raise UsageError(
            "--coordinator, --num_processes and --process_id must be given together; missing: "
            + ", ".join(missing)
        )
    return None


def join_processes() -> bool:
    """Connect to the other processes, if the flags describe any; call this before using devices.

    Returns:
      Whether this is one of several processes.

    Raises:
      UsageError: the flags do not identify this process.
      RunError: some processes are missing, or the processes are not compatible.
    """
    timeout = flags.FLAGS.distributed_timeout
    member, devices = check_member(), None
    if member is None:
        if not flags.FLAGS.distributed:
            return False
        from rmt_tpu.distributed import processes

        member, devices = processes.find_member(timeout)
    from rmt_tpu.distributed import processes

    processes.initialize(member, timeout=timeout, local_device_ids=devices)
    print(
        f"process {member.process_id} of {member.num_processes} has connected"
        + ("" if processes.is_first() else "; process 0 prints the progress"),
        file=sys.stderr,
        flush=True,
    )
    return True


def hush_gloo() -> None:
    """Discard the connection messages of Gloo, the library of collective operations on CPUs.

    Gloo prints these messages to standard output, which is reserved for results. Each process calls
    this function after all processes have connected.
    """
    import jax

    if jax.default_backend() != "cpu":
        return  # NCCL, the library for GPUs, prints to standard output only on request.
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    stream = open(stdout_copy, "w", encoding=sys.stdout.encoding, closefd=False)
    sys.stdout = streams.SafeStream(stream)
