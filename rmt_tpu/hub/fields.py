"""Checked access to the fields of a config.json in the hub's format.

This module does not import JAX.
"""

import json
import sys
from collections.abc import Container, Mapping
from typing import Any

from rmt_tpu.errors import UsageError, shown, unknown
from rmt_tpu.storage import Fault, Location, open_folder

# JSON has whole numbers that are larger than any float.
_LARGEST = sys.float_info.max


def values_in(folder: Location, name: str) -> Mapping[str, Any] | None:
    """Read the JSON object in a file; return None if the file is missing or contains no object.

    Args:
      folder: a local or gs:// folder.
      name: the name of the file.

    Raises:
      Fault: a bucket cannot be read.
    """
    folder = open_folder(folder)
    try:
        found = folder.read(name)
        values = json.loads(found.data) if found else None
    except Fault:
        if folder.local_path is None:
            raise
        return None
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def optional_values_in(folder: Location, name: str) -> Mapping[str, Any]:
    """Read the JSON object in a file; return an empty object if the file is missing.

    Raises:
      UsageError: the file does not contain a JSON object.
      Fault: a bucket cannot be read.
    """
    folder = open_folder(folder)
    values = values_in(folder, name)
    if values is None and name in folder.names():
        raise UsageError(f"{folder}/{name} is not a JSON object; legal: a JSON object, or no file")
    return values or {}


