"""Config changes that follow from the flags that name a run's text.

This module does not import jax; see `program` for the reason.
"""

from collections.abc import Mapping
from typing import Any

from rmt_tpu.config import parse_mixture
from rmt_tpu.errors import UsageError


def text_changes(changes: Mapping[str, Any], flag_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the config changes that follow from a new text.

    A mixture is parsed from its form on the command line. A token store brings its tokenizer; in a
    mixture, the first token store does. A text that is given alone replaces a mixture.

    Args:
      changes: the config changes of the flags, by config path.
      flag_names: maps each path in `changes` to the flag as written on the command line.

    Raises:
      UsageError: the mixture cannot be parsed, both a text and a mixture are given, or a token
        store is incomplete.
    """
    source, mixture = changes.get("data.source"), changes.get("data.mixture")
    more: dict[str, Any] = {}
    if isinstance(mixture, str):
        mixture = more["data.mixture"] = parse_mixture(mixture)
    if source is not None and mixture:
        both = " and ".join(flag_names[path] for path in ("data.source", "data.mixture"))
        raise UsageError(f"{both} both set the text; give one")
    if source is not None and mixture is None:
        more["data.mixture"] = []
    if "data.tokenizer" in changes:
        return more
    from rmt_tpu import data

    of_mixture = mixture if isinstance(mixture, list) else []
    names = [each.get("source") for each in of_mixture if isinstance(each, dict)]
    for name in names or [source]:
        if isinstance(name, str) and data.is_store(name):
            data.open_store(name)  # report an incomplete store before its tokenizer is read
            return more | {"data.tokenizer": name}
    return more
