"""Parameters and FLOPs of a model, from its config alone.

Appendix A of Mak and Flanigan (2025): Table 7 and sections A.1 and A.2, with two corrections that
reproduce the printed results (Table 4, Figure 1): parameters count the embedding and the
unembedding, and the key vectors of a layer cost `12 R D_k D_v` FLOPs a token, as A.2 lists them.
A multiplication and an addition are two FLOPs; a backward pass costs twice the forward pass.
"""

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
    return {
        "embedding": config.vocab_size * width + positions,
        "reads_and_writes": reads_and_writes,
        "feed_forward": layers * 2 * width * config.feed_forward.hidden_dim,
        "norms": (2 * layers + 1) * config.residual_size,
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
        "feed_forward": layers * 4 * width * config.feed_forward.hidden_dim,
        "unembedding": 2 * vocab * width + unembedding_keys,
    }


def non_embedding_flops(config: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs a token without embedding and unembedding: what Tables 3 and 4 count."""
    flops = forward_flops(config, seq_len)
    return flops["reads_and_writes"] + flops["attention"] + flops["feed_forward"]


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Forward FLOPs a token that a machine does: all but the embedding's look-up. For the MFU."""
    return non_embedding_flops(config, seq_len) + forward_flops(config, seq_len)["unembedding"]


def train_flops(forward: int, tokens: int | float) -> int | float:
    """FLOPs of training on so many tokens: forward and backward."""
    return 3 * forward * tokens
