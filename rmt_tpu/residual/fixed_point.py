"""The range and the fixed-point step of a residual that is stored as int16 fixed-point numbers.

The fixed-point step is the distance between two neighbouring numbers. It is constant during
training, so that a write can be undone exactly. It depends only on the config. It is chosen for the
expected size of the residual in a new model, and leaves room for growth. The size is the root mean
square over the residual's entries. It follows from the initial parameters (`layers.parameters`,
`residual.matrix`):

- At the first read, the residual contains the embeddings of tokens and, if learned, of positions.
  The keys that write them preserve their size. Tied embeddings of tokens are smaller, because they
  start like an unembedding.
- At the last read, it also contains the outputs of 2L sublayers, each scaled by 1/sqrt(2L).
  Attention outputs have at most the size of the values, about 1. Feed-forward outputs have the size
  of `W_2 gelu(W_1 z)` for a z of size 1.
- With muP, all keys that write have a further factor if R or D_k grows alone: see
  `layers.parameters.key_init_scale`.

The residual grows during training, and for some tokens it grows far more than for others. With the
preset rmt-tiny, the largest entry after 400 steps is 51 times the expected size in a new model.
"""

import math
from dataclasses import replace

from rmt_tpu import config as cfg
from rmt_tpu.config.checks import ranges
from rmt_tpu.layers.embedding import token_std
from rmt_tpu.layers.parameters import key_init_scale

_MAX_INT16 = 2**15 - 1
# The minimum ratio of the largest number to the residual's expected size at the last read. The
# preset rmt-tiny needed about half of this ratio.
_MIN_HEADROOM = 112
# The minimum expected size of the residual at the first read, in fixed-point steps. At this size,
# rounding errors are half a percent of the residual, about as large as in a model that uses
# bfloat16 everywhere.
_MIN_STEPS = 64


def with_float_residual(model: cfg.ModelConfig) -> cfg.ModelConfig:
    """Return the config for use without training, which has a float residual and remat "full".

    Without training no write is undone, so neither fixed-point numbers nor reversible remat are
    needed. A float residual cannot overflow. A config without reversible remat is returned
    unchanged.
    """
    if not model.rebuilds_residual:
        return model
    store = model.store
    return replace(
        model,
        remat="full",
        store=replace(store, dtype="auto") if store.dtype == "int16" else store,
    )


def expected_sizes(config: cfg.ModelConfig) -> tuple[float, float]:
    """Return the expected sizes of a new model's residual at the first and at the last read.

    A size is the root mean square over the residual's entries.
    """
    multiplier = getattr(config.parametrization, "input_multiplier", 1.0)
    tokens = multiplier * config.embedding_scale * token_std(config)
    positions = 0.0 if config.learned_positions is None else multiplier * config.init_std
    rank, base_rank = config.data_shape[0], config.base_model.data_shape[0]
    scale = key_init_scale(config, rank, base_rank, writes=True)
    first = scale * math.hypot(tokens, positions)
    # Approximates E[gelu(x)^2], which is x^2/4 for small x and x^2/2 for large x.
    hidden = config.init_std
    feed_forward = config.init_std * hidden * math.sqrt(0.25 + 0.25 * hidden / (hidden + 1))
    return first, math.sqrt(first**2 + scale**2 * 0.5 * (1 + feed_forward**2))


def fraction_bits(config: cfg.ModelConfig) -> int:
    """Return the number of fraction bits of the residual's fixed-point numbers.

    If the config does not set this number, the result is the largest number that leaves room for
    the residual to grow.
    """
    if config.store.fraction_bits is not None:
        return config.store.fraction_bits
    _, last = expected_sizes(config)
    bits = math.floor(math.log2(_MAX_INT16 / (_MIN_HEADROOM * last)))
    legal = ranges(cfg.MatrixStore)["fraction_bits"]
    return min(max(bits, legal.low), legal.high)


def fits_int16(config: cfg.ModelConfig) -> bool:
    """Return whether an int16 residual is precise enough for a new model of this config.

    The result is True for a config that sets the number of fraction bits itself.
    """
    if config.store.fraction_bits is not None:
        return True
    first, last = expected_sizes(config)
    steps = 2.0 ** fraction_bits(config)
    return first * steps >= _MIN_STEPS and last * _MIN_HEADROOM <= (_MAX_INT16 + 1) / steps


def describe(config: cfg.ModelConfig) -> str:
    """Return a text with the range and the fixed-point step of the int16 residual."""
    bits = fraction_bits(config)
    return f"fixed-point steps of 2^-{bits}, up to +-{2.0 ** (15 - bits):g}"
