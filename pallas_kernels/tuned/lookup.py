"""Choice of the block sizes of a kernel: from a table for the device lowered for, or by a rule.

Later tables win over earlier ones: the package's, the user's file, and the tables of
`with tuned(table)`, where the innermost wins. This module does not tune, and a table that cannot be
used costs only a warning.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.resources
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.target import Platform, target
from pallas_kernels.tuned.table import Entry, Items, Table, Value, items, parse

VARIABLE = "RMT_TPU_TUNED"
Blocks = Any  # A kernel's frozen dataclass or NamedTuple of integers and booleans.


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that can be tuned.

    Attributes:
      platform: the platform of the devices that it is for.
      name: the kernel's name, unique on its platform.
      version: a number that changes if blocks change their meaning or the kernel is rewritten;
        entries of other versions are ignored.
      blocks: the class of its blocks.
      key: the names of the values that it is specialised to, except for tokens.
      refused: a function of `(key, tokens, blocks)` that returns in a few words why these blocks
        cannot be compiled or would give other results; None if they can be used.
    """

    platform: Platform
    name: str
    version: int
    blocks: type
    key: tuple[str, ...]
    refused: Callable[[dict[str, Value], int, Blocks], str | None]

    def made(self, values: Mapping[str, Value]) -> Blocks:
        """Return blocks with these values as fields.

        Raises:
          ValueError: the names or types do not match the fields.
        """
        kinds = field_types(self.blocks)
        if values.keys() != kinds.keys():
            raise ValueError(f"blocks of {', '.join(values)}, and not of {', '.join(kinds)}")
        for name, value in values.items():
            if type(value) is not kinds[name] or (kinds[name] is int and value < 1):
                raise ValueError(f"{name}={value!r}")
        return self.blocks(**values)


def field_types(blocks: type) -> dict[str, type]:
    """Return the types of the fields of a class of blocks, by name."""
    return dict(blocks.__annotations__)


def fields(blocks: Blocks) -> dict[str, Value]:
    """Return blocks as a table lists them: a value for each field."""
    return {name: getattr(blocks, name) for name in field_types(type(blocks))}


# The kernels of the packages that have been imported, by platform and name.
KERNELS: dict[tuple[str, str], Kernel] = {}


def register(
    platform: Platform,
    names: Iterable[str],
    blocks: type,
    key: Iterable[str],
    refused: Callable[[str, dict[str, Value], int, Blocks], str | None],
    *,
    version: int = 1,
) -> dict[str, Kernel]:
    """Register one package's kernels; `refused` gets the name first, else it is as in `Kernel`."""
    made = {
        name: Kernel(platform, name, version, blocks, tuple(key), functools.partial(refused, name))
        for name in names
    }
    KERNELS.update({(platform, name): kernel for name, kernel in made.items()})
    return made


@dataclasses.dataclass(frozen=True)
class Look:
    """A request for blocks while something was traced, and its answer.

    Attributes:
      device: the slug of the device kind lowered for.
      kernel, key, tokens: the kernel that needed blocks, its key and its number of tokens.
      default: the blocks of the rule.
      chosen: the blocks that were chosen.
      source: the source of the chosen blocks, as in an entry; "heuristic" means the rule.
      table: the name of the table that lists them, or "".
    """

    device: str
    kernel: Kernel
    key: Items
    tokens: int
    default: Blocks
    chosen: Blocks
    source: str = "heuristic"
    table: str = ""

    def entry(self) -> Entry:
        """Return the answer as an entry."""
        return Entry(
            self.device,
            self.kernel.name,
            self.kernel.version,
            self.key,
            self.tokens,
            items(fields(self.chosen)),
            self.source,
            table=self.table,
        )


# The value of a user context is part of the cache key of jitted functions: a function that was
# traced without a table is traced again with it.
_overlays = jax.make_user_context(default_value=())


@contextlib.contextmanager
def tuned(*tables: Table) -> Iterator[None]:
    """Use these tables before all others for what is traced in the context; the last one first."""
    with _overlays((*(_overlays.value or ()), *tables)):
        yield


_collectors = threading.local()


@contextlib.contextmanager
def collecting() -> Iterator[list[Look]]:
    """Collect this thread's look-ups in the context, each once, in order.

    Functions that are already traced do not look up again.
    """
    looks: list[Look] = []
    _collectors.lists = (*getattr(_collectors, "lists", ()), looks)
    try:
        yield looks
    finally:
        _collectors.lists = tuple(kept for kept in _collectors.lists if kept is not looks)


def look_up(kernel: Kernel, key: Mapping[str, Value], tokens: int, default: Blocks) -> Blocks:
    """Return the blocks to compile a kernel with.

    Args:
      kernel: the kernel that needs them.
      key: the values that it is specialised to.
      tokens: the number of tokens. An entry for another, nearby number is used if its blocks can be
        compiled for this one.
      default: the blocks of the rule, for when there is no entry.
    """
    device = target().slug
    if target().platform != kernel.platform:
        return default
    look = _looked_up(kernel, dict(key), tokens, default, device)
    for looks in getattr(_collectors, "lists", ()):
        if look not in looks:
            looks.append(look)
    return look.chosen


