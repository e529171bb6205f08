"""Decoding of tokens to text while the tokens arrive."""

import codecs
from collections.abc import Sequence

import numpy as np

from rmt_tpu.data import Tokenizer


class Text:
    """The text of a sequence of tokens, decoded as the tokens arrive.

    Only whole characters are returned. The text ends before the first stop string, and no part of a
    stop string is returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending, self.stopped = "", False

    def add(self, tokens: Sequence[int], *, may_stop: bool = True) -> str:
        """Add tokens, and return the text that later tokens can no longer change.

        Args:
          tokens: the tokens.
          may_stop: whether a stop string that begins in these tokens ends the text.
        """
        # A model may have more token ids than its tokenizer. The additional ids have no text.
        ids = np.array([t for t in tokens if 0 <= t < self.tokenizer.vocab_size], int)
        new = self.decoder.decode(self.tokenizer.decode_bytes(ids))
        if not may_stop:
            new, self.pending = self.pending + new, ""
            return new
        return self._release(new)

    def end(self) -> str:
        """End the sequence, and return the text that was held back until now."""
        text = self._release(self.decoder.decode(b"", final=True)) + self.pending
        self.pending = ""
        return text

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        self.pending += new
        ends = [at for at in map(self.pending.find, self.stop) if at >= 0]
        if ends:
            text, self.pending, self.stopped = self.pending[: min(ends)], "", True
            return text
        # Hold back the end of the text if that end may be the beginning of a stop string.
        overlap = max((_overlap(self.pending, s) for s in self.stop), default=0)
        end = len(self.pending) - overlap
        text, self.pending = self.pending[:end], self.pending[end:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
