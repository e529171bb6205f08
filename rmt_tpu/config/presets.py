"""Named model configs: all models in the papers' tables, and tiny models for a laptop.

The sizes come from Tables 8, 9 and 10 of Mak and Flanigan (2025). The last two rows of Table 9 are
printed with D_k 896 and 1024, but only D_k 48 and 64 give the printed parameter counts and residual
sizes.

The depth, width, number of heads, batch size and learning rate of `prenorm-*` and `attnres-*` come
from Table 2 of Kimi Team (2026). The models in that table are mixtures of experts with linear
attention. The models here are dense, with GPT-2's vocabulary, softmax attention, heads of size 64
and RoPE. Their feed-forward layers are as wide as the nine experts that a token uses. Their
parameter counts and losses differ from the paper's.
"""

from dataclasses import replace

from rmt_tpu import cost
from rmt_tpu.config import (
    AdamW,
    Alibi,
    Attention,
    BlockAttention,
    DataConfig,
    DeltaAttention,
    Dense,
    DepthLstm,
    Experts,
    FeedForward,
    FullAttention,
    Hierarchical,
    Highway,
    HyperConnections,
    Kda,
    Learned,
    MatrixStore,
    Mhc,
    MhcLite,
    Mla,
    ModelConfig,
    Mudd,
    NoPositions,
    Positions,
    Quantiles,
    ResidualScalars,
    Rope,
    RunConfig,
    SignRule,
    Stack,
    Store,
    TrainConfig,
    VectorStore,
    WideStreams,
    stacks,
)
from rmt_tpu.errors import UsageError, unknown

_PAPER_POSITIONS = Learned(512)


def _model(
    layers: int,
    store: Store,
    heads: int,
    head_dim: int,
    hidden_dim: int,
    positions: Positions = _PAPER_POSITIONS,
    **options,
) -> ModelConfig:
    attention = Attention(num_heads=heads, head_dim=head_dim, positions=positions)
    layer = (attention, FeedForward(hidden_dim=hidden_dim))
    return ModelConfig(stacks=(Stack(layer, layers),), store=store, **options)


_MODELS = {
    # The Transformers of the scaling experiment, from Table 8 of the RMT paper.
    "gpt2-49m": _model(6, VectorStore(384), 12, 32, 1536),
    "gpt2-160m": _model(12, VectorStore(768), 12, 64, 3072),
    "gpt2-260m": _model(18, VectorStore(896), 14, 64, 3584),
    "gpt2-405m": _model(24, VectorStore(1024), 16, 64, 4096),
    # The corresponding Residual Matrix Transformers, from Table 9 of the RMT paper.
    "rmt-46m": _model(6, MatrixStore(32), 12, 32, 1536),
    "rmt-134m": _model(12, MatrixStore(32), 12, 64, 3072),
    "rmt-206m": _model(18, MatrixStore(48), 14, 64, 3584),
    "rmt-305m": _model(24, MatrixStore(64), 16, 64, 4096),
}

# The models in Figure 6 of the RMT paper: rmt-134m with residuals of 384 to 4096 numbers.
_MODELS |= {
    f"rmt-134m-k{key_dim}": replace(_MODELS["rmt-134m"], store=MatrixStore(key_dim))
    for key_dim in (6, 12, 24, 48, 64)
}

# The models in Table 10 of the RMT paper, and hyper-connections, with the sizes of gpt2-160m. No
# code was published for Table 10. The mixers here follow the papers that the table cites, with
# sizes that give the printed parameter counts.
_MIXERS = {
    "highway": Highway(),
    "depth-lstm": DepthLstm(),
    "hierarchical": Hierarchical(),
    "hc": HyperConnections(),
    "mhc": Mhc(),
    "mhc-lite": MhcLite(),
    "delta": DeltaAttention(),
    "wide": WideStreams(),
    "scalars": ResidualScalars(),
    "mudd": Mudd(),
}
_MODELS |= {
    f"{name}-{size}": replace(_MODELS["gpt2-160m"], mixer=_MIXERS[name])
    for name, size in {
        "highway": "191m",
        "depth-lstm": "233m",
        "hierarchical": "165m",
        "hc": "160m",
        "mhc": "160m",
        "mhc-lite": "160m",
        "delta": "160m",
        "wide": "160m",
        "scalars": "160m",
        "mudd": "160m",
    }.items()
}

