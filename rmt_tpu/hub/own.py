"""The kind `rmt_tpu`, which holds any model of this package in the form of the hub's folders.

config.json has the model's config in the field `model`, in the same form as run folders. Every
parameter is a tensor of its own shape, named by its path: `stacks.0.1.core.w_1`. Only this
package opens such a folder. The transformers library refuses its `model_type`, so that nobody takes
the weights of another residual for those of a plain model.

This module imports no jax, except to list the tensors.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.pieces import Piece, full

KIND = "rmt_tpu"
_MODEL = "model"


def model_config(values: Mapping[str, Any], where: str) -> cfg.ModelConfig:
    """Return the model config in a config.json of this kind.

    Args:
      values: the content of config.json.
      where: the location of the file, for error messages.

    Raises:
      UsageError: the field `model` is missing or is no legal config.
    """
    try:
        return overrides.from_json(cfg.ModelConfig, values.get(_MODEL))
    except UsageError as error:
        raise UsageError(f"{where}: {_MODEL}: {error}") from None


def config_values(model: cfg.ModelConfig, max_length: int) -> dict[str, Any]:
    """Return the fields of config.json, without those of start and end tokens.

    Choices that a run made for its device, such as the compute dtype, are written as "auto", so
    that they are made again for the device on which the folder is opened.

    Args:
      model: the model's config.
      max_length: the sequence length in training, in tokens.
    """
    store = dataclasses.replace(model.store, dtype="auto")
    anywhere = dataclasses.replace(
        model, store=store, compute_dtype="auto", remat="auto", kernels="auto"
    )
    return {
        "max_position_embeddings": max_length,
        "vocab_size": model.vocab_size,
        _MODEL: overrides.to_json(anywhere),
    }


def pieces(model: cfg.ModelConfig) -> Iterator[Piece]:
    """Yield a tensor for each parameter of a model."""
    import jax
    from flax import nnx, traverse_util

    from rmt_tpu.decoder import Decoder

    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
    shapes = traverse_util.flatten_dict(jax.tree.map(lambda x: x.shape, params))
    for path, shape in shapes.items():
        yield Piece(".".join(map(str, path)), path, full(*shape), as_it_is=True)