class Fields:
    """The fields of a config.json; each method checks the value that it returns.

    Args:
      values: the JSON object.
      where: the location of the file, for error messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where = values, where

    def wrong(self, name: str, value: object, legal: str) -> UsageError:
        """Make the error for an illegal field value; the caller raises it."""
        return UsageError(f"{self._where}: {name}={shown(value)} is not supported; legal: {legal}")

    def size(self, name: str, default: int | None = None) -> int:
        """Return the value of a field that must be a whole number from 1 to 2^31 - 1.

        Raises:
          UsageError: the field has a different value, or it is missing and there is no default.
        """
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 2**31:
            raise self.wrong(name, value, "a whole number, at least 1")
        return value

    def tokens(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the ids in a field that must be one token id or a list of ids below `vocab_size`.

        Raises:
          UsageError: the field has a different value or is missing.
        """
        value = self._values.get(name)
        several = value if isinstance(value, list) else [value]
        if not several or any(type(v) is not int or not 0 <= v < vocab_size for v in several):
            raise self.wrong(name, value, f"an id from 0 to {vocab_size - 1}, or a list of ids")
        return tuple(several)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return the value of a field that must be a finite number above 0.

        Raises:
          UsageError: the field has a different value, or it is missing and there is no default.
        """
        value = self._values.get(name, default)
        if type(value) not in (int, float) or not 0 < value <= _LARGEST:
            raise self.wrong(name, value, "a positive number")
        return float(value)

    def positive_or(self, name: str, default: float) -> float:
        """Return the value of a field that must be a finite number above 0.

        The result is `default` if the field is missing or null.

        Raises:
          UsageError: the field has a different value.
        """
        return self.positive(name) if self.has(name) else default

    def count(self, name: str) -> int:
        """Return the value of a field that must be a whole number from 0 to 2^31 - 1.

        Raises:
          UsageError: the field has a different value or is missing.
        """
        value = self._values.get(name)
        if type(value) is not int or not 0 <= value < 2**31:
            raise self.wrong(name, value, "a whole number, at least 0")
        return value

    def not_negative(self, name: str) -> float:
        """Return the value of a field that must be a finite number, at least 0.

        Raises:
          UsageError: the field has a different value or is missing.
        """
        value = self._values.get(name)
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
            raise self.wrong(name, value, "a number, at least 0")
        return float(value)

    def number(self, name: str) -> float:
        """Return the value of a field that must be a finite number.

        Raises:
          UsageError: the field has a different value or is missing.
        """
        value = self._values.get(name)
        if type(value) not in (int, float) or not abs(value) <= _LARGEST:
            raise self.wrong(name, value, "a number")
        return float(value)

    def layers(self, name: str, count: int, first: int = 0) -> list[int]:
        """Return the layer numbers that a field lists; [] if the field is missing or null.

        There are `count` layers, and the first one has the number `first`. The method checks that
        the values are whole numbers, but not their range.

        Raises:
          UsageError: the field is not a list of whole numbers.
        """
        value = self._values.get(name) or []
        if not isinstance(value, list) or any(type(layer) is not int for layer in value):
            legal = f"a list of layers, from {first} to {first + count - 1}"
            raise self.wrong(name, value, legal)
        return value

    def lookup(self, name: str, legal: Mapping[str, Any]) -> Any:
        """Return the entry of the dict `legal` whose key is the value of the field.

        Raises:
          UsageError: the field is missing or its value is not a key of `legal`.
        """
        value = self._values.get(name)
        if not isinstance(value, str) or value not in legal:
            raise UsageError(unknown(f"{self._where}: {name}", value, legal))
        return legal[value]

    def flag(self, name: str, default: bool = False) -> bool:
        """Return the value of a field that must be true or false; `default` if it is missing.

        Raises:
          UsageError: the field has a different value.
        """
        value = self._values.get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return value

    def only(self, name: str, *legal: object) -> None:
        """Raise UsageError unless a field's value is one of `legal`.

        A missing field counts as `legal[0]`.
        """
        value = self._values.get(name, legal[0])
        if value not in legal:
            raise self.wrong(name, value, " or ".join(dict.fromkeys(map(json.dumps, legal))))

    def known(self, names: Container[str]) -> None:
        """Raise UsageError if there is a field that is not in `names`, unless its value is null."""
        for name, value in self._values.items():
            if name not in names and value is not None:
                raise self.wrong(name, value, "null, or a config without this unknown field")

    def switches(self, name: str, default: list[bool]) -> list[bool]:
        """Read a list of zeros and ones; return the first `len(default)` of them as bools.

        The result is `default` if the field is missing or null.

        Raises:
          UsageError: the field is not a list of zeros and ones, or it is too short.
        """
        value = self._values.get(name)
        if value is None:
            return default
        count = len(default)
        if not isinstance(value, list) or len(value) < count or any(x not in (0, 1) for x in value):
            raise self.wrong(name, value, f"a list of {count} zeros and ones")
        return [bool(x) for x in value[:count]]

    def texts(self, name: str, count: int, *legal: str) -> list[str] | None:
        """Return a field's list of `count` strings, each one of the legal values.

        The result is None if the field is missing or null.

        Raises:
          UsageError: the field has a different value.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or any(x not in legal for x in value):
            words = " or ".join(map(repr, legal))
            legal = f"null, or a list of {count} values, one per layer: {words}"
            raise self.wrong(name, value, legal)
        return value

    def holds(self, name: str, *inner: str) -> bool:
        """Return whether a field is an object that contains at least one of the keys `inner`."""
        value = self._values.get(name)
        return isinstance(value, dict) and any(key in value for key in inner)

    def inside(self, name: str) -> "Fields":
        """Return the fields of a required nested object, which may contain further objects.

        Raises:
          UsageError: the field is not an object.
        """
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(value, f"{self._where}: {name}")

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._values)

    def group(self, name: str) -> "Fields":
        """Return the fields of an optional nested object; no fields if it is missing or null.

        Raises:
          UsageError: the field is not an object, or contains further objects.
        """
        value = self._values.get(name) or {}
        if not isinstance(value, dict) or any(isinstance(item, dict) for item in value.values()):
            raise self.wrong(name, value, "null, or an object without nested objects")
        return Fields(value, f"{self._where}: {name}")

    def has(self, name: str) -> bool:
        """Return whether a field is present and not null."""
        return self._values.get(name) is not None
