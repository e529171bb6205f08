"""A mixture of texts, from which training reads windows in given shares.

Each window of a run comes from one text. The texts alternate in an order that depends only on the
shares and repeats after a period. The period is the smallest number of windows in which every text
can have exactly its share. After any number of windows, each text is less than one window ahead of
or behind its share. Each text has its own epochs, whose windows are shuffled as if the run read
this text alone.

The state of reading is the number of windows read in the run. If shares have changed during the
run, the state also has the position of the last change. It then has the number of windows read from
each text before this change, too.
"""

import functools
import json
import math
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from rmt_tpu.data.batches import Batch, Rows, Stream, Windows
from rmt_tpu.errors import UsageError

_ALL = slice(None)


class MixedText(NamedTuple):
    """One text of a mixture.

    Attributes:
      source: path of the text, as in the config.
      units: the text's weight, a whole number. Its share is this number divided by the sum over all
        texts.
      windows: the windows of the text.
    """

    source: str
    units: int
    windows: Windows


class Mixture:
    """Batches of windows from several texts; it has the methods of `Windows` that training uses."""

    def __init__(
        self,
        texts: Sequence[MixedText],
        *,
        since: int = 0,
        read: Mapping[str, int] | None = None,
    ):
        """Create a mixture of texts.

        Args:
          texts: the texts, whose windows have the same length and batch size.
          since: number of windows read in the run when these shares took effect.
          read: a dict from the checksum of a text to the number of its windows that were read
            before `since`. It may contain texts that are not in this mixture.

        Raises:
          UsageError: two texts are the same.
        """
        self.texts, self._since, self._read = list(texts), since, dict(read or {})
        self._checksums = [str(text.windows.checksum()) for text in texts]
        for number, checksum in enumerate(self._checksums):
            if (first := self._checksums.index(checksum)) < number:
                raise UsageError(
                    f"--mixture: {texts[first].source} and {texts[number].source} are the same "
                    "text; list each text only once"
                )
        self._base = np.array([self._read.get(c, 0) for c in self._checksums], np.int64)
        self._units = tuple(text.units for text in texts)
        self.names = source_names([text.source for text in texts])
        self.batch_size, self.seq_len = texts[0].windows.batch_size, texts[0].windows.seq_len

    @property
    def shares(self) -> list[float]:
        """The shares of the texts, which add up to 1."""
        return [units / sum(self._units) for units in self._units]

    @property
    def streams(self) -> list[tuple[float, Stream]]:
        """The share and the token stream of each text."""
        streams = [text.windows.stream for text in self.texts]
        return list(zip(self.shares, streams, strict=True))

    def checksum(self) -> int:
        """Return the CRC-32 of the checksums of all texts, in the order of the config."""
        return zlib.crc32(json.dumps(self._checksums).encode())

    def batch_at(self, position: int, rows: Rows = _ALL) -> Batch:
        """Return the batch that comes after the first `position` windows of the run.

        See `Windows.batch_at`. The position must not be before the last change of the shares.
        """
        positions = position + np.arange(self.batch_size, dtype=np.int64)[rows]
        text, _ = order(self._units)
        chosen = text[(positions - self._since) % len(text)]
        numbers = self._windows_read(positions)
        batch = Batch(
            *(np.zeros((len(positions), self.seq_len), dtype) for dtype in (np.int32,) * 3),
            np.zeros((len(positions), self.seq_len), np.float32),
            np.repeat(chosen.astype(np.int32)[:, None], self.seq_len, axis=1),
        )
        used = np.unique(chosen).tolist()
        own = [np.flatnonzero(chosen == number) for number in used]
        reads = [
            functools.partial(self.texts[number].windows.at, numbers[rows_of_text, number])
            for number, rows_of_text in zip(used, own, strict=True)
        ]
        for rows_of_text, found in zip(own, _together(reads), strict=True):
            for whole, part in zip(batch[:4], found[:4], strict=True):
                whole[rows_of_text] = part
        return batch

    def windows_read(self, position: int) -> list[int]:
        """Return how many of the first `position` windows of the run come from each text."""
        return self._windows_read(np.array([position], np.int64))[0].tolist()

    def _windows_read(
        self, positions: Int64[np.ndarray, " rows"]
    ) -> Int64[np.ndarray, "rows texts"]:
        if (positions < self._since).any():
            raise ValueError(
                f"a position is before window {self._since}, at which the shares last changed"
            )
        return self._base + counts(self._units, positions - self._since)

    def epochs(self, position: int) -> list[float]:
        """Return how often each text has been read after `position` windows of the run."""
        windows = (text.windows.num_windows for text in self.texts)
        return [n / total for n, total in zip(self.windows_read(position), windows, strict=True)]

    def metrics(self, position: int) -> dict[str, int | float]:
        """Return each text's tokens and epochs in the first `position` windows of the run.

        Tokens are counted as whole windows, although the last window of an epoch is padded.
        """
        read = self.windows_read(position)
        tokens = {
            f"data/{n}/tokens": r * self.seq_len for n, r in zip(self.names, read, strict=True)
        }
        epochs = zip(self.names, self.epochs(position), strict=True)
        return tokens | {f"data/{name}/epochs": value for name, value in epochs}

    def meta(self) -> dict[str, Any]:
        """Return the state of reading for the metadata of a checkpoint; see `resumed`."""
        sources = zip(self.texts, self._checksums, strict=True)
        return {
            "since": self._since,
            "read": self._read,
            "sources": [[text.source, text.units, checksum] for text, checksum in sources],
        }

    def resumed(self, position: int, saved: Mapping[str, Any]) -> "Mixture":
        """Return this mixture in the state that continues a run after its first `position` windows.

        The shares and texts may differ from those in the checkpoint. The shares of this mixture
        then apply from now on. Each text continues with the windows that the run has not read yet.

        Args:
          position: number of windows read in the run.
          saved: the state in the metadata of the checkpoint: the result of `meta` or `only_text`.

        Raises:
          UsageError: the text of a source differs from its text at the time of the checkpoint.
        """
        for source, _, checksum in saved["sources"]:
            for text, own in zip(self.texts, self._checksums, strict=True):
                if text.source == source and own != checksum:
                    raise UsageError(
                        f"--mixture: the tokens of {source} are not those that the run was trained "
                        "on up to this checkpoint: a file, the tokenizer or (for stdlib) the "
                        "version of Python has changed; restore it, or give another --workdir"
                    )
        units = tuple(units for _, units, _ in saved["sources"])
        checksums = [checksum for _, _, checksum in saved["sources"]]
        if (units, checksums) == (self._units, self._checksums):
            return Mixture(self.texts, since=saved["since"], read=saved["read"])
        since = np.array([position - saved["since"]], np.int64)
        read = dict(saved["read"])
        for checksum, count in zip(checksums, counts(units, since)[0].tolist(), strict=True):
            read[checksum] = read.get(checksum, 0) + count
        return Mixture(self.texts, since=position, read=read)


