"""Conversion between the hub's config.json and a `ModelConfig`.

This module does not import JAX.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.hub import attnres, gpt2, latent, own, qwen3_next
from rmt_tpu.hub.families import (
    ATTNRES,
    BIAS,
    EXPERTS,
    FAMILIES,
    GEMMA,
    GPT2,
    LATENT,
    NEXT,
    NORMS_AFTER,
    OWN,
    PARTIAL_ROPE,
    QUERY_KEY_NORM,
    UNROTATED_LAYERS,
    Family,
)
from rmt_tpu.hub.fields import Fields, optional_values_in, values_in
from rmt_tpu.hub.ropes import Ropes, read_ropes, rope_values
from rmt_tpu.hub.windows import read_windows, window_values
from rmt_tpu.storage import Folder, Location, open_folder

CONFIG, GENERATION = "config.json", "generation_config.json"
# Default values of keys that may be missing in a config.json of any model type.
_ABSENT = {"hidden_act": "silu"}
# This dict maps field names in newer files to the names that this package uses.
_RENAMED = {"num_local_experts": "num_experts"}
# The fields for the soft caps on attention logits and on output logits.
_OF_ATTENTION, _OF_MODEL = "attn_logit_softcapping", "final_logit_softcapping"
# Top-level fields of a text-and-image model that also apply to its text model.
_OUTSIDE = ("quantization_config", "tie_word_embeddings")
_MOST_LAYERS = 1000
# Model types that are written only on request, because a different type also fits their models.
EXPLICIT = (own.KIND, "qwen3_5_moe_text")
_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
# A written config need not have the same values of these fields of a model. `_layers` and
# `_check_expressed` check the first four in other ways. The others do not change what a trained
# model computes, except by rounding.
_NOT_COMPARED = (
    *("stacks", "store", "mixer", "parametrization"),
    *("init_std", "compute_dtype", "remat", "kernels"),
)


class Description(NamedTuple):
    """The model that a config.json in the hub's format describes.

    Attributes:
      model: the model's configuration.
      max_length: the maximum number of tokens that the model supports.
      ends: the tokens that end a text; empty if the folder does not name any.
      default_end: the end token that models of this type use by default, or None.
      family: the model type.
    """

    model: cfg.ModelConfig
    max_length: int
    ends: tuple[int, ...] = ()
    default_end: int | None = None
    family: Family = FAMILIES["llama"]


def is_hub(location: Location) -> bool:
    """Return whether a folder contains a hub model; False if the folder cannot be read."""
    folder = open_folder(location)
    try:
        folder.check()
    except UsageError:
        return False
    return "model_type" in (values_in(folder, CONFIG) or {})


def describe(folder: Location) -> Description:
    """Read the description of the model in a local or gs:// folder in the hub's format.

    Raises:
      Fault: a bucket cannot be read.
      UsageError: the folder does not contain a hub model, or the model needs an operation that is
        not supported here.
    """
    folder = open_folder(folder)
    values = values_in(folder, CONFIG)
    if values is None:
        raise UsageError(f"{folder} has no {CONFIG} in the hub's format; legal: a folder with one")
    where = f"{folder}/{CONFIG}"
    config_fields = Fields(_with_defaults(values), where)
    model = model_config(values, where)
    ends = _ends(folder, values, model.vocab_size)
    family = FAMILIES[values["model_type"]]
    if LATENT in family.traits:
        family = latent.own_family(config_fields, family)
    max_length = config_fields.size(family.length, 2048)
    return Description(model, max_length, ends, family.end, family)


def _with_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a config.json, with the model type's defaults for missing keys."""
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family and family.inside and isinstance(inside := values.get(family.inside), dict):
        outside = {name: values[name] for name in _OUTSIDE if name in values}
        values = {**outside, **inside, "model_type": kind}
    known = {**_ABSENT, **(family.absent if family else {})}
    others = {**_RENAMED, **(family.renamed if family else {})}
    renamed = {ours: values[name] for name, ours in others.items() if name in values}
    return {**known, **{name: x for name, x in renamed.items() if name in known}, **values}