def _looked_up(kernel: Kernel, key: dict[str, Value], tokens: int, default, device: str) -> Look:
    look = Look(device, kernel, items(key), tokens, default, default)
    for table in tables(device, kernel.name):
        for entry in table.candidates(device, kernel.name, look.key, tokens):
            blocks = usable(entry, kernel, tokens, table.name)
            if blocks is not None:
                return dataclasses.replace(
                    look, chosen=blocks, source=entry.source, table=table.name
                )
    return look


def winner(kernel: Kernel, key: Mapping[str, Value], tokens: int) -> str | None:
    """Return the implementation that a table lists as the fastest on the device lowered for.

    Without an entry the result is None. On a device that the kernel is for, a line of the log then
    says once how to find out.
    """
    device = target().slug
    if target().platform != kernel.platform:
        return None
    for table in tables(device, kernel.name):
        for entry in table.candidates(device, kernel.name, items(key), tokens):
            if entry.implementation is not None and entry.kernel_version == kernel.version:
                return entry.implementation
    _tell_how(target().kind)
    return None


@functools.cache
def _tell_how(kind: str) -> None:
    logging.getLogger("pallas_kernels").warning(
        "plain XLA in place of kernels on %s: `python -m recipes.autotune --device` finds out "
        "which are faster here, and these are then taken",
        kind,
    )


def usable(entry: Entry, kernel: Kernel, tokens: int, table: str) -> Blocks | None:
    """Return the entry's blocks if the kernel can be compiled with them for this many tokens.

    A warning is given once if it cannot be compiled with them even for the entry's own tokens.
    """
    if not entry.blocks:
        return None
    why = None
    if entry.kernel_version != kernel.version:
        why = (
            f"it is of version {entry.kernel_version} of the kernel, which is at {kernel.version}; "
            "recipes.autotune finds another"
        )
    else:
        try:
            blocks, key = kernel.made(dict(entry.blocks)), dict(entry.key)
            why = kernel.refused(key, entry.tokens, blocks)
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            why = str(error)
    if why is not None:
        _warn(f"{table}: an entry of {entry.kernel} on {entry.device} is passed over: {why}")
        return None
    if tokens != entry.tokens and kernel.refused(key, tokens, blocks) is not None:
        return None
    return blocks


def tables(device: str, kernel: str) -> list[Table]:
    """Return all tables that may have an entry, in the order in which to search them."""
    within = tuple(reversed(_overlays.value or ()))
    return [*within, user_table(), package_table(device, kernel)]


# The user's file and the package's ---------------------------------------------------------------


def user_path() -> str | None:
    """Return the user's file: $RMT_TPU_TUNED or one in the cache folder; None if that is "off"."""
    if given := os.environ.get(VARIABLE):
        return None if given == "off" else given
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
    return os.path.join(cache, "rmt_tpu", "tuned.json")


def user_table() -> Table:
    """Return the user's table, read when it is first requested; empty if there is no file.

    A file that `RMT_TPU_TUNED` names and that cannot be read gives a warning, once.
    """
    path = user_path()
    return Table("") if path is None else _read_table(path)


def read_anew() -> None:
    """Forget the contents of all files, so that they are read again."""
    _read_table.cache_clear()
    package_table.cache_clear()
    _warn.cache_clear()
    _tell_how.cache_clear()


# Functions that read files with these schemes: `(url) -> bytes, or None if there is no such file`.
# An OSError or a ValueError becomes a warning.
READERS: dict[str, Callable[[str], bytes | None]] = {}


@functools.cache
def _read_table(path: str) -> Table:
    scheme, separator, _ = path.partition("://")
    try:
        if separator:
            reader = READERS.get(scheme)
            if reader is None:
                raise OSError(f"{scheme}:// needs rmt_tpu, which is not loaded")
            content = reader(path)
        else:
            file = Path(path).expanduser()
            content = file.read_bytes() if file.exists() else None
    except (OSError, ValueError) as error:
        _warn(f"{path} is passed over: {' '.join(str(error).split())}")
        return Table(path)
    if content is None:
        if os.environ.get(VARIABLE):
            _warn(f"{VARIABLE}={path} is not there: block sizes are chosen without it")
        return Table(path)
    table = parse(content, path)
    if table.faults:
        more = f" ({len(table.faults)} like this)" if len(table.faults) > 1 else ""
        _warn(table.faults[0] + more)
    return table


@functools.cache
def package_table(device: str, kernel: str) -> Table:
    """Return the table that is shipped for a kernel on a device; empty if there is none."""
    name = f"pallas_kernels/tuned/{device}/{kernel}.json"
    file = importlib.resources.files(__package__).joinpath(device, f"{kernel}.json")
    try:
        return parse(file.read_bytes(), name)
    except OSError:
        return Table(name)


def shipped() -> Iterator[tuple[str, str]]:
    """Yield the device and the kernel of every table in the package."""
    for folder in importlib.resources.files(__package__).iterdir():
        if folder.is_dir():
            for file in folder.iterdir():
                if file.name.endswith(".json"):
                    yield folder.name, file.name.removesuffix(".json")


def fingerprint() -> str:
    """Return a hash of the package's and the user's tables; equal hashes mean equal blocks."""
    texts = [package_table(*where).text() for where in sorted(shipped())]
    return hashlib.sha256("".join((*texts, user_table().text())).encode()).hexdigest()[:12]


@functools.cache
def _warn(message: str) -> None:
    """Give this warning once."""
    warnings.warn(message, stacklevel=2)