def _together(reads: Sequence[Callable[[], Batch]]) -> list[Batch]:
    """Call functions concurrently, because each one waits for storage, and return their results."""
    futures: list[Future[Batch]] = [Future() for _ in reads]

    def call(read: Callable[[], Batch], future: Future[Batch]) -> None:
        try:
            future.set_result(read())
        except BaseException as error:  # The call of `result` below raises the error.
            future.set_exception(error)

    # Use daemon threads, so that a read that hangs does not keep the process from exiting.
    for item in zip(reads[1:], futures[1:], strict=True):
        threading.Thread(target=call, args=item, daemon=True).start()
    for item in zip(reads[:1], futures[:1], strict=True):
        call(*item)
    return [future.result() for future in futures]


def only_text(source: str, units: int, checksum: int) -> dict[str, Any]:
    """Return the state, in the form of `Mixture.meta`, of a run that has read only one text."""
    return {"since": 0, "read": {}, "sources": [[source, units, str(checksum)]]}


def counts(
    units: tuple[int, ...], positions: Int64[np.ndarray, " rows"]
) -> Int64[np.ndarray, "rows texts"]:
    """Return how many of the first `positions` windows come from each text."""
    text, before = order(units)
    periods, within = np.divmod(positions, len(text))
    return periods[:, None] * before[-1] + before[within]


@functools.lru_cache(maxsize=64)
def order(
    units: tuple[int, ...],
) -> tuple[Int64[np.ndarray, " period"], Int64[np.ndarray, "period_plus_1 texts"]]:
    """Return one period of the order in which texts alternate.

    This is Tijdeman's solution of the chairman assignment problem (1980). If there are K texts, a
    text with share s has been chosen at least `n s - c` and at most `n s + c` times after n
    windows, with `c = 1 - 1 / (2 K - 2)`.

    Args:
      units: the share of each text as a whole number, at least 0; not all are 0.

    Returns:
      Two arrays. The first has the index of the text that each window of the period comes from. The
      second has one row per window, and a last row for the end of the period. A row has the number
      of earlier windows of each text.
    """
    divisor = math.gcd(*units)
    weights = np.array(units, np.int64) // divisor
    period, used = int(weights.sum()), np.flatnonzero(weights)
    weight, scale = weights[used], max(2 * len(used) - 2, 1)
    chosen, count = np.zeros(period, np.int64), np.zeros(len(used), np.int64)
    before = np.zeros((period + 1, len(units)), np.int64)
    for n in range(1, period + 1):
        # If a text is not chosen now, it is this far behind its share after n windows, and must be
        # chosen within this number of windows. Both numbers are scaled by a constant, so that
        # `behind` is a whole number.
        behind = scale * (n * weight - period * count)
        due = ((scale - 1) * period - behind) / weight
        # Exclude texts that would be too far ahead of their share if they were chosen now.
        due[behind < period] = np.inf
        best = int(np.argmin(due)) if len(used) > 1 else 0
        count[best] += 1
        chosen[n - 1] = used[best]
        before[n, used] = count
    return chosen, before


def source_names(sources: Sequence[str]) -> list[str]:
    """Return a short name for each source: the shortest end of its path that is unique."""
    parts = [
        [part for part in re.sub(r"[^\w./-]+", "_", source).split("/") if part] or ["_"]
        for source in sources
    ]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of[-length:]) for of in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name}.{number}" for number, name in enumerate(names)]
