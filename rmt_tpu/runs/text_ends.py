"""The tokens that end a run's texts: BOS, and the end tokens of the model that it started from."""

import json

from rmt_tpu.data import Tokenizer, load_saved
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.fields import Fields
from rmt_tpu.hub.models import GENERATION, describe, is_hub, special_tokens
from rmt_tpu.hub.tokens import read_tokenizer
from rmt_tpu.storage import Folder


def load(folder: Folder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text of the run in a folder; BOS alone if no file lists them.

    Args:
      folder: the run folder.
      tokenizer: the run's tokenizer.

    Raises:
      UsageError: the file is damaged.
    """
    found = folder.read(GENERATION)
    if found is None:
        return tokenizer.ends
    where = f"{folder}/{GENERATION}"
    try:
        values = json.loads(found.data)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{where} is damaged; legal: a JSON object, or no file")
    return Fields(values, where).tokens("eos_token_id", tokenizer.vocab_size)


def save(folder: Folder, tokenizer: Tokenizer) -> None:
    """Write the end tokens to a file in Hugging Face format, from which `load` reads them.

    If BOS is the only end token, there is no file.
    """
    if tokenizer.ends == (tokenizer.bos,):
        folder.delete(GENERATION)
        return
    text = json.dumps(special_tokens(tokenizer.bos, tokenizer.ends), indent=2) + "\n"
    folder.write(GENERATION, text.encode())


def after_warm_start(folder: Folder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the end tokens for a run that starts from the model in a folder.

    They are the end tokens of that model, and BOS, which separates documents in training. If the
    model has another vocabulary or no tokenizer, only the end tokens of `tokenizer` are returned.

    Args:
      folder: the folder of the model from which the run starts.
      tokenizer: the run's tokenizer.
    """
    try:
        if is_hub(folder):
            other = read_tokenizer(folder, describe(folder))
        else:
            other = load_saved(folder)
            other.ends = load(folder, other)
    except UsageError:
        return tokenizer.ends
    if other.fingerprint() != tokenizer.fingerprint():
        return tokenizer.ends
    return tuple(dict.fromkeys((*other.ends, tokenizer.bos)))
