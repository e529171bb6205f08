"""Config.json of later kinds, with values that are not their kinds' defaults."""

_QWEN3_5 = {
    "full_attention_interval": 2,
    "head_dim": 16,
    "hidden_size": 16,
    "layer_types": [f"{name}_attention" for name in ("linear", "linear", "full", "linear", "full")],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 6,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
    "vocab_size": 257,
}
CONFIGS = {
    "gemma2": {
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 1.5,
        "head_dim": 6,
        "hidden_activation": "silu",
        "hidden_size": 24,  # whose square root is no whole number
        "intermediate_size": 14,
        "layer_types": [
            f"{name}_attention" for name in ("full", "sliding", "full", "sliding", "sliding")
        ],
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 11,
        "rms_norm_eps": 1e-3,
        "rope_theta": 500.0,
        "sliding_window": 7,
        "tie_word_embeddings": False,
        "vocab_size": 257,
    },
    "qwen3_5_text": _QWEN3_5 | {"intermediate_size": 14, "tie_word_embeddings": False},
    "qwen3_5_moe_text": _QWEN3_5
    | {
        "moe_intermediate_size": 8,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "router_aux_loss_coef": 0.5,
        "shared_expert_intermediate_size": 16,
    },
}
# Keys that do not fit what others are by default.
TOGETHER = [
    (kind, f"linear_{name}")
    for kind in ("qwen3_5_text", "qwen3_5_moe_text")
    for name in ("key_head_dim", "num_key_heads", "value_head_dim")
] + [("qwen3_5_moe_text", "moe_intermediate_size")]
