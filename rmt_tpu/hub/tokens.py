"""A hub folder's tokenizer, and the start and end tokens of its texts. Imports no jax."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmt_tpu import data
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.models import Description, values_in

CONFIG = "tokenizer_config.json"


def tokenizer_of(folder: str | Path, described: Description) -> data.Tokenizer:
    """Read a folder's tokenizer, whose texts start and end as in transformers.

    A text starts with BOS if the template of tokenizer.json puts it there, whatever `add_bos_token`
    of tokenizer_config.json is. For the end of a text, see `_ends`.

    Raises:
      UsageError: the folder has no tokenizer, or a file is damaged.
    """
    tokenizer = data.load_tokenizer(str(folder))
    path = Path(folder) / CONFIG
    values = values_in(path)
    if values is None and path.exists():
        raise UsageError(f"{path} is damaged; legal: an object of JSON, or no file")
    tokenizer.starts = tokenizer.template
    tokenizer.ends = _ends(tokenizer, described, values or {})
    return tokenizer


def config_of(tokenizer: data.Tokenizer, max_length: int) -> dict[str, Any]:
    """Return the tokenizer_config.json of one of our models; empty if tokens have no names."""
    names = [tokenizer.spelled(token) for token in (tokenizer.bos, tokenizer.ends[0])]
    if None in names:
        return {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.starts,
        "bos_token": names[0],
        "eos_token": names[1],
        "model_max_length": max_length,
    }


def _ends(
    tokenizer: data.Tokenizer, described: Description, values: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the tokens that end a text.

    They are the first that exist of: `eos_token_id`; `eos_token`; the usual end token of the
    model's kind; the tokenizer's own. The usual one counts only if the tokenizer has no text for
    it: in another vocabulary it is a word.
    """
    if described.ends:
        return described.ends
    named = values.get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    token = tokenizer.named(named) if isinstance(named, str) else None
    if token is not None and token < described.model.vocab_size:
        return (token,)
    usual = described.usual_end
    if usual is not None and usual < tokenizer.vocab_size and tokenizer.spelled(usual):
        if not tokenizer.decode_bytes([usual]):
            return (usual,)
    return tokenizer.ends
