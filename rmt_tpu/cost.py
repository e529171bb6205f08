"""Parameters and FLOPs of a model, from its config alone.

Appendix A of Mak and Flanigan (2025): Table 7 and sections A.1 and A.2, with two corrections that
reproduce the printed results (Table 4, Figure 1): parameters count the embedding and the
unembedding, and the key vectors of a layer cost `12 R D_k D_v` FLOPs a token, as A.2 lists them.
A multiplication and an addition are two FLOPs; a backward pass costs twice the forward pass.

Mixers are counted in the same way: products with matrices, and weighted sums and inner products of
residuals. Norms, activations, gates' products of numbers and plain sums are left out.
"""

from math import factorial

from rmt_tpu import config as cfg
from rmt_tpu.config import Learned, MatrixStore, ModelConfig, VectorStore

_PEAK_BF16_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s that the maker states for a device, or None if it is not known here."""
    matches = [kind for kind in _PEAK_BF16_FLOPS if device_kind.startswith(kind)]
    return _PEAK_BF16_FLOPS[max(matches, key=len)] if matches else None


def parameters(config: ModelConfig) -> dict[str, int]:
    """Number of parameters by part; their sum is the model's."""
    layers, width = config.num_layers, config.width
    rank, head_dim = config.attention.num_heads, config.attention.head_dim
    learned = isinstance(config.attention.positions, Learned)
    positions = config.attention.positions.max_length * width if learned else 0
    match config.store:
        case MatrixStore(key_dim=key_dim):
            # w_E, r_U, w_PE, and 3R + R + R + R a layer (A.1).
            reads_and_writes = rank * key_dim * (6 * layers + 2 + learned)
        case VectorStore(dim=dim):
            reads_and_writes = layers * 4 * dim * rank * head_dim
    # A depth-wise LSTM norms what it computes, not what sublayers read.
    normed_sites = 1 if isinstance(config.mixer, cfg.DepthLstm) else 2 * layers + 1
    return {
        "embedding": config.vocab_size * width + positions,
        "reads_and_writes": reads_and_writes,
        "feed_forward": layers * _feed_forward_weights(config),
        "norms": normed_sites * config.residual_size,
        "mixer": _mixer_parameters(config),
        "unembedding": config.vocab_size * width,
    }


def forward_flops(config: ModelConfig, seq_len: int) -> dict[str, int]:
    """FLOPs of the forward pass for one token of a window of `seq_len`, by part.

    Attention is counted over the whole window, as in the paper, although the mask is causal.
    `embedding` counts looking up as a matrix product (what Figure 1 counts; no machine does it).
    """
    layers, width, vocab = config.num_layers, config.width, config.vocab_size
    rank, head_dim = config.attention.num_heads, config.attention.head_dim
    learned = isinstance(config.attention.positions, Learned)
    match config.store:
        case MatrixStore(key_dim=key_dim):
            # One key vector against one data vector of each token: 2 D_k D_v.
            per_vector = 2 * key_dim * head_dim
            reads_and_writes = 6 * layers * rank * per_vector
            embedding_keys, unembedding_keys = (1 + learned) * rank * per_vector, rank * per_vector
        case VectorStore(dim=dim):
            reads_and_writes = layers * 8 * dim * rank * head_dim
            embedding_keys = unembedding_keys = 0
    return {
        "embedding": 2 * vocab * width + embedding_keys,
        "reads_and_writes": reads_and_writes,
        "attention": layers * (4 * seq_len * rank * head_dim + 3 * seq_len * rank),
        "feed_forward": 2 * layers * _feed_forward_weights(config),
        "mixer": _mixer_flops(config),
        "unembedding": 2 * vocab * width + unembedding_keys,
    }


