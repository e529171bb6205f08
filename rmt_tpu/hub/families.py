"""The table of model types (`model_type` in config.json) that this package reads and writes.

This module does not import JAX.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from rmt_tpu.hub import attnres

# The default rule for which layers have a sliding window, if config.json sets a window:
#   "all", "listed": all layers;
#   "late": layers from number `max_window_layers` on;
#   "unrotated": layers without RoPE;
#   "most": all layers except every n-th, where n is `sliding_window_pattern` or 4;
#   "other": every second layer, starting with the first.
# The field `layer_types` overrides every rule except "all".
Windows = Literal["all", "listed", "late", "unrotated", "most", "other"]


class Family(NamedTuple):
    """One model type, described by its differences from Llama.

    Attributes:
      architecture: the name of the type's class in the transformers library.
      absent: the transformers library's default values for keys that a config.json lacks. A key
        whose value is null does not get its default.
      traits: names of the features that Llama lacks (see the constants below).
      end: the token that ends a text by default, or None.
      length: the name of the field with the maximum number of tokens.
      base: the name prefix of all tensors except W_U. Files of a model without an unembedding lack
        this prefix.
      windows: which layers have a sliding window; None if the type has no windows.
      activation: the name of the field with the activation of feed-forward layers.
      rotated: the fraction of each head that RoPE rotates by default; None means that RoPE always
        rotates whole heads.
      inside: for text-and-image models, the name of the object in config.json that has the text
        model's fields. Only the text model is opened.
      other_bases: alternative prefixes that files may use in place of `base`.
      ignored: name prefixes of tensors that are not part of the text model.
      ropes: whether layers with a window have their own RoPE, in `rope_parameters`.
      renamed: alternative field names in config.json, each with the name that this package uses.
    """

    architecture: str
    absent: Mapping[str, Any]
    traits: frozenset[str] = frozenset()
    end: int | None = None
    length: str = "max_position_embeddings"
    base: str = "model."
    windows: Windows | None = None
    ropes: bool = False
    activation: str = "hidden_act"
    rotated: float | None = None
    inside: str | None = None
    other_bases: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = {}


# These constants are traits: features of a model type that Llama lacks. BIAS: queries, keys and
# values have biases. QUERY_KEY_NORM: queries and keys are normalized. UNROTATED_LAYERS: some layers
# have no RoPE. PARTIAL_ROPE: RoPE may rotate only a part of each head, and the projections of the
# same input are stored as one tensor.
BIAS, QUERY_KEY_NORM, UNROTATED_LAYERS = "bias", "query_key_norm", "layers without rope"
PARTIAL_ROPE = "rope of a part"
# EXPERTS: some layers are mixtures of experts.
EXPERTS = "experts"
# NORMS_AFTER: sublayers normalize their output, not their input. Queries and keys are normalized
# over all heads together.
NORMS_AFTER = "norms of outputs"
# GEMMA: sublayers normalize both their input and their output, and files store the norm gains minus
# one. Embeddings are multiplied by the square root of the width. A field of config.json scales
# attention logits, and logits may be capped.
GEMMA = "norms of inputs and outputs"
# NEXT: layers have Gated DeltaNet or gated attention, the shared expert has a gate, and tensors
# have special names.
NEXT = "gated delta net"
# APART: each projection of Gated DeltaNet is a separate tensor. Either all of the layers or none of
# them have experts.
APART = "projections apart"
# ATTNRES: the model has attention over depth (see `rmt_tpu.hub.attnres`).
ATTNRES = "attention over depth"
# LATENT: layers have latent attention, a bias is added to each expert's score, and tensors have
# special names.
LATENT = "latent attention"
# KIMI, in addition to LATENT: some layers have Kimi Delta Attention, and latent attention uses no
# position encoding.
KIMI = "kimi delta attention"
# PACKED: the matrices of routed experts are packed as MXFP4 (see `rmt_tpu.hub.packed`).
PACKED = "packed experts"
# INTERLEAVED: the files store weights for a RoPE that rotates pairs of adjacent numbers.
INTERLEAVED = "rope of adjacent numbers"
# GPT2: all projections have biases, norms are layer norms, positions are learned, and fields and
# tensors have special names.
GPT2 = "layernorm"
# OWN: this is the model type `rmt_tpu`, which can express any model of this package.
OWN = "own"

# The name prefix of the layers for multi-token prediction in Qwen's files. The transformers library
# ignores these tensors too.
MTP = ("mtp.",)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", {"max_position_embeddings": 2048}, end=2),
    "mistral": Family(
        "MistralForCausalLM",
        {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        end=2,
        windows="all",
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        end=2,
        windows="listed",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {
            "max_position_embeddings": 32_768,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        frozenset({BIAS}),
        windows="late",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        frozenset({QUERY_KEY_NORM}),
        windows="late",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "max_position_embeddings": 32_768,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        frozenset({UNROTATED_LAYERS}),
        end=128_001,
        windows="unrotated",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        frozenset({PARTIAL_ROPE}),
        end=32_000,
        windows="all",
        rotated=1.0,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        frozenset({NORMS_AFTER, QUERY_KEY_NORM}),
        end=50_279,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
        },
        frozenset({NORMS_AFTER, QUERY_KEY_NORM}),
        end=50_279,
        windows="most",
        ropes=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            "decoder_sparse_step": 1,
            "max_position_embeddings": 32_768,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "router_aux_loss_coef": 1e-3,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        frozenset({QUERY_KEY_NORM, EXPERTS}),
        windows="all",
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {
            "decoder_sparse_step": 1,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 32_768,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_key_value_heads": 2,
            "router_aux_loss_coef": 1e-3,
            "shared_expert_intermediate_size": 512,
        },
        frozenset({NEXT}),
        rotated=0.25,
        ignored=MTP,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        frozenset({GEMMA}),
        end=1,
        windows="other",
        activation="hidden_activation",
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        {
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "linear_conv_kernel_dim": 4,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "model_max_length": 1_048_576,
            "moe_intermediate_size": 1024,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "num_expert_group": 1,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 1,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
            "v_head_dim": 128,
        },
        frozenset({LATENT, KIMI}),
        end=163_586,
        length="model_max_length",
        renamed={
            "max_position_embeddings": "model_max_length",
            "n_group": "num_expert_group",
            "n_shared_experts": "num_shared_experts",
            "norm_topk_prob": "moe_renormalize",
            "num_experts_per_tok": "num_experts_per_token",
            "num_local_experts": "num_experts",
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-6,
            "rope_interleave": True,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "v_head_dim": 128,
        },
        frozenset({LATENT, INTERLEAVED}),
        end=1,
        renamed={
            "num_local_experts": "n_routed_experts",
            "num_mtp_layers": "num_nextn_predict_layers",
        },
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        frozenset({GEMMA, QUERY_KEY_NORM}),
        end=1,
        windows="most",
        ropes=True,
        activation="hidden_activation",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"activation_function": "gelu_new", "n_positions": 1024, "tie_word_embeddings": True},
        frozenset({GPT2}),
        end=50_256,
        length="n_positions",
        base="transformer.",
    ),
    "rmt_tpu": Family("RmtTpuForCausalLM", {}, frozenset({OWN}), base=""),
}
# The type "qwen3_attnres" is Qwen3 with attention over depth.
FAMILIES[attnres.KIND] = FAMILIES["qwen3"]._replace(
    architecture="Qwen3AttnResForCausalLM",
    absent={**FAMILIES["qwen3"].absent, **attnres.ABSENT},
    traits=FAMILIES["qwen3"].traits | {ATTNRES},
)
_LINEAR = {
    name: value
    for name, value in FAMILIES["qwen3_next"].absent.items()
    if name.startswith("linear_")
}
FAMILIES["qwen3_5_text"] = Family(
    "Qwen3_5ForCausalLM",
    {
        **_LINEAR,
        "head_dim": 256,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "vocab_size": 248_320,
    },
    frozenset({NEXT, APART}),
    rotated=0.25,
    other_bases=("model.language_model.",),
    ignored=(*MTP, "model.visual."),  # The latter tensors belong to the image model.
)
FAMILIES["qwen3_5_moe_text"] = FAMILIES["qwen3_5_text"]._replace(
    architecture="Qwen3_5MoeForCausalLM",
    absent={
        **FAMILIES["qwen3_5_text"].absent,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "router_aux_loss_coef": 1e-3,
        "shared_expert_intermediate_size": 512,
    },
    traits=frozenset({NEXT, APART, EXPERTS}),
)
for _kind in ("qwen3_5", "qwen3_5_moe"):
    FAMILIES[_kind] = FAMILIES[f"{_kind}_text"]._replace(inside="text_config")
# The type `gemma3` is for text-and-image models whose text model is a `gemma3_text`.
FAMILIES["gemma3"] = FAMILIES["gemma3_text"]._replace(
    absent={
        **FAMILIES["gemma3_text"].absent,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "vocab_size": 262_208,
    },
    inside="text_config",
    other_bases=("language_model.model.", "model.language_model."),
    ignored=tuple(
        f"{base}{part}."
        for base in ("", "model.")
        for part in ("vision_tower", "multi_modal_projector")
    ),
)
# The type `kimi_k3` is for a text-and-image model. Its text model is a `kimi_linear` with
# additional fields.
FAMILIES["kimi_k3"] = FAMILIES["kimi_linear"]._replace(
    base="",
    inside="text_config",
    other_bases=("language_model.",),
    ignored=("vision_tower.", "mm_projector."),
)
