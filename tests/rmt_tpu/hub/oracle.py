"""Models of the hub in NumPy and float64, by their published equations and the names of tensors.

It knows nothing of this package: a model is its config.json and its tensors. What a config.json
does not say is as transformers has it for the kind.
"""

import math
import sys

import numpy as np

from tests.rmt_tpu.hub import oracle_latent, oracle_next

COMMON = {
    "attention_bias": False,
    "head_dim": None,
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
# Of each kind, every key that a config.json may lack here, and what it then has.
DEFAULTS = {
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_inner": None,
        "n_positions": 1024,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    "llama": {"max_position_embeddings": 2048},
    "qwen3_next": oracle_next.DEFAULTS,
    **oracle_next.DEFAULTS_3_5,
    **oracle_latent.DEFAULTS,
    "mistral": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "ministral": {
        "layer_types": None,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "layer_types": None,
        "max_position_embeddings": 32_768,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    "qwen3": {
        "head_dim": 128,
        "layer_types": None,
        "max_position_embeddings": 32_768,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    "olmo3": {
        "layer_types": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
    },
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": None,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": None,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "qwen3_moe": {
        "decoder_sparse_step": 1,
        "max_position_embeddings": 32_768,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    "smollm3": {
        "layer_types": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_position_embeddings": 32_768,
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
}


DEFAULTS["qwen3_attnres"] = DEFAULTS["qwen3"] | {
    "attnres_gate_type": "bias",
    "attnres_mode": "block",
    "attnres_num_blocks": 8,
    "attnres_recency_bias_init": 3.0,
}
GEMMAS = ("gemma2", "gemma3_text")
# Kinds that norm each query and key.
NORMED = ("qwen3", "qwen3_attnres", "qwen3_moe", "gemma3_text")
# Kinds that norm what sublayers write, and not what they read.
AFTER = ("olmo2", "olmo3")


def filled(config):
    """A config.json with what it lacks."""
    if config["model_type"] == "gpt2":
        c = DEFAULTS["gpt2"] | config
        return c | {"n_inner": c["n_inner"] or 4 * c["n_embd"]}
    c = COMMON | DEFAULTS[config["model_type"]] | config
    c["num_key_value_heads"] = c["num_key_value_heads"] or c["num_attention_heads"]
    c["head_dim"] = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    return c


def shapes(config):
    """The shape of each tensor, by name."""
    c = filled(config)
    if c["model_type"] == "gpt2":
        return gpt2_shapes(c)
    if c["model_type"] in oracle_next.KINDS:
        return oracle_next.shapes(c)
    if c["model_type"] in oracle_latent.DEFAULTS:
        return oracle_latent.shapes(c)
    width, hidden, size, kind = (
        c[name] for name in ("hidden_size", "intermediate_size", "head_dim", "model_type")
    )
    heads = {"q": c["num_attention_heads"], **dict.fromkeys("kv", c["num_key_value_heads"])}
    layer = {"self_attn.o_proj.weight": (width, heads["q"] * size)}
    for letter, count in heads.items():
        layer[f"self_attn.{letter}_proj.weight"] = (count * size, width)
        if kind == "qwen2":
            layer[f"self_attn.{letter}_proj.bias"] = (count * size,)
        if kind in NORMED and letter != "v":
            layer[f"self_attn.{letter}_norm.weight"] = (size,)
        if kind in AFTER and letter != "v":
            layer[f"self_attn.{letter}_norm.weight"] = (count * size,)
    layer |= {f"mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
    layer["mlp.down_proj.weight"] = (width, hidden)
    if kind == "phi3":
        fused = {"self_attn.qkv_proj.weight": "qkv", "mlp.gate_up_proj.weight": ("gate", "up")}
        for name, parts in fused.items():
            of_parts = [layer.pop(f"{name.split('.')[0]}.{part}_proj.weight") for part in parts]
            layer[name] = (sum(rows for rows, _ in of_parts), width)
    norms = ["post_attention", "post_feedforward" if kind in AFTER else "input"]
    if kind in GEMMAS:
        norms += ["pre_feedforward", "post_feedforward"]
    layer |= {f"{n}_layernorm.weight": (width,) for n in norms}
    if kind == "qwen3_attnres":
        for site in ("attn_res_", "mlp_res_"):
            layer |= {f"{site}proj.weight": (1, width), f"{site}norm.weight": (width,)}
            layer[f"{site}bias"] = ()
    found = {"model.embed_tokens.weight": (c["vocab_size"], width), "model.norm.weight": (width,)}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], width)
    for number in range(c["num_hidden_layers"]):
        own = expert_shapes(layer, c) if has_experts(c, number) else layer
        found |= {f"model.layers.{number}.{name}": shape for name, shape in own.items()}
    return found


def has_experts(c, number):
    if c["model_type"] != "qwen3_moe" or number in (c["mlp_only_layers"] or []):
        return False
    return (number + 1) % c["decoder_sparse_step"] == 0


def expert_shapes(layer, c):
    width, hidden = c["hidden_size"], c["moe_intermediate_size"]
    found = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
    found["mlp.gate.weight"] = (c["num_experts"], width)
    for e in range(c["num_experts"]):
        name = f"mlp.experts.{e}."
        found |= {f"{name}{matrix}_proj.weight": (hidden, width) for matrix in ("gate", "up")}
        found[f"{name}down_proj.weight"] = (width, hidden)
    return found


def gpt2_shapes(c):
    width, hidden = c["n_embd"], c["n_inner"]
    norms = {f"{name}.{end}": (width,) for name in ("ln_1", "ln_2") for end in ("weight", "bias")}
    layer = norms | {
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "mlp.c_fc.weight": (width, hidden),
        "mlp.c_fc.bias": (hidden,),
        "mlp.c_proj.weight": (hidden, width),
        "mlp.c_proj.bias": (width,),
    }
    found = {"wte.weight": (c["vocab_size"], width), "wpe.weight": (c["n_positions"], width)}
    found |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    for number in range(c["n_layer"]):
        found |= {f"h.{number}.{name}": shape for name, shape in layer.items()}
    found = {f"transformer.{name}": shape for name, shape in found.items()}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], width)
    return found


def drawn(config, seed=0):
    """Random tensors, none of which is as a start has it."""
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        fan_in = shape[-1] if shape else 1
        x = rng.normal(size=shape) * fan_in**-0.5
        is_gain = name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))
        less = config["model_type"] in (*GEMMAS, *oracle_next.KINDS)
        if is_gain and less and not name.endswith("linear_attn.norm.weight"):
            return np.array(
                np.round(1024 * x) / 1024, np.float32
            )  # one more has no rounding in float32
        return np.array(1 + x if is_gain else x, np.float32)

    return {name: draw(name, shape) for name, shape in shapes(config).items()}