def non_embedding_flops(config: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs a token without embedding and unembedding: what Tables 3 and 4 count."""
    flops = forward_flops(config, seq_len)
    parts = ("reads_and_writes", "attention", "feed_forward", "mixer")
    return sum(flops[part] for part in parts)


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs a token that a machine does: all but the embedding's look-up. For the MFU."""
    return non_embedding_flops(config, seq_len) + forward_flops(config, seq_len)["unembedding"]


def train_flops(forward: int, tokens: int | float) -> int | float:
    """FLOPs of training on so many tokens: forward and backward."""
    return 3 * forward * tokens


# Mixers -----------------------------------------------------------------------------------------


def _feed_forward_weights(config: ModelConfig) -> int:
    """W_1 and W_2. A depth-wise LSTM's W_1 has twice the inputs."""
    inputs = 2 if isinstance(config.mixer, cfg.DepthLstm) else 1
    return (inputs + 1) * config.width * config.feed_forward.hidden_dim


def _mixer_parameters(config: ModelConfig) -> int:
    """What the mixer learns, at its sites and beside them."""
    mixer, layers, size = config.mixer, config.num_layers, config.residual_size
    match mixer:
        case cfg.Sum():
            return 0
        case cfg.FullAttention() | cfg.BlockAttention():
            sites = 2 * layers + 1
            if mixer.query == "scalars":
                return sum(_sources(config))
            projection = size**2 if mixer.query == "input" else 0
            key_gain = size if mixer.key_norm and mixer.key_gain else 0
            return sites * (size + key_gain + projection)
        case cfg.Dense():
            return sum(_averaged(mixer, layers))
        case cfg.HyperConnections(streams=m):
            static = m * (m + 2)
            return 2 * layers * (static + (size + size * (m + 2) + 2) * mixer.dynamic)
        case cfg.Mhc() | cfg.MhcLite():
            # The norm's gain, the projection, its biases, and three scales.
            streams_size, outputs = mixer.streams * size, _projected(mixer)
            return 2 * layers * (streams_size * (1 + outputs) + outputs + 3)
        case cfg.Highway():
            return 2 * layers * 2 * size**2
        case cfg.DepthLstm():
            # Gates, their norms, and the norm within the feed-forward layer.
            return layers * (6 * size**2 + 3 * size + config.feed_forward.hidden_dim)
        case cfg.Hierarchical():
            nodes = _node_inputs(mixer, layers)
            kept = set(nodes) if mixer.shared else nodes
            return sum((inputs + 1) * size * mixer.hidden_dim + size for inputs in kept)


def _mixer_flops(config: ModelConfig) -> int:
    """What the mixer computes for one token in a forward pass."""
    mixer, layers, size = config.mixer, config.num_layers, config.residual_size
    match mixer:
        case cfg.Sum():
            return 0
        case cfg.FullAttention() | cfg.BlockAttention():
            # A logit and a weighted term of every source.
            scored = mixer.query != "scalars"
            projection = (2 * layers + 1) * 2 * size**2 if mixer.query == "input" else 0
            return sum(_sources(config)) * 2 * size * (1 + scored) + projection
        case cfg.Dense():
            return 2 * size * sum(_averaged(mixer, layers))
        case cfg.HyperConnections(streams=m):
            projection = 2 * m * size * (m + 2) if mixer.dynamic else 0
            return 2 * layers * (projection + _streams_flops(m, size))
        case cfg.Mhc(streams=m):
            projection = 2 * m * size * _projected(mixer)
            return 2 * layers * (projection + _streams_flops(m, size))
        case cfg.MhcLite(streams=m):
            projection = 2 * m * size * _projected(mixer) + 2 * factorial(m) * m**2
            return 2 * layers * (projection + _streams_flops(m, size))
        case cfg.Highway():
            return 2 * layers * 4 * size**2
        case cfg.DepthLstm():
            return layers * 12 * size**2
        case cfg.Hierarchical():
            nodes = _node_inputs(mixer, layers)
            return sum(2 * (inputs + 1) * size * mixer.hidden_dim for inputs in nodes)


def _sources(config: ModelConfig) -> list[int]:
    """How many sources each of the 2L + 1 sites attends over."""
    block = config.mixer.sublayers_a_block(config.num_layers)
    window = getattr(config.mixer, "window", None)
    done = [-(-site // block) for site in range(2 * config.num_layers + 1)]
    return [1 + (count if window is None else min(count, window)) for count in done]


def _averaged(mixer: cfg.Dense, layers: int) -> list[int]:
    """How many outputs each of a DenseFormer's averages has."""
    ends = range(mixer.period, layers + 1, mixer.period)
    return [(end + mixer.dilation) // mixer.dilation for end in ends]


def _streams_flops(streams: int, size: int) -> int:
    """A read, a write and the mixing of hyper-connections."""
    return 2 * size * (streams**2 + 2 * streams)


def _projected(mixer: cfg.Mhc | cfg.MhcLite) -> int:
    """Coefficients of a site before they are made legal."""
    m = mixer.streams
    return 2 * m + (m**2 if isinstance(mixer, cfg.Mhc) else factorial(m))


def _node_inputs(mixer: cfg.Hierarchical, layers: int) -> list[int]:
    """How many residuals each node of hierarchical aggregation has below it."""
    return [mixer.every + (node > 0) for node in range(layers // mixer.every)]
