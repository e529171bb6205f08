"""Functions that report the machine's memory and reduce out-of-memory errors to one line."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rmt_tpu.errors import RmtError, RunError


def train_advice(parts: int) -> str:
    """Return advice for a train step that computes a batch in `parts` parts and needs less memory.

    A run that chooses the number of parts would choose fewer for a smaller batch.
    """
    same = f" with --set=train.accumulate={parts}" if parts > 1 else ""
    return (
        f"use a smaller --batch_size{same}, --set=train.accumulate={parts + 1} or more, "
        "--set=model.remat=full (for an RMT reversible), or, on several devices, --mesh=fsdp=-1; "
        "`python -m recipes.preflight` shows what uses the memory"
    )


def machine_bytes() -> int:
    """Return the bytes of memory that this process can use.

    The number is the size of the machine's memory, or less if cgroups limit the process.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _limits(groups: Path, mounted: Path) -> Iterator[int]:
    """Yield the memory limits of this process's cgroups (v1 and v2) and of their ancestors.

    Args:
      groups: the file that names this process's cgroups.
      mounted: the mount point of the cgroup file systems; in a container it shows only the
        container's cgroup.
    """
    with contextlib.suppress(OSError):  # The file is missing on a system without cgroups.
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                top, name = mounted / "memory", "memory.limit_in_bytes"
            elif not controllers:
                top, name = mounted, "memory.max"
            else:
                continue
            folder = top / path.lstrip("/")
            for group in (g for g in (folder, *folder.parents) if g.is_relative_to(top)):
                # The file is missing, or contains the word "max", if the group has no limit.
                with contextlib.suppress(OSError, ValueError):
                    yield int((group / name).read_text())


def format_bytes(count: int) -> str:
    """Return a number of bytes as text with a unit."""
    size, unit = next((u for u in ((1e9, "GB"), (1e6, "MB")) if count >= u[0]), (1e3, "kB"))
    return f"{count / size:,.1f} {unit}"


@contextlib.contextmanager
def report_out_of_memory(advice: str) -> Iterator[None]:
    """Turn an out-of-memory error in the body of a `with` statement into a one-line RunError.

    The memory may be the host's or a device's.

    Args:
      advice: the end of the error message, which says how the user can reduce the memory needed.
    """
    try:
        yield
    except Exception as error:
        if not is_out(error):
            raise
        # Drop error kinds such as RESOURCE_EXHAUSTED, which parts of XLA put before the message.
        reason = re.sub(r"^([A-Z_]+: |Error \w+ \w+: )*", "", str(error).partition("\n")[0])
        reason = f" ({reason[:300].rstrip('. ')})" if reason else ""
        raise RunError(f"out of memory{reason}: {advice}") from None


def is_out(error: Exception) -> bool:
    """Return whether an error means that there is not enough memory on the host or on a device.

    The error may come from XLA (when a program is compiled or run), NumPy or Python.
    """
    # An RmtError is not a failed allocation, even if its text says that a quota is exhausted.
    if isinstance(error, RmtError):
        return False
    message = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | ValueError)
        and ("RESOURCE_EXHAUSTED" in message or "Out of memory" in message)
    )
