"""Which blocks a kernel is compiled with: those of a table for the device lowered for, or a rule's.

Later tables win: the package's, the user's file, and those of `with tuned(table)`, the innermost
first. Nothing is tuned here, and a table that cannot be used costs a warning and no more.
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
Blocks = Any  # of a kernel: a frozen dataclass or a NamedTuple of whole numbers and truths


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What can be tuned.

    Attributes:
      platform: of the devices that it is for.
      name: of the kernel; one of a platform has it.
      version: another number wherever blocks come to mean something else, or the kernel is
        rewritten: entries of other versions are passed over.
      blocks: their class.
      key: names of what it is specialised to, but for tokens.
      refused: `(key, tokens, blocks)`, why these cannot be compiled or would give other results, in
        a few words; None if they can.
    """

    platform: Platform
    name: str
    version: int
    blocks: type
    key: tuple[str, ...]
    refused: Callable[[dict[str, Value], int, Blocks], str | None]

    def made(self, values: Mapping[str, Value]) -> Blocks:
        """Blocks of their fields.

        Raises:
          ValueError: these are not its fields, or of another type.
        """
        kinds = field_types(self.blocks)
        if values.keys() != kinds.keys():
            raise ValueError(f"blocks of {', '.join(values)}, and not of {', '.join(kinds)}")
        for name, value in values.items():
            if type(value) is not kinds[name] or (kinds[name] is int and value < 1):
                raise ValueError(f"{name}={value!r}")
        return self.blocks(**values)


def field_types(blocks: type) -> dict[str, type]:
    """Of a class of blocks, by the names of its fields."""
    return dict(blocks.__annotations__)


def fields(blocks: Blocks) -> dict[str, Value]:
    """Blocks as a table has them."""
    return {name: getattr(blocks, name) for name in field_types(type(blocks))}


# Those of the packages that have been imported, by platform and name.
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
    """Kernels of one package, by name; `refused` is given the name first, else as in `Kernel`."""
    made = {
        name: Kernel(platform, name, version, blocks, tuple(key), functools.partial(refused, name))
        for name in names
    }
    KERNELS.update({(platform, name): kernel for name, kernel in made.items()})
    return made


@dataclasses.dataclass(frozen=True)
class Look:
    """What was asked for while something was traced, and the answer.

    Attributes:
      device: the slug of the device kind lowered for.
      kernel, key, tokens: what needed blocks.
      default: the rule's.
      chosen: the answer.
      source: of it, as in an entry; "heuristic" is the rule.
      table: the name of the table that has it, or "".
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
        """The answer as an entry."""
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


# The values of a user context are a part of what jitted functions are kept under: a function that
# was traced without a table is traced again with it.
_overlays = jax.make_user_context(default_value=())


@contextlib.contextmanager
def tuned(*tables: Table) -> Iterator[None]:
    """These come before all others, for what is traced within; of several the last."""
    with _overlays((*(_overlays.value or ()), *tables)):
        yield


_collectors = threading.local()


@contextlib.contextmanager
def collecting() -> Iterator[list[Look]]:
    """What this thread looks up within, each once, in order; what is traced already is not."""
    looks: list[Look] = []
    _collectors.lists = (*getattr(_collectors, "lists", ()), looks)
    try:
        yield looks
    finally:
        _collectors.lists = tuple(kept for kept in _collectors.lists if kept is not looks)


def look_up(kernel: Kernel, key: Mapping[str, Value], tokens: int, default: Blocks) -> Blocks:
    """The blocks to compile a kernel with.

    Args:
      kernel: that needs them.
      key: what it is specialised to.
      tokens: that it is for; of other numbers the nearest entry serves, if its blocks do here.
      default: what a rule gives, if there is no entry.
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
    """The implementation that a table says is the fastest on the device lowered for, if one does.

    Without, and on a device that the kernel is for, a line of the log says how to find out: once.
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
    """The entry's blocks, if the kernel can be compiled with them for so many tokens.

    Those that it could not be compiled with even for the entry's own tokens are warned of, once.
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
    """All that may have an entry, the first to look in first."""
    within = tuple(reversed(_overlays.value or ()))
    return [*within, user_table(), package_table(device, kernel)]


# The user's file and the package's ---------------------------------------------------------------


def user_path() -> str | None:
    """Of the user's file: $RMT_TPU_TUNED, or one in the cache folder; None if that is "off"."""
    if given := os.environ.get(VARIABLE):
        return None if given == "off" else given
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
    return os.path.join(cache, "rmt_tpu", "tuned.json")


def user_table() -> Table:
    """What is in the user's file when it is first asked for; empty if there is none.

    One that `RMT_TPU_TUNED` names and that cannot be read is warned of, once.
    """
    path = user_path()
    return Table("") if path is None else _read_table(path)


def read_anew() -> None:
    """Forgets what the files held."""
    _read_table.cache_clear()
    package_table.cache_clear()
    _warn.cache_clear()
    _tell_how.cache_clear()


# How files with these schemes are read: `(url) -> bytes, or None if there is no such file`. What
# raises an OSError or a ValueError is warned of.
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
    """What is shipped for a kernel on a device; empty if there is nothing."""
    name = f"pallas_kernels/tuned/{device}/{kernel}.json"
    file = importlib.resources.files(__package__).joinpath(device, f"{kernel}.json")
    try:
        return parse(file.read_bytes(), name)
    except OSError:
        return Table(name)


def shipped() -> Iterator[tuple[str, str]]:
    """Device and kernel of every table in the package."""
    for folder in importlib.resources.files(__package__).iterdir():
        if folder.is_dir():
            for file in folder.iterdir():
                if file.name.endswith(".json"):
                    yield folder.name, file.name.removesuffix(".json")


def fingerprint() -> str:
    """Of the package's tables and the user's: where it is equal, so are the blocks."""
    texts = [package_table(*where).text() for where in sorted(shipped())]
    return hashlib.sha256("".join((*texts, user_table().text())).encode()).hexdigest()[:12]


@functools.cache
def _warn(message: str) -> None:
    """Once."""
    warnings.warn(message, stacklevel=2)
