"""Conversion between the hub's config.json and a `ModelConfig`, for the Llama family.

This module imports no jax.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError, shown, unknown

CONFIG, GENERATION = "config.json", "generation_config.json"
# Maps each model type to (whether queries, keys and values have a bias, whether queries and keys
# are normalized).
KINDS = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
# The values that the transformers library uses for keys that are absent from a config.json, by
# model type. A key whose value is null does not get a default.
_ABSENT: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
    },
    "qwen3": {
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
    },
}
_DEFAULT_ENDS = {"llama": 2, "mistral": 2}
_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class Description(NamedTuple):
    """The model that a config.json in the hub's format describes.

    Attributes:
      model: the model's configuration.
      max_length: the maximum number of tokens that the model supports.
      tied: whether the unembedding W_U is the embedding matrix. W_U may then have no tensor in the
        files.
      ends: the end tokens; each end token ends a text; empty if the folder does not name any.
      default_end: the end token that models of this type use by default, or None.
    """

    model: cfg.ModelConfig
    max_length: int
    tied: bool
    ends: tuple[int, ...] = ()
    default_end: int | None = None


def is_hub(folder: str | Path | None) -> bool:
    """Return whether a local folder has a model in the hub's format; False for None."""
    return folder is not None and "model_type" in (values_in(Path(folder) / CONFIG) or {})


def describe(folder: str | Path) -> Description:
    """Read the description of the model in a folder in the hub's format.

    Raises:
      UsageError: the folder has no such model, or the model needs an operation that is not
        supported here.
    """
    path = Path(folder)
    values = values_in(path / CONFIG)
    if values is None:
        raise UsageError(f"{folder} has no {CONFIG} in the hub's format; legal: a folder with one")
    where = str(path / CONFIG)
    config_fields = Fields(_with_defaults(values), where)
    max_length = config_fields.size("max_position_embeddings", 2048)
    model, tied = model_config(values, where), config_fields.flag("tie_word_embeddings")
    ends = _ends(path, values, model.vocab_size)
    return Description(model, max_length, tied, ends, _DEFAULT_ENDS.get(values["model_type"]))


def _with_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a config.json, with the model type's defaults for absent keys."""
    kind = values.get("model_type")
    return {**_ABSENT.get(kind if isinstance(kind, str) else "", {}), **values}


