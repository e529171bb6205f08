"""Selection of a kernel's block sizes for the device that a program is compiled for.

The block sizes come from the first table with a usable entry. The tables of `with tuned(table)` are
searched first, starting with the innermost context, then the user's file, and last the table in the
package. If no table has a usable entry, the kernel's own rule (its heuristic) selects the block
sizes. A table that cannot be read causes a warning, not an error.
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
# A kernel's block sizes: a frozen dataclass or a NamedTuple whose fields are integers and booleans.
Blocks = Any


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel whose block sizes can be tuned.

    Attributes:
      platform: the platform that the kernel is for.
      name: the kernel's name, unique on its platform.
      version: a number that changes when the kernel is rewritten or its block sizes change meaning.
        Table entries with a different version are ignored.
      blocks: the class of the kernel's block sizes.
      key: the names of the sizes and options that the kernel is specialised to, without the number
        of tokens.
      refused: a function of `(key, tokens, blocks)`. It returns None if these block sizes can be
        used. If they cannot be compiled or would change the results, it returns the reason in a few
        words.
    """

    platform: Platform
    name: str
    version: int
    blocks: type
    key: tuple[str, ...]
    refused: Callable[[dict[str, Value], int, Blocks], str | None]

    def build_blocks(self, values: Mapping[str, Value]) -> Blocks:
        """Return the kernel's block sizes with these field values, as an instance of `blocks`.

        Raises:
          ValueError: the names or types do not match the fields, or an integer is less than 1.
        """
        kinds = field_types(self.blocks)
        if values.keys() != kinds.keys():
            raise ValueError(
                f"the entry's blocks have the fields {', '.join(values)}; legal: {', '.join(kinds)}"
            )
        for name, value in values.items():
            if type(value) is not kinds[name] or (kinds[name] is int and value < 1):
                least = ", at least 1" if kinds[name] is int else ""
                raise ValueError(
                    f"the block size {name}={value!r} is not legal; legal: "
                    f"{kinds[name].__name__}{least}"
                )
        return self.blocks(**values)


def field_types(blocks: type) -> dict[str, type]:
    """Return a dict that maps the field names of a class of block sizes to their types."""
    return dict(blocks.__annotations__)


def fields(blocks: Blocks) -> dict[str, Value]:
    """Return block sizes as a dict from field names to values, as tables store them."""
    return {name: getattr(blocks, name) for name in field_types(type(blocks))}


# Maps (platform, name) to each tunable kernel whose package is imported.
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
    """Register the tunable kernels of one package, and return a dict that maps names to kernels.

    The arguments are the fields of `Kernel`, for all kernels named in `names`. `refused` has the
    kernel's name as an additional first argument.
    """
    made = {
        name: Kernel(platform, name, version, blocks, tuple(key), functools.partial(refused, name))
        for name in names
    }
    KERNELS.update({(platform, name): kernel for name, kernel in made.items()})
    return made


@dataclasses.dataclass(frozen=True)
class Look:
    """A look-up of a kernel's block sizes during tracing, and its result.

    Attributes:
      device: the slug of the device kind that the program is compiled for.
      kernel, key, tokens: the kernel, its key and its number of tokens.
      default: the block sizes that the kernel's own rule (heuristic) selects.
      chosen: the block sizes that the look-up returned.
      source: the source of `chosen`, as in `Entry`; "heuristic" if no table had a usable entry.
      table: the name of the table that lists `chosen`, or "" if there is none.
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
        """Return the result of the look-up as a table entry."""
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


# The tables of `tuned` are in a user context because JAX includes user contexts in the cache keys
# of jitted functions. A function that was traced without a table is traced again when a table is
# added.
_overlays = jax.make_user_context(default_value=())


@contextlib.contextmanager
def tuned(*tables: Table) -> Iterator[None]:
    """Search the given tables before all others, for kernels that are traced in this context.

    If several of the tables have a usable entry, the last such table is used.
    """
    with _overlays((*(_overlays.value or ()), *tables)):
        yield


_collectors = threading.local()


@contextlib.contextmanager
def collecting() -> Iterator[list[Look]]:
    """Yield a list, and append to it each new look-up of this thread.

    The list grows until the context ends, and has no duplicates. Look-ups happen during tracing, so
    a jitted function that is already traced adds none.
    """
    looks: list[Look] = []
    _collectors.lists = (*getattr(_collectors, "lists", ()), looks)
    try:
        yield looks
    finally:
        _collectors.lists = tuple(x for x in _collectors.lists if x is not looks)


def look_up(
    kernel: Kernel,
    key: Mapping[str, Value],
    tokens: int,
    default: Blocks,
    *,
    fixed: bool = False,
) -> Blocks:
    """Return the block sizes for a kernel: those of the best table entry, or else `default`.

    Args:
      kernel: the kernel to compile.
      key: the sizes and options that the kernel is specialised to.
      tokens: the number of tokens. If the tables have no entry for this number, an entry for a
        similar number is used, provided that its block sizes can be compiled for `tokens`.
      default: the block sizes to use if there is no usable entry.
      fixed: whether to use `default` whatever the tables list. The call is still collected, so that
        a search finds the kernel and can say whether it is faster than plain JAX.
    """
    device = target().slug
    if target().platform != kernel.platform:
        return default
    look = Look(device, kernel, items(key), tokens, default, default)
    look = look if fixed else _with_tables(look)
    for looks in getattr(_collectors, "lists", ()):
        if look not in looks:
            looks.append(look)
    return look.chosen


def _with_tables(look: Look) -> Look:
    kernel, tokens = look.kernel, look.tokens
    for table in tables(look.device, kernel.name):
        for entry in table.candidates(look.device, kernel.name, look.key, tokens):
            blocks = usable(entry, kernel, tokens, table.name)
            if blocks is not None:
                return dataclasses.replace(
                    look, chosen=blocks, source=entry.source, table=table.name
                )
    return look


def winner(kernel: Kernel, key: Mapping[str, Value], tokens: int) -> str | None:
    """Return the implementation that a table lists as the fastest on the target device.

    The result is None if no table has such an entry. In this case, if the kernel supports the
    device, a message is logged once per device kind. It explains how to measure which
    implementation is faster.
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
        "using plain XLA instead of the kernels on %s; run `python -m recipes.autotune --device` "
        "to measure which kernels are faster here and to use those",
        kind,
    )


