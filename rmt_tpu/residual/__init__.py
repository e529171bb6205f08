"""The residual: where a sublayer's output is put, and what the next sublayer is given.

    state, y = store.start(tokens, positions)
    state, y = mixer.start(store, state, y)
    state, z = mixer.advance(store, state, y, site, index)

There is a site before each sublayer and one before the unembedding: `2L + 1` for L layers. A site
owns the parameters of what happens there: how the newest output is written, the norm, how the next
sublayer reads, and in `site.mix` what the mixer learns there. A site is made from the ports of the
cores on its two sides. The embedding is the first thing written. A sublayer is `y = core(z)`, where
z are the data vectors that its site has read; a core knows nothing of the residual.

Two choices compose:
- the *store*, what one token's residual is: `vector` (Transformer) or `matrix` (RMT);
- the *mixer*, how what was written becomes what is read: `sum`, attention over depth, ...

Mixers that keep what was written as rows of a bank (protocol `Banked`) run by a schedule of their
own, `rmt_tpu.execution.banked`, whose backward pass needs little more than the bank. The methods
that stores and mixers must have are in `protocols`.
"""

from types import ModuleType

from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import HeadsLayout
from rmt_tpu.layers.parameters import Seed
from rmt_tpu.residual import (
    depth_ablations,
    depth_attention,
    depth_lstm,
    fixed_point,
    highway,
    hyper_connections,
    matrix,
    vector,
)
from rmt_tpu.residual.dense import Dense
from rmt_tpu.residual.depth_lstm import DepthLstm
from rmt_tpu.residual.hierarchical import Hierarchical
from rmt_tpu.residual.highway import Highway
from rmt_tpu.residual.hyper_connections import HyperConnections
from rmt_tpu.residual.place import Place
from rmt_tpu.residual.protocols import Banked, Carried
from rmt_tpu.residual.sum import Sum

__all__ = [
    "Place",
    "Seed",
    "fixed_point",
    "heads_layout",
    "make_mixer",
    "make_site",
    "output_scale",
    "store_module",
]


def store_module(store: cfg.Store) -> ModuleType:
    """Return the module (with `Store` and `Site`) of a configured store."""
    match store:
        case cfg.VectorStore():
            return vector
        case cfg.MatrixStore():
            return matrix


def make_mixer(config: cfg.ModelConfig, seed: Seed) -> Carried | Banked:
    """Return the configured mixer, with the parameters that it has besides those of its sites."""
    match config.mixer:
        case cfg.Sum():
            return Sum()
        case cfg.FullAttention() | cfg.BlockAttention():
            if config.mixer.fused:
                return depth_attention.DepthAttention(config)
            return depth_ablations.DepthAblation(config, seed)
        case cfg.Dense():
            return Dense(config)
        case cfg.HyperConnections() | cfg.Mhc() | cfg.MhcLite():
            return HyperConnections(config)
        case cfg.Highway():
            return Highway(config)
        case cfg.DepthLstm():
            return DepthLstm(config)
        case cfg.Hierarchical():
            return Hierarchical(config, seed)


def make_site(config: cfg.ModelConfig, seed: Seed, place: Place) -> nnx.Module:
    """Return a site of the configured store, with what the configured mixer learns there."""
    site = store_module(config.store).Site(config, seed, place)
    match config.mixer:
        case cfg.FullAttention() | cfg.BlockAttention():
            module = depth_attention if config.mixer.fused else depth_ablations
            site.mix = module.Mix(config, seed / "mix")
        case cfg.HyperConnections() | cfg.Mhc() | cfg.MhcLite():
            make_mix, at = hyper_connections.make_mix, {"index": place.index}
            site.mix = None if place.last else make_mix(config, seed / "mix", **at)
        case cfg.Highway():
            site.mix = None if place.last else highway.Mix(config, seed / "mix")
        case cfg.DepthLstm():
            site.mix = depth_lstm.Mix(config, seed / "mix") if place.within else None
    return site


def heads_layout(config: cfg.ModelConfig) -> HeadsLayout:
    """Return the layout of heads of the configured store."""
    return store_module(config.store).HEADS


def output_scale(config: cfg.ModelConfig) -> float:
    """Return the initial scale of the weights that make what is written to the residual.

    It is small where many writes are added up. In an RMT the storage keys carry the scale instead.
    """
    return store_module(config.store).output_scale(config)
