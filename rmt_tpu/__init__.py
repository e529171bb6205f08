"""Residual Matrix Transformers and Attention Residuals: models, training, generation.

`decoder, tokenizer = rmt_tpu.load("runs/rmt-tiny")` opens a trained run.
"""

import importlib

from rmt_tpu.config.presets import preset, presets

__version__ = "0.1.0"  # setup.py reads the version from this line.

__all__ = ["Decoder", "load", "preset", "presets"]

# These names are imported on first use, because the import of jax is slow.
_LAZY = {"Decoder": "rmt_tpu.decoder", "load": "rmt_tpu.runs.loading"}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rmt_tpu' has no attribute {name!r}")


def __dir__():
    return __all__
