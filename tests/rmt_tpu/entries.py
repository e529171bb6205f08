"""An entry of a table of block sizes."""

from pallas_kernels import tuned
from pallas_kernels.tuned import KERNELS, Entry

V5E = "tpu_v5_lite"


def entry(tokens: int, queries: int = 128) -> Entry:
    key = dict(heads=4, size=64, dtype="bfloat16", rows="size_major", alibi=False, segments=True)
    blocks = (("queries", queries),)
    kernel = KERNELS["tpu", "attention_forward"]
    return Entry(V5E, kernel.name, kernel.version, tuned.items(key), tokens, blocks, "measured")
