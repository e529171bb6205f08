"""Functions that load a run's text as training windows and held-out windows."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rmt_tpu import data
from rmt_tpu.config import RunConfig
from rmt_tpu.data.batches import Packed, any_loss, pack
from rmt_tpu.data.marked import ANSWERS, find_template
from rmt_tpu.errors import UsageError
from rmt_tpu.storage import open_folder

# A store with more tokens is not read to find out whether any has a loss; recipes.prepare_data
# has checked it.
_MOST_CHECKED = 2**22


class MixedHeldOut(NamedTuple):
    """The held-out windows of one text of a mixture.

    Attributes:
      name: short name of the text.
      share: the text's share of the training tokens.
      windows: its held-out windows.
    """

    name: str
    share: float
    windows: data.Windows


class Datasets(NamedTuple):
    """The training windows and the held-out windows of a run.

    Attributes:
      train: the training windows.
      held_out: the held-out windows; for a mixture, those of the text with the largest share.
      mixed: the held-out windows of all texts of a mixture; empty without a mixture.
    """

    train: data.Windows | data.Mixture
    held_out: data.Windows
    mixed: tuple[MixedHeldOut, ...] = ()


def load_datasets(config: RunConfig, tokenizer: data.Tokenizer) -> Datasets:
    """Load the text or the mixture that the config names, from files or from token stores.

    Text from files is split, tokenised and packed. A token store already has a held-out part, so
    `data.eval_fraction` is ignored.

    Raises:
      UsageError: a file is missing or unreadable, the text is shorter than a window, the tokenizer
        has more tokens than the model, no token to train on has a loss, or a store is incomplete
        or was made with a different tokenizer or without the marks that the config's format needs.
      RunError: the manifest of a store is damaged.
    """
    if not config.data.mixture:
        return _load(config, tokenizer, config.data.source)
    with _errors_of_mixture():
        _check_one_tokenizer([each.source for each in config.data.mixture])
        found = [
            _load(config, tokenizer, each.source, trains=each.units > 0)
            for each in config.data.mixture
        ]
        mixture = data.Mixture(
            [
                data.MixedText(each.source, each.units, datasets.train)
                for each, datasets in zip(config.data.mixture, found, strict=True)
            ]
        )
    mixed = tuple(
        MixedHeldOut(name, share, datasets.held_out)
        for name, share, datasets in zip(mixture.names, mixture.shares, found, strict=True)
    )
    return Datasets(mixture, max(mixed, key=lambda each: each.share).windows, mixed)


def _check_one_tokenizer(sources: Sequence[str]) -> None:
    """Check that the token stores among the texts of a mixture have the same tokenizer.

    Raises:
      UsageError: two stores have different tokenizers, or a store is incomplete.
    """
    stores = [data.open_store(source) for source in sources if data.is_store(source)]
    if len({store.tokenizer.fingerprint for store in stores}) > 1:
        texts = ", ".join(
            f"{store.url} has {store.tokenizer.name} ({store.tokenizer.vocab_size} tokens)"
            for store in stores
        )
        raise UsageError(
            f"--mixture: all texts need one tokenizer, but {texts}; legal: token stores that were "
            "prepared with the same --tokenizer"
        )


def _load(
    config: RunConfig, tokenizer: data.Tokenizer, source: str, *, trains: bool = True
) -> Datasets:
    """Load the training windows and the held-out windows of one text.

    A text that a run does not train on need not have a token with a loss.
    """
    seed, bounds = config.train.seed, {}
    if data.is_store(source):
        store = data.open_store(source)
        if not store.has_tokenizer(tokenizer):
            raise UsageError(
                f"--data={store.url} was made with the tokenizer {store.tokenizer.name!r} "
                f"({store.tokenizer.vocab_size} tokens), but --tokenizer={tokenizer.name} "
                f"({tokenizer.vocab_size} tokens) encodes text differently; "
                f"legal: --tokenizer={store.url}"
            )
        if config.data.format != "text" and not store.has_marks:
            raise UsageError(
                f"--data={source} is a token store that was prepared with --format=text, so every "
                "token has a loss; legal: --format=text, or a store that was prepared with "
                f"--format={config.data.format}"
            )
        _check_vocabulary(config, tokenizer, special=store.has_marks)
        train, held_out = store.train, store.held_out
        if store.has_marks:
            bounds = {True: train.bounds(), False: held_out.bounds()}
    else:
        _check_vocabulary(config, tokenizer, special=config.data.format != "text")
        (train, of_train), (held_out, of_held_out) = _read(config, tokenizer, source)
        if config.data.format != "text":
            bounds = {True: of_train, False: of_held_out}

    def windows(tokens: np.ndarray | data.Stream, shuffle: bool) -> data.Windows:
        return data.Windows(
            tokens,
            seq_len=config.data.seq_len,
            batch_size=config.train.batch_size,
            bos=tokenizer.bos,
            seed=seed,
            shuffle=shuffle,
            source=source,
            bounds=bounds.get(shuffle),
        )

    datasets = Datasets(windows(train, shuffle=True), windows(held_out, shuffle=False))
    is_checked = len(train) <= _MOST_CHECKED or not data.is_store(source)
    if bounds and trains and is_checked and not any_loss(datasets.train.stream):
        raise UsageError(
            f"--data={source}: no token to train on has a loss; legal: text with {ANSWERS}"
        )
    return datasets


def _check_vocabulary(config: RunConfig, tokenizer: data.Tokenizer, *, special: bool):
    """Raise UsageError if the model lacks an embedding of a token that the text may have.

    Args:
      config: the run's config.
      tokenizer: the tokenizer.
      special: whether the text may have other special tokens than BOS.
    """
    given, count = config.model.vocab_size, tokenizer.vocab_size
    # Special tokens have no text. A folder of the hub's format may have more of them than
    # embeddings: the tokenizer of the text-only Gemma 3 has a token for images.
    needed = lambda token: special or token == tokenizer.bos or tokenizer.decode_bytes([token])
    if any(map(needed, range(given, count))):
        raise UsageError(
            f"model.vocab_size={given} is smaller than the {count} tokens of "
            f"--tokenizer={config.data.tokenizer}; legal: {count} or more"
        )


def _read(config: RunConfig, tokenizer: data.Tokenizer, source: str) -> list[Packed]:
    """Return the training tokens and the held-out tokens of text files."""
    kind = config.data.format
    template = find_template(kind, tokenizer, config.data.chat_template, "format")
    documents = data.documents(
        source, text_field=config.data.text_field, kind=kind, template=template
    )
    parts = data.split(
        documents, eval_fraction=config.data.eval_fraction, seed=config.train.seed, source=source
    )
    return [pack(part, tokenizer, kind) for part in parts]


def chat_template_of(config: RunConfig, tokenizer: data.Tokenizer) -> data.ChatTemplate | None:
    """Return the chat template of a run's conversations, or None if the run reads none.

    Raises:
      UsageError: the template cannot be read.
    """
    sources = [each.source for each in config.data.mixture] or [config.data.source]
    for source in sources:
        if not data.is_store(source):
            flags = tokenizer, config.data.chat_template, "format"
            found = find_template(config.data.format, *flags)
        else:
            found = None
            if data.open_store(source).has_marks:
                found = data.read_template(open_folder(source), tokenizer)
        if found is not None:
            return found
    return None


@contextlib.contextmanager
def _errors_of_mixture() -> Iterator[None]:
    """Replace --data by --mixture in the messages of errors from the `with` body."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("--data=", "--mixture: ", 1)) from None
