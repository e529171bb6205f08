"""Text as batches: `documents`, `split`, `pack` with a `Tokenizer`, and `Windows` of the stream.

Only numpy: nothing here is on a device yet. The order of the batches depends on the text, the
tokenizer, the seed and nothing else, and the whole state of reading is one number.
"""

from rmt_tpu.data.batches import Batch, Windows, pack, split
from rmt_tpu.data.corpus import documents
from rmt_tpu.data.tokenizer import ByteTokenizer, Tokenizer, load_saved, load_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Tokenizer",
    "Windows",
    "documents",
    "load_saved",
    "load_tokenizer",
    "pack",
    "split",
]