# Models with attention over depth, in sizes for comparing kernels. The dict maps the name of each
# model to the name of the same model with the standard residual (a plain sum).
_WITH_DEPTH = {"gpt2-405m-attnres": "gpt2-405m", "rmt-attnres-305m": "rmt-305m"}
_MODELS |= {
    name: replace(_MODELS[plain], mixer=BlockAttention(num_blocks=8))
    for name, plain in _WITH_DEPTH.items()
}

# Kimi Team (2026), Table 2. The keys are numbers of activated parameters. The values are: number of
# layers, which is also the number of heads; width; width of one expert; learning rate; batch size
# in sequences of 8192 tokens; number of training tokens; and number of sublayers per block (S). S
# gives 8 blocks, or the nearest possible number.
_DEPTH_ROWS = {
    "194m": (12, 896, 400, 2.99e-3, 192, 38.7e9, 3),
    "241m": (13, 960, 432, 2.80e-3, 256, 45.4e9, 4),
    "296m": (14, 1024, 464, 2.50e-3, 320, 62.1e9, 4),
    "436m": (16, 1168, 528, 2.20e-3, 384, 87.9e9, 4),
    "528m": (17, 1264, 560, 2.02e-3, 432, 119.0e9, 4),
}
for _size, (_layers, _width, _expert, *_, _block) in _DEPTH_ROWS.items():
    _row = replace(
        _model(_layers, VectorStore(_width), _layers, 64, 9 * _expert, Rope()), norm="rmsnorm"
    )
    _MODELS |= {
        f"prenorm-{_size}": _row,
        f"attnres-{_size}": replace(_row, mixer=BlockAttention(sublayers_per_block=_block)),
        f"attnres-full-{_size}": replace(_row, mixer=FullAttention()),
    }

# Current Transformers, after Llama 3 (Grattafiori et al. 2024): RMSNorm, RoPE, SwiGLU and grouped
# queries, with GPT-2's vocabulary and untied embeddings. The keys are parameter counts. The values
# are: number of layers, width, number of query heads of size 64, number of key and value heads, and
# D_FF; then D_k and the parameter count of the same model with a matrix store. llama-1.2b has the
# sizes of Llama 3.2 1B.
_LLAMA_ROWS = {
    "153m": (12, 768, 12, 4, 2048, 32, "134m"),
    "374m": (24, 1024, 16, 4, 2816, 64, "311m"),
    "1.2b": (16, 2048, 32, 8, 8192, 64, "1b"),
}


def _llama(layers: int, store: Store, heads: int, kv_heads: int, head_dim: int, hidden_dim: int):
    attention = Attention(
        heads, head_dim, Rope(500_000.0), inverse_layer_scaling=False, num_kv_heads=kv_heads
    )
    layer = (attention, FeedForward(hidden_dim, "swiglu"))
    return ModelConfig((Stack(layer, layers),), store, norm="rmsnorm", norm_epsilon=1e-5)


# The options of attention over depth in open-attention-residuals, which released checkpoints use,
# and in the trainer marin.
_LLAMA_OPTIONS = {
    "open": {"newest_bias": 3.0, "cumulative": True, "output_site": "newest"},
    "marin": {"normed_embedding": True, "output_site": "sum"},
}
_LLAMA_MODELS: dict[str, ModelConfig] = {}
for _size, (_layers, _width, _heads, _kv_heads, _hidden, _key_dim, _small) in _LLAMA_ROWS.items():
    _vector = _llama(_layers, VectorStore(_width), _heads, _kv_heads, 64, _hidden)
    _matrix = replace(_vector, store=MatrixStore(_key_dim))
    _LLAMA_MODELS |= {
        f"llama-{_size}": _vector,
        f"llama-attnres-{_size}": replace(_vector, mixer=BlockAttention(num_blocks=8)),
        f"rmt-llama-{_small}": _matrix,
        f"rmt-llama-attnres-{_small}": replace(_matrix, mixer=BlockAttention(num_blocks=8)),
    }
