"""What an int16 residual is to hold, and so in which steps it is held.

A step is fixed while training, so that what was written can be taken back without error. It is a
function of the config alone: from how large the residual is expected to be at the start, with room
to grow. Numbers of a residual, as root mean squares over its entries, from how parameters are drawn
(`layers.parameters`, `residual.matrix`):

- first read: the embedding, written with keys that keep its size, and learned positions like it;
- last read: beside these, 2L writes of sublayers with keys that make them 1/sqrt(2L) as large: of
  attention, at most the values, which are read from a normed residual and so about 1; of
  feed-forward layers about what `W_2 gelu(W_1 z)` is, with z about 1.

Training makes it larger, and of some tokens far larger: rmt-tiny's largest number is 51 times the
size expected of a new model after 400 steps.
"""

import math
from dataclasses import replace

from rmt_tpu import config as cfg
from rmt_tpu.config.checks import ranges

_LARGEST = 2**15 - 1
# Times the last read's size that the range is at least: twice what rmt-tiny came to.
_ROOM = 112
# Steps that the first read is at least: rounding is then half a percent of it, about what bfloat16
# costs a model all over.
_FEWEST_STEPS = 64


def in_floats(model: cfg.ModelConfig) -> cfg.ModelConfig:
    """The same model where it is used and not trained: nothing is taken back there.

    Floats have no range to leave, and no sublayer's output is kept.
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
    """Of a new model's residual at the first and at the last read."""
    embedding = config.init_std * getattr(config.parametrization, "input_multiplier", 1.0)
    writes = 1 if config.learned_positions is None else 2
    first = embedding * math.sqrt(writes)
    # E[gelu(x)^2] for x of this size: x^2/4 where it is small, x^2/2 where it is large.
    hidden = config.init_std
    feed_forward = config.init_std * hidden * math.sqrt(0.25 + 0.25 * hidden / (hidden + 1))
    return first, math.sqrt(first**2 + 0.5 * (1 + feed_forward**2))


def fraction_bits(config: cfg.ModelConfig) -> int:
    """Of the residual of a matrix store: as configured, or the most that leave it room."""
    if config.store.fraction_bits is not None:
        return config.store.fraction_bits
    _, last = expected_sizes(config)
    bits = math.floor(math.log2(_LARGEST / (_ROOM * last)))
    legal = ranges(cfg.MatrixStore)["fraction_bits"]
    return min(max(bits, legal.low), legal.high)


def holds(config: cfg.ModelConfig) -> bool:
    """Whether int16 has steps fine enough for a new model, or the config names its own."""
    if config.store.fraction_bits is not None:
        return True
    first, last = expected_sizes(config)
    steps = 2.0 ** fraction_bits(config)
    return first * steps >= _FEWEST_STEPS and last * _ROOM <= (_LARGEST + 1) / steps


def described(config: cfg.ModelConfig) -> str:
    """The range and the steps, in words."""
    bits = fraction_bits(config)
    return f"steps of 2^-{bits}, up to +-{2.0 ** (15 - bits):g}"
