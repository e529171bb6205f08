"""Loading of a run's text as training windows and held-out windows."""

from typing import NamedTuple

import numpy as np

from rmt_tpu import data
from rmt_tpu.config import RunConfig
from rmt_tpu.errors import UsageError


class Datasets(NamedTuple):
    """The training windows and the held-out windows of a run."""

    train: data.Windows
    held_out: data.Windows


def load_datasets(config: RunConfig, tokenizer: data.Tokenizer) -> Datasets:
    """Load the text that the config names, from files or from a token store.

    Text from files is split, tokenised and packed. A token store already has a held-out part, so
    `data.eval_fraction` is ignored.

    Raises:
      UsageError: a file is missing or unreadable, the text is shorter than a window, the tokenizer
        has more tokens than the model, or the store is incomplete or was made with another
        tokenizer.
      RunError: the store's manifest is damaged.
    """
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UsageError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {tokenizer.vocab_size}"
            f" tokens of --tokenizer={config.data.tokenizer}; legal: {tokenizer.vocab_size} or more"
        )
    seed = config.train.seed
    if data.is_store(config.data.source):
        store = data.open_store(config.data.source)
        store.check_tokenizer(tokenizer)
        train, held_out = store.train, store.held_out
    else:
        documents = data.documents(config.data.source, text_field=config.data.text_field)
        parts = data.split(
            documents,
            eval_fraction=config.data.eval_fraction,
            seed=seed,
            source=config.data.source,
        )
        train, held_out = (data.pack(part, tokenizer) for part in parts)

    def windows(tokens: np.ndarray | data.Stream, shuffle: bool) -> data.Windows:
        return data.Windows(
            tokens,
            seq_len=config.data.seq_len,
            batch_size=config.train.batch_size,
            bos=tokenizer.bos,
            seed=seed,
            shuffle=shuffle,
            source=config.data.source,
        )

    return Datasets(windows(train, shuffle=True), windows(held_out, shuffle=False))
