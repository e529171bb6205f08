"""The residual: where a sublayer's output is put, and what the next sublayer is given.

    state, y = store.start(tokens, positions)
    state, y = mixer.start(state, y)
    state, z = mixer.advance(state, y, site)

There are `2L + 1` sites: one before each of the `2L` sublayers and one before the unembedding. A
site owns the parameters of what happens there: how what has just been produced is written, the
norm, and how the next sublayer reads. The embedding is the first thing written. A sublayer is a
plain function `y = core(z)` of data vectors `[..., vectors, size]` and knows nothing of all this.

Two choices compose:
- the *store*, what one token's residual is: `vector` (Transformer) or `matrix` (RMT);
- the *mixer*, how what was written becomes what is read: `sum`.
"""

from rmt_tpu import config as cfg
from rmt_tpu.residual import matrix, vector
from rmt_tpu.residual.sum import Sum

__all__ = ["make_mixer", "matrix", "store_module", "vector"]


def store_module(store: cfg.Store):
    """The module (with `Store` and `Site`) of a configured store."""
    match store:
        case cfg.VectorStore():
            return vector
        case cfg.MatrixStore():
            return matrix


def make_mixer(mixer: cfg.Mixer, store):
    """The configured mixer over a store's module."""
    match mixer:
        case cfg.Sum():
            return Sum(store)
