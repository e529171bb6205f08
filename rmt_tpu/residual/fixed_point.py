"""The range and the step size of an int16 residual.

The step is constant during training, so that a write can be undone exactly. It is derived from the
config alone: from the expected size of the residual at initialisation, with room to grow. Sizes are
root mean squares over the residual's entries. They follow from how parameters are initialised
(`layers.parameters`, `residual.matrix`):

- first read: the embedding, which is written with keys that preserve its size, and learned
  positions of the same size;
- last read: in addition, the 2L writes of the sublayers, whose keys scale each output by
  1/sqrt(2L). The size of attention outputs is at most that of the values, which is about 1 because
  values are read from a normed residual. The size of feed-forward outputs is about that of
  `W_2 gelu(W_1 z)` with z about 1.

The residual grows during training, and for some tokens it grows far more than for others: after 400
steps, the largest number in rmt-tiny is 51 times the expected size in a new model.
"""

import math
from dataclasses import replace

from rmt_tpu import config as cfg
from rmt_tpu.config.checks import ranges

_MAX_INT16 = 2**15 - 1
# Minimum ratio of the range to the residual's size at the last read. It is about twice what
# rmt-tiny needed.
_MIN_HEADROOM = 112
# Minimum size of the residual at the first read, in steps. Rounding errors are then half a percent
# of that size, about as large as the errors of a model that uses bfloat16 everywhere.
_MIN_STEPS = 64


def with_float_residual(model: cfg.ModelConfig) -> cfg.ModelConfig:
    """Return the model config for use without training: a float residual and remat "full".

    Without training no write is undone, so neither a fixed step nor the sublayers' stored outputs
    are needed, and a float residual cannot overflow. A config without reversible remat is returned
    unchanged.
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
    """Return the expected sizes of a new model's residual at its first and last reads.

    A size is the root mean square over the residual's entries.
    """
    embedding = config.init_std * getattr(config.parametrization, "input_multiplier", 1.0)
    writes = 1 if config.learned_positions is None else 2
    first = embedding * math.sqrt(writes)
    # Approximates E[gelu(x)^2], which is x^2/4 for small x and x^2/2 for large x.
    hidden = config.init_std
    feed_forward = config.init_std * hidden * math.sqrt(0.25 + 0.25 * hidden / (hidden + 1))
    return first, math.sqrt(first**2 + 0.5 * (1 + feed_forward**2))


def fraction_bits(config: cfg.ModelConfig) -> int:
    """Return the number of fraction bits of a matrix store's fixed-point numbers.

    If the config does not set it, this is the largest number that leaves room for the residual to
    grow.
    """
    if config.store.fraction_bits is not None:
        return config.store.fraction_bits
    _, last = expected_sizes(config)
    bits = math.floor(math.log2(_MAX_INT16 / (_MIN_HEADROOM * last)))
    legal = ranges(cfg.MatrixStore)["fraction_bits"]
    return min(max(bits, legal.low), legal.high)


def fits_int16(config: cfg.ModelConfig) -> bool:
    """Return whether int16 is precise enough for a new model.

    A config that sets the fraction bits itself is always accepted.
    """
    if config.store.fraction_bits is not None:
        return True
    first, last = expected_sizes(config)
    steps = 2.0 ** fraction_bits(config)
    return first * steps >= _MIN_STEPS and last * _MIN_HEADROOM <= (_MAX_INT16 + 1) / steps


def describe(config: cfg.ModelConfig) -> str:
    """Return a text that describes the range and the step size."""
    bits = fraction_bits(config)
    return f"steps of 2^-{bits}, up to +-{2.0 ** (15 - bits):g}"
