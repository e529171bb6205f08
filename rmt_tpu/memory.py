"""Memory: how much there is, and that it is out, told in one line."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rmt_tpu.errors import RmtError, RunError

TRAIN_ADVICE = (
    "less is taken with a smaller --batch_size, --set=train.accumulate=2 or more, "
    "--set=model.remat=full, and on several devices --mesh=fsdp=-1; `python -m recipes.preflight` "
    "shows what takes how much"
)


def of_machine() -> int:
    """Bytes that this process can have: the machine's, or fewer by its control groups."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([there, *_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _limits(groups: Path, mounted: Path) -> Iterator[int]:
    """Of the control groups that a process is in, and of those above, in both of their versions.

    Args:
      groups: the file that names them.
      mounted: the folder of all; in a container its top is the container's own.
    """
    with contextlib.suppress(OSError):  # there are none here
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
                with contextlib.suppress(OSError, ValueError):  # not seen from here, or "max"
                    yield int((group / name).read_text())


def told(count: int) -> str:
    """Bytes for a person."""
    size, unit = next((u for u in ((1e9, "GB"), (1e6, "MB")) if count >= u[0]), (1e3, "kB"))
    return f"{count / size:,.1f} {unit}"


@contextlib.contextmanager
def told_if_out(advice: str) -> Iterator[None]:
    """A host or a device that has no memory left for what is done within is a RunError.

    Args:
      advice: what a person can do.
    """
    try:
        yield
    except Exception as error:
        if not is_out(error):
            raise
        # Without the kinds of error that XLA's layers put in front.
        reason = re.sub(r"^([A-Z_]+: |Error \w+ \w+: )*", "", str(error).partition("\n")[0])
        reason = f" ({reason[:300].rstrip('. ')})" if reason else ""
        raise RunError(f"out of memory{reason}: {advice}") from None


def is_out(error: Exception) -> bool:
    """Whether XLA, its runtime, numpy or Python says so; at compile time too."""
    if isinstance(error, RmtError):  # a store's quota, say
        return False
    said = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | ValueError)
        and ("RESOURCE_EXHAUSTED" in said or "Out of memory" in said)
    )
