"""Annotations are checked while tests run, as jaxtyping does it but for less.

jaxtyping makes two functions of every one, binds the arguments of each call to its signature, and
looks at them twice. That took a tenth of the time of the tests. Here a function is decorated by the
type checker alone, and its calls have a scope for the names of axes if an annotation has such.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import types
import typing
from collections.abc import Callable

import beartype
import jaxtyping

_JAXTYPED = jaxtyping.jaxtyped
_NO_ANNOTATION = object()
_CHECKED = "__beartype_func"  # the argument of beartype's functions that is what they check
_WRITTEN: dict[tuple[types.CodeType, Callable], Callable] = {}


class Mismatch(jaxtyping.TypeCheckError):
    """An argument or outcome that is not what its annotation says."""

    def __str__(self) -> str:
        return f"Type-check error: {super().__str__()}"


def check_cheaply() -> None:
    """Has jaxtyping's import hook decorate by `checked`. Call it before what it shall check."""
    jaxtyping.jaxtyped = checked


def checked(fn=_NO_ANNOTATION, *, typechecker: Callable | None = None):
    """Stand in for `jaxtyping.jaxtyped`, for the import hook and for other callers."""
    if fn is _NO_ANNOTATION:
        return functools.partial(checked, typechecker=typechecker)
    if typechecker is None or isinstance(fn, str):
        return _JAXTYPED(fn, typechecker=typechecker) if typechecker else _JAXTYPED(fn)
    if inspect.isclass(fn):
        if dataclasses.is_dataclass(fn) and not hasattr(fn.__init__, "__wrapped__"):
            fn.__init__ = checked(fn.__init__, typechecker=typechecker)
        return fn
    if isinstance(fn, classmethod | staticmethod):
        return type(fn)(checked(fn.__func__, typechecker=typechecker))
    if isinstance(fn, property):
        parts = (fn.fget, fn.fset, fn.fdel)
        return property(*(part and checked(part, typechecker=typechecker) for part in parts))
    return _function(fn, typechecker)


def _function(fn, typechecker):
    parts = {kind for hint in fn.__annotations__.values() for kind in _parts(hint)}
    if not parts:
        return fn
    if "string" in parts:  # jaxtyping looks up what it names
        return _JAXTYPED(fn, typechecker=typechecker)
    of_types = _checks(fn, typechecker)
    config = jaxtyping.config

    if "shape" not in parts:

        @functools.wraps(fn)
        def run(*args, **kwargs):
            return (fn if config.jaxtyping_disable else of_types)(*args, **kwargs)

        return run

    @functools.wraps(fn)
    def run(*args, **kwargs):
        if config.jaxtyping_disable:
            return fn(*args, **kwargs)
        with _JAXTYPED("context"):
            try:
                return of_types(*args, **kwargs)
            except Mismatch as error:
                if not hasattr(error, "__notes__"):  # it is of this function
                    error.add_note(_sizes())
                raise

    return run


def _checks(fn, typechecker):
    """Return `fn` with checks, which are written once for all functions of one definition.

    A function within a function is made anew by every call of the outer one, and to write its
    checks takes a millisecond: that was a tenth of the time of some tests.
    """
    key = (fn.__code__, typechecker)
    if key in _WRITTEN and _WRITTEN[key].__annotations__ == fn.__annotations__:
        written = _WRITTEN[key]
        checks = types.FunctionType(written.__code__, written.__globals__, fn.__name__)
        checks.__kwdefaults__ = written.__kwdefaults__ | {_CHECKED: fn}
        return checks
    checks = typechecker(fn, conf=beartype.BeartypeConf(violation_type=Mismatch))
    if _CHECKED in (getattr(checks, "__kwdefaults__", None) or {}):
        _WRITTEN[key] = checks
    return checks


def _parts(hint) -> set[str]:
    """Return the kinds of an annotation's parts: "shape", "string" or "type"."""
    if isinstance(hint, str | typing.ForwardRef):
        return {"string"}
    if type(hint).__module__.startswith("jaxtyping") or (
        inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    ):
        return {"shape"}
    if typing.get_origin(hint) is typing.Literal:
        return {"type"}
    within = hint if isinstance(hint, list | tuple) else typing.get_args(hint)
    return {"type"}.union(*map(_parts, within))


def _sizes() -> str:
    """The sizes of axes that the arguments looked at so far have."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        jaxtyping.print_bindings()
    return said.getvalue().strip()
