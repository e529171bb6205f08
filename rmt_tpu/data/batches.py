"""The steps from documents to batches: the held-out part, the stream of tokens, and its windows."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, Int64

from rmt_tpu.data.permutation import permute
from rmt_tpu.data.tokenizer import Tokenizer
from rmt_tpu.errors import UsageError


def split(
    documents: list[str], *, eval_fraction: float, seed: int, source: str = ""
) -> tuple[list[str], list[str]]:
    """Hold out whole documents for evaluation, as near to `eval_fraction` as they allow.

    The choice depends on the documents' text and on the seed, not on their order, and equal
    documents stay together. Documents larger than the wanted share are skipped, unless all are
    larger: then the smallest is held out. If there is only one document (or copies of one), its
    tail is held out, from the next start of a line, or else of a word.

    Args:
      documents: the documents of the corpus.
      eval_fraction: share of the characters to hold out, from 0 (nothing) to 0.5.
      seed: another seed holds out other documents.
      source: value of --data, for the message.

    Returns:
      `(train, held_out)`, each in the order of `documents`. Training always has a document and at
      least half of the characters; evaluation is empty only at 0.

    Raises:
      UsageError: the fraction is outside its range, or there is too little text to divide.
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


def pack(documents: list[str], tokenizer: Tokenizer) -> Int32[np.ndarray, " tokens"]:
    """Return the stream of tokens: BOS and the tokens of each document, one after the other.

    Args:
      documents: documents in order.
      tokenizer: the tokenizer that the model is trained with.

    Returns:
      int32 [tokens].
    """
    bos = np.array([tokenizer.bos], np.int32)
    encoded = tokenizer.encode_all(documents)
    return np.concatenate(
        [np.empty(0, np.int32), *(a for tokens in encoded for a in (bos, tokens))]
    )


class Batch(NamedTuple):
    """Windows of the stream, one in each row. All entries past the end of the stream are 0.

    Attributes:
      inputs: int32 [batch, seq].
      targets: int32 [batch, seq], the token after each input.
      segment_ids: int32 [batch, seq], the number of the input's document in the window, from 1.
      weights: float32 [batch, seq], 1 where there is a target.
    """

    inputs: Int32[np.ndarray, "batch seq"]
    targets: Int32[np.ndarray, "batch seq"]
    segment_ids: Int32[np.ndarray, "batch seq"]
    weights: Float32[np.ndarray, "batch seq"]


