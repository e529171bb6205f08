"""Functions that convert configs to and from JSON, and apply `--set=path=value` flags.

All values are checked against the type annotations of the config dataclasses.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from rmt_tpu.errors import UsageError, shown, unknown

Config = TypeVar("Config")


def to_json(config: Any, *, short: bool = True) -> Any:
    """Return a config as JSON values, with a `kind` for each class that has one.

    Args:
      config: a config, or a value within one.
      short: whether to use the short form of classes that have it (see `ModelConfig`).
    """
    if isinstance(config, tuple):
        return [to_json(item, short=short) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    values = {"kind": config.kind} if hasattr(config, "kind") else {}
    short_names = getattr(type(config), "short_names", {}) if short else {}
    if short_names:
        parts = config.short_form()
    else:
        parts = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for name, part in parts.items():
        values[name] = to_json(part, short=short)
        if name in short_names and isinstance(values[name], dict):
            del values[name]["kind"]  # in the short form, the field's name is the kind of the core
    return values


def from_json(cls: type[Config], values: Any) -> Config:
    """Return the config of class `cls` from JSON values; missing fields get their defaults.

    An object with a `kind` may be given as a string, its kind, if all its other fields have
    defaults.

    Raises:
      UsageError: a field is unknown, missing, or of the wrong type; the message names its path.
    """
    return _parse(cls, values, "")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
      ValueError: the text is not JSON, or is nested too deeply for Python's parser.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def apply(config: Config, overrides: dict[str, Any]) -> Config:
    """Return `config` with the values at dotted paths replaced.

    Shorter paths are set first, in any order of the overrides. The config is checked at the end.

    Raises:
      UsageError: a path or value is not legal; the message states it and the legal values.
    """
    long_form = any(_LONG_FORM_FIELD in path.split(".") for path in overrides)
    values = to_json(config, short=not long_form)
    for path, value in sorted(overrides.items(), key=lambda override: override[0].count(".")):
        for node, key in _places(values, path.split("."), path):
            node[key] = value
    return from_json(type(config), values)


def value_at(config: Any, path: str) -> Any:
    """Return the value at a dotted path in a config, as JSON.

    If the path names a kind of core, the value of the first core of that kind is returned.

    Raises:
      UsageError: the config has no such path.
    """
    values = to_json(config, short=_LONG_FORM_FIELD not in path.split("."))
    holder, key = _places(values, path.split("."), path)[0]
    if isinstance(holder, dict) and key not in holder:
        raise UsageError(unknown(f"{path}: field", key, holder))
    return holder[key]


# The name of the field that ModelConfig has only in its long form. A path that contains this name
# refers to the long form.
_LONG_FORM_FIELD = "stacks"


def _places(node: Any, keys: list[str], path: str) -> list[tuple[Any, Any]]:
    """Return the places of the values at `keys`, as pairs `(holder, key)` for `holder[key]`.

    If a node has no field of a name, the name is taken as a kind. It then refers to all objects of
    that kind in the lists below the node.
    """
    if isinstance(node, list):
        if not keys[0].isdecimal() or int(keys[0]) >= len(node):
            legal = ", ".join(map(str, range(len(node))))
            raise UsageError(f"{path}: {keys[0]} is not an index of the list; legal: {legal}")
        holders = [(node, int(keys[0]))]
    elif keys[0] in node:
        holders = [(node, keys[0])]
    else:
        holders = _find_kind(node, keys[0]) or [(node, keys[0])]
    if len(keys) == 1:
        return holders
    places = []
    for holder, key in holders:
        child = holder.setdefault(key, {}) if isinstance(holder, dict) else holder[key]
        if isinstance(child, str):  # an earlier override set only the object's kind
            child = holder[key] = {"kind": child}
        if not isinstance(child, dict | list):
            name = ".".join(path.split(".")[: 1 - len(keys)])
            raise UsageError(f"{path}: {name} has no fields; legal: a new value for {name}")
        places += _places(child, keys[1:], path)
    return places


def _find_kind(node: Any, kind: str) -> list[tuple[Any, Any]]:
    """Return pairs `(list, index)` for all objects of the given kind in the lists below `node`."""
    pairs = []
    for values in (v for v in node.values() if isinstance(v, list)):
        for index, item in enumerate(values):
            if isinstance(item, dict) and item.get("kind") == kind:
                pairs.append((values, index))
            elif isinstance(item, dict):
                pairs += _find_kind(item, kind)
    return pairs


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split `path=value` into the path and the value, which is JSON or a bare word.

    Raises:
      UsageError: there is no path or no `=`.
    """
    path, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not path:
        raise UsageError(f"--set={shown(text)} must be path=value, like model.num_layers=6")
    try:
        return path, parse_json(value)
    except ValueError:
        return path, {"true": True, "false": False}.get(value.lower(), value)


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Return the values in texts of the form `path=value`, keyed by path.

    Raises:
      UsageError: a text does not have this form, or two texts give a path different values.
    """
    values: dict[str, Any] = {}
    for text in texts:
        path, value = parse_assignment(text)
        if values.setdefault(path, value) != value:
            raise UsageError(
                f"--set={path}={shown(values[path])} and --set={text} both set {path}; give one"
            )
    return values


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return a line like `model.store.key_dim is 16 there, 32 here` for each differing value.

    Args:
      old: a config as JSON, called "there" in the lines.
      new: the config as JSON that it is compared with, called "here".
      path: the dotted path of both values.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [
            line
            for key in keys
            for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, values in pairs for line in differences(*values, f"{path}.{i}")]
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
        if types.NoneType in classes and value in (None, "none"):
            return None
        classes = tuple(cls for cls in classes if cls is not types.NoneType)
        if len(classes) == 1:
            return _parse_optional(classes[0], value, path)
        return _parse_choice(classes, value, path)
    if origin is Literal:
        if value not in typing.get_args(annotation):
            legal = map(str, typing.get_args(annotation))
            raise UsageError(unknown(path, _as_written(value), legal))
        return value
    if origin is tuple:
        items = [v for v in value.split(",") if v] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise UsageError(f"{path}={_shown(value)} must be a list")
        (item_type, *_), numbered = typing.get_args(annotation), isinstance(value, list)
        if not dataclasses.is_dataclass(item_type) and typing.get_origin(item_type) is Literal:
            numbered = False  # errors about single values show the path of their list
        return tuple(
            _parse(item_type, item, f"{path}.{index}" if numbered else path)
            for index, item in enumerate(items)
        )
    if dataclasses.is_dataclass(annotation):
        if hasattr(annotation, "kind"):  # only one class can be chosen here
            return _parse_choice((annotation,), value, path)
        return _parse_fields(annotation, value, path)
    return _parse_scalar(annotation, value, path)


def _parse_optional(annotation: Any, value: Any, path: str) -> Any:
    """Return the value of a field that may also be None, and say so in the error about a scalar."""
    try:
        return _parse(annotation, value, path)
    except UsageError as error:
        if dataclasses.is_dataclass(annotation) or typing.get_origin(annotation) is tuple:
            raise
        raise UsageError(f"{error}, or none") from None


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
        subject = f"{path}={_shown(values)}" if path else "the config"
        raise UsageError(f"{subject} must be a JSON object with fields")
    short = getattr(cls, "short_names", {})
    hints = typing.get_type_hints(cls) | short
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields | short:
            raise UsageError(unknown(f"field of {path or 'the config'}", key, fields | short))
    in_short = [name for name in short if name in values]
    required = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if in_short:
        cls.check_short(in_short)
        required = [name for name in required if name != _LONG_FORM_FIELD]
    if missing := [name for name in required if name not in values]:
        if not path:
            raise UsageError(f"the config lacks required fields: {', '.join(missing)}")
        kind = {"kind": cls.kind} if hasattr(cls, "kind") else {}
        example = json.dumps(kind | dict.fromkeys(missing, 64))
        raise UsageError(f"{path} needs {', '.join(missing)}, like {path}={example}")
    join = lambda name: f"{path}.{name}" if path else name
    parsed = {}
    for name, value in values.items():
        # In the short form, the field's name is the kind of the core, so the value has no `kind`.
        if name in in_short and dataclasses.is_dataclass(hints[name]):
            parsed[name] = _parse_fields(hints[name], value, join(name))
        else:
            parsed[name] = _parse(hints[name], value, join(name))
    try:
        return cls.from_short(**parsed) if in_short else cls(**parsed)
    except UsageError as error:  # show the config path instead of the class
        raise UsageError(str(error).replace(f"{cls.__name__}.", join(""))) from None


def _parse_scalar(annotation: type, value: Any, path: str) -> Any:
    if annotation is float and type(value) is int and abs(value) < _BEYOND_FLOAT:
        return float(value)
    if annotation is int and type(value) is float and value.is_integer():
        return int(value)
    if annotation is str and type(value) in (int, float):
        return str(value)
    if type(value) is not annotation:
        raise UsageError(f"{path}={_shown(value)} must be {_ARTICLE[annotation]}")
    return value


def _as_written(value: Any) -> Any:
    """Return a value as the user would write it, with None, True and False as in JSON."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value


def _shown(value: Any) -> str:
    text = _as_written(value)
    return shown(value) if text is value else text


_BEYOND_FLOAT = 2**1023  # integers of this size or more may not fit into a float
_ARTICLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
