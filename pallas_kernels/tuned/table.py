"""Tables of block sizes, stored as JSON with one entry per line.

If an entry is invalid, only that entry is skipped.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

Value = str | int | bool
Items = tuple[tuple[str, Value], ...]  # The (name, value) pairs of a mapping, sorted by name.
Source = Literal["measured", "estimated", "heuristic"]

_FORMAT = 1
# Maximum ratio between an entry's number of tokens and the requested number. An entry beyond this
# ratio is not used, because its block sizes may be slow for the requested number.
_NEAR = 4
_SLUG = re.compile(r"[a-z0-9][a-z0-9_.\-]*")


def items(values: Mapping[str, Value]) -> Items:
    """Return the (name, value) pairs of a mapping as a sorted tuple, which can be a dict key."""
    return tuple(sorted(values.items()))


@dataclasses.dataclass(frozen=True)
class Entry:
    """The best known block sizes (blocks) of one kernel, on one device and for one input size.

    Attributes:
      device: the slug of the device kind.
      kernel, kernel_version: the kernel's name and version. Block sizes may mean something else in
        a different version.
      key: the sizes and options that the kernel is specialised to, without the number of tokens.
      tokens: the number of tokens for which the block sizes were selected.
      blocks: the names and values of the block sizes.
      source: how the block sizes were found: "measured" on a device, "estimated" from compiled
        programs, or selected by the kernel's own rule, its "heuristic".
      seconds: the time of a call with `blocks`, in seconds. The list has all measured times, or one
        estimated time.
      default_seconds: the time of a call with `default_blocks`, in the form of `seconds`.
      default_blocks: the block sizes that the heuristic selected when this entry was made.
      implementation: the fastest implementation of the call, which may be this entry's kernel. Only
        entries for GPUs have this field.
      versions: the names and versions of the software that compiled and measured the kernel.
      date: the date of the search, as YYYY-MM-DD.
      table: the name of the table from which the entry was copied. Only the records of a run have
        it.
    """

    device: str
    kernel: str
    kernel_version: int
    key: Items
    tokens: int
    blocks: Items
    source: Source
    seconds: tuple[float, ...] = ()
    default_seconds: tuple[float, ...] = ()
    default_blocks: Items = ()
    implementation: str | None = None
    versions: Items = ()
    date: str = ""
    table: str = ""

    @property
    def identity(self) -> tuple[str, str, Items, int]:
        """The values that identify the entry; a table has at most one entry per identity."""
        return self.device, self.kernel, self.key, self.tokens

    def json(self) -> dict[str, Any]:
        """Return the entry as a JSON object, without the optional fields that are empty."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values |= {name: dict(values[name]) for name in _MAPPINGS}
        return {k: v for k, v in values.items() if k in _REQUIRED or v not in (None, "", (), {})}