def logits(tensors, config, tokens):
    """The logits of a row of tokens."""
    c, t = filled(config), {name: np.float64(x) for name, x in tensors.items()}
    if c["model_type"] == "gpt2":
        return gpt2_logits(t, c, tokens)
    if c["model_type"] in oracle_next.KINDS:
        return oracle_next.logits(t, c, tokens, sys.modules[__name__])
    if c["model_type"] in oracle_latent.DEFAULTS:
        return oracle_latent.logits(t, c, tokens, sys.modules[__name__])
    h = t["model.embed_tokens.weight"][tokens]
    sources = [h]
    if c["model_type"] in GEMMAS:
        h = h * np.sqrt(c["hidden_size"])
    for number in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        own = {n.removeprefix(prefix): x for n, x in t.items() if n.startswith(prefix)}
        if c["model_type"] == "phi3":
            own |= separate(own, c)
        attended = lambda x, own=own, number=number: (
            attention(x, own, c, number) @ own["self_attn.o_proj.weight"].T
        )
        post = own["post_attention_layernorm.weight"]
        if c["model_type"] == "qwen3_attnres":
            sources, h = attention_over_depth(sources, h, own, c, number, attended)
            continue
        if c["model_type"] in GEMMAS:
            of = lambda name, own=own: own[f"{name}_layernorm.weight"]
            h = h + norm(attended(norm(h, of("input"), c)), of("post_attention"), c)
            y = mlp(norm(h, of("pre_feedforward"), c), own, c)
            h = h + norm(y, of("post_feedforward"), c)
        elif c["model_type"] in AFTER:
            h = h + norm(attended(h), post, c)
            h = h + norm(mlp(h, own, c), own["post_feedforward_layernorm.weight"], c)
        else:
            h = h + attended(norm(h, own["input_layernorm.weight"], c))
            second = experts if has_experts(c, number) else mlp
            h = h + second(norm(h, post, c), own, c)
    unembedding = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
    found = norm(h, t["model.norm.weight"], c) @ t[f"{unembedding}.weight"].T
    return capped(found, c.get("final_logit_softcapping"))


