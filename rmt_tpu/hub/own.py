"""The model type `rmt_tpu`, which stores any model of this package in a hub-style folder.

config.json has the model's config in the field `model`, in the same form as run folders. Every
parameter is a tensor of the same shape, named by its path: `stacks.0.1.core.w_1`.

The transformers library has no built-in type of this name. It runs the PyTorch code in the folder,
which is copied from `torch/`. One file contains the models of the papers, and a second file
contains the other mixers and cores. This package never imports these files. If they do not
implement a model's mixer or cores, its folder has no PyTorch code, and only this package can open
it.

This module imports JAX only to list the tensors and to compute factors.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rmt_tpu import config as cfg
from rmt_tpu.config import overrides
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.pieces import Piece, full

KIND = "rmt_tpu"
_MODEL = "model"
_SOURCES = Path(__file__).parent / "torch"
# The mixers and cores that each PyTorch file implements. The second file imports the first.
CODE = {
    "modeling_rmt_tpu": frozenset(
        {"attention", "block_attention", "feed_forward", "full_attention", "sum"}
    ),
    "modeling_rmt_tpu_more": frozenset(
        {
            *("delta_attention", "dense", "depth_lstm", "experts", "hierarchical", "highway"),
            *("hyper_connections", "kda", "mhc", "mhc_lite", "mla", "mudd", "residual_scalars"),
            "wide_streams",
        }
    ),
}

# The names of parameters that are written in float32 even if the other tensors have a narrower
# dtype: counts of tokens, from which the biases of experts follow, and the rates of decays. The
# second PyTorch file keeps the same ones in float32.
EXACT = frozenset({"decay_bias", "load", "log_rate", "seen"})


def model_config(values: Mapping[str, Any], where: str) -> cfg.ModelConfig:
    """Read the model config from a config.json of the type `rmt_tpu`.

    Args:
      values: the content of config.json.
      where: the location of the file, for error messages.

    Raises:
      UsageError: the field `model` is missing or is not a legal config.
    """
    try:
        return overrides.from_json(cfg.ModelConfig, values.get(_MODEL))
    except UsageError as error:
        raise UsageError(f"{where}: the field {_MODEL} is not a legal config: {error}") from None


def config_values(model: cfg.ModelConfig, max_length: int) -> dict[str, Any]:
    """Return the fields of config.json, except the start and end tokens.

    Options that depend on the device, such as the compute dtype, are written as "auto".

    Args:
      model: the model's config.
      max_length: the sequence length in training, in tokens.
    """
    store = dataclasses.replace(model.store, dtype="auto")
    anywhere = dataclasses.replace(
        model, store=store, compute_dtype="auto", remat="auto", kernels="auto"
    )
    values = {
        "max_position_embeddings": max_length,
        "vocab_size": model.vocab_size,
        # The long form does not depend on the order of fields, which other programs may change.
        _MODEL: overrides.to_json(anywhere, short=False),
    }
    return values | (_for_code(model) if code_files(model) else {})


def without_code(model: cfg.ModelConfig) -> str | None:
    """Explain in one line why a model's folder has no PyTorch code; return None if it has code."""
    parts = [("mixer", model.mixer.kind), *(("core", core.kind) for core in model.cores)]
    computed = frozenset().union(*CODE.values())
    missing = [f"{name}={kind}" for name, kind in parts if kind not in computed]
    if not missing:
        return None
    return (
        f"the folder has no PyTorch code, because there is none for {', '.join(missing)}; only "
        "this package opens it"
    )


def code_files(model: cfg.ModelConfig) -> list[str]:
    """Return the names of the PyTorch modules that a model needs; [] if it has no code."""
    if without_code(model):
        return []
    first, more = CODE
    alone = {model.mixer.kind, *(core.kind for core in model.cores)} <= CODE[first]
    return [first] if alone else [first, more]


def write_code(model: cfg.ModelConfig, folder: Path) -> None:
    """Copy the PyTorch files that a model needs into the model's folder."""
    for name in code_files(model):
        shutil.copyfile(_SOURCES / f"{name}.py", folder / f"{name}.py")


def not_in_hub_format(
    name: str, value: object, legal: object, form: str = "in the hub's format"
) -> UsageError:
    """Return the error of an option that a format lacks, which offers this package's own kind."""
    return UsageError(
        f"{name}={value} cannot be written {form}; legal: {legal}, or this package's own kind, "
        f"{KIND} (recipes.export --kind={KIND})"
    )


def _for_code(model: cfg.ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that the PyTorch code reads to build the model."""
    from rmt_tpu.cores.core import logit_scale

    cores: list[tuple[cfg.Core, cfg.Core]] = []  # each sublayer's, and the base model's there
    for stack, base in zip(model.stacks, model.base_model.stacks, strict=True):
        cores += stack.repeat * [*zip(stack.cores, base.cores, strict=True)]
    scales: list[float | None] = []
    for index, (core, base_core) in enumerate(cores):
        by_layer = index // 2 + 1 if getattr(core, "inverse_layer_scaling", False) else 1
        scales.append(logit_scale(model, core, base_core) / by_layer if core.softmax else None)
    of_mup = lambda name: getattr(model.parametrization, name, 1.0)
    factors = {
        "tokens": of_mup("input_multiplier") * model.embedding_scale,
        "positions": of_mup("input_multiplier"),
        "attention": scales,
        "logits": of_mup("output_multiplier") / model.width_ratio,
    }
    file = code_files(model)[-1]
    return {
        "auto_map": {
            "AutoConfig": f"{file}.RmtTpuConfig",
            "AutoModelForCausalLM": f"{file}.RmtTpuForCausalLM",
        },
        "factors": factors,
        "tensors": {piece.name: list(piece.shape) for piece in pieces(model)},
    }


def pieces(model: cfg.ModelConfig) -> Iterator[Piece]:
    """Yield one tensor for each parameter of a model."""
    import jax
    from flax import nnx, traverse_util

    from rmt_tpu.decoder import Decoder

    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
    shapes = traverse_util.flatten_dict(jax.tree.map(lambda x: x.shape, params))
    for path, shape in shapes.items():
        name, exact = ".".join(map(str, path)), path[-1] in EXACT
        yield Piece(name, path, full(*shape), as_it_is=True, exact=exact)
