"""Kimi K3's text model in NumPy and float64, by its equations and the names of its tensors."""

import numpy as np

from tests.rmt_tpu.hub import oracle, oracle_latent
from tests.rmt_tpu.hub.oracle_latent import sigmoid

PREFIX = "language_model."
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def number(code):
    """The E2M1 numbers, by their four bits."""
    return E2M1[code % 8] * (-1 if code >= 8 else 1)


def unpacked(packed, scales):
    """A matrix of MXFP4, a number at a time."""
    rows, columns = len(packed), 2 * packed.shape[1]
    found = np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            byte = int(packed[row, column // 2])
            code = byte // 16 if column % 2 else byte % 16
            found[row, column] = number(code) * 2.0 ** (int(scales[row, column // 32]) - 127)
    return found


def drawn(config, seed=0):
    """Random tensors, with routed experts packed, a padded A_log, and some of images."""
    c = config["text_config"]
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes(c).items():
        if ".experts." in name:
            rows, columns = shape
            packed = rng.integers(0, 256, (rows, columns // 2), np.uint8)
            found[f"{PREFIX}{name}_packed"] = packed
            found[f"{PREFIX}{name}_scale"] = rng.integers(122, 126, (rows, columns // 32), np.uint8)
            continue
        x = rng.normal(size=shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)
        found[PREFIX + name] = np.float32(1 + x if name.endswith("norm.weight") else x)
    return found | {
        "vision_tower.patch_embed.proj.weight": np.zeros((2, 3), np.float32),
        "mm_projector.linear_1.weight": np.zeros((2, 3), np.float32),
    }


def shapes(c):
    """The shapes of the tensors, by their names in a kimi_linear."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    found = oracle_latent.shapes(oracle.filled(c | {"model_type": "kimi_linear"}))
    found = {name: shape for name, shape in found.items() if "experts.e" not in name}
    linear, latent = c["linear_attn_config"], c["routed_expert_hidden_size"]
    inner, hidden = linear["num_heads"] * linear["head_dim"], c["moe_intermediate_size"]
    for layer in range(c["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        if layer + 1 in linear["kda_layers"]:
            for part in "ab":
                del found[f"{name}self_attn.g_{part}_proj.weight"]
            found[f"{name}self_attn.g_proj.weight"] = (inner, width)
            found[f"{name}self_attn.A_log"] = (4 * linear["num_heads"],)
        else:
            found[f"{name}self_attn.g_proj.weight"] = (heads * c["v_head_dim"], width)
        for sublayer in ("self_attention", "mlp"):
            found[f"{name}{sublayer}_res_proj.weight"] = (1, width)
            found[f"{name}{sublayer}_res_norm.weight"] = (width,)
        if layer >= c["first_k_dense_replace"]:
            moe = f"{name}block_sparse_moe."
            found[f"{moe}routed_expert_down_proj.weight"] = (latent, width)
            found[f"{moe}routed_expert_up_proj.weight"] = (width, latent)
            found[f"{moe}routed_expert_norm.weight"] = (latent,)
            for e in range(c["num_experts"]):
                for matrix in ("w1", "w3"):
                    found[f"{moe}experts.{e}.{matrix}.weight"] = (hidden, latent)
                found[f"{moe}experts.{e}.w2.weight"] = (latent, hidden)
    found["model.output_attn_res_proj.weight"] = (1, width)
    found["model.output_attn_res_norm.weight"] = (width,)
    return found


def logits(tensors, c, tokens, prefix=PREFIX):
    """The logits of a row of tokens; `c` are the fields of the text model."""
    t = {}
    for name, x in tensors.items():
        own = name.removeprefix(prefix)
        if own.endswith("_packed"):
            scales = tensors[name.replace("_packed", "_scale")]
            t[own.removesuffix("_packed")] = unpacked(x, scales)
        elif not own.endswith("_scale"):
            t[own] = np.float64(x)
    c = oracle.filled(c | {"model_type": "kimi_linear"})
    norm = lambda x, gain: oracle.norm(x, gain, c)
    # The sums of the outputs of complete blocks, after the embedding, and that of the current one.
    blocks, running = [], t["model.embed_tokens.weight"][tokens]

    def over_depth(name, sources):
        keys = np.array([norm(v, t[f"{name}_norm.weight"]) for v in sources])
        scores = np.exp(keys @ t[f"{name}_proj.weight"][0])
        return np.einsum("sn,snd->nd", scores / scores.sum(0), np.array(sources))

    for layer in range(c["num_hidden_layers"]):
        begin = f"model.layers.{layer}."
        own = {n.removeprefix(begin): x for n, x in t.items() if n.startswith(begin)}
        inner = {n.removeprefix("self_attn."): x for n, x in own.items() if n.startswith("self_")}
        h = running
        if blocks:
            h = over_depth(f"{begin}self_attention_res", [*blocks, running])
        if layer % c["attn_res_block_size"] == 0:
            blocks, running = [*blocks, running], 0
        x = norm(h, own["input_layernorm.weight"])
        linear = layer + 1 in c["linear_attn_config"]["kda_layers"]
        mixed = (delta_attention if linear else latent_attention)(x, inner, c)
        running = running + mixed @ inner["o_proj.weight"].T
        h = over_depth(f"{begin}mlp_res", [*blocks, running])
        x = norm(h, own["post_attention_layernorm.weight"])
        if layer < c["first_k_dense_replace"]:
            running = running + gated(x, own, "mlp.{}_proj.weight", ("gate", "up", "down"), c)
        else:
            running = running + experts(x, own, c)
    h = over_depth("model.output_attn_res", [*blocks, running])
    return norm(h, t["model.norm.weight"]) @ t["lm_head.weight"].T


def gated(x, own, name, matrices, c):
    gate, up, down = (own[name.format(matrix)] for matrix in matrices)
    beta, linear = c["activation_situ_beta"], c["activation_situ_linear_beta"]
    gate, up = x @ gate.T, x @ up.T
    return (beta * np.tanh(gate / beta) * sigmoid(gate) * linear * np.tanh(up / linear)) @ down.T


def latent_attention(x, own, c):
    y = oracle_latent.latent_attention(x, own, c, oracle)
    return y * sigmoid(x @ own["g_proj.weight"].T)


def delta_attention(x, own, c):
    """A state at a time, with bounded decays and full gates."""
    inside = c["linear_attn_config"]
    heads, size, taps = (inside[n] for n in ("num_heads", "head_dim", "short_conv_kernel_size"))
    split = lambda y: y.reshape(len(x), heads, size)

    def convolved(letter):
        y = x @ own[f"{letter}_proj.weight"].T
        before = np.concatenate([np.zeros_like(y[: taps - 1]), y])
        weights = own[f"{letter}_conv1d.weight"][:, 0].T
        return split(oracle.silu(sum(w * before[n : n + len(x)] for n, w in enumerate(weights))))

    unit = lambda y: y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
    q, k, v = unit(convolved("q")), unit(convolved("k")), convolved("v")
    z = split(x @ own["f_a_proj.weight"].T @ own["f_b_proj.weight"].T + own["dt_bias"])
    rate = np.exp(own["A_log"].reshape(-1)[:heads, None])
    decay = np.exp(inside["gate_lower_bound"] * sigmoid(rate * z))
    beta, state, read = sigmoid(x @ own["b_proj.weight"].T), np.zeros((heads, size, size)), []
    for n in range(len(x)):
        state = decay[n][..., None] * state
        missing = v[n] - np.einsum("hk,hkv->hv", k[n], state)
        state = state + np.einsum("h,hk,hv->hkv", beta[n], k[n], missing)
        read.append(np.einsum("hk,hkv->hv", q[n], state) / np.sqrt(size))
    gates = sigmoid(split(x @ own["g_proj.weight"].T))
    return (oracle.norm(np.array(read), own["o_norm.weight"], c) * gates).reshape(len(x), -1)


def experts(x, own, c):
    name = "block_sparse_moe."
    scores = sigmoid(x @ own[f"{name}gate.weight"].T)
    read = x @ own[f"{name}routed_expert_down_proj.weight"].T
    mixed = np.zeros_like(read)
    for place, score in enumerate(scores):
        biased = score + own[f"{name}gate.e_score_correction_bias"]
        chosen = np.argsort(-biased)[: c["num_experts_per_token"]]
        for e in chosen:
            y = gated(read[place], own, f"{name}experts.{e}.{{}}.weight", ("w1", "w3", "w2"), c)
            mixed[place] += c["routed_scaling_factor"] * score[e] / score[chosen].sum() * y
    mixed = oracle.norm(mixed, own[f"{name}routed_expert_norm.weight"], c)
    shared = gated(x, own, f"{name}shared_experts.{{}}_proj.weight", ("gate", "up", "down"), c)
    return mixed @ own[f"{name}routed_expert_up_proj.weight"].T + shared
