"""The conversion of documents to batches: splitting, packing into a stream, and windows."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, Int64

from rmt_tpu.data import marked
from rmt_tpu.data.permutation import permute
from rmt_tpu.data.tokenizer import Tokenizer
from rmt_tpu.errors import UsageError


def split(
    documents: list[str], *, eval_fraction: float, seed: int, source: str = ""
) -> tuple[list[str], list[str]]:
    """Split documents into training and held-out documents, close to the given fraction.

    The choice depends on the texts and the seed, but not on the order of the documents. Equal
    documents go to the same part. Documents larger than the requested share are not held out. If
    all documents are larger, the smallest one is held out. If there is only one document, or only
    copies of one, its tail is held out. The tail starts at a line if possible, or else at a word.

    Args:
      documents: the documents of the corpus.
      eval_fraction: fraction of the characters to hold out, from 0 (nothing) to 0.5.
      seed: seed of the choice of documents.
      source: value of --data, for error messages.

    Returns:
      The training documents and the held-out documents, both in the order of `documents`. Training
      documents always have at least half of the characters. There are no held-out documents only if
      `eval_fraction` is 0.

    Raises:
      UsageError: the fraction is out of range, or there is too little text to split.
    """
    if not 0 <= eval_fraction <= 0.5:
        raise UsageError(f"data.eval_fraction={eval_fraction} is out of range; legal: 0 to 0.5")
    if eval_fraction == 0:
        return documents, []
    sizes = {text: len(text) * count for text, count in Counter(documents).items()}
    if len(sizes) == 1:
        if len(documents[0]) < 2:
            raise UsageError(_too_short_to_cut(source, documents[0], eval_fraction))
        head, tail = cut(documents[0], eval_fraction)
        return [head] * len(documents), [tail] * len(documents)
    held_out = _choose(sizes, eval_fraction, seed)
    return (
        [text for text in documents if text not in held_out],
        [text for text in documents if text in held_out],
    )


class Packed(NamedTuple):
    """A stream of tokens, and where its documents begin.

    Attributes:
      tokens: int32 [tokens]. The bit `marked.CONTEXT` is set in tokens that training excludes from
        the loss.
      bounds: int64 [documents + 1], the position of the first token of each document, and the end
        of the stream. Tokens equal to BOS may also be within a conversation.
    """

    tokens: Int32[np.ndarray, " tokens"]
    bounds: Int64[np.ndarray, " documents_plus_1"]


def pack(documents: list[str], tokenizer: Tokenizer, kind: str = "text") -> Packed:
    """Concatenate the tokens of all documents into one stream, with BOS before each document.

    Args:
      documents: the documents in order.
      tokenizer: the tokenizer with which the model is trained.
      kind: the kind of the documents, such as "text" or "messages"; see `marked.Reading`.
    """
    bos = np.array([marked.first_token(tokenizer, kind)], np.int32)
    encoded = list(marked.encode_all(documents, tokenizer))
    bounds = np.cumsum([0, *(len(tokens) + 1 for tokens in encoded)], dtype=np.int64)
    pieces = (piece for tokens in encoded for piece in (bos, tokens))
    return Packed(np.concatenate([np.empty(0, np.int32), *pieces]), bounds)


class Batch(NamedTuple):
    """A batch of windows, with one window per row.

    Entries beyond the end of the token stream are 0 in all arrays.

    Attributes:
      inputs: int32 [batch, seq], the input tokens.
      targets: int32 [batch, seq], the next token after each input.
      segment_ids: int32 [batch, seq], the number of the document within the window, from 1.
      weights: float32 [batch, seq], 1 where a target has a loss, and 0 elsewhere.
      texts: int32 [batch, seq], the index of each token's text in the mixture; None without a
        mixture.
    """

    inputs: Int32[np.ndarray, "batch seq"]
    targets: Int32[np.ndarray, "batch seq"]
    segment_ids: Int32[np.ndarray, "batch seq"]
    weights: Float32[np.ndarray, "batch seq"]
    texts: Int32[np.ndarray, "batch seq"] | None = None


@runtime_checkable
class Stream(Protocol):
    """The interface of a stream of tokens that are read on demand, such as from a token store."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def read(
        self, starts: Int64[np.ndarray, " rows"], length: int
    ) -> Int32[np.ndarray, "rows length"]:
        """Return `length` tokens from each position in `starts` onwards, with 0 beyond the end.

        The bit `marked.CONTEXT` is set in tokens that training excludes from the loss. Several
        threads may call this method concurrently.

        Raises:
          RunError: the tokens cannot be read.
        """

    def checksum(self) -> int:
        """Return a checksum, by which a resumed run verifies that it reads the same text."""


