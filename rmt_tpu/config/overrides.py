"""Configs as JSON and as `--set path=value` overrides, both checked against the dataclasses."""

import dataclasses
import json
import types
import typing
from typing import Any, Literal, TypeVar

from rmt_tpu.errors import UsageError, shown, unknown

Config = TypeVar("Config")


def to_json(config: Any) -> Any:
    """A config as plain JSON values; a class out of a choice carries its `kind`."""
    if not dataclasses.is_dataclass(config):
        return list(config) if isinstance(config, tuple) else config
    values = {"kind": config.kind} if hasattr(config, "kind") else {}
    return values | {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}


def from_json(cls: type[Config], values: Any) -> Config:
    """The config that `to_json` gave these values for. Fields left out take their defaults.

    A class out of a choice may be given by its bare `kind`, if all its fields have defaults.

    Raises:
      UsageError: a field is unknown, missing, or of the wrong type; the message names its path.
    """
    return _parse(cls, values, "")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: it is not JSON, or nested deeper than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def apply(config: Config, overrides: dict[str, Any]) -> Config:
    """`config` with the value at each dotted path replaced, checked when all are in place.

    Raises:
      UsageError: a path or value is not legal; the message names it and what is.
    """
    values = to_json(config)
    for path, value in overrides.items():
        *parents, last = path.split(".")
        node = values
        for depth, key in enumerate(parents, start=1):
            child = node.setdefault(key, {})
            if isinstance(child, str):  # a choice, just given by its kind
                child = node[key] = {"kind": child}
            if not isinstance(child, dict):
                raise UsageError(f"{path}: {'.'.join(parents[:depth])} is a value without fields")
            node = child
        node[last] = value
    return from_json(type(config), values)


def parse_assignment(text: str) -> tuple[str, Any]:
    """`path=value` as the path and the value, which is JSON or a bare word.

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
    """Lines like `model.store.key_dim is 16 there, 32 here`, one for each differing leaf."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [
            line
            for key in keys
            for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if old == new else [f"{path} is {_short(old)} there, {_short(new)} here"]


def _short(value: Any) -> str:
    return "{...}" if isinstance(value, dict) else json.dumps(value)


def _parse(annotation: Any, value: Any, path: str) -> Any:
    """`value` (JSON) as `annotation`, or UsageError."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        classes = typing.get_args(annotation)
        if types.NoneType not in classes:
            return _parse_choice(classes, value, path)
        (annotation,) = (cls for cls in classes if cls is not types.NoneType)
        return None if value in (None, "none") else _parse(annotation, value, path)
    if origin is Literal:
        if value not in typing.get_args(annotation):
            raise UsageError(unknown(path, value, map(str, typing.get_args(annotation))))
        return value
    if origin is tuple:
        items = [v for v in value.split(",") if v] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise UsageError(f"{path}={shown(value)} must be a list")
        return tuple(_parse(typing.get_args(annotation)[0], item, path) for item in items)
    if dataclasses.is_dataclass(annotation):
        if hasattr(annotation, "kind"):  # a choice of one
            return _parse_choice((annotation,), value, path)
        return _parse_fields(annotation, value, path)
    return _parse_scalar(annotation, value, path)


def _parse_choice(classes: tuple[type, ...], value: Any, path: str) -> Any:
    by_kind = {cls.kind: cls for cls in classes}
    values = {"kind": value} if isinstance(value, str) else value
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in by_kind:
        raise UsageError(unknown(path, kind or value, by_kind))
    return _parse_fields(by_kind[kind], {k: v for k, v in values.items() if k != "kind"}, path)


def _parse_fields(cls: type, values: Any, path: str) -> Any:
    if not isinstance(values, dict):
        what = f"{path}={shown(values)}" if path else "the config"
        raise UsageError(f"{what} must be an object of fields")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise UsageError(unknown(f"field of {path or 'the config'}", key, fields))
    needed = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in needed if name not in values]:
        if not path:
            raise UsageError(f"the config has no {' and no '.join(missing)}")
        kind = {"kind": cls.kind} if hasattr(cls, "kind") else {}
        example = json.dumps(kind | dict.fromkeys(missing, 64))
        raise UsageError(f"{path} needs {', '.join(missing)}, like {path}={example}")
    join = lambda name: f"{path}.{name}" if path else name
    parsed = {name: _parse(hints[name], v, join(name)) for name, v in values.items()}
    try:
        return cls(**parsed)
    except UsageError as error:  # it names its class; whoever gave the value knows it by its path
        raise UsageError(str(error).replace(f"{cls.__name__}.", join(""))) from None


def _parse_scalar(annotation: type, value: Any, path: str) -> Any:
    if annotation is float and type(value) is int and abs(value) < _BEYOND_FLOAT:
        return float(value)
    if annotation is int and type(value) is float and value.is_integer():
        return int(value)
    if annotation is str and type(value) in (int, float):
        return str(value)
    if type(value) is not annotation:
        raise UsageError(f"{path}={shown(value)} must be {_ARTICLE[annotation]}")
    return value


_BEYOND_FLOAT = 2**1023  # larger integers are no float
_ARTICLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
