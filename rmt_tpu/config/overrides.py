"""Configs as JSON and as `--set path=value` overrides, both checked against the dataclasses."""

import dataclasses
import json
import types
import typing
from typing import Any, Literal, TypeVar

from rmt_tpu.errors import UsageError, shown, unknown

Config = TypeVar("Config")


def to_json(config: Any, *, short: bool = True) -> Any:
    """Return a config as plain JSON values; a class that is one of several choices has its `kind`.

    `short` uses the short form of classes that have one (see `ModelConfig`).
    """
    if isinstance(config, tuple):
        return [to_json(item, short=short) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    values = {"kind": config.kind} if hasattr(config, "kind") else {}
    of_short = getattr(type(config), "short_names", {}) if short else {}
    if of_short:
        parts = config.short_form()
    else:
        parts = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for name, part in parts.items():
        values[name] = to_json(part, short=short)
        if name in of_short and isinstance(values[name], dict):
            del values[name]["kind"]  # the name of the field is its kind
    return values


def from_json(cls: type[Config], values: Any) -> Config:
    """Return the config with the values that `to_json` returned, or defaults where none is given.

    A class that is one of several choices may be given by its bare `kind`, if all its fields have
    defaults.

    Raises:
      UsageError: a field is unknown, missing, or of the wrong type; the message names its path.
    """
    return _parse(cls, values, "")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
      ValueError: it is not JSON, or nested deeper than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def apply(config: Config, overrides: dict[str, Any]) -> Config:
    """Return `config` with the values at dotted paths replaced; it is checked after all of them.

    A path that is part of another path is set first, whatever their order.

    Raises:
      UsageError: a path or value is not legal; the message names it and what is legal.
    """
    whole = any(_WHOLE_FORM in path.split(".") for path in overrides)
    values = to_json(config, short=not whole)
    for path, value in sorted(overrides.items(), key=lambda given: given[0].count(".")):
        for node, key in _places(values, path.split("."), path):
            node[key] = value
    return from_json(type(config), values)


def value_at(config: Any, path: str) -> Any:
    """Return a config's value at a dotted path, as JSON; if the path names a kind, its first value.

    Raises:
      UsageError: it has no such path.
    """
    values = to_json(config, short=_WHOLE_FORM not in path.split("."))
    holder, key = _places(values, path.split("."), path)[0]
    if isinstance(holder, dict) and key not in holder:
        raise UsageError(unknown(f"{path}: field", key, holder))
    return holder[key]


# A part of a path that only the long form has.
_WHOLE_FORM = "stacks"


def _places(node: Any, keys: list[str], path: str) -> list[tuple[Any, Any]]:
    """Return all places `(holder, key)` in `node` such that `holder[key]` is the value at a path.

    A name that a node does not have stands for all objects of this kind in the lists below it.
    """
    if isinstance(node, list):
        if not keys[0].isdecimal() or int(keys[0]) >= len(node):
            legal = ", ".join(map(str, range(len(node))))
            raise UsageError(f"{path}: {keys[0]} is none of the list's; legal: {legal}")
        found = [(node, int(keys[0]))]
    elif keys[0] in node:
        found = [(node, keys[0])]
    else:
        found = _of_kind(node, keys[0]) or [(node, keys[0])]
    if len(keys) == 1:
        return found
    places = []
    for holder, key in found:
        child = holder.setdefault(key, {}) if isinstance(holder, dict) else holder[key]
        if isinstance(child, str):  # a choice that was just given by its kind
            child = holder[key] = {"kind": child}
        if not isinstance(child, dict | list):
            done = path.split(".")[: 1 - len(keys)]
            raise UsageError(f"{path}: {'.'.join(done)} is a value without fields")
        places += _places(child, keys[1:], path)
    return places


def _of_kind(node: Any, kind: str) -> list[tuple[Any, Any]]:
    """Return the places of all objects of a kind in the lists below a node."""
    found = []
    for values in (v for v in node.values() if isinstance(v, list)):
        for index, item in enumerate(values):
            if isinstance(item, dict) and item.get("kind") == kind:
                found.append((values, index))
            elif isinstance(item, dict):
                found += _of_kind(item, kind)
    return found


def parse_assignment(text: str) -> tuple[str, Any]:
    """Return the path and the value in `path=value`; the value is JSON or a bare word.

    Raises:
      UsageError: there is no path or no `=`.
    """
    path, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not path:
        raise UsageError(f"--set={shown(text)} is not path=value, like model.num_layers=6")
    try:
        return path, parse_json(value)
    except ValueError:
        return path, {"true": True, "false": False}.get(value.lower(), value)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return a line like `model.store.key_dim is 16 there, 32 here` for each leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [
            line
            for key in keys
            for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, f"{path}.{i}")]
    return [] if old == new else [f"{path} is {_short(old)} there, {_short(new)} here"]


