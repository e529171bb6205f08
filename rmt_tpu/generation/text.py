"""Tokens as text that can be shown: whole characters, and no part of a stop string."""

import codecs
from collections.abc import Sequence

import numpy as np

from rmt_tpu.data import Tokenizer


class Text:
    """The text of tokens in whole characters, up to a stop string, of which no part is returned."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held, self.stopped = "", False

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the text that is now certain."""
        # A model may have more tokens than its tokenizer; these have no text.
        known = np.array([t for t in tokens if 0 <= t < self.tokenizer.vocab_size], int)
        return self._told(self.decoder.decode(self.tokenizer.decode_bytes(known)))

    def end(self) -> str:
        """Return the rest of the text."""
        told = self._told(self.decoder.decode(b"", final=True)) + self.held
        self.held = ""
        return told

    def _told(self, new: str) -> str:
        if self.stopped:
            return ""
        self.held += new
        ends = [at for at in map(self.held.find, self.stop) if at >= 0]
        if ends:
            told, self.held, self.stopped = self.held[: min(ends)], "", True
            return told
        # The end of the text may be the beginning of a stop string.
        keep = max((_overlap(self.held, s) for s in self.stop), default=0)
        told, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return told


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
