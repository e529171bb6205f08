"""The model type "qwen3_attnres": Qwen3 with the Attention Residuals of open-attnres.

These models use attention over depth in place of Qwen3's residual. Each sublayer attends to the
residuals at the ends of earlier blocks and to the current residual. These residuals are called
sources. The logit of the newest source has a learned bias. The unembedding reads the current
residual without attention. The equations are in `rmt_tpu.residual.depth_attention`.

This module does not import JAX.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rmt_tpu import config as cfg
from rmt_tpu.hub import own
from rmt_tpu.hub.fields import Fields
from rmt_tpu.hub.pieces import Piece, Place

KIND = "qwen3_attnres"
ABSENT = {
    "attnres_gate_type": "bias",
    "attnres_mode": "block",
    "attnres_num_blocks": 8,
    "attnres_recency_bias_init": 3.0,
}
Mixer = cfg.BlockAttention | cfg.FullAttention


def is_one(model: cfg.ModelConfig) -> bool:
    """Return whether a model has the options that define the model type "qwen3_attnres"."""
    mixer = model.mixer
    return isinstance(mixer, Mixer) and mixer.cumulative and mixer.newest_bias is not None


def read_mixer(fields: Fields, layers: int) -> Mixer:
    """Return the config of the attention over depth that a config.json describes.

    Args:
      fields: the fields of config.json.
      layers: the number of layers.

    Raises:
      UsageError: the model needs an operation that is not supported here.
    """
    fields.only("attnres_gate_type", "bias")
    full = fields.lookup("attnres_mode", {"block": False, "full": True})
    blocks = fields.size("attnres_num_blocks")
    options = {
        "newest_bias": fields.number("attnres_recency_bias_init"),
        "cumulative": True,
        "output_site": "newest",
        "epsilon": fields.positive("rms_norm_eps", 1e-6),
    }
    if full:
        return cfg.FullAttention(**options)
    return cfg.BlockAttention(layers_per_block=-(-layers // blocks), **options)


def mixer_values(model: cfg.ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe a model's attention over depth.

    Raises:
      UsageError: the fields cannot express the mixer; the message names the option that differs.
    """
    mixer, layers = model.mixer, model.num_layers
    full = isinstance(mixer, cfg.FullAttention)
    block = mixer.sublayers_a_block(model.num_sublayers)
    values = ABSENT | {
        "attnres_mode": "full" if full else "block",
        "attnres_recency_bias_init": mixer.newest_bias,
        "attnres_num_blocks": ABSENT["attnres_num_blocks"] if full else -(-2 * layers // block),
    }
    found = read_mixer(Fields(values | {"rms_norm_eps": model.norm_epsilon}, ""), layers)
    sizes = ("num_blocks", "sublayers_per_block", "layers_per_block", "phase_layers")
    for name in (field.name for field in dataclasses.fields(mixer)):
        value, legal = getattr(mixer, name), getattr(found, name)
        if name not in sizes and value != legal:
            raise own.not_in_hub_format(f"model.mixer.{name}", value, legal, f"as {KIND}")
    legal = found.sublayers_a_block(model.num_sublayers)
    if block != legal:
        raise own.not_in_hub_format("model.mixer.sublayers_per_block", block, legal, f"as {KIND}")
    return values


def pieces(layer: str, place: Place, sublayer: str, dim: int) -> Iterator[Piece]:
    """Yield the tensors of the attention over depth before one sublayer.

    Args:
      layer: the prefix of the layer's tensor names.
      place: the location of the sublayer's parameters.
      sublayer: the sublayer's part of the tensor names: "attn" or "mlp".
      dim: the width of the residual.
    """
    name = f"{layer}{sublayer}_res_"
    yield place.piece(f"{name}proj.weight", "site/mix/query", (0, dim), transposed=False)
    yield place.piece(f"{name}norm.weight", "site/mix/key_gain", (0, dim))
    yield place.piece(f"{name}bias", "site/mix/newest_bias", (0, 1))
