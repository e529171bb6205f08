"""Errors that are sent to clients, and checks of the fields of a request."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from rmt_tpu.config.overrides import parse_json
from rmt_tpu.errors import shown, unknown

# An error shows at most this number of characters of a field name that a client sent.
_LONGEST_NAME = 256


class Refusal(Exception):
    """An error that is sent to the client instead of a completion.

    Args:
      message: one line that names the field, its value and the legal values.
      param: the name of the field.
      status: the HTTP status.
      code: a machine-readable error code.
      retry_after: the number of seconds after which the client may retry; None if retrying is
        useless.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        # A message may quote an unpaired surrogate of the request, which no answer can contain.
        super().__init__(message.encode(errors="backslashreplace").decode())
        self.param, self.status, self.code = param, status, code
        self.retry_after = retry_after

    def to_json(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        kinds = {429: "rate_limit_error"}
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, default)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def read_object(
    body: bytes, legal: Iterable[str], neutral: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the fields that the body of a request sets; a field that is null counts as absent.

    Args:
      body: the body, in JSON.
      legal: the names of all legal fields.
      neutral: fields that are accepted only if absent or equal to the neutral value given here.

    Raises:
      Refusal: the body is not a JSON object of legal fields.
    """
    try:
        values = parse_json(body.decode())
    # Bytes that are not UTF-8 raise UnicodeDecodeError, which is a ValueError.
    except ValueError as error:
        raise Refusal(f"the request body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise Refusal(f"the request body is {shown(values)}; legal: a JSON object")
    for name in values:
        if name not in legal:
            param = name[:_LONGEST_NAME].encode(errors="replace").decode()
            raise Refusal(unknown("field", name, legal), param, code="unknown_field")
    values = {name: value for name, value in values.items() if value is not None}
    for name, value in neutral.items():
        if values.get(name, value) != value:
            raise Refusal(
                f"{name}={shown(values[name])} is not supported; legal: {shown(value)}, or leave "
                "it out",
                name,
            )
    return values


def whole_number(
    values: Mapping[str, Any], name: str, default: int | None, low: int, high: int, more: str = ""
) -> Any:
    """Return a whole number from `low` to `high`, or the default if the field is absent.

    `more` follows the legal numbers in the error message.

    Raises:
      Refusal: the field has an illegal value.
    """
    words = f"a whole number from {low} to {high}" if low < high else f"{low}"
    legal = lambda v: is_a(int)(v) and low <= v <= high
    return field(values, name, default, legal, words + more)


def field(
    values: Mapping[str, Any], name: str, default: Any, legal: Callable[[Any], bool], words: str
) -> Any:
    """Return the value of a field, or the default if the field is absent.

    Args:
      values: the fields of the request.
      name: the name of the field.
      default: the value if the field is absent.
      legal: a function that returns whether a value is legal.
      words: a description of the legal values, for the error message.

    Raises:
      Refusal: the value is not legal.
    """
    value = values.get(name, default)
    if name in values and not legal(value):
        raise Refusal(f"{name}={shown(value)} must be {words}", name)
    return value


def is_a(*kinds: type) -> Callable[[Any], bool]:
    """Return a function that checks whether a value's type is one of `kinds`.

    Subclasses do not count, so that a bool is not an int.
    """
    return lambda value: type(value) in kinds
