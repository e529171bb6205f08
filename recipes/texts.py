"""Config changes that must be made if flags set the text of a run.

This module does not import jax, because the import is slow.
"""

from collections.abc import Mapping
from typing import Any

from rmt_tpu.config import parse_mixture
from rmt_tpu.errors import UsageError


def text_changes(changes: Mapping[str, Any], flag_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the further config changes that are needed if flags set the text of a run.

    A mixture is parsed from its form on the command line. If no flag sets the tokenizer, the run
    gets the tokenizer of the token store, or of the first store in a mixture. If flags set a text
    and no mixture, the config's mixture is removed.

    Args:
      changes: maps config paths to the values that flags set.
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
        text_flag, mixture_flag = flag_names["data.source"], flag_names["data.mixture"]
        raise UsageError(f"{text_flag} and {mixture_flag} both set the text; give one")
    if source is not None and mixture is None:
        more["data.mixture"] = []
    if "data.tokenizer" in changes:
        return more
    from rmt_tpu import data

    of_mixture = mixture if isinstance(mixture, list) else []
    names = [each.get("source") for each in of_mixture if isinstance(each, dict)]
    for name in names or [source]:
        if isinstance(name, str) and data.is_store(name):
            # Report an incomplete store before its tokenizer is read.
            data.open_store(name, "mixture" if names else "data")
            return more | {"data.tokenizer": name}
    return more
