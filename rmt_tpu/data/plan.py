"""The plan of a token store: its parts, and all that has to be the same to go on with it."""

import itertools
import math
import os
import zlib
from collections.abc import Iterator
from typing import Any

from rmt_tpu.data.corpus import divide
from rmt_tpu.data.inputs import Span
from rmt_tpu.data.token_store import TokenizerOfStore, seal
from rmt_tpu.data.tokenizer import Tokenizer
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import Folder

# Parts are small enough to be done again and to be divided among processes, but not so small or so
# many that their files become a burden.
_LEAST_PART, _USUAL_PART, _MOST_PARTS = 2**20, 64 * 2**20, 4096


def usual_part_bytes(total: int) -> int:
    """Return the size of parts for an input of `total` bytes."""
    return max(min(max(total // 64, _LEAST_PART), _USUAL_PART), math.ceil(total / _MOST_PARTS))


def parts(files: list[Span], part_bytes: int) -> Iterator[tuple[Span, ...]]:
    """Yield the parts, each of which is spans of one large file or of several small ones.

    Raises:
      Problem: a file cannot be read.
    """
    part, size = [], 0
    for span in itertools.chain.from_iterable(divide(file, part_bytes) for file in files):
        part.append(span)
        size += span.stop - span.start
        if size >= part_bytes:
            yield tuple(part)
            part, size = [], 0
    if part:
        yield tuple(part)


def plan_of(
    files: list[Span],
    num_parts: int,
    part_bytes: int,
    tokenizer: Tokenizer,
    eval_fraction: int | float,
    seed: int,
) -> dict[str, Any]:
    """Return the content of plan.json.

    It has no digests of the files' contents; the parts have those.
    """
    return {
        "tokenizer": TokenizerOfStore.of(tokenizer)._asdict(),
        "eval_fraction": eval_fraction,
        "seed": seed,
        "part_bytes": part_bytes,
        "num_parts": num_parts,
        "sources": [_source(file) for file in files],
    }


def plan_id(plan: dict[str, Any]) -> int:
    """Return a checksum of the plan, by which parts know which store they belong to."""
    return zlib.crc32(seal(plan))


def _source(file: Span) -> list[Any]:
    """Return a file's name and size, and for an object also crc32c and generation.

    The path is not included, because it may differ between processes and may be private.
    """
    version = file.version if file.in_bucket else file.version[:1]
    return [os.path.basename(file.path), *version]


def check_same(folder: Folder, old: Any, new: dict[str, Any]) -> None:
    """Check that the store in the folder has the plan `new`.

    Raises:
      UsageError: it has another plan.
    """
    if old == new:
        return
    old = old if isinstance(old, dict) else {}
    different = [
        f"{name} {old.get(name)} is now {new[name]}"
        for name in ("eval_fraction", "seed", "part_bytes")
        if old.get(name) != new[name]
    ]
    if (tokenizer := old.get("tokenizer")) != new["tokenizer"]:
        tokenizer = tokenizer.get("name") if isinstance(tokenizer, dict) else None
        again = " of other files" if tokenizer == new["tokenizer"]["name"] else ""
        different.append(f"tokenizer {tokenizer} is now {new['tokenizer']['name']}{again}")
    if (sources := old.get("sources")) != new["sources"]:
        different.append(_different_input(sources, new["sources"]))
    changed = "the content of its input has changed"  # the content then divides into other parts
    raise UsageError(
        f"--output={folder.url} is of another command: {'; '.join(different) or changed}. "
        "Give the same input and flags to go on, or another --output"
    )


def _different_input(old: Any, new: list[list[Any]]) -> str:
    if not isinstance(old, list) or len(old) != len(new):
        count = len(old) if isinstance(old, list) else 0
        return f"the input of {count} files is now of {len(new)}"
    was, now = next((was, now) for was, now in zip(old, new, strict=True) if was != now)
    if was[:2] != now[:2]:
        return f"the input {was[0]!r} of {was[1]} bytes is now {now[0]!r} of {now[1]}"
    if len(was) == len(now) and was[2] == now[2]:
        return f"{now[0]!r} was written again, if with the same content"
    return f"the content of {now[0]!r} has changed"
