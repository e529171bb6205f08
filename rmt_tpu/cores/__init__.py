"""Cores, the functions that sublayers compute, such as attention.

Each core has its own file. The module `core` defines the interface that all cores implement.
"""

from rmt_tpu import config as cfg
from rmt_tpu import residual
from rmt_tpu.cores.attention import Attention
from rmt_tpu.cores.core import (
    Aux,
    Cache,
    Context,
    Core,
    cached,
    causal,
    flatten_rows,
    logit_scale,
    unflatten_rows,
)
from rmt_tpu.cores.experts import Experts
from rmt_tpu.cores.feed_forward import FeedForward
from rmt_tpu.cores.kda import Kda
from rmt_tpu.cores.mla import Mla
from rmt_tpu.layers.parameters import Seed

__all__ = [
    "Aux",
    "Cache",
    "Context",
    "Core",
    "unflatten_rows",
    "cached",
    "causal",
    "flatten_rows",
    "make_core",
]


def make_core(
    config: cfg.ModelConfig, core: cfg.Core, base_core: cfg.Core, seed: Seed, within: int
) -> Core:
    """Return the core (the function of a sublayer) that a config describes.

    Args:
      config: the config of the model.
      core: the config of the core.
      base_core: the config of the core at the same place in muP's base model.
      seed: the seed of the core's weights.
      within: 0 if the sublayer is the first of the two in its layer, and 1 if it is the second.
    """
    match core:
        case cfg.Attention():
            scales = {
                "scale": logit_scale(config, core, base_core),
                "output_scale": residual.output_scale(config),
            }
            return Attention(config, core, residual.heads_layout(config), seed, **scales)
        case cfg.Mla():
            scale = logit_scale(config, core, base_core)
            return Mla(config, core, seed, residual.heads_layout(config), scale=scale)
        case cfg.Kda():
            return Kda(config, core, seed, residual.heads_layout(config))
    widths = config.mixer.second_input if within else 1
    sizes = {
        "output_scale": residual.output_scale(config),
        "input_width": widths * config.width,
    }
    match core:
        case cfg.FeedForward():
            return FeedForward(config, core, seed, **sizes, norm_hidden=widths > 1)
        case cfg.Experts():
            return Experts(config, core, seed, **sizes)
