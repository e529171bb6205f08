"""The residual: where sublayers write their outputs, and where later sublayers read their inputs.

    state, y = store.start(tokens, positions)
    state, y = mixer.start(store, state, y)
    state, z = mixer.advance(store, state, y, site, index)

A *site* is the place before a sublayer or before the unembedding, so a model with L layers has
`2L+1` sites. A site has the parameters for writing the previous output, for the norm, for the next
sublayer's read and, in `site.mix`, for the mixer. Their shapes follow from the inputs and outputs
of the cores before and after the site. The embedding is the first output that is written. A
sublayer computes `y = core(z)`, where z contains the data vectors that the site before the sublayer
has read. A core does not depend on the kind of residual.

Two choices can be combined freely:
- the *store* defines the residual of one token: `vector` (Transformer) or `matrix` (RMT);
- the *mixer* defines how earlier outputs are combined into the next input: `sum`, attention over
  depth, ...

Some mixers keep earlier outputs as rows of an array, the *bank* (protocol `BankMixer`). These
mixers run in their own schedule, `rmt_tpu.execution.banked`, whose backward pass needs little more
memory than the bank. `protocols` lists the methods that stores and mixers must have.
"""

from types import ModuleType

from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.layers.data_vectors import HeadsLayout
from rmt_tpu.layers.parameters import Seed
from rmt_tpu.residual import (
    delta_attention,
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
from rmt_tpu.residual.mudd import Mudd
from rmt_tpu.residual.place import Place
from rmt_tpu.residual.protocols import BankMixer, StateMixer
from rmt_tpu.residual.residual_scalars import ResidualScalars, ScalarsMix
from rmt_tpu.residual.sum import Sum
from rmt_tpu.residual.wide_streams import WideMix, WideStreams

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
    """Return the module that defines `Store` and `Site` for a configured store."""
    match store:
        case cfg.VectorStore():
            return vector
        case cfg.MatrixStore():
            return matrix


def make_mixer(config: cfg.ModelConfig, seed: Seed) -> StateMixer | BankMixer:
    """Return the configured mixer, which forms a sublayer's input from earlier outputs.

    The mixer has only the parameters that do not belong to a site (the place before a sublayer).
    """
    match config.mixer:
        case cfg.Sum():
            return Sum()
        case cfg.FullAttention() | cfg.BlockAttention():
            if config.mixer.fused:
                return depth_attention.DepthAttention(config)
            return depth_ablations.DepthAblation(config, seed)
        case cfg.DeltaAttention():
            return delta_attention.DeltaAttention(config)
        case cfg.Dense():
            return Dense(config)
        case cfg.Mudd():
            return Mudd(config, seed)
        case cfg.HyperConnections() | cfg.Mhc() | cfg.MhcLite():
            return HyperConnections(config)
        case cfg.WideStreams():
            return WideStreams(config)
        case cfg.ResidualScalars():
            return ResidualScalars(config, heads_layout(config))
        case cfg.Highway():
            return Highway(config)
        case cfg.DepthLstm():
            return DepthLstm(config)
        case cfg.Hierarchical():
            return Hierarchical(config, seed)


def make_site(config: cfg.ModelConfig, seed: Seed, place: Place) -> nnx.Module:
    """Return the parameters of one site, at which the residual is written and read.

    The site has the parameters of the configured store (the kind of residual), and in `site.mix`
    those of the configured mixer.
    """
    site = store_module(config.store).Site(config, seed, place)
    match config.mixer:
        case cfg.FullAttention() | cfg.BlockAttention():
            fused = config.mixer.fused
            mix = depth_attention.DepthAttentionMix if fused else depth_ablations.DepthAblationMix
            attends = not place.last or config.mixer.output_site == "attention"
            site.mix = mix(config, seed / "mix") if attends else None
        case cfg.DeltaAttention():
            site.mix = delta_attention.DeltaAttentionMix(config, seed / "mix")
        case cfg.HyperConnections() | cfg.Mhc() | cfg.MhcLite():
            make_mix, at = hyper_connections.make_mix, {"index": place.index}
            site.mix = None if place.last else make_mix(config, seed / "mix", **at)
        case cfg.WideStreams():
            site.mix = None if place.last else WideMix(config.mixer)
        case cfg.ResidualScalars():
            site.mix = None if place.last else ScalarsMix(config.mixer, place)
        case cfg.Highway():
            site.mix = None if place.last else highway.HighwayMix(config, seed / "mix")
        case cfg.DepthLstm():
            site.mix = depth_lstm.LstmGates(config, seed / "mix") if place.within else None
    return site


def heads_layout(config: cfg.ModelConfig) -> HeadsLayout:
    """Return the layout of heads on devices for the configured store."""
    return store_module(config.store).HEADS


def output_scale(config: cfg.ModelConfig) -> float:
    """Return the initial scale of the weights that produce a sublayer's output.

    The scale is small where the mixer sums many outputs. In an RMT, the storage keys carry this
    scale instead.
    """
    return store_module(config.store).output_scale(config)