def _short(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[...]"
    return "{...}" if isinstance(value, dict) else json.dumps(value)


def _parse(annotation: Any, value: Any, path: str) -> Any:
    """Return the JSON `value` as an object of the type `annotation`.

    Raises:
      UsageError: the value does not fit the type.
    """
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        classes = typing.get_args(annotation)
        if types.NoneType not in classes:
            return _parse_choice(classes, value, path)
        (annotation,) = (cls for cls in classes if cls is not types.NoneType)
        return None if value in (None, "none") else _parse(annotation, value, path)
    if origin is Literal:
        if value not in typing.get_args(annotation):
            legal = map(str, typing.get_args(annotation))
            raise UsageError(unknown(path, _as_written(value), legal))
        return value
    if origin is tuple:
        items = [v for v in value.split(",") if v] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise UsageError(f"{path}={_told(value)} must be a list")
        (of_items, *_), named = typing.get_args(annotation), isinstance(value, list)
        if not dataclasses.is_dataclass(of_items) and typing.get_origin(of_items) is Literal:
            named = False  # plain values are named by their list
        return tuple(
            _parse(of_items, item, f"{path}.{index}" if named else path)
            for index, item in enumerate(items)
        )
    if dataclasses.is_dataclass(annotation):
        if hasattr(annotation, "kind"):  # a choice with a single class
            return _parse_choice((annotation,), value, path)
        return _parse_fields(annotation, value, path)
    return _parse_scalar(annotation, value, path)


def _parse_choice(classes: tuple[type, ...], value: Any, path: str) -> Any:
    by_kind = {cls.kind: cls for cls in classes}
    values = {"kind": value} if isinstance(value, str) else value
    implied = next((cls.kind for cls in classes if getattr(cls, "implied", False)), None)
    kind = values.get("kind", implied) if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in by_kind:
        raise UsageError(unknown(path, _as_written(kind or value), by_kind))
    return _parse_fields(by_kind[kind], {k: v for k, v in values.items() if k != "kind"}, path)


def _parse_fields(cls: type, values: Any, path: str) -> Any:
    if not isinstance(values, dict):
        what = f"{path}={_told(values)}" if path else "the config"
        raise UsageError(f"{what} must be an object of fields")
    short = getattr(cls, "short_names", {})
    hints = typing.get_type_hints(cls) | short
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields | short:
            raise UsageError(unknown(f"field of {path or 'the config'}", key, fields | short))
    in_short = [name for name in short if name in values]
    needed = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if in_short:
        cls.check_short(in_short)
        needed = [name for name in needed if name != _WHOLE_FORM]
    if missing := [name for name in needed if name not in values]:
        if not path:
            raise UsageError(f"the config has no {' and no '.join(missing)}")
        kind = {"kind": cls.kind} if hasattr(cls, "kind") else {}
        example = json.dumps(kind | dict.fromkeys(missing, 64))
        raise UsageError(f"{path} needs {', '.join(missing)}, like {path}={example}")
    join = lambda name: f"{path}.{name}" if path else name
    parsed = {}
    for name, value in values.items():
        # The name of the field is its kind.
        if name in in_short and dataclasses.is_dataclass(hints[name]):
            parsed[name] = _parse_fields(hints[name], value, join(name))
        else:
            parsed[name] = _parse(hints[name], value, join(name))
    try:
        return cls.from_short(**parsed) if in_short else cls(**parsed)
    except UsageError as error:  # the error names its class, but the user knows the path
        raise UsageError(str(error).replace(f"{cls.__name__}.", join(""))) from None


def _parse_scalar(annotation: type, value: Any, path: str) -> Any:
    if annotation is float and type(value) is int and abs(value) < _BEYOND_FLOAT:
        return float(value)
    if annotation is int and type(value) is float and value.is_integer():
        return int(value)
    if annotation is str and type(value) in (int, float):
        return str(value)
    if type(value) is not annotation:
        raise UsageError(f"{path}={_told(value)} must be {_ARTICLE[annotation]}")
    return value


def _as_written(value: Any) -> Any:
    """Return null, true and false as JSON writes them, since the user wrote them so."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value


def _told(value: Any) -> str:
    written = _as_written(value)
    return shown(value) if written is value else written


_BEYOND_FLOAT = 2**1023  # larger integers do not fit a float
_ARTICLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