_MAPPINGS = ("key", "blocks", "default_blocks", "versions")
_REQUIRED = ("device", "kernel", "kernel_version", "key", "tokens", "blocks", "source")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of entries from one file or other source.

    Attributes:
      name: the name of the file or other source, for messages.
      entries: the entries, at most one per identity.
      exact: whether an entry is used only for exactly its own number of tokens.
      faults: for each entry that was skipped, a one-line message that states why it is invalid.
    """

    name: str
    entries: tuple[Entry, ...] = ()
    exact: bool = False
    faults: tuple[str, ...] = ()

    def candidates(self, device: str, kernel: str, key: Items, tokens: int) -> list[Entry]:
        """Return a kernel's entries for a device, a key and a number of tokens near `tokens`.

        The entries whose number of tokens is nearest come first. If the table is `exact`, only
        entries with the same number are returned.
        """
        found = [e for e in self.entries if (e.device, e.kernel, e.key) == (device, kernel, key)]
        if self.exact:
            return [e for e in found if e.tokens == tokens]
        distance = lambda e: abs(math.log2(e.tokens / tokens))
        return sorted((e for e in found if distance(e) <= math.log2(_NEAR)), key=distance)

    def merged(self, entries: Iterable[Entry]) -> "Table":
        """Return the table with `entries` added; each replaces an entry with the same identity."""
        of = {e.identity: e for e in (*self.entries, *entries)}
        return dataclasses.replace(self, entries=tuple(sorted(of.values(), key=_order)))

    def without(self, entry: Entry) -> "Table":
        """Return the table without the entry that has the identity of `entry`, if there is one."""
        kept = tuple(e for e in self.entries if e.identity != entry.identity)
        return dataclasses.replace(self, entries=kept)

    def text(self) -> str:
        """Return the table as the content of a JSON file."""
        lines = ",\n".join(
            json.dumps(e.json(), sort_keys=True) for e in sorted(self.entries, key=_order)
        )
        return f'{{"format": {_FORMAT}, "entries": [\n{lines}\n]}}\n'


def _order(entry: Entry) -> tuple[str, str, str, int]:
    return entry.device, entry.kernel, json.dumps(entry.key), entry.tokens


def parse(content: str | bytes, name: str, *, exact: bool = False) -> Table:
    """Parse a file's content into a table. Invalid parts are listed in `faults`, not raised."""
    try:
        values = json.loads(content)
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise ValueError(f'the file is not a JSON object with "format": {_FORMAT}')
        listed = values.get("entries")
        if not isinstance(listed, list):
            raise ValueError('the file has no list "entries"')
    except (ValueError, RecursionError) as error:
        return Table(name, (), exact, (f"{name} is ignored: {error}",))
    entries, faults = {}, []
    for number, value in enumerate(listed, 1):
        try:
            entry = _entry(value)
            entries[entry.identity] = entry
        except (ValueError, TypeError, KeyError) as error:
            why = f"the entry has no field {error}" if isinstance(error, KeyError) else error
            faults.append(f"{name}: entry {number} is ignored: {why}")
    return Table(name, tuple(sorted(entries.values(), key=_order)), exact, tuple(faults))


def _entry(value: Any) -> Entry:
    if not isinstance(value, dict):
        raise ValueError("the entry is not a JSON object")
    names = {f.name for f in dataclasses.fields(Entry)}
    if extra := sorted(value.keys() - names):
        raise ValueError(
            f"{extra[0]!r} is not a field of an entry; legal: {', '.join(sorted(names))}"
        )
    for name, kind in (("device", str), ("kernel", str), ("kernel_version", int), ("tokens", int)):
        if type(value[name]) is not kind or (kind is int and value[name] < 1):
            legal = "text" if kind is str else "a whole number, at least 1"
            raise ValueError(f"the field {name}={value[name]!r} is not legal; legal: {legal}")
    if not _SLUG.fullmatch(value["device"]):
        raise ValueError(
            f"the field device={value['device']!r} is not legal; legal: a device kind in lower case"
        )
    if value["source"] not in get_args(Source):
        legal = ", ".join(get_args(Source))
        raise ValueError(f"the field source={value['source']!r} is not legal; legal: {legal}")
    made = {name: _items(name, value.get(name, {})) for name in _MAPPINGS}
    if not made["blocks"] and not value.get("implementation"):
        raise ValueError("the entry has neither blocks nor implementation; legal: one or both")
    for name in ("seconds", "default_seconds"):
        times = value.get(name, [])
        if not isinstance(times, list) or not all(_is_time(t) for t in times):
            raise ValueError(
                f"the field {name}={times!r} is not legal; legal: a list of positive numbers"
            )
        made[name] = tuple(times)
    for name in ("implementation", "date", "table"):
        if name in value and not isinstance(value[name], str):
            raise ValueError(f"the field {name}={value[name]!r} is not legal; legal: text")
    return Entry(**(value | made))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _items(name: str, value: Any) -> Items:
    if not isinstance(value, dict) or not all(type(v) in (str, int, bool) for v in value.values()):
        raise ValueError(
            f"the field {name}={value!r} is not legal; legal: a JSON object whose values are "
            "integers, text or booleans"
        )
    return items(value)
