"""The plan of a token store: its division into parts, and the arguments that must not change.

A call that resumes the preparation of a store must have the same arguments.

A part is a piece of the input text that is tokenised and stored independently of the others.
"""

import contextlib
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterator
from typing import Any

from rmt_tpu.data.chat import CONFIG_FILE, ChatTemplate
from rmt_tpu.data.corpus import divide
from rmt_tpu.data.inputs import Span
from rmt_tpu.data.marked import USUAL_FIELD, Reading
from rmt_tpu.data.token_store import MANIFEST, PARTS, PLAN, TokenizerOfStore, read_sealed, seal
from rmt_tpu.data.tokenizer import FILE, Tokenizer, digest
from rmt_tpu.data.tokenizer_files import load_saved
from rmt_tpu.errors import RmtError, UsageError, flag_errors
from rmt_tpu.storage import Folder

# Minimum and usual size of a part in bytes, and maximum number of parts. Parts are small, so that
# little work is lost in an interruption and processes get equal shares. They are not smaller, so
# that there are few files.
_LEAST_PART, _USUAL_PART, _MOST_PARTS = 2**20, 64 * 2**20, 4096

# The names of a config in a run or a model, and of the checkpoints in a run.
_CONFIG, _CHECKPOINTS = "config.json", "checkpoints"


