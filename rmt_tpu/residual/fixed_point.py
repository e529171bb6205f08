"""The range that an int16 residual must cover, and the step in which it is held.

A step is fixed while training, so that a write can be taken back without error. It depends on the
config alone: on how large the residual is expected to be at the start, with room to grow. Sizes of
a residual, as root mean squares over its entries, follow from how parameters are drawn
(`layers.parameters`, `residual.matrix`):

- first read: the embedding, written with keys that keep its size, and learned positions of the same
  size;
- last read: in addition, 2L writes of sublayers with keys that make each 1/sqrt(2L) as large. The
  size of attention's outputs is at most that of the values, which are read from a normed residual
  and so about 1. The size of the feed-forward layers' outputs is about that of `W_2 gelu(W_1 z)`
  with z about 1.

Training makes the residual larger, and that of some tokens far larger: after 400 steps, rmt-tiny's
largest number is 51 times the size expected of a new model.
"""

import math
from dataclasses import replace

from rmt_tpu import config as cfg
from rmt_tpu.config.checks import ranges

_LARGEST = 2**15 - 1
# The range is at least this many times the size of the last read: twice what rmt-tiny needed.
_ROOM = 112
# The size of the first read is at least this many steps. Rounding is then half a percent of it,
# about what bfloat16 costs a model everywhere.
_FEWEST_STEPS = 64


def in_floats(model: cfg.ModelConfig) -> cfg.ModelConfig:
    """Return the model as it is used without training: with a residual in floats and remat "full".

    Nothing is taken back without training, so no fixed step and no stored outputs of sublayers are
    needed, and floats have no range to leave. A model without reversible remat is returned as it
    is.
    """
    if model.remat != "reversible":
        return model
    store = model.store
    return replace(
        model,
        remat="full",
        store=replace(store, dtype="auto") if store.dtype == "int16" else store,
    )


def expected_sizes(config: cfg.ModelConfig) -> tuple[float, float]:
    """Return the sizes of a new model's residual at its first and at its last read."""
    embedding = config.init_std * getattr(config.parametrization, "input_multiplier", 1.0)
    writes = 1 if config.learned_positions is None else 2
    first = embedding * math.sqrt(writes)
    # E[gelu(x)^2] for x of this size: x^2/4 where it is small, x^2/2 where it is large.
    hidden = config.init_std
    feed_forward = config.init_std * hidden * math.sqrt(0.25 + 0.25 * hidden / (hidden + 1))
    return first, math.sqrt(first**2 + 0.5 * (1 + feed_forward**2))


def fraction_bits(config: cfg.ModelConfig) -> int:
    """Return a matrix store's fraction bits: as configured, or the most with room to grow."""
    if config.store.fraction_bits is not None:
        return config.store.fraction_bits
    _, last = expected_sizes(config)
    bits = math.floor(math.log2(_LARGEST / (_ROOM * last)))
    legal = ranges(cfg.MatrixStore)["fraction_bits"]
    return min(max(bits, legal.low), legal.high)


def holds(config: cfg.ModelConfig) -> bool:
    """Return whether int16 has steps fine enough for a new model, or the config names its own."""
    if config.store.fraction_bits is not None:
        return True
    first, last = expected_sizes(config)
    steps = 2.0 ** fraction_bits(config)
    return first * steps >= _FEWEST_STEPS and last * _ROOM <= (_LARGEST + 1) / steps


def described(config: cfg.ModelConfig) -> str:
    """Describe the range and the step in words."""
    bits = fraction_bits(config)
    return f"steps of 2^-{bits}, up to +-{2.0 ** (15 - bits):g}"
