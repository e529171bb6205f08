"""Text as batches: `documents`, `split`, `pack` with a `Tokenizer`, and `Windows` of the stream.

Text of any amount goes into a token store (`rmt_tpu.data.prepare`), and the streams of `open_store`
are read from it in place. A `Prefetcher` reads the next batches ahead.

This package uses only numpy: nothing is on a device yet. The order of the batches depends only on
the text, the tokenizer and the seed, and the whole state of reading is one number.
"""

from rmt_tpu.data.batches import Batch, Stream, Windows, pack, split
from rmt_tpu.data.corpus import documents
from rmt_tpu.data.prefetch import Prefetcher
from rmt_tpu.data.token_store import TokenStore, is_store, open_store
from rmt_tpu.data.tokenizer import ByteTokenizer, Tokenizer
from rmt_tpu.data.tokenizer_files import load_saved, load_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Prefetcher",
    "Stream",
    "TokenStore",
    "Tokenizer",
    "Windows",
    "documents",
    "is_store",
    "load_saved",
    "load_tokenizer",
    "open_store",
    "pack",
    "split",
]