def _ends(folder: Path, values: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens named in generation_config.json, or else in config.json.

    This is the order of precedence in the transformers library. The result is empty if neither file
    names an end token.
    """
    generation = values_in(folder / GENERATION)
    if generation is None and (folder / GENERATION).exists():
        raise UsageError(
            f"{folder / GENERATION} is not a JSON object; legal: a JSON object, or no file"
        )
    for config_fields, name in ((generation or {}, GENERATION), (values, CONFIG)):
        if config_fields.get("eos_token_id") is not None:
            return Fields(config_fields, str(folder / name)).tokens("eos_token_id", vocab_size)
    return ()


def values_in(file: Path) -> Mapping[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing or holds no object."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


class Fields:
    """The fields of a config.json, which are checked as they are read.

    Args:
      values: the JSON object.
      where: the location of the file, for error messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where = values, where

    def wrong(self, name: str, value: object, legal: str) -> UsageError:
        """Return an error that says that a field has an illegal value."""
        return UsageError(f"{self._where}: {name}={shown(value)} is not supported; legal: {legal}")

    def size(self, name: str, default: int | None = None) -> int:
        """Return a field that holds a whole number from 1 to 2^31 - 1.

        Raises:
          UsageError: the field has another value, or it is missing and there is no default.
        """
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 2**31:
            raise self.wrong(name, value, "a whole number, at least 1")
        return value

    def tokens(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the tokens in a field that holds one token or a list of tokens."""
        value = self._values.get(name)
        several = value if isinstance(value, list) else [value]
        if not several or any(type(v) is not int or not 0 <= v < vocab_size for v in several):
            raise self.wrong(name, value, f"a token from 0 to {vocab_size - 1}, or a list of them")
        return tuple(several)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a field that holds a finite number above 0.

        Raises:
          UsageError: the field has another value, or it is missing and there is no default.
        """
        value = self._values.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(name, value, "a positive number")
        return float(value)

    def lookup(self, name: str, legal: Mapping[str, Any]) -> Any:
        """Return the value that the dict `legal` has for the field's text.

        Raises:
          UsageError: the field is missing or its value is not a key of `legal`.
        """
        value = self._values.get(name)
        if not isinstance(value, str) or value not in legal:
            raise UsageError(unknown(f"{self._where}: {name}", value, legal))
        return legal[value]

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a field that holds true or false.

        Raises:
          UsageError: the field has another value.
        """
        value = self._values.get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return value

    def only(self, name: str, *legal: object) -> None:
        """Raise UsageError unless a field has one of the values `legal` or is absent.

        An absent field counts as having the first of these values.
        """
        value = self._values.get(name, legal[0])
        if value not in legal:
            raise self.wrong(name, value, " or ".join(dict.fromkeys(map(json.dumps, legal))))

    def only_each(self, name: str, legal: str) -> None:
        """Raise UsageError unless a field is absent or a list in which every value is `legal`."""
        value = self._values.get(name) or []
        if not isinstance(value, list) or any(item != legal for item in value):
            raise self.wrong(name, value, f"a list of {legal!r}")

    def group(self, name: str) -> "Fields":
        """Return the fields of a nested object, which may be absent.

        Raises:
          UsageError: the field is not an object, or contains further objects.
        """
        value = self._values.get(name) or {}
        if not isinstance(value, dict) or any(isinstance(item, dict) for item in value.values()):
            raise self.wrong(name, value, "null, or an object of plain values")
        return Fields(value, f"{self._where}: {name}")

    def rope(self) -> cfg.Rope:
        """Return the RoPE settings from `rope_theta` and `rope_scaling`, or from `rope_parameters`.

        Files of newer versions of transformers have `rope_parameters`, which contains both the base
        and the scaling.
        """
        parameters, scaling = self.group("rope_parameters"), None
        for group in (parameters, self.group("rope_scaling")):
            scaling = group._scaling(self) or scaling
            group.only("partial_rotary_factor", 1.0, None)
        self.only("partial_rotary_factor", 1.0, None)
        base = parameters.positive("rope_theta", self.positive("rope_theta", 10_000.0))
        return cfg.Rope(base=base, scaling=scaling)

    def _scaling(self, model: "Fields") -> cfg.Llama3Scaling | None:
        """Return the RoPE scaling in this group of fields, or None if it has none.

        If the group does not give the length before scaling, the model's `max_position_embeddings`
        is used.
        """
        for name in ("rope_type", "type"):
            self.only(name, "default", cfg.Llama3Scaling.kind)
        if cfg.Llama3Scaling.kind not in (self._values.get("rope_type"), self._values.get("type")):
            return None
        low, high = self.positive("low_freq_factor"), self.positive("high_freq_factor")
        if low >= high:
            raise self.wrong("low_freq_factor", low, f"below high_freq_factor={high}")
        length = self.size(
            "original_max_position_embeddings", model.size("max_position_embeddings", 2048)
        )
        return cfg.Llama3Scaling(self.positive("factor"), low, high, length)


def model_config(values: Mapping[str, Any], where: str) -> cfg.ModelConfig:
    """Return the model config that a config.json in the hub's format describes.

    Args:
      values: the content of config.json.
      where: the location of the file, for error messages.

    Raises:
      UsageError: the model is of another family, or needs an operation that is not supported here.
    """
    present, values = values, _with_defaults(values)
    config_fields = Fields(values, where)
    bias, norm = config_fields.lookup("model_type", KINDS)
    config_fields.only("mlp_bias", False)
    config_fields.only("attention_bias", bias, False)
    config_fields.only("quantization_config", None)
    config_fields.only_each("layer_types", "full_attention")
    slides = config_fields.flag("use_sliding_window", True)
    if slides and (window := values.get("sliding_window")) is not None:
        legal = "null" if "sliding_window" in present else "null, written explicitly"
        raise config_fields.wrong("sliding_window", window, legal)
    width, heads = config_fields.size("hidden_size"), config_fields.size("num_attention_heads")
    size = config_fields.size("head_dim", max(width // heads, 1))
    if size % 2:
        raise config_fields.wrong(
            "head_dim", size, "an even number, because RoPE rotates two halves"
        )
    groups = config_fields.size("num_key_value_heads", heads)
    if heads % groups:
        raise config_fields.wrong("num_key_value_heads", groups, f"a divisor of the {heads} heads")
    attention = cfg.Attention(
        heads,
        size,
        config_fields.rope(),
        inverse_layer_scaling=False,
        num_kv_heads=groups,
        query_key_norm=norm,
        bias=bias,
    )
    activation = config_fields.lookup("hidden_act", _ACTIVATIONS)
    feed_forward = cfg.FeedForward(config_fields.size("intermediate_size"), activation)
    return cfg.ModelConfig(
        (cfg.Stack((attention, feed_forward), config_fields.size("num_hidden_layers")),),
        cfg.VectorStore(width),
        vocab_size=config_fields.size("vocab_size"),
        norm="rmsnorm",
        norm_epsilon=config_fields.positive("rms_norm_eps", 1e-6),
    )


def config_values(
    model: cfg.ModelConfig, *, max_length: int, bos: int, ends: Sequence[int]
) -> dict[str, Any]:
    """Return the fields of the hub's config.json for a model.

    Args:
      model: a model of the Llama family.
      max_length: the sequence length in training, in tokens.
      bos: the start token of texts.
      ends: the end tokens; each end token ends a text.

    Raises:
      UsageError: the model is not of the Llama family; the message names the field that differs.
    """
    attention, feed_forward = _sublayers(model)
    kinds = {flags: kind for kind, flags in reversed(KINDS.items())}
    kind = kinds.get((attention.bias, attention.query_key_norm))
    if kind is None:
        raise _not_in_hub_format("model.attention.bias and query_key_norm", "both", "one of them")
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    return {
        "architectures": [f"{_CLASSES[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": model.store.dim,
        "intermediate_size": feed_forward.hidden_dim,
        "num_hidden_layers": model.stacks[0].repeat,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": activations[feed_forward.activation],
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": attention.positions.base,
        "rope_scaling": _rope_scaling(attention.positions.scaling),
        "max_position_embeddings": max_length,
        "vocab_size": model.vocab_size,
        "attention_bias": attention.bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **special_tokens(bos, ends),
    }


def special_tokens(bos: int, ends: Sequence[int]) -> dict[str, Any]:
    """Return the fields for start and end tokens in config.json and generation_config.json."""
    return {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else list(ends)}


def _sublayers(model: cfg.ModelConfig) -> tuple[cfg.Attention, cfg.FeedForward]:
    """Return the attention and the feed-forward core of a Llama-family model's layers."""
    if not isinstance(model.store, cfg.VectorStore):
        raise _not_in_hub_format("model.store", model.store.kind, "vector")
    if not isinstance(model.mixer, cfg.Sum):
        raise _not_in_hub_format("model.mixer", model.mixer.kind, "sum")
    if not isinstance(model.parametrization, cfg.Standard):
        raise _not_in_hub_format("model.parametrization", model.parametrization.kind, "standard")
    if model.norm != "rmsnorm":
        raise _not_in_hub_format("model.norm", model.norm, "rmsnorm")
    kinds = [core.kind for core in model.cores]
    if len(model.stacks) > 1 or kinds != ["attention", "feed_forward"]:
        raise _not_in_hub_format(
            "model.stacks", ", ".join(kinds), "one stack, of attention and feed_forward"
        )
    attention, feed_forward = model.cores
    if feed_forward.activation not in _ACTIVATIONS.values():
        legal = " or ".join(_ACTIVATIONS.values())
        raise _not_in_hub_format("model.feed_forward.activation", feed_forward.activation, legal)
    if not isinstance(attention.positions, cfg.Rope) or attention.positions.dims is not None:
        raise _not_in_hub_format(
            "model.attention.positions", attention.positions.kind, "rope over all dimensions"
        )
    if attention.inverse_layer_scaling:
        raise _not_in_hub_format("model.attention.inverse_layer_scaling", True, "false")
    return attention, feed_forward


def _rope_scaling(scaling: cfg.Llama3Scaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original_length,
    }


def _not_in_hub_format(name: str, value: object, legal: str) -> UsageError:
    return UsageError(f"{name}={value} cannot be written in the hub's format; legal: {legal}")