def usable(entry: Entry, kernel: Kernel, tokens: int, table: str) -> Blocks | None:
    """Return the entry's block sizes if they can be used for `tokens` tokens, or else None.

    If the kernel cannot use the block sizes even for the entry's own number of tokens, the entry is
    invalid, and one warning states the reason.
    """
    if not entry.blocks:
        return None
    why = None
    if entry.kernel_version != kernel.version:
        why = (
            f"it is for version {entry.kernel_version} of the kernel, whose version is now "
            f"{kernel.version}; run recipes.autotune to replace it"
        )
    else:
        try:
            blocks, key = kernel.build_blocks(dict(entry.blocks)), dict(entry.key)
            why = kernel.refused(key, entry.tokens, blocks)
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            why = str(error)
    if why is not None:
        _warn(f"{table}: the entry for {entry.kernel} on {entry.device} is ignored: {why}")
        return None
    if tokens != entry.tokens and kernel.refused(key, tokens, blocks) is not None:
        return None
    return blocks


def tables(device: str, kernel: str) -> list[Table]:
    """Return all tables that may have a kernel's block sizes for a device, in search order."""
    within = tuple(reversed(_overlays.value or ()))
    return [*within, user_table(), package_table(device, kernel)]


# Reading the user's table and the package's tables ---------------------------------------------


def user_path() -> str | None:
    """Return the path of the user's table, or None if $RMT_TPU_TUNED is "off".

    The path is $RMT_TPU_TUNED if that is set, and otherwise a file in the user's cache folder.
    """
    if path := os.environ.get(VARIABLE):
        return None if path == "off" else path
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
    return os.path.join(cache, "rmt_tpu", "tuned.json")


def user_table() -> Table:
    """Return the user's table, which is read at the first call; it is empty if there is no file.

    If the file cannot be read, the table is empty and one warning is emitted. A missing file causes
    a warning only if `RMT_TPU_TUNED` names it.
    """
    path = user_path()
    return Table("") if path is None else _read_table(path)


def clear_caches() -> None:
    """Clear the caches of this module, so that table files are read again and warnings repeated."""
    _read_table.cache_clear()
    package_table.cache_clear()
    _warn.cache_clear()
    _tell_how.cache_clear()


# Maps a URL scheme to a function that reads a file. The function returns the content, or None if
# there is no such file. If it raises an OSError or a ValueError, a warning is emitted.
READERS: dict[str, Callable[[str], bytes | None]] = {}


@functools.cache
def _read_table(path: str) -> Table:
    scheme, separator, _ = path.partition("://")
    try:
        if separator:
            reader = READERS.get(scheme)
            if reader is None:
                raise OSError(f"{scheme}:// paths can be read only if rmt_tpu is imported")
            content = reader(path)
        else:
            file = Path(path).expanduser()
            content = file.read_bytes() if file.exists() else None
    except (OSError, ValueError) as error:
        _warn(f"{path} is ignored: {' '.join(str(error).split())}")
        return Table(path)
    if content is None:
        if os.environ.get(VARIABLE):
            _warn(f"{VARIABLE}={path} does not exist; default block sizes are used")
        return Table(path)
    table = parse(content, path)
    if table.faults:
        more = f" (and {len(table.faults) - 1} more like this)" if len(table.faults) > 1 else ""
        _warn(table.faults[0] + more)
    return table


@functools.cache
def package_table(device: str, kernel: str) -> Table:
    """Return the table that the package ships for a kernel on a device; empty if there is none."""
    name = f"pallas_kernels/tuned/{device}/{kernel}.json"
    file = importlib.resources.files(__package__).joinpath(device, f"{kernel}.json")
    try:
        return parse(file.read_bytes(), name)
    except OSError:
        return Table(name)


def shipped() -> Iterator[tuple[str, str]]:
    """Yield (device slug, kernel name) for every table that the package ships."""
    for folder in importlib.resources.files(__package__).iterdir():
        if folder.is_dir():
            for file in folder.iterdir():
                if file.name.endswith(".json"):
                    yield folder.name, file.name.removesuffix(".json")


def fingerprint() -> str:
    """Return a hash of the package's tables and the user's table.

    While the hash stays the same, a look-up always returns the same block sizes, except within
    `with tuned(table)`.
    """
    texts = [package_table(*where).text() for where in sorted(shipped())]
    return hashlib.sha256("".join((*texts, user_table().text())).encode()).hexdigest()[:12]


@functools.cache
def _warn(message: str) -> None:
    """Emit a warning, unless the same message has been emitted before."""
    warnings.warn(message, stacklevel=2)
