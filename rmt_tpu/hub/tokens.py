"""The tokenizer in a folder in the Hugging Face hub's format, with its start and end tokens.

This module does not import JAX.
"""

from collections.abc import Mapping
from typing import Any

from rmt_tpu import data
from rmt_tpu.data.tokenizer import byte_names
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.fields import optional_values_in
from rmt_tpu.hub.models import Description
from rmt_tpu.storage import Location

CONFIG = "tokenizer_config.json"


def read_tokenizer(folder: Location, described: Description) -> data.Tokenizer:
    """Read the tokenizer in a folder, with the start and end tokens that transformers would use.

    A text starts with BOS if the template in tokenizer.json adds it, regardless of `add_bos_token`
    in tokenizer_config.json. `_ends` describes how a text ends.

    Raises:
      UsageError: the folder has no tokenizer, a file is damaged, or the model has no embedding of
        the start token.
    """
    tokenizer = data.load_tokenizer(data.spec_of_folder(folder))
    if tokenizer.bos >= described.model.vocab_size:
        raise UsageError(
            f"{folder}: the start token {tokenizer.bos} has no embedding, because config.json has "
            f"vocab_size={described.model.vocab_size}; legal: a start token below it"
        )
    values = optional_values_in(folder, CONFIG)
    tokenizer.starts = tokenizer.template
    tokenizer.ends = _ends(tokenizer, described, values)
    return tokenizer


def tokenizer_config(
    tokenizer: data.Tokenizer, max_length: int, template: data.ChatTemplate | None
) -> dict[str, Any]:
    """Return the content of tokenizer_config.json for an exported model.

    Without a template, the result is empty if the tokenizer has no names for its start and end
    tokens. If the template has other names for them, they are written, because it reads them.

    Raises:
      UsageError: the template cannot be compiled, or jinja2 is not installed.
    """
    of_template = {} if template is None else template.standalone_json()
    of_bytes = isinstance(tokenizer, data.ByteTokenizer)
    name = dict(enumerate(byte_names())).get if of_bytes else tokenizer.token_name
    names = [name(token) for token in (tokenizer.bos, tokenizer.ends[0])]
    if None in names:
        return of_template
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.starts,
        "bos_token": names[0],
        "eos_token": names[1],
        "model_max_length": max_length,
        # By default, transformers 4 also returns token types, which `generate` refuses.
        "model_input_names": ["input_ids", "attention_mask"],
        **of_template,
    }


def _ends(
    tokenizer: data.Tokenizer, described: Description, values: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the end tokens, from the first of these sources that exists.

    The sources are `eos_token_id` in the config, `eos_token` in tokenizer_config.json, the model
    type's default end token, and the tokenizer's own end tokens. The default end token is used only
    if its id belongs to a special token of this tokenizer (a token that does not represent text).
    In a different vocabulary, the same id may belong to a word.
    """
    if described.ends:
        return described.ends
    end_token = values.get("eos_token")
    end_token = end_token.get("content") if isinstance(end_token, dict) else end_token
    token = tokenizer.token_id(end_token) if isinstance(end_token, str) else None
    if token is not None and token < described.model.vocab_size:
        return (token,)
    default = described.default_end
    if default is not None and default < tokenizer.vocab_size and tokenizer.token_name(default):
        if not tokenizer.decode_bytes([default]):
            return (default,)
    return tokenizer.ends