def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def attention_over_depth(sources, h, own, c, number, attended):
    """A layer of open-attention-residuals: its sources and the residual, before and after.

    The residual h is a source of every site, and its logit has a bias. It joins the others at the
    end of a block of layers, or after every sublayer in the mode "full".
    """
    layers, blocks = c["num_hidden_layers"], c["attnres_num_blocks"]
    ends = (number + 1) % -(-layers // blocks) == 0
    every = c["attnres_mode"] == "full"

    def read(site):
        values = np.array([*sources, h])
        scores = norm(values, own[f"{site}_res_norm.weight"], c) @ own[f"{site}_res_proj.weight"][0]
        scores[-1] += own[f"{site}_res_bias"]
        return np.einsum("nt,ntd->td", softmax(scores.T).T, values)

    h = h + attended(norm(read("attn"), own["input_layernorm.weight"], c))
    sources = [*sources, h] if every else sources
    h = h + mlp(norm(read("mlp"), own["post_attention_layernorm.weight"], c), own, c)
    return [*sources, h] if every or ends else sources, h


def separate(own, c):
    """Phi-3's joined projections, one after the other."""
    size, heads, groups = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    ends = [heads * size, (heads + groups) * size]
    found = dict(zip("qkv", np.split(own["self_attn.qkv_proj.weight"], ends), strict=True))
    found = {f"self_attn.{letter}_proj.weight": x for letter, x in found.items()}
    gate, up = np.split(own["mlp.gate_up_proj.weight"], 2)
    return found | {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}


def norm(x, gain, c):
    if c["model_type"] in GEMMAS:
        gain = 1 + gain
    return gain * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + c["rms_norm_eps"])


def attention(x, own, c, layer):
    """The heads' outputs, side by side: causal, with grouped queries."""
    heads, size, places = c["num_attention_heads"], c["head_dim"], np.arange(len(x))
    qkv = {}
    for letter in "qkv":
        y = x @ own[f"self_attn.{letter}_proj.weight"].T
        y = y + own.get(f"self_attn.{letter}_proj.bias", 0)
        if c["model_type"] in AFTER and letter != "v":
            y = norm(y, own[f"self_attn.{letter}_norm.weight"], c)
        y = y.reshape(len(x), -1, size)
        if c["model_type"] in NORMED and letter != "v":
            y = norm(y, own[f"self_attn.{letter}_norm.weight"], c)
        if letter != "v" and rotates(c, layer):
            dims = int(size * c.get("partial_rotary_factor", 1))
            part = turned(y[..., :dims], places, *rope(c, layer, dims))
            y = np.concatenate([part, y[..., dims:]], -1)
        qkv[letter] = np.repeat(y, heads // y.shape[1], axis=1)
    divisor = np.sqrt(c.get("query_pre_attn_scalar", size) / size)
    cap = c.get("attn_logit_softcapping")
    return attended(*qkv.values(), divisor, window(c, layer), cap)


def attended(q, k, v, divisor=1, window=None, cap=None):
    places = np.arange(len(q))
    logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1]) / divisor
    logits = capped(logits, cap)
    before = places[:, None] - places
    seen = (before >= 0) & (before < (window or len(q)))
    share = softmax(np.where(seen, logits, -np.inf))
    return np.einsum("hqk,khd->qhd", share, v).reshape(len(q), -1)


def rotates(c, layer):
    """Whether a layer has RoPE."""
    if c["model_type"] != "smollm3":
        return True
    listed = c["no_rope_layers"]
    return (layer + 1) % c["no_rope_layer_interval"] != 0 if listed is None else listed[layer]


def window(c, layer):
    """The number of tokens that a token of a layer sees; None for all before it."""
    size, kind = c.get("sliding_window"), c["model_type"]
    if not c.get("use_sliding_window", True) or size is None:
        return None
    listed = c.get("layer_types")
    if listed is not None:
        return {"sliding_attention": size, "full_attention": None}[listed[layer]]
    slides = True
    if kind in ("qwen2", "qwen3", "qwen3_attnres"):
        slides = layer >= c["max_window_layers"]
    if kind == "smollm3":
        slides = not rotates(c, layer)
    if kind == "olmo3":
        slides = layer % 4 != 3
    if kind == "gemma2":
        slides = layer % 2 == 0
    if kind == "gemma3_text":
        slides = (layer + 1) % c["sliding_window_pattern"] != 0
    return size if slides else None


