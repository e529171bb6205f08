"""Small models and batches that tests share."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rmt_tpu import Decoder
from rmt_tpu import config as cfg
from rmt_tpu.data import Batch

VOCAB = 61
# Small, one of every kind.
MIXERS = {
    "sum": cfg.Sum(),
    "blocks": cfg.BlockAttention(num_blocks=2),
    "input query": cfg.BlockAttention(num_blocks=2, query="input"),
    "full": cfg.FullAttention(),
    "delta": cfg.DeltaAttention(num_blocks=2),
    "dense": cfg.Dense(),
    "mudd": cfg.Mudd(),
    "hc": cfg.HyperConnections(streams=2),
    "mhc": cfg.Mhc(streams=2),
    "mhc-lite": cfg.MhcLite(streams=2),
    "wide": cfg.WideStreams(streams=2, forget=0.1),
    "scalars": cfg.ResidualScalars(),
    "highway": cfg.Highway(),
    "lstm": cfg.DepthLstm(),
    "hierarchical": cfg.Hierarchical(hidden_dim=10),
}


def model(kind: str = "matrix", **changes) -> cfg.ModelConfig:
    """A decoder of 3 layers with odd sizes.

    `changes` are fields of ModelConfig, those of its short form too, or of Attention.
    """
    attention = cfg.Attention(num_heads=3, head_dim=6, positions=cfg.Learned(32))
    names = {"positions", "inverse_layer_scaling", "num_heads", "head_dim"}
    attention = replace(attention, **{k: v for k, v in changes.items() if k in names})
    stores = {"matrix": cfg.MatrixStore(key_dim=5), "vector": cfg.VectorStore(dim=20)}
    layer = (attention, cfg.FeedForward(hidden_dim=22))
    config = cfg.ModelConfig((cfg.Stack(layer, 3),), store=stores[kind], vocab_size=VOCAB)
    return config.replace(**{k: v for k, v in changes.items() if k not in names})


def split(config: cfg.ModelConfig) -> tuple[nnx.GraphDef, dict]:
    """A decoder's graph and parameters; the same ones for the same config."""
    return graph(config), _parameters(replace(config, remat="full"))


@cache
def _parameters(config: cfg.ModelConfig) -> dict:
    draw = lambda: nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param))
    return jax.jit(draw)()  # compiled as a whole: much faster than one by one


def random_parameters(config: cfg.ModelConfig, seed: int = 0) -> dict:
    """A decoder's parameters as after training: no gain is 1, no query 0, no two layers alike.

    Drawn by NumPy, in float64: nothing is compiled.
    """
    rng = np.random.default_rng(seed)

    def draw(path, p):
        x = rng.normal(size=p.shape) * p.shape[-1] ** -0.5
        return 1 + x if "gain" in path[-1].key else x

    shapes = nnx.to_pure_dict(nnx.state(abstract(config), nnx.Param))
    return jax.tree_util.tree_map_with_path(draw, shapes)


@cache
def abstract(config: cfg.ModelConfig) -> Decoder:
    """A decoder of shapes: no parameter is drawn."""
    with jax.enable_x64(jax.config.jax_enable_x64 or config.compute_dtype == "float64"):
        return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def graph(config: cfg.ModelConfig) -> nnx.GraphDef:
    return nnx.split(abstract(config), nnx.Param)[0]


def decoder(config: cfg.ModelConfig) -> Decoder:
    return nnx.merge(*split(config))


def byte_decoder(**changes) -> Decoder:
    """Two layers, with parameters as after training, that tell bytes apart."""
    config = model(vocab_size=257, num_layers=2, **changes)
    return nnx.merge(graph(config), jax.tree.map(jnp.float32, random_parameters(config)))


def tokens(batch: int = 2, seq: int = 11, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, VOCAB, (batch, seq), dtype=np.int32))


def batch(size: int = 4, seq: int = 11, seed: int = 0) -> Batch:
    """Random tokens, two documents a row, some padding in the last row."""
    rng = np.random.default_rng(seed)
    stream = rng.integers(0, VOCAB, (size, seq + 1), dtype=np.int32)
    segment_ids = np.tile(1 + (np.arange(seq) >= seq // 2), (size, 1)).astype(np.int32)
    weights = np.ones((size, seq), np.float32)
    segment_ids[-1, -3:], weights[-1, -3:] = 0, 0
    return Batch(stream[:, :-1].copy(), stream[:, 1:].copy(), segment_ids, weights)
