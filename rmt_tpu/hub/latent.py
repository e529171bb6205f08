"""Kimi Linear and DeepSeek-V3 models, which have latent attention, in the hub's format.

In both, the router has a bias for each expert, and every token uses the shared experts. Kimi Linear
also has layers of Kimi Delta Attention, and its latent attention uses no position encoding. An
unknown field raises an error, because it may select a different variant of the model.

This module does not import JAX.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.hub import kimi_k3
from rmt_tpu.hub.families import INTERLEAVED, KIMI, PACKED, Family
from rmt_tpu.hub.fields import Fields
from rmt_tpu.hub.ropes import (
    FULL,
    Ropes,
    logit_factor_values,
    read_logit_factor,
    read_ropes,
    rope_values,
)

LINEAR = "linear_attention"
_DENSE, _SPARSE = "dense", "sparse"
_LINEAR_CONFIG = "linear_attn_config"
# This is the epsilon in the norms of latent vectors. It is a constant in the code of these models,
# and not a field of config.json.
_LATENT_EPSILON = 1e-6
# A training step changes the bias of an expert by this rate. Files contain the biases, but not the
# rate. The parameter is bias / rate, and the division is exact because the rate is a power of two.
_RATE = 2.0**-10


class Names(NamedTuple):
    """The names of the config.json fields that describe the experts of one model type."""

    count: str
    top_k: str
    shared: str
    normalized: str
    groups: str
    scores: str


_KIMI_NAMES = Names(
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_renormalize",
    "num_expert_group",
    "moe_router_activation_func",
)
_DEEPSEEK_NAMES = Names(
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "norm_topk_prob",
    "n_group",
    "scoring_func",
)
# These fields do not affect the outputs of a trained model.
_WITHOUT_EFFECT = """
    _name_or_path architectures attention_dropout auto_map aux_loss_alpha bos_token_id dtype
    eos_token_id ep_size head_dim initializer_range model_type output_router_logits pad_token_id
    pretraining_tp qk_head_dim seq_aux tie_word_embeddings torch_dtype transformers_version
    use_cache
""".split()
_READ = """
    attention_bias first_k_dense_replace hidden_act hidden_size intermediate_size kv_lora_rank
    moe_intermediate_size moe_layer_freq num_attention_heads num_hidden_layers num_key_value_heads
    num_nextn_predict_layers q_lora_rank qk_nope_head_dim qk_rope_head_dim quantization_config
    rms_norm_eps rope_parameters rope_scaling rope_theta routed_scaling_factor topk_group
    topk_method v_head_dim vocab_size
""".split()
_OF_KIMI = (
    """
    layer_types linear_attn_config linear_conv_kernel_dim linear_head_dim linear_num_heads
    mla_use_nope mlp_layer_types use_grouped_topk
""".split()
    + kimi_k3.FIELDS
)
_OF_DEEPSEEK = ["rope_interleave"]
_OF_ROPE = """
    attention_factor beta_fast beta_slow factor high_freq_factor low_freq_factor mscale
    mscale_all_dim original_max_position_embeddings partial_rotary_factor rope_theta rope_type
    truncate type