_LLAMA_MODELS |= {
    f"llama-attnres-{name}-153m": replace(
        _LLAMA_MODELS["llama-153m"], mixer=BlockAttention(num_blocks=8, **options)
    )
    for name, options in _LLAMA_OPTIONS.items()
}
_MODELS |= _LLAMA_MODELS

# Kimi Linear (Kimi Team 2025): every fourth layer and the last layer have latent attention, and all
# other layers have linear attention. All layers except the first have experts. Only the linear
# attention encodes positions. About the models in its Table 2, Kimi Team (2026) only says that they
# are "identical to Kimi Linear". The models here have the 256 experts, ranks and vocabulary of Kimi
# Linear, and 1.0 to 1.7 percent fewer parameters than printed.
_KIMI_VOCABULARY = 163_840
_KIMI_TOKENS, _KIMI_BATCH, _KIMI_LENGTH = 1.4e12, 2048, 4096


def _kimi(layers: int, width: int, heads: int, hidden_dim: int):
    linear = Kda(heads, 128)
    latent = Mla(heads, 128, kv_rank=512, rope_dim=64, positions=NoPositions(), latent_epsilon=1e-6)
    # Model files on the Hugging Face hub contain the biases of experts, but not the rate at which
    # training changes them. A model from such a file gets this rate.
    balance = SignRule(2.0**-10)
    experts = Experts(256, 8, hidden_dim, scale=2.446, balance=balance)
    cores = [latent if n % 4 == 0 or n == layers else linear for n in range(1, layers + 1)]
    wide = [FeedForward(4 * width, "swiglu"), *(layers - 1) * [experts]]
    return ModelConfig(
        stacks(list(zip(cores, wide, strict=True))),
        VectorStore(width),
        vocab_size=_KIMI_VOCABULARY,
        norm="rmsnorm",
        norm_epsilon=1e-5,
    )


_KIMI_48B = _kimi(27, 2304, 32, 1024)
_KIMI_MODELS = {
    "kimi-linear-48b-a3b": _KIMI_48B,
    "attnres-kimi-48b": replace(_KIMI_48B, mixer=BlockAttention(sublayers_per_block=6)),
}
for _size, (_layers, _width, _expert, *_, _block) in _DEPTH_ROWS.items():
    _row = _kimi(_layers, _width, _layers, _expert)
    _KIMI_MODELS |= {
        f"prenorm-kimi-{_size}": _row,
        f"attnres-kimi-{_size}": replace(_row, mixer=BlockAttention(sublayers_per_block=_block)),
        f"attnres-full-kimi-{_size}": replace(_row, mixer=FullAttention()),
    }

# Kimi K3 (Kimi Team 2026, and its config.json): Kimi Linear with bounded decays, SiTU, and full
# output gates in both kinds of attention. Its experts work on vectors of half the width, and every
# 12 layers form a block of attention over depth.
_K3_LAYERS = 93
_K3_GATED = Kda(96, 128, lower_bound=-5.0, gates="full")
_K3_LATENT = Mla(
    96,
    128,
    kv_rank=512,
    rope_dim=64,
    query_rank=1536,
    positions=NoPositions(),
    latent_epsilon=1e-6,
    output_gate=True,
)
_K3_EXPERTS = Experts(
    896,
    16,
    3072,
    shared=2,
    activation="situ",
    latent_dim=3584,
    latent_norm=True,
    balance=Quantiles(),
)
_K3_CORES = [
    _K3_LATENT if n % 4 == 0 or n == _K3_LAYERS else _K3_GATED for n in range(1, _K3_LAYERS + 1)
]
_K3_WIDE = [FeedForward(33_792, "situ"), *(_K3_LAYERS - 1) * [_K3_EXPERTS]]
_KIMI_MODELS["k3-2.8t"] = replace(
    _KIMI_48B,
    stacks=stacks(list(zip(_K3_CORES, _K3_WIDE, strict=True))),
    store=VectorStore(7168),
    mixer=BlockAttention(layers_per_block=12, epsilon=1e-5),
)
_MODELS |= _KIMI_MODELS

