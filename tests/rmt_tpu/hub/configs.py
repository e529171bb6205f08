"""Config.json of random tiny models of each kind of the hub."""

from tests.rmt_tpu.hub import configs_later

# None of these is as its kind has it where the key is left out.
COMMON = {
    "hidden_size": 16,
    "intermediate_size": 14,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "vocab_size": 257,
}
GPT2 = {
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 14,
    "n_positions": 64,
    "activation_function": "gelu",
    "layer_norm_epsilon": 1e-3,
    "scale_attn_by_inverse_layer_idx": True,
    "tie_word_embeddings": False,
    "vocab_size": 257,
}
LAYER_TYPES = [f"{name}_attention" for name in ("full", "sliding", "full", "sliding", "sliding")]
WINDOWS = {"sliding_window": 7, "use_sliding_window": True}
CONFIGS = {
    "gpt2": GPT2,
    "gemma3_text": {key: x for key, x in COMMON.items() if key != "hidden_act"}
    | {
        "final_logit_softcapping": 3.0,
        "hidden_activation": "silu",
        "hidden_size": 24,  # whose square root is no whole number
        "query_pre_attn_scalar": 11,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "sliding_window": 7,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": False,
    },
    "mistral": COMMON | {"num_attention_heads": 8, "sliding_window": 7},
    "ministral": COMMON
    | {"num_attention_heads": 8, "sliding_window": 7, "layer_types": LAYER_TYPES},
    "olmo2": COMMON | {"tie_word_embeddings": True},
    "olmo3": COMMON
    | {
        "tie_word_embeddings": True,
        "sliding_window": 7,
        "layer_types": LAYER_TYPES,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "attention_factor": 1.3,
        },
    },
    "qwen2": COMMON
    | {
        "hidden_size": 64,
        "num_attention_heads": 32,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
        **WINDOWS,
    },
    "qwen3": COMMON
    | {
        "num_attention_heads": 32,
        "max_window_layers": 3,
        "layer_types": LAYER_TYPES,
        **WINDOWS,
    },
    "qwen3_attnres": COMMON
    | {
        "attnres_mode": "block",
        "attnres_gate_type": "bias",
        "attnres_num_blocks": 2,
        "attnres_recency_bias_init": -0.5,
        "max_window_layers": 3,
        "num_attention_heads": 32,
        "layer_types": LAYER_TYPES,
        **WINDOWS,
    },
    "qwen3_moe": COMMON
    | {
        "hidden_act": "silu",
        "num_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.5,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
        **WINDOWS,
    },
    "qwen3_next": {key: x for key, x in COMMON.items() if key != "hidden_act"}
    | {
        "decoder_sparse_step": 2,
        "full_attention_interval": 2,
        "head_dim": 16,
        "layer_types": [
            f"{name}_attention" for name in ("linear", "linear", "full", "linear", "full")
        ],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 6,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 6,
        "mlp_only_layers": [3],
        "moe_intermediate_size": 8,
        "norm_topk_prob": False,
        "num_experts": 10,
        "num_experts_per_tok": 3,
        "partial_rotary_factor": 0.5,
        "router_aux_loss_coef": 0.5,
        "shared_expert_intermediate_size": 16,
        "tie_word_embeddings": True,
    },
    "kimi_linear": {key: x for key, x in COMMON.items() if key != "max_position_embeddings"}
    | {
        "first_k_dense_replace": 2,
        "hidden_act": "silu",
        "kv_lora_rank": 6,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 6,
            "short_conv_kernel_size": 3,
            "kda_layers": [1, 3, 4],
            "full_attn_layers": [2, 5],
        },
        "model_max_length": 64,
        "moe_intermediate_size": 8,
        "moe_layer_freq": 2,
        "moe_renormalize": False,
        "num_expert_group": 4,
        "num_experts": 16,
        "num_experts_per_token": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 2,
        "num_shared_experts": 2,
        "q_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "routed_scaling_factor": 1.7,
        "tie_word_embeddings": True,
        "topk_group": 2,
        "v_head_dim": 6,
    },
    "deepseek_v3": COMMON
    | {
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "kv_lora_rank": 6,
        "moe_intermediate_size": 8,
        "moe_layer_freq": 2,
        "n_group": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 2,
        "q_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "rope_interleave": False,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
        "routed_scaling_factor": 1.7,
        "topk_group": 2,
        "tie_word_embeddings": True,
        "v_head_dim": 6,
    },
    "phi3": COMMON
    | {
        "partial_rotary_factor": 0.7,
        "head_dim": 12,
        "tie_word_embeddings": True,
        "sliding_window": 7,
    },
    "smollm3": COMMON
    | {"no_rope_layers": [1, 0, 1, 1, 0], "tie_word_embeddings": False, **WINDOWS},
}
CONFIGS |= configs_later.CONFIGS
CONFIGS = {kind: {"model_type": kind, **values} for kind, values in CONFIGS.items()}
LATENT = "deepseek_v3", "kimi_linear"
# Keys that do not fit what others are by default: see REFUSED.
TOGETHER = [
    *((kind, f"{part}_head_dim") for kind in LATENT for part in ("qk_nope", "v")),
    ("kimi_linear", "num_expert_group"),
    ("qwen3", "use_sliding_window"),
    ("qwen3_attnres", "use_sliding_window"),
    ("qwen3_next", "linear_key_head_dim"),
    ("qwen3_next", "linear_num_key_heads"),
    ("qwen3_next", "linear_value_head_dim"),
    ("qwen3_next", "moe_intermediate_size"),
    *configs_later.TOGETHER,
]
