"""Named models: every row of the papers' tables, and tiny ones for a laptop.

Sizes are those of Tables 8, 9 and 10 of Mak and Flanigan (2025). The last two rows of Table 9 are
printed with D_k 896 and 1024; only D_k 48 and 64 give their parameter counts and residual sizes.
"""

from dataclasses import replace

from rmt_tpu.config import (
    AdamW,
    Alibi,
    Attention,
    DataConfig,
    FeedForward,
    Learned,
    MatrixStore,
    ModelConfig,
    Positions,
    RunConfig,
    Store,
    TrainConfig,
    VectorStore,
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
) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        attention=Attention(num_heads=heads, head_dim=head_dim, positions=positions),
        feed_forward=FeedForward(hidden_dim=hidden_dim),
        store=store,
    )


_MODELS = {
    # Table 8: the Transformers of the scaling experiment.
    "gpt2-49m": _model(6, VectorStore(384), 12, 32, 1536),
    "gpt2-160m": _model(12, VectorStore(768), 12, 64, 3072),
    "gpt2-260m": _model(18, VectorStore(896), 14, 64, 3584),
    "gpt2-405m": _model(24, VectorStore(1024), 16, 64, 4096),
    # Table 9: their residual matrix counterparts.
    "rmt-46m": _model(6, MatrixStore(32), 12, 32, 1536),
    "rmt-134m": _model(12, MatrixStore(32), 12, 64, 3072),
    "rmt-206m": _model(18, MatrixStore(48), 14, 64, 3584),
    "rmt-305m": _model(24, MatrixStore(64), 16, 64, 4096),
}

# Figure 6: rmt-134m with residual sizes 384 to 4096.
_MODELS |= {
    f"rmt-134m-k{key_dim}": replace(_MODELS["rmt-134m"], store=MatrixStore(key_dim))
    for key_dim in (6, 12, 24, 48, 64)
}

# ALiBi, as in the RMT authors' code: learned positions take longer than these have, and RoPE turns
# pairs of numbers that key vectors, unlike matrices, cannot choose.
_TINY = {
    "gpt2-tiny": _model(4, VectorStore(128), 4, 32, 512, Alibi()),
    "rmt-tiny": _model(4, MatrixStore(16), 4, 32, 512, Alibi()),
}

# Batch size and training tokens of Tables 8 and 9, at 512 tokens a sequence.
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


def presets() -> list[str]:
    """Names that `preset` knows."""
    return [*_TINY, *_MODELS]


def preset(name: str) -> ModelConfig:
    """The model of that name.

    Raises:
      UsageError: there is none; the message has the nearest names.
    """
    models = _TINY | _MODELS
    if name not in models:
        raise UsageError(unknown("preset", name, models))
    return models[name]


def run(name: str) -> RunConfig:
    """The model of that name with the batch, steps and data it is trained with by default."""
    model = preset(name)
    if name in _TINY:
        return _tiny_run(model)
    batch_size, tokens = _BUDGETS.get(name, (64, 1.7e9))
    train = TrainConfig(steps=round(tokens / (batch_size * 512)), batch_size=batch_size)
    return RunConfig(model=model, train=train, data=DataConfig(seq_len=512))


def _tiny_run(model: ModelConfig) -> RunConfig:
    train = TrainConfig(
        steps=400,
        batch_size=16,
        optimizer=AdamW(learning_rate=1e-2),
        checkpoint_every=100,
        eval_every=100,
        eval_batches=8,
    )
    return RunConfig(model=model, train=train, data=DataConfig(seq_len=128))