# The tiny models use ALiBi, as in the RMT authors' code. Learned positions would take too long to
# learn. RoPE rotates pairs of numbers within a vector. Projection matrices can learn which numbers
# form a pair, but key vectors cannot. The tokens are bytes and BOS, because GPT-2's vocabulary
# would have most of the parameters of such small models.
_BYTES = 257
_TINY = {
    "gpt2-tiny": _model(4, VectorStore(128), 4, 32, 512, Alibi(), vocab_size=_BYTES),
    "rmt-tiny": _model(4, MatrixStore(16), 4, 32, 512, Alibi(), vocab_size=_BYTES),
}
_TINY |= {
    f"{name}-tiny": replace(_TINY["gpt2-tiny"], mixer=mixer) for name, mixer in _MIXERS.items()
}

_DEPTH_MIXERS = {
    "attnres": BlockAttention(num_blocks=4),
    "attnres-full": FullAttention(),
    "denseformer": Dense(),
    "delta": DeltaAttention(num_blocks=4),
    "mean": BlockAttention(num_blocks=4, query="none"),
}
_TINY |= {f"{n}-tiny": replace(_TINY["gpt2-tiny"], mixer=m) for n, m in _DEPTH_MIXERS.items()}
_TINY |= {f"rmt-{n}-tiny": replace(_TINY["rmt-tiny"], mixer=m) for n, m in _DEPTH_MIXERS.items()}

_TINY["rmt-wide-tiny"] = replace(_TINY["rmt-tiny"], mixer=WideStreams())
_TINY["rmt-scalars-tiny"] = replace(_TINY["rmt-tiny"], mixer=ResidualScalars())
_TINY["rmt-mudd-tiny"] = replace(_TINY["rmt-tiny"], mixer=Mudd())

_LLAMA_TINY = replace(_llama(4, VectorStore(128), 4, 2, 32, 352), vocab_size=_BYTES)
_TINY |= {
    "llama-tiny": _LLAMA_TINY,
    "llama-attnres-tiny": replace(_LLAMA_TINY, mixer=BlockAttention(num_blocks=4)),
    "rmt-llama-tiny": replace(_LLAMA_TINY, store=MatrixStore(16)),
}
_TINY |= {
    f"llama-attnres-{name}-tiny": replace(
        _LLAMA_TINY, mixer=BlockAttention(num_blocks=4, **options)
    )
    for name, options in _LLAMA_OPTIONS.items()
}

# A tiny Kimi Linear: the same kinds of cores in four layers, with 8 experts.
_WIDE = FeedForward(384, "swiglu")
_LINEAR = Kda(4, 32)
_LATENT = Mla(4, 32, kv_rank=64, rope_dim=16, positions=NoPositions(), latent_epsilon=1e-6)
_EXPERTS = Experts(8, 2, 128, scale=2.446, balance=SignRule(1e-2))
_KIMI_TINY = replace(
    _LLAMA_TINY, stacks=stacks([(_LINEAR, _WIDE), *2 * [(_LINEAR, _EXPERTS)], (_LATENT, _EXPERTS)])
)
_TINY |= {
    "kimi-tiny": _KIMI_TINY,
    "attnres-kimi-tiny": replace(_KIMI_TINY, mixer=BlockAttention(num_blocks=4)),
    "attnres-full-kimi-tiny": replace(_KIMI_TINY, mixer=FullAttention()),
    "rmt-kimi-tiny": replace(_KIMI_TINY, store=MatrixStore(16)),
}

# A tiny Kimi K3 with the same four layers.
_GATED_LATENT = replace(_LATENT, query_rank=96, output_gate=True)
_LATENT_EXPERTS = Experts(
    8, 2, 128, activation="situ", latent_dim=64, latent_norm=True, balance=Quantiles()
)
_GATED_LINEAR = replace(_LINEAR, lower_bound=-5.0, gates="full")
_TINY["k3-tiny"] = replace(
    _KIMI_TINY,
    stacks=stacks(
        [
            (_GATED_LINEAR, replace(_WIDE, activation="situ")),
            *2 * [(_GATED_LINEAR, _LATENT_EXPERTS)],
            (_GATED_LATENT, _LATENT_EXPERTS),
        ]
    ),
    mixer=BlockAttention(layers_per_block=2, epsilon=1e-5),
)