def _ends(folder: Folder, values: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Read the end tokens from generation_config.json, or else from config.json.

    This is the order of precedence in the transformers library. The result is empty if neither file
    names an end token.
    """
    generation = optional_values_in(folder, GENERATION)
    inside = _with_defaults(values)
    sources = (generation, GENERATION), (values, CONFIG), (inside, CONFIG)
    for config_fields, name in sources:
        if config_fields.get("eos_token_id") is not None:
            return Fields(config_fields, f"{folder}/{name}").tokens("eos_token_id", vocab_size)
    return ()


def model_config(values: Mapping[str, Any], where: str) -> cfg.ModelConfig:
    """Convert a config.json in the hub's format to a model config.

    Args:
      values: the content of config.json.
      where: the location of the file, for error messages.

    Raises:
      UsageError: the model type or an operation that the model needs is not supported here.
    """
    config_fields = Fields(_with_defaults(values), where)
    family = config_fields.lookup("model_type", FAMILIES)
    if OWN in family.traits:
        return own.model_config(values, where)
    tied = config_fields.flag("tie_word_embeddings")
    return replace(_model_config(config_fields, family), tied_embeddings=tied)


def _model_config(config_fields: Fields, family: Family) -> cfg.ModelConfig:
    if GPT2 in family.traits:
        return gpt2.model_config(config_fields, _MOST_LAYERS)
    if NEXT in family.traits:
        return qwen3_next.model_config(config_fields, family, _num_layers(config_fields))
    if LATENT in family.traits:
        return latent.model_config(config_fields, family, _num_layers(config_fields))
    config_fields.only("mlp_bias", False)
    config_fields.only("attention_bias", BIAS in family.traits, False)
    config_fields.only("quantization_config", None)
    if GEMMA in family.traits:
        config_fields.only("use_bidirectional_attention", False, None)
        if _OF_ATTENTION not in family.absent:  # the transformers library ignores this cap
            config_fields.only(_OF_ATTENTION, None)
    cores = _attention(config_fields, family)
    seconds = _feed_forward(config_fields, family, len(cores))
    return cfg.ModelConfig(
        cfg.stacks(list(zip(cores, seconds, strict=True))),
        cfg.VectorStore(config_fields.size("hidden_size")),
        mixer=_mixer(config_fields, family, len(cores)),
        vocab_size=config_fields.size("vocab_size"),
        norm="rmsnorm",
        norm_epsilon=config_fields.positive("rms_norm_eps", 1e-6),
        embedding_scale=_embedding_scale(family, config_fields.size("hidden_size")),
        logit_cap=_cap(config_fields, family, _OF_MODEL),
    )


def _mixer(config_fields: Fields, family: Family, layers: int) -> cfg.Mixer:
    if ATTNRES in family.traits:
        return attnres.read_mixer(config_fields, layers)
    return cfg.Sum()


def _num_layers(config_fields: Fields) -> int:
    layers = config_fields.size("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise config_fields.wrong("num_hidden_layers", layers, f"at most {_MOST_LAYERS}")
    return layers


def _attention(config_fields: Fields, family: Family) -> list[cfg.Attention]:
    """Return the attention core of each layer."""
    width = config_fields.size("hidden_size")
    heads = config_fields.size("num_attention_heads")
    size = config_fields.size("head_dim", max(width // heads, 1))
    if size % 2:
        raise config_fields.wrong(
            "head_dim", size, "an even number, because RoPE rotates two halves"
        )
    groups = config_fields.size("num_key_value_heads", heads)
    if heads % groups:
        raise config_fields.wrong("num_key_value_heads", groups, f"a divisor of the {heads} heads")
    ropes = read_ropes(config_fields, family, size)
    layers = _num_layers(config_fields)
    rotated = [True] * layers
    if UNROTATED_LAYERS in family.traits:
        interval = config_fields.size("no_rope_layer_interval", 4)
        default = [(layer + 1) % interval > 0 for layer in range(layers)]
        rotated = config_fields.switches("no_rope_layers", default)
    options = {
        "inverse_layer_scaling": False,
        "normed": _normed(family),
        "query_key_norm_over": "heads" if NORMS_AFTER in family.traits else "head",
        "num_kv_heads": groups,
        "query_key_norm": QUERY_KEY_NORM in family.traits,
        "bias": BIAS in family.traits,
    }
    if GEMMA in family.traits:
        inverse_square = config_fields.positive("query_pre_attn_scalar")
        options["scale"] = None if inverse_square == size else inverse_square**-0.5
        options["logit_cap"] = _cap(config_fields, family, _OF_ATTENTION)
    windows = read_windows(config_fields, family, rotated)

    def layer(turned: bool, window: int | None) -> cfg.Attention:
        rope = ropes.full if window is None else ropes.sliding
        positions = rope if turned else cfg.NoPositions()
        return cfg.Attention(heads, size, positions, window=window, **options)

    return [layer(*of_layer) for of_layer in zip(rotated, windows, strict=True)]


def _feed_forward(config_fields: Fields, family: Family, layers: int) -> list[cfg.Core]:
    """Return the feed-forward core or the experts of each layer."""
    activation = config_fields.lookup(family.activation, _ACTIVATIONS)
    hidden = config_fields.size("intermediate_size")
    dense = cfg.FeedForward(hidden, activation, normed=_normed(family))
    if EXPERTS not in family.traits:
        return layers * [dense]
    config_fields.only("hidden_act", "silu")
    count, top_k = config_fields.size("num_experts"), config_fields.size("num_experts_per_tok")
    if top_k > count:
        raise config_fields.wrong("num_experts_per_tok", top_k, f"at most num_experts={count}")
    experts = cfg.Experts(
        count,
        top_k,
        config_fields.size("moe_intermediate_size"),
        shared=0,
        scores="softmax",
        normalized=config_fields.flag("norm_topk_prob"),
        balance=cfg.BalanceLoss(config_fields.not_negative("router_aux_loss_coef")),
    )
    step = config_fields.size("decoder_sparse_step")
    without = config_fields.layers("mlp_only_layers", layers)
    sparse = ((n + 1) % step == 0 and n not in without for n in range(layers))
    return [experts if has_experts else dense for has_experts in sparse]


def _normed(family: Family) -> str:
    if GEMMA in family.traits:
        return "both"
    return "output" if NORMS_AFTER in family.traits else "input"


def _cap(config_fields: Fields, family: Family, name: str) -> float | None:
    """Return the soft cap on logits from the field `name`, or None; only Gemma models have caps."""
    if GEMMA not in family.traits or not config_fields.has(name):
        return None
    return config_fields.positive(name)


def _embedding_scale(family: Family, width: int) -> float:
    return width**0.5 if GEMMA in family.traits else 1.0


def config_values(
    model: cfg.ModelConfig,
    *,
    max_length: int,
    bos: int,
    ends: Sequence[int],
    kind: str | None = None,
) -> dict[str, Any]:
    """Convert a model config to the fields of a hub config.json.

    Args:
      model: the config of a model that fits one of `FAMILIES`.
      max_length: the sequence length in training, in tokens.
      bos: the start token of texts.
      ends: the tokens that end a text.
      kind: the model type to write; None means the result of `kind_of`.

    Raises:
      UsageError: the model does not fit the model type; the message names the field that differs.
    """
    kind = kind_of(model) if kind is None else kind
    special = {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        **special_tokens(bos, ends),
        "tie_word_embeddings": model.tied_embeddings,
        # Some model types have a default token, whose id may be outside the vocabulary. Null
        # overrides this default.
        "pad_token_id": None,
    }
    if kind == own.KIND:
        return special | own.config_values(model, max_length)
    family = FAMILIES[kind]
    if family.traits & {NEXT, LATENT}:
        is_latent = LATENT in family.traits
        _layers(model, cfg.Kda.kind, *(is_latent * [cfg.Mla.kind]))
        of_kind = latent if is_latent else qwen3_next
        values = special | of_kind.config_values(model, family, max_length)
        _check_expressed(model, model_config(values, CONFIG))
        return values
    layers = _layers(model)
    attention, feed_forward = layers[0]
    if GPT2 in family.traits:
        values = gpt2.config_values(model, attention, feed_forward, len(layers)) | special
        _check_expressed(model, model_config(values, CONFIG))
        return values
    dense = [n for n, (_, core) in enumerate(layers) if core.kind != cfg.Experts.kind]
    feed_forward = layers[dense[0]][1] if dense else cfg.FeedForward(1, "swiglu")
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    values = special | {
        "hidden_size": model.store.dim,
        "intermediate_size": feed_forward.hidden_dim,
        "num_hidden_layers": len(layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        family.activation: activations.get(feed_forward.activation, "silu"),
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": max_length,
        "vocab_size": model.vocab_size,
        "attention_bias": attention.bias,
        "mlp_bias": False,
    }
    values |= _position_values(family, layers)
    if EXPERTS in family.traits:
        values |= _expert_values(layers, dense)
    if GEMMA in family.traits:
        values[_OF_MODEL] = model.logit_cap
    if ATTNRES in family.traits:
        values |= attnres.mixer_values(model)
    _check_expressed(model, model_config(values, CONFIG))
    return values


def _position_values(family: Family, layers: Sequence[tuple]) -> dict[str, Any]:
    """Return the fields for RoPE, for windows and for the scale of attention logits."""
    attention = layers[0][0]
    rotated = [isinstance(core.positions, cfg.Rope) for core, _ in layers]
    windows, ropes = [core.window for core, _ in layers], _ropes(layers)
    values = rope_values(family, ropes) | window_values(family, windows)
    if PARTIAL_ROPE in family.traits:
        # Readers truncate factor * size. Adding 0.5 makes the truncated product equal dims.
        dims, size = ropes.full.dims or attention.head_dim, attention.head_dim
        rounded = int(size * (dims / size)) < dims
        values["partial_rotary_factor"] = (dims + 0.5 * rounded) / size
    if GEMMA in family.traits:
        values["query_pre_attn_scalar"] = _inverse_square(attention)
        if _OF_ATTENTION in family.absent:
            values[_OF_ATTENTION] = attention.logit_cap
    if not all(rotated):
        values["no_rope_layers"] = list(map(int, rotated))
    return values


def _inverse_square(attention: cfg.Attention) -> int | float:
    """Return n such that attention divides the products of queries and keys by sqrt(n)."""
    if attention.scale is None:
        return attention.head_dim
    exact = attention.scale**-2
    return round(exact) if math.isclose(exact, round(exact), rel_tol=1e-12) else exact


def _expert_values(layers: Sequence[tuple], dense: list[int]) -> dict[str, Any]:
    """Return the fields for experts; `dense` lists the numbers of the layers without experts."""
    experts = next(core for _, core in layers if core.kind == cfg.Experts.kind)
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.hidden_dim,
        "norm_topk_prob": experts.normalized,
        "router_aux_loss_coef": getattr(experts.balance, "weight", 0.0),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def special_tokens(bos: int, ends: Sequence[int]) -> dict[str, Any]:
    """Return the start and end token fields of config.json and generation_config.json."""
    return {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else list(ends)}


def kind_of(model: cfg.ModelConfig) -> str:
    """Choose the model type to write: the first one with the same traits as the model.

    A type that can express the model's sliding windows is preferred.

    Raises:
      UsageError: no model type has exactly these traits.
    """
    if latent.kind(model) is not None:
        return latent.kind(model)
    if qwen3_next.kind_of(model):
        return qwen3_next.kind_of(model)
    cores = [core for core, _ in _layers(model)]
    seconds = [core for _, core in _layers(model)]
    layernorm = model.norm == "layernorm"
    has = {
        GPT2: layernorm,
        BIAS: not layernorm and any(core.bias for core in cores),
        NORMS_AFTER: any(core.normed == "output" for core in cores),
        GEMMA: any(core.normed == "both" for core in cores),
        QUERY_KEY_NORM: any(core.query_key_norm for core in cores),
        UNROTATED_LAYERS: any(core.positions == cfg.NoPositions() for core in cores),
        ATTNRES: attnres.is_one(model),
        EXPERTS: any(core.kind == cfg.Experts.kind for core in seconds),
        PARTIAL_ROPE: any(getattr(core.positions, "dims", None) for core in cores),
    }
    traits = [name for name in has if has[name]]
    kinds = [kind for kind, family in FAMILIES.items() if family.traits == set(traits)]
    windows = [core.window for core in cores]
    fitting = [kind for kind in kinds if _has_windows(FAMILIES[kind], windows)]
    if kinds:
        # If no type fits, the caller's error names the field that the first type cannot express.
        return (fitting or kinds)[0]
    families = [f.traits for f in FAMILIES.values() if f.traits and OWN not in f.traits]
    several = sorted({" and ".join(sorted(traits)) for traits in families})
    raise own.not_in_hub_format("model.attention", " and ".join(traits), ", or ".join(several))


def _has_windows(family: Family, windows: list[int | None]) -> bool:
    """Return whether a model type can express the windows of these layers."""
    if not any(windows):
        return True
    return family.windows is not None and (family.windows != "all" or all(windows))


def _ropes(layers: list[tuple[cfg.Attention, cfg.FeedForward | cfg.Experts]]) -> Ropes:
    """Return the RoPE of the first layer without a window, and of the first layer with a window.

    If one of the two sorts of layers is missing, the RoPE of the other sort is used for both.
    """
    rotated = [core for core, _ in layers if isinstance(core.positions, cfg.Rope)]
    any_rope = rotated[0].positions if rotated else cfg.Rope()
    found = {core.window is None: core.positions for core in reversed(rotated)}
    return Ropes(found.get(True, any_rope), found.get(False, any_rope))


def _layers(
    model: cfg.ModelConfig, *first: str
) -> list[tuple[cfg.Attention | cfg.Mla | cfg.Kda, cfg.FeedForward | cfg.Experts]]:
    """Return each layer's attention, and its feed-forward core or experts.

    Args:
      model: the model.
      *first: the kinds of other cores that are legal in place of attention.

    Raises:
      UsageError: hub models do not have this residual or these cores.
    """
    if not isinstance(model.store, cfg.VectorStore):
        raise own.not_in_hub_format("model.store", model.store.kind, "vector")
    over_depth = attnres.is_one(model) or latent.kind(model) == "kimi_linear"
    if not isinstance(model.mixer, cfg.Sum) and not over_depth:
        raise own.not_in_hub_format("model.mixer", model.mixer.kind, "sum")
    if not isinstance(model.parametrization, cfg.Standard):
        raise own.not_in_hub_format("model.parametrization", model.parametrization.kind, "standard")
    if model.norm_bias != (model.norm == "layernorm"):
        legal = "rmsnorm without norm_bias, or layernorm with norm_bias"
        raise own.not_in_hub_format("model.norm", model.norm, legal)
    cores = list(model.sublayers)
    layers = list(zip(cores[::2], cores[1::2], strict=False))
    kinds = [core.kind for core in cores]
    mixing = (cfg.Attention.kind, *first)
    legal = {(kind, second.kind) for kind in mixing for second in (cfg.FeedForward, cfg.Experts)}
    if len(kinds) % 2 or not legal.issuperset(zip(kinds[::2], kinds[1::2], strict=True)):
        listed = ", ".join(dict.fromkeys(kinds))
        legal_cores = "layers of attention, followed by feed_forward or experts"
        raise own.not_in_hub_format("model.stacks", listed, legal_cores)
    return layers


def _check_expressed(model: cfg.ModelConfig, found: cfg.ModelConfig) -> None:
    """Raise UsageError unless `found`, the config read back from config.json, equals `model`.

    Without this check, an option that the hub's format lacks would be dropped silently.
    """
    for name in (field.name for field in fields(model) if field.name not in _NOT_COMPARED):
        given, legal = getattr(model, name), getattr(found, name)
        if given != legal:
            raise own.not_in_hub_format(f"model.{name}", given, legal)
    if isinstance(found.mixer, cfg.Sum) and not isinstance(model.mixer, cfg.Sum):
        raise own.not_in_hub_format("model.mixer", model.mixer.kind, "sum")
    for core, other in zip(model.sublayers, found.sublayers, strict=True):
        if core.kind != other.kind:
            raise own.not_in_hub_format("model.stacks", f"layers with {core.kind}", other.kind)
        for name in (field.name for field in fields(core)):
            value, legal = getattr(core, name), getattr(other, name)
            derived = {"num_kv_heads": "kv_heads", "num_key_heads": "key_heads"}.get(name)
            by_default = derived and getattr(core, derived) == getattr(other, derived)
            if name == "latent_epsilon":
                by_default = value is None and model.norm_epsilon == legal
            # The update rate of expert biases is not in files. It does not affect the model's
            # outputs.
            biases = isinstance(value, cfg.SignRule) and isinstance(legal, cfg.SignRule)
            if value != legal and not (by_default or biases):
                kinds = [getattr(x, "kind", None) for x in (value, legal)]
                value, legal = kinds if kinds[0] != kinds[1] else (value, legal)
                raise own.not_in_hub_format(f"model.{core.kind}.{name}", value, legal)