class StreamInMemory:
    """A stream of tokens that is kept in memory as one array."""

    def __init__(self, tokens: Int32[np.ndarray, " tokens"]):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(
        self, starts: Int64[np.ndarray, " rows"], length: int
    ) -> Int32[np.ndarray, "rows length"]:
        """Return `length` tokens from each position in `starts` onwards, with 0 beyond the end."""
        positions = starts[:, None] + np.arange(length)
        real = positions < len(self.tokens)
        tokens = self.tokens[np.where(real, positions, 0)]
        return np.where(real, tokens, 0).astype(np.int32)

    def checksum(self) -> int:
        """Return the CRC-32 of the tokens."""
        return zlib.crc32(np.ascontiguousarray(self.tokens))


# Number of tokens that `any_loss` reads at a time.
_BLOCK = 2**16


def any_loss(stream: Stream, end: int | None = None) -> bool:
    """Return whether any target among the first `end` tokens of a stream has a loss.

    The stream is read up to the block that has such a target. None means the whole stream.
    """
    end = len(stream) if end is None else min(end, len(stream))
    for start in range(1, end, _BLOCK):  # The first token is no target.
        tokens = stream.read(np.array([start], np.int64), min(_BLOCK, end - start))
        if marked.have_loss(tokens).any():
            return True
    return False


# A selection of the rows of a batch.
Rows = slice | Int64[np.ndarray, " rows"]
_ALL = slice(None)