@runtime_checkable
class Stream(Protocol):
    """Tokens that are read from where they are stored, such as a token store."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def read(
        self, starts: Int64[np.ndarray, " rows"], length: int
    ) -> Int32[np.ndarray, "rows length"]:
        """Return `length` tokens from each of `starts` on, with 0 past the end.

        Several threads may call it.

        Raises:
          RunError: the tokens cannot be read.
        """

    def checksum(self) -> int:
        """Return a checksum, by which a resumed run knows that it reads the same text."""


class StreamInMemory:
    """A stream that is held as one array."""

    def __init__(self, tokens: Int32[np.ndarray, " tokens"]):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(
        self, starts: Int64[np.ndarray, " rows"], length: int
    ) -> Int32[np.ndarray, "rows length"]:
        """See `Stream`."""
        positions = starts[:, None] + np.arange(length)
        real = positions < len(self.tokens)
        tokens = self.tokens[np.where(real, positions, 0)]
        return np.where(real, tokens, 0).astype(np.int32)

    def checksum(self) -> int:
        """Return the CRC-32 of the tokens."""
        return zlib.crc32(np.ascontiguousarray(self.tokens))


Rows = slice | Int64[np.ndarray, " rows"]  # the rows of a batch to read
_ALL = slice(None)


class Windows:
    """Windows of a stream of tokens: `seq_len` inputs, each with the next token as its target.

    Window i starts at token `i * seq_len`, and the last window is padded. Therefore each token but
    the first is a target exactly once in an epoch.
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
    ):
        """Keep a stream, without copying it, to read windows from it.

        Args:
          tokens: int32 [tokens], from `pack`; or a `Stream`, from which only windows are read.
          seq_len: number of inputs in a window.
          batch_size: number of windows in a batch.
          bos: the token that starts a document.
          seed: seed of the order of the windows.
          shuffle: whether each epoch has an order of its own; if not, all have the order of the
            stream (held-out text).
          source: value of --data, for the message.

        Raises:
          UsageError: a size is below 1, or the stream is shorter than one window and its last
            target. Held-out text may be shorter, down to one target: its window is padded.
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

    @property
    def tokens_per_epoch(self) -> int:
        """Number of targets in one epoch."""
        return len(self.stream) - 1

    @property
    def num_windows(self) -> int:
        """Number of windows in one epoch."""
        return -(-self.tokens_per_epoch // self.seq_len)

    def checksum(self) -> int:
        """Return the stream's checksum, by which a resumed run knows that it has the same text."""
        return self.stream.checksum()

    @property
    def num_batches(self) -> int:
        """Number of batches in one epoch, including a last one that is not full."""
        return -(-self.num_windows // self.batch_size)

    def batch_at(self, position: int, rows: Rows = _ALL) -> Batch:
        """Return the next batch after `position` windows have been read since the run began.

        Epochs follow one another without a gap, so a batch may hold the end of one and the start of
        the next. The position is the whole state: a run that resumes with another batch size
        repeats and skips nothing.

        Args:
          position: number of windows read, 0 or more.
          rows: the rows of the batch to read; each of several processes asks for its own.

        Returns:
          `batch_size` windows, or those in `rows`.
        """
        epoch, window = np.divmod(position + np.arange(self.batch_size)[rows], self.num_windows)
        if self.shuffle:
            window = permute(window, size=self.num_windows, seed=self.seed, epoch=epoch)
        return self._gather(window, self.num_windows)

    def batches(self) -> Iterator[Batch]:
        """Return every window once, in the order of the stream.

        Returns:
          Batches of one shape: rows past the last window are 0, including their weights.
        """
        return map(self.in_order, range(self.num_batches))

    def in_order(self, number: int, rows: Rows = _ALL, *, end: int | None = None) -> Batch:
        """Return the batch of `batches` with this number, from 0, or only some of its rows.

        Args:
          number: number of the batch.
          rows: the rows of the batch to read.
          end: windows from this one on are left out: their rows are 0, including their weights.
        """
        window = number * self.batch_size + np.arange(self.batch_size)[rows]
        return self._gather(window, self.num_windows if end is None else end)

    def _gather(self, window: Int64[np.ndarray, " batch"], end: int) -> Batch:
        starts = window * self.seq_len
        real = starts[:, None] + np.arange(self.seq_len + 1) < len(self.stream)
        # A row past the last window may start at the last token, which has no target, so it is
        # masked.
        real &= (window < min(end, self.num_windows))[:, None]
        tokens = np.where(real, self.stream.read(starts, self.seq_len + 1), 0).astype(np.int32)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        begins = (inputs == self.bos) & real[:, :-1]
        # The first token of a window belongs to its first document, whether it is a BOS or not.
        begins[:, 0] = True
        segments = np.where(real[:, :-1], np.cumsum(begins, axis=1), 0)
        return Batch(inputs, targets, segments.astype(np.int32), real[:, 1:].astype(np.float32))


def _choose(sizes: dict[str, int], eval_fraction: float, seed: int) -> set[str]:
    """Return the documents to hold out, given the size of each; there are at least two."""
    total = sum(sizes.values())
    wanted, held = eval_fraction * total, 0
    chosen, passed_over = set(), []
    for text in sorted(sizes, key=lambda text: rank(text, seed)):
        if held + sizes[text] <= wanted:
            chosen.add(text)
            held += sizes[text]
        else:
            passed_over.append(text)
    # Hold out one more document if that brings the share nearer, or if none was chosen.
    for text in sorted(passed_over, key=sizes.__getitem__)[:1]:
        after = held + sizes[text]
        if not chosen or (after - wanted < wanted - held and after <= total / 2):
            chosen.add(text)
    return chosen


def rank(text: str, seed: int) -> bytes:
    """Return 16 pseudo-random bytes for a text and seed.

    Documents with the least rank are held out first.
    """
    return hashlib.blake2b(f"{seed} {text}".encode(), digest_size=16).digest()


def cut(text: str, eval_fraction: float) -> tuple[str, str]:
    """Return the head and the tail of a document, the tail of at most about `eval_fraction`.

    The document needs at least 2 characters.
    """
    tail = max(1, int(eval_fraction * len(text)))
    # The cut is at a later boundary, so that the tail never exceeds its share, and within the first
    # half of the tail.
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
            f"the held-out part of {data} has {tokens} tokens, none with another after it; legal: "
            "more text or a larger data.eval_fraction"
        )
    shorter = f"--seq_len of at most {tokens - 1}, or " if tokens > 1 else ""
    return (
        f"{data} has {tokens} tokens to train on, fewer than one window of --seq_len={seq_len} and "
        f"the token after it; legal: {shorter}more text"
    )
