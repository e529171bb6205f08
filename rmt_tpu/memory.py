"""Out of memory, told in one line."""

import contextlib
import re
from collections.abc import Iterator

from rmt_tpu.errors import RmtError, RunError

TRAIN_ADVICE = (
    "less is taken with a smaller --batch_size, --set=train.accumulate=2 or more, "
    "--set=model.remat=full, and on several devices --mesh=fsdp=-1; `python -m recipes.preflight` "
    "shows what takes how much"
)


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