class Windows:
    """Batches of windows from a stream of tokens.

    A window has `seq_len` inputs. The target of an input is the token after it. Window i starts at
    token `i * seq_len`, and the last window is padded. Therefore every token except the first is a
    target exactly once per epoch.

    If the bounds of the documents are given, each window instead has as many whole documents as
    fit, in order, and is padded. Only a document that is longer than a window is divided. Without
    bounds, each BOS begins a document. With bounds it need not, because a chat template may write
    BOS within a conversation.
    """

    def __init__(
        self,
        tokens: Int32[np.ndarray, " tokens"] | Stream,
        *,
        seq_len: int,
        batch_size: int,
        bos: int,
        seed: int,
        shuffle: bool,
        source: str = "",
        bounds: Int64[np.ndarray, " documents_plus_1"] | None = None,
    ):
        """Create windows over a stream, which is not copied.

        Args:
          tokens: the int32 array [tokens] of `pack`, or a `Stream`, from which only the needed
            windows are read.
          seq_len: number of inputs per window.
          batch_size: number of windows per batch.
          bos: the token that starts a document.
          seed: seed of the order of the windows.
          shuffle: whether the windows are shuffled, differently in each epoch. Otherwise they have
            the order of the stream, which is used for held-out text.
          source: value of --data, for error messages.
          bounds: the position of the first token of each document, and the end of the stream. None
            allows windows to divide all documents.

        Raises:
          UsageError: a size is below 1, or the stream has no more than `seq_len` tokens. Without
            `shuffle`, two tokens suffice.
        """
        for name, value in {"seq_len": seq_len, "batch_size": batch_size}.items():
            if value < 1:
                raise UsageError(f"--{name}={value} is out of range; legal: 1 or more")
        if len(tokens) <= (seq_len if shuffle else 1):
            raise UsageError(_too_short(source, len(tokens), seq_len, held_out=not shuffle))
        self.stream = StreamInMemory(tokens) if isinstance(tokens, np.ndarray) else tokens
        self.bos = bos
        self.seq_len, self.batch_size = seq_len, batch_size
        self.seed, self.shuffle = seed, shuffle
        self._documents = bounds
        self._bounds = None if bounds is None else whole_documents(bounds, seq_len)

    @property
    def tokens_per_epoch(self) -> int:
        """Number of targets per epoch."""
        return len(self.stream) - 1

    @property
    def num_windows(self) -> int:
        """Number of windows per epoch."""
        if self._bounds is not None:
            return len(self._bounds) - 1
        return -(-self.tokens_per_epoch // self.seq_len)

    def any_loss(self, windows: int) -> bool:
        """Return whether any target of the stream's first windows has a loss."""
        if self._bounds is None:
            return any_loss(self.stream, windows * self.seq_len + 1)
        return any_loss(self.stream, int(self._bounds[min(windows, self.num_windows)]) + 1)

    def checksum(self) -> int:
        """Return the checksum of the token stream, by which a resumed run verifies its text."""
        return self.stream.checksum()

    @property
    def streams(self) -> list[tuple[float, Stream]]:
        """A list with the only token stream and its share of 1; a `Mixture` has several streams."""
        return [(1.0, self.stream)]

    def metrics(self, position: int) -> dict[str, int | float]:
        """Return no metrics; a `Mixture` returns metrics of each of its texts."""
        return {}

    @property
    def num_batches(self) -> int:
        """Number of batches per epoch, including a last batch that is not full."""
        return -(-self.num_windows // self.batch_size)

    def batch_at(self, position: int, rows: Rows = _ALL) -> Batch:
        """Return the batch that comes after the first `position` windows of a run.

        Epochs follow each other without a gap, so a batch may contain the end of one epoch and the
        start of the next. The position is the complete state of reading. A run that resumes with a
        different batch size therefore neither repeats nor skips a window.

        Args:
          position: number of windows read since the start of the run, 0 or more.
          rows: the rows of the batch to read; each process requests only the rows that it needs.

        Returns:
          The batch, or only the given rows of it.
        """
        return self.at(position + np.arange(self.batch_size)[rows])

    def at(self, numbers: Int64[np.ndarray, " batch"]) -> Batch:
        """Return the windows with these numbers, counted from 0 over all epochs of a run."""
        epoch, window = np.divmod(numbers, self.num_windows)
        if self.shuffle:
            window = permute(window, size=self.num_windows, seed=self.seed, epoch=epoch)
        return self._gather(window, self.num_windows)

    def batches(self) -> Iterator[Batch]:
        """Iterate over batches that contain every window once, in the order of the stream.

        Returns:
          An iterator over batches of the same shape. Rows beyond the last window are 0, including
          their weights.
        """
        return map(self.in_order, range(self.num_batches))

    def in_order(self, number: int, rows: Rows = _ALL, *, end: int | None = None) -> Batch:
        """Return one batch of `batches`, or only some of its rows.

        Args:
          number: number of the batch, from 0.
          rows: the rows of the batch to read.
          end: number of windows to use, or None for all. Rows for later windows are 0, including
            their weights.
        """
        window = number * self.batch_size + np.arange(self.batch_size)[rows]
        return self._gather(window, self.num_windows if end is None else end)

    def _gather(self, window: Int64[np.ndarray, " batch"], end: int) -> Batch:
        if self._bounds is None:
            starts = window * self.seq_len
            ends = starts + self.seq_len
        else:
            number = np.minimum(window, self.num_windows - 1)
            starts, ends = self._bounds[number], self._bounds[number + 1]
        positions = starts[:, None] + np.arange(self.seq_len + 1)
        # The token at the end of a window is only a target.
        real = positions < np.minimum(ends + 1, len(self.stream))[:, None]
        # Rows beyond the last window have no loss. Such a row may start at the last token of the
        # stream, which has no target.
        real &= (window < min(end, self.num_windows))[:, None]
        stored = np.where(real, self.stream.read(starts, self.seq_len + 1), 0)
        tokens, has_loss = marked.without_marks(stored), real & marked.have_loss(stored)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        segments = np.where(real[:, :-1], self._segments(inputs, positions[:, :-1]), 0)
        weights = has_loss[:, 1:].astype(np.float32)
        return Batch(inputs, targets, segments.astype(np.int32), weights)

    def _segments(
        self, inputs: Int32[np.ndarray, "batch seq"], positions: Int64[np.ndarray, "batch seq"]
    ) -> Int64[np.ndarray, "batch seq"]:
        """Return the number of each input's document within its window, from 1."""
        if self._documents is not None:
            numbers = np.searchsorted(self._documents, positions, side="right")
            return 1 + numbers - numbers[:, :1]
        begins = inputs == self.bos
        # A window may begin within a document, so its first token starts segment 1 even if it is
        # not a BOS.
        begins[:, 0] = True
        return np.cumsum(begins, axis=1)


def whole_documents(
    bounds: Int64[np.ndarray, " documents_plus_1"], seq_len: int
) -> Int64[np.ndarray, " windows_plus_1"]:
    """Return the bounds of windows that have as many whole documents as fit, in order.

    Args:
      bounds: the position of the first token of each document, and the end of the last.
      seq_len: largest number of tokens in a window. A longer document starts a new window, and is
        divided over several windows.
    """
    found, at, end = [], int(bounds[0]), int(bounds[-1])
    while at < end:
        found.append(at)
        fits = int(bounds[np.searchsorted(bounds, at + seq_len, side="right") - 1])
        at = fits if fits > at else min(at + seq_len, end)
    return np.array([*found, end], np.int64)


def _choose(sizes: dict[str, int], eval_fraction: float, seed: int) -> set[str]:
    """Return the texts of the documents to hold out.

    Args:
      sizes: maps the text of each document to its number of characters, times the number of its
        copies. There must be at least two distinct documents.
      eval_fraction: fraction of the characters to hold out.
      seed: seed of the choice.
    """
    total = sum(sizes.values())
    wanted, held = eval_fraction * total, 0
    chosen, passed_over = set(), []
    for text in sorted(sizes, key=lambda text: rank(text, seed)):
        if held + sizes[text] <= wanted:
            chosen.add(text)
            held += sizes[text]
        else:
            passed_over.append(text)
    # Also hold out the smallest remaining document if this brings the total closer to the requested
    # share, or if no document was chosen.
    for text in sorted(passed_over, key=sizes.__getitem__)[:1]:
        after = held + sizes[text]
        if not chosen or (after - wanted < wanted - held and after <= total / 2):
            chosen.add(text)
    return chosen


def rank(text: str, seed: int) -> bytes:
    """Return the rank of a document: 16 pseudo-random bytes from its text and a seed.

    Documents are held out in ascending order of their ranks.
    """
    return hashlib.blake2b(f"{seed} {text}".encode(), digest_size=16).digest()


def cut(text: str, eval_fraction: float) -> tuple[str, str]:
    """Split a document of at least 2 characters into a head and a tail.

    The tail has roughly `eval_fraction` of the characters, or fewer, and starts at a line or a word
    if possible.
    """
    tail = max(1, int(eval_fraction * len(text)))
    # Search for the end of a line or a word in the first half of the requested tail. At least half
    # of the requested tail then remains.
    at, end = len(text) - tail, len(text) - tail // 2 - 1
    for boundary in "\n", " ":
        if (found := text.find(boundary, at - 1, end)) >= 0:
            return text[: found + 1], text[found + 1 :]
    return text[:at], text[at:]


def _too_short_to_cut(source: str, text: str, eval_fraction: float) -> str:
    data = f"--data={source}" if source else "--data"
    characters = f"{len(text)} character" + "s" * (len(text) != 1)
    return (
        f"{data} is one document of {characters}, too short to hold out "
        f"data.eval_fraction={eval_fraction} of it; legal: 2 characters or more"
    )


def _too_short(source: str, tokens: int, seq_len: int, *, held_out: bool) -> str:
    data = f"--data={source}" if source else "--data"
    if held_out:
        return (
            f"the held-out part of {data} has {tokens} tokens, and none is followed by another; "
            "legal: more text or a larger data.eval_fraction"
        )
    shorter = f"--seq_len of at most {tokens - 1}, or " if tokens > 1 else ""
    return (
        f"{data} has {tokens} tokens to train on, fewer than one window of --seq_len={seq_len} and "
        f"the token after it; legal: {shorter}more text"
    )
