"""Conversion of text into batches for training.

Text that fits in memory is read by `documents`. `split` holds out a part for evaluation, `pack`
tokenises the documents into one stream, and `Windows` cuts the stream into batches. Text of any
size can be tokenised once into a token store (`rmt_tpu.data.prepare`), whose streams (`open_store`)
are read from storage as needed. A `Prefetcher` reads batches ahead of time.

This package uses only numpy and puts nothing on a device. The order of the batches depends only on
the text, the tokenizer and the seed. To resume reading, one number suffices: the number of windows
read.
"""

from rmt_tpu.data.batches import Batch, Stream, Windows, pack, split
from rmt_tpu.data.chat import ChatTemplate, read_template
from rmt_tpu.data.corpus import documents
from rmt_tpu.data.mixture import MixedText, Mixture
from rmt_tpu.data.prefetch import Prefetcher
from rmt_tpu.data.token_store import TokenStore, is_store, open_store
from rmt_tpu.data.tokenizer import ByteTokenizer, Tokenizer
from rmt_tpu.data.tokenizer_files import load_saved, load_tokenizer, spec_of_folder

__all__ = [
    "Batch",
    "ByteTokenizer",
    "ChatTemplate",
    "MixedText",
    "Mixture",
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
    "read_template",
    "spec_of_folder",
    "split",
]