""".split()
_OF_LINEAR_CONFIG = "full_attn_layers head_dim kda_layers num_heads short_conv_kernel_size".split()


def kind(model: cfg.ModelConfig) -> str | None:
    """Choose the model type for latent or Kimi Delta Attention; None if the model has neither."""
    latent, linear = (model.cores_of_kind(kind) for kind in (cfg.Mla.kind, cfg.Kda.kind))
    if any(core.decays == "channels" for core in linear):
        return "kimi_linear"
    if not latent:
        return None
    rotated = any(isinstance(core.positions, cfg.Rope) for core in latent)
    return "deepseek_v3" if rotated else "kimi_linear"


def own_family(fields: Fields, family: Family) -> Family:
    """Return `family`, adapted to the tensor layout that a config.json describes.

    In some files, RoPE rotates pairs of adjacent numbers, or experts are packed. Layers for
    multi-token prediction are ignored, with each prefix that the family's files may have; their
    numbers follow those of the model's own layers.

    Raises:
      UsageError: one of these fields has an illegal value.
    """
    first, more = fields.size("num_hidden_layers"), fields.count("num_nextn_predict_layers")
    layers = [f"model.layers.{layer}." for layer in range(first, first + more)]
    ignored = tuple(base + layer for base in ("", *family.other_bases) for layer in layers)
    halves = KIMI not in family.traits and not fields.flag("rope_interleave")
    traits = family.traits - ({INTERLEAVED} if halves else set())
    if KIMI in family.traits and kimi_k3.is_packed(fields):
        traits |= {PACKED}
    return family._replace(traits=traits, ignored=(*family.ignored, *ignored))


# Reading a config.json -----------------------------------------------------------------------


def model_config(fields: Fields, family: Family, layers: int) -> cfg.ModelConfig:
    """Convert the config.json of a Kimi Linear or DeepSeek-V3 model to a model config.

    Raises:
      UsageError: a field is unknown, or the model needs an operation that is not supported here.
    """
    is_kimi = KIMI in family.traits
    names = _KIMI_NAMES if is_kimi else _DEEPSEEK_NAMES
    own = _OF_KIMI if is_kimi else _OF_DEEPSEEK
    fields.known({*_WITHOUT_EFFECT, *_READ, *own, *names, family.length, *family.renamed})
    fields.only("attention_bias", False)
    fields.only(names.scores, "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.count("num_nextn_predict_layers")
    further, activation, mixer = {}, {"activation": "swiglu"}, cfg.Sum()
    if is_kimi:
        fields.only("mla_use_nope", True)
        fields.only("rope_scaling", None)
        activation = kimi_k3.read_activation(fields)
        further = activation | kimi_k3.read_latent(fields)
        mixer = kimi_k3.read_mixer(fields, layers)
        kimi_k3.is_packed(fields)
    else:
        fields.only("hidden_act", "silu")
        fields.only("quantization_config", None)
    attention = _latent_attention(fields, family)
    full = _full_layers(fields, layers) if is_kimi else layers * [True]
    first = [attention if has_latents else _delta_attention(fields) for has_latents in full]
    dense = cfg.FeedForward(fields.size("intermediate_size"), **activation)
    sparse = _sparse_layers(fields, layers, is_kimi)
    experts = _experts(fields, names, further) if any(sparse) else dense
    second = [experts if has_experts else dense for has_experts in sparse]
    return cfg.ModelConfig(
        cfg.stacks(list(zip(first, second, strict=True))),
        cfg.VectorStore(fields.size("hidden_size")),
        mixer,
        vocab_size=fields.size("vocab_size"),
        norm="rmsnorm",
        norm_epsilon=fields.positive("rms_norm_eps"),
    )


def _latent_attention(fields: Fields, family: Family) -> cfg.Mla:
    heads, size, part = map(
        fields.size, ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    _only_as(fields, "num_key_value_heads", heads, "num_attention_heads")
    _only_as(fields, "v_head_dim", size, "qk_nope_head_dim")
    positions, scale = cfg.NoPositions(), None
    if KIMI not in family.traits:
        if part % 2:
            legal = "an even number, because RoPE rotates pairs"
            raise fields.wrong("qk_rope_head_dim", part, legal)
        for name in ("rope_parameters", "rope_scaling"):
            fields.group(name).known(_OF_ROPE)
        positions = read_ropes(fields, family, part).full
        factor = read_logit_factor(fields, positions)
        scale = None if factor == 1.0 else (size + part) ** -0.5 * factor
    return cfg.Mla(
        heads,
        size,
        fields.size("kv_lora_rank"),
        part,
        query_rank=fields.size("q_lora_rank") if fields.has("q_lora_rank") else None,
        positions=positions,
        scale=scale,
        latent_epsilon=_LATENT_EPSILON,
        output_gate=KIMI in family.traits and fields.flag("mla_use_output_gate"),
    )


def _only_as(fields: Fields, name: str, legal: int, other: str) -> None:
    """Raise UsageError unless a field is null or equals `legal`, the value of the field `other`."""
    if fields.has(name) and fields.size(name) != legal:
        raise fields.wrong(name, fields.size(name), f"{other}={legal}")


def _delta_attention(fields: Fields) -> cfg.Kda:
    inside = fields.group(_LINEAR_CONFIG)
    inside.known([*_OF_LINEAR_CONFIG, *kimi_k3.LINEAR_FIELDS])
    names = {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    given = (inside.size(n, fields.size(outside)) for n, outside in names.items())
    heads, size, taps = given
    return cfg.Kda(heads, size, conv_size=taps, **kimi_k3.read_linear(inside))


def _full_layers(fields: Fields, layers: int) -> list[bool]:
    """Return, for each layer, whether it has latent attention. Other layers have linear attention.

    `linear_attn_config` numbers the layers from 1, and `layer_types` lists every layer. If both
    are missing, every fourth layer from the fifth on has latent attention, as in the transformers
    library.

    Raises:
      UsageError: the two fields are incomplete or contradict each other.
    """
    inside = fields.group(_LINEAR_CONFIG)
    listed = fields.texts("layer_types", layers, FULL, LINEAR)
    if not (inside.has("kda_layers") or inside.has("full_attn_layers")):
        if listed is None:
            return [layer > 0 and layer % 4 == 0 for layer in range(layers)]
        return [name == FULL for name in listed]
    full, linear = (inside.layers(n, layers, 1) for n in ("full_attn_layers", "kda_layers"))
    if sorted(full + linear) != list(range(1, layers + 1)):
        legal = f"the layers from 1 to {layers} that are not in kda_layers={linear}"
        raise inside.wrong("full_attn_layers", full, legal)
    found = [layer in full for layer in range(1, layers + 1)]
    if listed is not None and found != [name == FULL for name in listed]:
        raise fields.wrong("layer_types", listed, f"null, or the layers as in {_LINEAR_CONFIG}")
    return found


def _sparse_layers(fields: Fields, layers: int, is_kimi: bool) -> list[bool]:
    """Return, for each layer, whether it has experts."""
    listed = fields.texts("mlp_layer_types", layers, _DENSE, _SPARSE) if is_kimi else None
    if listed is not None:
        return [name == _SPARSE for name in listed]
    first, step = fields.count("first_k_dense_replace"), fields.size("moe_layer_freq")
    return [layer >= first and layer % step == 0 for layer in range(layers)]


def _experts(fields: Fields, names: Names, further: Mapping[str, Any]) -> cfg.Experts:
    count, top_k = fields.size(names.count), fields.size(names.top_k)
    groups, top_groups = fields.size(names.groups, 1), fields.size("topk_group", 1)
    if not fields.flag("use_grouped_topk", True):
        groups = top_groups = 1
    if top_k > count:
        raise fields.wrong(names.top_k, top_k, f"at most {names.count}={count}")
    if count % groups or (groups > 1 and count // groups < 2):
        legal = f"a number of groups of at least 2 of the {names.count}={count}"
        raise fields.wrong(names.groups, groups, legal)
    if not -(-top_k * groups // count) <= top_groups <= groups:
        legal = f"at most {names.groups}={groups}, and enough for {names.top_k}={top_k}"
        raise fields.wrong("topk_group", top_groups, legal)
    return cfg.Experts(
        count,
        top_k,
        fields.size("moe_intermediate_size"),
        shared=fields.size(names.shared) if fields.has(names.shared) else 0,
        scale=fields.positive("routed_scaling_factor"),
        normalized=fields.flag(names.normalized),
        balance=cfg.SignRule(_RATE),
        groups=groups,
        top_groups=top_groups,
        **further,
    )


# Writing a config.json -----------------------------------------------------------------------


def config_values(model: cfg.ModelConfig, family: Family, max_length: int) -> dict[str, Any]:
    """Return the fields of config.json that describe a model.

    The caller must read the fields back and compare the result with the model. Fields for features
    that the model lacks, such as experts, get placeholder values.

    Raises:
      UsageError: the model has attention that is neither latent nor Kimi Delta Attention.
    """
    is_kimi = KIMI in family.traits
    cores = list(model.sublayers)
    mixing, second = cores[::2], cores[1::2]
    legal = [cfg.Mla.kind] + is_kimi * [cfg.Kda.kind]
    _check_kinds(mixing, legal)
    experts = _first(model, cfg.Experts.kind, cfg.Experts(1, 1, 1))
    dense = _first(model, cfg.FeedForward.kind, cfg.FeedForward(1))
    latent = _first(model, cfg.Mla.kind, cfg.Mla(1, 1, 1, 2))
    values = {
        "hidden_size": model.store.dim,
        "intermediate_size": dense.hidden_dim,
        "num_hidden_layers": len(mixing),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        family.length: max_length,
        "vocab_size": model.vocab_size,
        "attention_bias": False,
        "num_attention_heads": latent.num_heads,
        "num_key_value_heads": latent.num_heads,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.head_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.head_dim,
        "num_nextn_predict_layers": 0,
    }
    values |= _expert_values(experts, _KIMI_NAMES if is_kimi else _DEEPSEEK_NAMES)
    values |= _sparse_values([core.kind == cfg.Experts.kind for core in second], is_kimi)
    if is_kimi:
        net = _first(model, cfg.Kda.kind, cfg.Kda(1, 1))
        values |= _linear_values(net, [core.kind == cfg.Kda.kind for core in mixing])
        return values | kimi_k3.config_values(model, latent, experts, dense)
    return values | _rope_values(family, latent)


def _check_kinds(cores: Sequence[cfg.Core], legal: Collection[str]) -> None:
    other = next((core.kind for core in cores if core.kind not in legal), None)
    if other is not None:
        raise UsageError(
            f"a model with {legal[0]} and {other} cannot be written in the hub's format; legal: "
            f"{' and '.join(legal)}, or this package's own kind, rmt_tpu (recipes.export "
            "--kind=rmt_tpu)"
        )


def _first(model: cfg.ModelConfig, kind: str, default: cfg.Core) -> Any:
    return next(iter(model.cores_of_kind(kind)), default)


def _expert_values(experts: cfg.Experts, names: Names) -> Mapping[str, Any]:
    return {
        names.count: experts.num_experts,
        names.top_k: experts.top_k,
        names.shared: experts.shared or None,
        names.normalized: experts.normalized,
        names.groups: experts.groups,
        names.scores: "sigmoid",
        "topk_group": experts.top_groups,
        "moe_intermediate_size": experts.hidden_dim,
        "routed_scaling_factor": experts.scale,
    }


def _sparse_values(sparse: list[bool], is_kimi: bool) -> Mapping[str, Any]:
    """Return the fields of config.json that list the layers with experts."""
    first, layers = sparse.index(True) if any(sparse) else len(sparse), range(len(sparse))
    of_step = lambda step: [layer >= first and layer % step == 0 for layer in layers]
    step = next((n for n in range(1, len(sparse) + 1) if of_step(n) == sparse), 1)
    values = {"first_k_dense_replace": first, "moe_layer_freq": step}
    # The transformers library does not use `moe_layer_freq`.
    if is_kimi and not all(sparse[first:]):
        values["mlp_layer_types"] = [_SPARSE if layer else _DENSE for layer in sparse]
    return values


def _linear_values(net: cfg.Kda, linear: list[bool]) -> Mapping[str, Any]:
    numbered = list(enumerate(linear, 1))
    return {
        "mla_use_nope": True,
        _LINEAR_CONFIG: {
            "num_heads": net.num_heads,
            "head_dim": net.head_dim,
            "short_conv_kernel_size": net.conv_size,
            "kda_layers": [number for number, is_linear in numbered if is_linear],
            "full_attn_layers": [number for number, is_linear in numbered if not is_linear],
            **kimi_k3.linear_values(net),
        },
        "use_grouped_topk": True,
    }


def _rope_values(family: Family, latent: cfg.Mla) -> Mapping[str, Any]:
    """Return the fields for RoPE, including YaRN's factor for the attention logits."""
    rope = latent.positions if isinstance(latent.positions, cfg.Rope) else cfg.Rope()
    values = rope_values(family, Ropes(rope, rope)) | {
        "rope_interleave": True,
        "topk_method": "noaux_tc",
    }
    if latent.scale is not None and rope.scaling is not None:
        factor = latent.scale * latent.query_dim**0.5
        values["rope_scaling"] |= logit_factor_values(rope, factor)
    return values