# The batch size in sequences of 512 tokens, and the number of training tokens, from Tables 8 and 9
# of the RMT paper. The runs of Figure 6 (appendix C.3) and Table 10 (appendix C.4) have 50,000
# steps. Appendix C.4 prints 5,000 steps, which does not match its 1.6e9 tokens.
_BUDGETS = {
    "gpt2-49m": (64, 212e6),
    "gpt2-160m": (64, 1.7e9),
    "gpt2-260m": (64, 3.5e9),
    "gpt2-405m": (256, 6.04e9),
    "rmt-46m": (64, 142e6),
    "rmt-134m": (64, 1.1e9),
    "rmt-206m": (64, 2.3e9),
    "rmt-305m": (256, 6.04e9),
}
_BUDGETS |= {name: _BUDGETS[plain] for name, plain in _WITH_DEPTH.items()}
_SWEEPS = ("rmt-134m-k", "highway-", "depth-lstm-", "hierarchical-")


def presets() -> list[str]:
    """Return the names of all presets."""
    return [*_TINY, *_MODELS]


def preset(name: str) -> ModelConfig:
    """Return the config of a named model.

    Raises:
      UsageError: there is no preset of this name; the message suggests similar names.
    """
    models = _TINY | _MODELS
    if name not in models:
        raise UsageError(unknown("preset", name, models))
    return models[name]


_ABOUT = {
    "gpt2": "Transformer",
    "rmt": "Residual Matrix Transformer",
    "highway": "Highway Transformer",
    "depth-lstm": "depth-wise LSTM in place of residuals",
    "hierarchical": "hierarchical aggregation of layers",
    "hc": "hyper-connections",
    "mhc": "manifold-constrained hyper-connections",
    "mhc-lite": "hyper-connections that mix by permutations",
    "mean": "means of sums of outputs in blocks, with no queries and no weights to learn",
    "delta": "Delta Attention Residuals: the standard residual plus attention over changes to it",
    "wide": "wide streams: several residuals with learned read and write weights",
    "scalars": "value residual, and learned scales of the residual and the embedding",
    "mudd": "MUDD: dynamic weighted sums of layers' outputs for queries, keys, values and residual",
    "denseformer": "DenseFormer: weighted sums of layers' outputs",
    "attnres": "Block Attention Residuals",
    "attnres-full": "Full Attention Residuals",
    "prenorm": "Transformer with RMSNorm and RoPE",
    "llama": "Llama-style Transformer: RMSNorm, RoPE, SwiGLU, grouped queries",
    "llama-attnres": "Block Attention Residuals in a Llama-style Transformer",
    "llama-attnres-open": "Block Attention Residuals with the options of open-attention-residuals",
    "llama-attnres-marin": "Block Attention Residuals with the options of the trainer marin",
    "kimi": "Kimi Linear: KDA and MLA 3 to 1, and experts",
    "kimi-linear-48b": "Kimi Linear: KDA and MLA 3 to 1, and experts",
    "prenorm-kimi": "Kimi Linear: KDA and MLA 3 to 1, and experts",
    "k3": "Kimi K3: gated KDA and MLA 3 to 1, latent experts, and Block Attention Residuals",
    "attnres-kimi": "Block Attention Residuals in Kimi Linear",
    "attnres-full-kimi": "Full Attention Residuals in Kimi Linear",
    "rmt-kimi": "Residual Matrix Transformer with the cores of Kimi Linear",
    "rmt-llama": "Residual Matrix Transformer with Llama-style cores",
    "rmt-llama-attnres": "Block Attention Residuals on a residual matrix, with Llama-style cores",
    "rmt-attnres": "Block Attention Residuals on a residual matrix",
    "rmt-attnres-full": "Full Attention Residuals on a residual matrix",
    "rmt-delta": "Delta Attention Residuals on a residual matrix",
    "rmt-mean": "means of sums of outputs in blocks, on a residual matrix",
    "rmt-wide": "wide streams, each a residual matrix",
    "rmt-scalars": "value residual and learned scales, on a residual matrix",
    "rmt-mudd": "MUDD on a residual matrix",
    "rmt-denseformer": "DenseFormer on a residual matrix",
}