def rope(c, layer, dims):
    """The frequencies of RoPE in a layer, and the factor of what it turns.

    OLMo 3 and Gemma 3 scale them in layers without a window alone, if `rope_scaling` says so.
    """
    base = c["rope_theta"]
    scaling = c.get("rope_scaling") or {}
    if c["model_type"] in ("olmo3", "gemma3_text"):
        slides = window(c, layer) is not None
        base = c.get("rope_local_base_freq", base) if slides else base
        own = c.get("rope_parameters") or {}
        own = own.get("sliding_attention" if slides else "full_attention", {})
        base, scaling = own.get("rope_theta", base), own if slides else own | scaling
    plain = base ** (-np.arange(dims // 2) / (dims // 2))
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return plain / scaling["factor"], 1
    if kind == "yarn":
        return yarn(plain, base, scaling, c)
    return plain, 1


def yarn(plain, base, scaling, c):
    """Peng et al. (2023), section 3.2: a ramp from `beta_fast` turns to `beta_slow`."""
    length = scaling.get("original_max_position_embeddings", c["max_position_embeddings"])
    dims, factor = 2 * len(plain), scaling["factor"]
    number = lambda turns: dims * np.log(length / (2 * np.pi * turns)) / (2 * np.log(base))
    first = max(np.floor(number(scaling.get("beta_fast", 32))), 0)
    last = min(np.ceil(number(scaling.get("beta_slow", 1))), dims - 1)
    ramp = np.clip((np.arange(len(plain)) - first) / max(last - first, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, scaling.get(
        "attention_factor", 0.1 * np.log(factor) + 1
    )


def turned(x, places, frequencies, factor=1):
    """Number i of a head and number i + size / 2 are turned together."""
    half = x.shape[-1] // 2
    angles = places[:, None] * frequencies
    z = (x[..., :half] + 1j * x[..., half:]) * factor * np.exp(1j * angles)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def softmax(x):
    share = np.exp(x - x.max(-1, keepdims=True))
    return share / share.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


ACTIVATIONS = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh, "gelu_new": gelu_tanh, "gelu": gelu}


def gpt2_logits(t, c, tokens):
    """Radford et al. (2019): matrices are [in, out], and everything has a bias."""
    t = {name.removeprefix("transformer."): x for name, x in t.items()}
    affine = lambda x, name: x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + c["layer_norm_epsilon"])
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    h = t["wte.weight"][tokens] + t["wpe.weight"][: len(tokens)]
    for number in range(c["n_layer"]):
        own = f"h.{number}."
        qkv = np.split(affine(norm(h, f"{own}ln_1"), f"{own}attn.c_attn"), 3, axis=-1)
        divisor = number + 1 if c["scale_attn_by_inverse_layer_idx"] else 1
        y = attended(*(x.reshape(len(x), c["n_head"], -1) for x in qkv), divisor)
        h = h + affine(y, f"{own}attn.c_proj")
        hidden = affine(norm(h, f"{own}ln_2"), f"{own}mlp.c_fc")
        h = h + affine(ACTIVATIONS[c["activation_function"]](hidden), f"{own}mlp.c_proj")
    return norm(h, "ln_f") @ t.get("lm_head.weight", t["wte.weight"]).T


def mlp(x, own, c, name="mlp."):
    gate, up = (x @ own[f"{name}{matrix}_proj.weight"].T for matrix in ("gate", "up"))
    activation = ACTIVATIONS[c.get("hidden_activation", c["hidden_act"])]
    return (activation(gate) * up) @ own[f"{name}down_proj.weight"].T


def experts(x, own, c):
    """Each token's sum over the experts with the largest shares."""
    shares = softmax(x @ own["mlp.gate.weight"].T)
    y = np.zeros_like(x)
    for place, share in enumerate(shares):
        chosen = np.argsort(-share)[: c["num_experts_per_tok"]]
        total = share[chosen].sum() if c["norm_topk_prob"] else 1
        for e in chosen:
            y[place] += share[e] / total * mlp(x[place], own, c, f"mlp.experts.{e}.")
    return y
