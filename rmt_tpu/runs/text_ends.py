"""The start and end tokens of a run's texts.

They are BOS, the tokens of the initial model, and those that end an answer in conversations.
"""

import json
from typing import NamedTuple

from rmt_tpu.data import Tokenizer, load_saved
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.fields import Fields
from rmt_tpu.hub.models import GENERATION, describe, is_hub, special_tokens
from rmt_tpu.hub.tokens import read_tokenizer
from rmt_tpu.runs.workdir import read_config
from rmt_tpu.storage import Folder

_STARTS = "add_bos_token"


class TextBounds(NamedTuple):
    """Text boundaries: whether texts start with BOS (`starts`), and their end tokens (`ends`)."""

    starts: bool
    ends: tuple[int, ...]


def load(folder: Folder, tokenizer: Tokenizer, vocab_size: int) -> TextBounds:
    """Read the text boundaries of the run in a folder.

    Without a generation_config.json, the boundaries are those of the tokenizer: by default, BOS is
    both the start token and the end token.

    Args:
      folder: the run folder.
      tokenizer: the run's tokenizer.
      vocab_size: the number of the model's tokens, which may be more than those of the tokenizer.

    Raises:
      UsageError: generation_config.json is damaged.
    """
    found = folder.read(GENERATION)
    if found is None:
        return TextBounds(tokenizer.starts, tokenizer.ends)
    where = f"{folder}/{GENERATION}"
    try:
        values = json.loads(found.data)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{where} is damaged; legal: a JSON object, or no file")
    fields = Fields(values, where)
    ends = fields.tokens("eos_token_id", vocab_size)
    return TextBounds(fields.flag(_STARTS, True), ends)


def save(folder: Folder, tokenizer: Tokenizer) -> None:
    """Write the tokenizer's text boundaries to generation_config.json, which `load` reads.

    If texts start with BOS and BOS is the only end token, the file is deleted instead.
    """
    if tokenizer.starts and tokenizer.ends == (tokenizer.bos,):
        folder.delete(GENERATION)
        return
    values = special_tokens(tokenizer.bos, tokenizer.ends)
    values |= {} if tokenizer.starts else {_STARTS: False}
    folder.write(GENERATION, (json.dumps(values, indent=2) + "\n").encode())


def after_warm_start(folder: Folder, tokenizer: Tokenizer) -> TextBounds:
    """Return the text boundaries of a run that is initialized from the model in a folder.

    Texts start with BOS if the model's texts do. The end tokens are the model's end tokens and BOS,
    because BOS separates documents in training. If the model's tokenizer is missing or differs from
    `tokenizer`, the result has the boundaries of `tokenizer`.

    Args:
      folder: the folder of the initial model.
      tokenizer: the run's tokenizer.
    """
    own = TextBounds(tokenizer.starts, tokenizer.ends)
    try:
        if is_hub(folder):
            other = read_tokenizer(folder, describe(folder))
        else:
            other, vocab_size = load_saved(folder), read_config(folder).model.vocab_size
            other.starts, other.ends = load(folder, other, vocab_size)
    except UsageError:
        return own
    if other.fingerprint() != tokenizer.fingerprint():
        return own
    return TextBounds(other.starts, tuple(dict.fromkeys((*other.ends, tokenizer.bos))))