def about(name: str) -> str:
    """Return a phrase about a preset's architecture and the source of its sizes."""
    system = _ABOUT.get(name.rpartition("-")[0])
    if name in _TINY:
        return f"{system}; laptop size, on bytes"
    if name in _WITH_DEPTH:
        return f"{_ABOUT['attnres']} in {_WITH_DEPTH[name]}, 8 blocks"
    if name.startswith("rmt-134m-k"):
        return f"{_ABOUT['rmt']}; RMT paper, Figure 6, D_k {_MODELS[name].store.key_dim}"
    if name in _LLAMA_MODELS:
        return f"{system}; after Llama 3"
    size = name.rpartition("-")[2]
    if name in _KIMI_MODELS:
        active = f"{cost.active_parameters(_MODELS[name]) / 1e6:,.1f}M active"
        printed = f"; the AttnRes paper's Table 2 prints {size}" if size in _DEPTH_ROWS else ""
        return f"{system}; {active}{printed}"
    if size in _DEPTH_ROWS:
        return f"{system}; dense, after Kimi Team, Table 2"
    if name in _BUDGETS:
        return f"{system}; RMT paper, Table {9 if name.startswith('rmt-') else 8}"
    return f"{system}; {'RMT paper, Table 10' if name.startswith(_SWEEPS) else 'as gpt2-160m'}"


def run(name: str) -> RunConfig:
    """Return a run of a named model with its default batch size, steps and data."""
    model = preset(name)
    if name in _TINY:
        return _tiny_run(model)
    size = name.rpartition("-")[2]
    if size in _DEPTH_ROWS:
        return _depth_run(model, size)
    if name in _LLAMA_MODELS:
        return modern_run(model)
    if name in _KIMI_MODELS:
        return _kimi_run(model)
    batch_size, tokens = _BUDGETS.get(name, (64, 1.7e9))
    train = TrainConfig(steps=round(tokens / (batch_size * 512)), batch_size=batch_size)
    if name.startswith(_SWEEPS):
        train = TrainConfig(steps=50_000, batch_size=64, optimizer=AdamW(learning_rate=1e-2))
    return RunConfig(model=model, train=train, data=DataConfig(seq_len=512))


def _depth_run(model: ModelConfig, size: str) -> RunConfig:
    *_, rate, batch_size, tokens, _ = _DEPTH_ROWS[size]
    train = TrainConfig(
        steps=round(tokens / (batch_size * 8192)),
        batch_size=batch_size,
        optimizer=AdamW(learning_rate=rate),
    )
    return RunConfig(model=model, train=train, data=DataConfig(seq_len=8192))


def modern_run(model: ModelConfig) -> RunConfig:
    """Return a run that trains a model on 20 tokens per parameter, in batches of 0.5M tokens."""
    batch_size, seq_len = 256, 2048
    steps = round(20 * sum(cost.parameters(model).values()) / (batch_size * seq_len))
    train = TrainConfig(
        steps=max(steps, 1),
        batch_size=batch_size,
        optimizer=AdamW(learning_rate=1e-3, weight_decay=0.1),
    )
    return RunConfig(model=model, train=train, data=DataConfig(seq_len=seq_len))


def _kimi_run(model: ModelConfig) -> RunConfig:
    """Return a run that trains a model on 1.4T tokens, in batches of 8M tokens.

    The paper does not state the learning rate; the value here comes from a note about the paper.
    Kimi K3 gets the same number of tokens as Kimi Linear.
    """
    train = TrainConfig(
        steps=round(_KIMI_TOKENS / (_KIMI_BATCH * _KIMI_LENGTH)),
        batch_size=_KIMI_BATCH,
        optimizer=AdamW(learning_rate=1.1e-3, weight_decay=0.1),
    )
    return RunConfig(model=model, train=train, data=DataConfig(seq_len=_KIMI_LENGTH))


def _tiny_run(model: ModelConfig) -> RunConfig:
    """Return a run of a tiny model, with the rate and the warmup that a search found for its store.

    docs/log.md has the search.
    """
    rate = 2e-2 if isinstance(model.store, MatrixStore) else 5e-3
    train = TrainConfig(
        steps=400,
        batch_size=16,
        optimizer=AdamW(learning_rate=rate, warmup_fraction=0.2),
        checkpoint_every=100,
        eval_every=100,
        eval_tokens=2**14,
    )
    return RunConfig(model=model, train=train, data=DataConfig(seq_len=128))