def usual_part_bytes(total: int) -> int:
    """Return the default size of a part, in bytes, for an input of `total` bytes."""
    return max(min(max(total // 64, _LEAST_PART), _USUAL_PART), math.ceil(total / _MOST_PARTS))


def parts(files: list[Span], part_bytes: int) -> Iterator[tuple[Span, ...]]:
    """Yield the parts; a part consists of one span of a large file, or of several small files.

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
    reading: Reading,
    template: ChatTemplate | None,
) -> dict[str, Any]:
    """Return the content of plan.json.

    Digests of the input files are not included, because the manifests of the parts have them.
    """
    # Default values are left out, so that plans still equal those of stores that were made before
    # these arguments existed.
    field = {} if reading.field == USUAL_FIELD else {"text_field": reading.field}
    if reading.has_marks:
        field["format"] = reading.kind
    if template is not None:
        field["chat_template"] = digest(template.json())
    return {
        "tokenizer": TokenizerOfStore.of(tokenizer)._asdict(),
        "eval_fraction": eval_fraction,
        "seed": seed,
        "part_bytes": part_bytes,
        "num_parts": num_parts,
        "sources": [_source(file) for file in files],
        **field,
    }


def plan_id(plan: dict[str, Any]) -> int:
    """Return a checksum of the plan, which the manifest of each part records."""
    return zlib.crc32(seal(plan))


def _source(file: Span) -> list[Any]:
    """Return the name and size of a file, and for an object in a bucket its crc32c and generation.

    The folder is not included, because it may differ between processes and may be private.
    """
    version = file.version if file.in_bucket else file.version[:1]
    return [os.path.basename(file.path), *version]


def check_same(folder: Folder, old: Any, new: dict[str, Any]) -> None:
    """Check that the plan `old` of the store in a folder equals the plan `new`.

    Raises:
      UsageError: the plans differ; the message lists the differences.
    """
    if old == new:
        return
    old = old if isinstance(old, dict) else {}
    different = [
        f"{name} {old.get(name)} is now {new[name]}"
        for name in ("eval_fraction", "seed", "part_bytes")
        if old.get(name) != new[name]
    ]
    fields = [each.get("text_field", USUAL_FIELD) for each in (old, new)]
    if fields[0] != fields[1]:
        different.append(f"text_field {fields[0]} is now {fields[1]}")
    formats = [each.get("format", "text") for each in (old, new)]
    if formats[0] != formats[1]:
        different.append(f"format {formats[0]} is now {formats[1]}")
    elif old.get("chat_template") != new.get("chat_template"):
        different.append("the chat template has changed")
    if (tokenizer := old.get("tokenizer")) != new["tokenizer"]:
        tokenizer = tokenizer.get("name") if isinstance(tokenizer, dict) else None
        again = " with other files" if tokenizer == new["tokenizer"]["name"] else ""
        different.append(f"tokenizer {tokenizer} is now {new['tokenizer']['name']}{again}")
    if (sources := old.get("sources")) != new["sources"]:
        different.append(_different_input(sources, new["sources"]))
    # If no argument differs, only the division into parts can differ, so the content of the input
    # must have changed.
    changed = "the content of its input has changed"
    raise UsageError(
        f"--output={folder.url} was made from other input or with other flags: "
        f"{'; '.join(different) or changed}. "
        "Give the same input and flags to resume, give another --output, or delete this folder"
    )


def _different_input(old: Any, new: list[list[Any]]) -> str:
    if not isinstance(old, list) or len(old) != len(new):
        count = len(old) if isinstance(old, list) else 0
        return f"the input had {count} files and now has {len(new)}"
    was, now = next((was, now) for was, now in zip(old, new, strict=True) if was != now)
    if was[:2] != now[:2]:
        return f"the input {was[0]!r} of {was[1]} bytes is now {now[0]!r} of {now[1]} bytes"
    if len(was) == len(now) and was[2] == now[2]:
        return f"{now[0]!r} was written again, with the same content"
    return f"the content of {now[0]!r} has changed"


# The plan in the folder of the store --------------------------------------------------------------


def write(
    folder: Folder, plan: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None
) -> None:
    """Write plan, tokenizer and template to a new store; for an existing store, check its plan.

    A complete store gets its tokenizer or its template again if the file is missing or has changed.

    Raises:
      UsageError: the store cannot be written to, has a different plan, or is a folder that holds
        something else.
    """
    with flag_errors("output"):
        folder.check()
        _check_unused(folder)
        folder.check(write=True)
    if (complete := read_sealed(folder, MANIFEST)) is not None:
        check_same(folder, complete.get("plan"), plan)
    elif not folder.create(PLAN, seal(plan)):
        check_same(folder, read_sealed(folder, PLAN), plan)
    # Other commands may be reading a store, so leave its files as they are if possible.
    if not _has_tokenizer(folder, tokenizer):
        if folder.read(_CONFIG) is not None:
            raise UsageError(
                f"--output={folder.url} also holds a run, whose tokenizer the store's would "
                f"replace; move {_CONFIG}, {_CHECKPOINTS} and the run's other files away"
            )
        tokenizer.save(folder)
    if template is not None and not _has_template(folder, template):
        template.save(folder)


def _has_tokenizer(folder: Folder, tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer in a folder encodes text like the given one."""
    try:
        return load_saved(folder).fingerprint() == tokenizer.fingerprint()
    except UsageError:  # The file is missing or damaged.
        return False


def _has_template(folder: Folder, template: ChatTemplate) -> bool:
    """Return whether the chat template in a folder is the given one."""
    found = folder.read(CONFIG_FILE)
    try:
        return found is not None and json.loads(found.data) == template.json()
    except (ValueError, RecursionError):
        return False


@contextlib.contextmanager
def deleted_unless_begun(folder: Folder, plan: dict[str, Any]) -> Iterator[None]:
    """Delete what `write` wrote if the body raises a UsageError and no part is finished.

    After the input has been mended, the same command can then make the store.
    """
    try:
        yield
    except UsageError:
        with contextlib.suppress(RmtError):  # The error in the input is the one to report.
            if not _has_begun(folder) and read_sealed(folder, PLAN) == plan:
                template = [CONFIG_FILE] if "chat_template" in plan else []
                # Delete the plan last, because without it a tokenizer counts as another program's.
                for name in (*template, FILE, PLAN):
                    folder.delete(name)
        raise


def _has_begun(folder: Folder) -> bool:
    """Return whether any part of a store is finished."""
    parts = (f"{PARTS}/{name.rstrip('/')}" for name in folder.names(PARTS))
    return any(MANIFEST in folder.names(part) for part in parts)


def _check_unused(folder: Folder) -> None:
    """Check that a folder holds no files of others that a store would replace.

    Raises:
      UsageError: the folder holds a run, a model or a tokenizer, or is the checkpoints of a run.
    """
    legal = "legal: a new folder, or the store to resume"
    names = set(folder.names())
    # Another command may be making the store, so read the plan after the names. It is written
    # before the tokenizer.
    if any(read_sealed(folder, name) for name in (PLAN, MANIFEST)):
        return
    if {_CONFIG, f"{_CHECKPOINTS}/"} & names:
        raise UsageError(
            f"{folder.url} has a {_CONFIG} or {_CHECKPOINTS}, like a run or a model; {legal}"
        )
    path = folder.local_path
    for inner in (path, *path.parents) if path is not None else ():
        if inner.name == _CHECKPOINTS and os.path.isfile(inner.parent / _CONFIG):
            raise UsageError(f"{folder.url} is in the folder of a run; {legal}")
    if {FILE, CONFIG_FILE} & names:
        raise UsageError(f"{folder.url} holds a tokenizer; {legal}")
