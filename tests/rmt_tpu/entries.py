"""An entry of a table of block sizes."""

from pallas_kernels import tuned
from pallas_kernels.tuned import Entry

V5E = "tpu_v5_lite"


def entry(tokens: int, queries: int = 128) -> Entry:
    key = dict(heads=4, size=64, dtype="bfloat16", rows="size_major", alibi=False, segments=True)
    blocks = (("queries", queries),)
    return Entry(V5E, "attention_forward", 1, tuned.items(key), tokens, blocks, "measured")
