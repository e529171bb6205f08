"""Where a run's texts start and end: at BOS, or as in the model that it started from."""

import json
from typing import NamedTuple

from rmt_tpu.data import Tokenizer, load_saved
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.fields import Fields
from rmt_tpu.hub.models import GENERATION, describe, is_hub, special_tokens
from rmt_tpu.hub.tokens import read_tokenizer
from rmt_tpu.storage import Folder

_STARTS = "add_bos_token"


class TextBounds(NamedTuple):
    """How texts begin and end, with the attributes `starts` and `ends` of a `Tokenizer`."""

    starts: bool
    ends: tuple[int, ...]


def load(folder: Folder, tokenizer: Tokenizer) -> TextBounds:
    """Return how texts of the run in a folder begin and end.

    If no file says so, texts start and end with BOS.

    Args:
      folder: the run folder.
      tokenizer: the run's tokenizer.

    Raises:
      UsageError: the file is damaged.
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
    ends = fields.tokens("eos_token_id", tokenizer.vocab_size)
    return TextBounds(fields.flag(_STARTS, True), ends)


def save(folder: Folder, tokenizer: Tokenizer) -> None:
    """Write how texts begin and end to a file in Hugging Face format, which `load` reads.

    If texts start with BOS and end with nothing else, there is no file.
    """
    if tokenizer.starts and tokenizer.ends == (tokenizer.bos,):
        folder.delete(GENERATION)
        return
    values = special_tokens(tokenizer.bos, tokenizer.ends)
    values |= {} if tokenizer.starts else {_STARTS: False}
    folder.write(GENERATION, (json.dumps(values, indent=2) + "\n").encode())


def after_warm_start(folder: Folder, tokenizer: Tokenizer) -> TextBounds:
    """Return how texts of a run that starts from the model in a folder begin and end.

    They begin as that model's. They end at its end tokens, and at BOS, which separates documents in
    training. If the model has another vocabulary or no tokenizer, `tokenizer` alone says it.

    Args:
      folder: the folder of the model from which the run starts.
      tokenizer: the run's tokenizer.
    """
    own = TextBounds(tokenizer.starts, tokenizer.ends)
    try:
        if is_hub(folder):
            other = read_tokenizer(folder, describe(folder))
        else:
            other = load_saved(folder)
            other.starts, other.ends = load(folder, other)
    except UsageError:
        return own
    if other.fingerprint() != tokenizer.fingerprint():
        return own
    return TextBounds(other.starts, tuple(dict.fromkeys((*other.ends, tokenizer.bos))))
