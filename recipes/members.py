"""The flags by which several processes are one. No jax: see `program`."""

import sys

from absl import flags

from rmt_tpu.distributed.roll_call import DEFAULT_TIMEOUT, Member, check
from rmt_tpu.errors import UsageError

# Flags that a module of the recipes defines are those of the recipe that has it do so: see --help.
flags.disclaim_key_flags()


def define_distributed_flags() -> None:
    """Flags by which several processes train as one."""
    flags.DEFINE_bool(
        "distributed",
        False,
        "one of several processes; which one is found out on TPU slices and in SLURM, Open MPI and "
        "Kubernetes jobs, and said by --coordinator, --num_processes and --process_id elsewhere",
    )
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, the same for all")
    flags.DEFINE_integer("num_processes", None, "how many there are, the same for all")
    flags.DEFINE_integer("process_id", None, "which one this is, from 0")
    flags.DEFINE_float(
        "distributed_timeout",
        DEFAULT_TIMEOUT,
        "seconds to wait for other processes, at the start and at each checkpoint",
    )


def check_member() -> Member | None:
    """The process that --coordinator and the flags beside it say that this is, if they are given.

    Raises:
      UsageError: they do not say which process this is, or it cannot be one.
    """
    given = {name: flags.FLAGS[name].value for name in ("coordinator", *Member._fields[1:])}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if not missing:
        member = Member(*given.values())
        check(member)
        return member
    if len(missing) < len(given):
        raise UsageError(f"{' and '.join(missing)} must be given with the other flags of a process")
    return None


def join_processes() -> bool:
    """Joins the other processes, if the flags say that there are any; before devices are touched.

    Returns:
      Whether they do.

    Raises:
      UsageError: the flags do not say which process this is.
      RunError: the processes are not all there, or do not fit together.
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
        f"process {member.process_id} of {member.num_processes} has joined"
        + ("" if processes.is_first() else "; process 0 tells how the run goes"),
        file=sys.stderr,
        flush=True,
    )
    return True
