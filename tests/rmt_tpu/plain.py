"""A decoder written plainly, unrolled, for any residual system that mixes what was written.

`mix(k, site, written)` is what site k reads, before its norm: `written` are the embedding and what
each of the k sublayers before it wrote, a vector or a matrix for each token. It is a list of three
if queries, keys and values are read from different ones.

In NumPy, of real numbers or complex ones: `derivative` is exact to rounding.
"""

import jax
import numpy as np

from rmt_tpu import config as cfg


def derivative(f, params, direction):
    """Of real f(params) along a tree of directions, by a complex step: no difference is taken."""
    step = 1e-30
    moved = jax.tree.map(lambda p, d: p + 1j * step * d, params, direction)
    return np.imag(f(moved)) / step


def plain_sum(k, site, written):
    """Return the standard residual, by equations 2 and 3, and 15 and 16."""
    return sum(written)


def site_norm(x, site, config):
    """As a site has it, which may have none, and a bias."""
    if "gain" not in site:
        return x
    return norm(x, site["gain"], config) + site.get("bias", 0)


def norm(x, gain, config):
    axes = tuple(range(2, x.ndim))
    if config.norm == "layernorm":
        x = x - x.mean(axes, keepdims=True)
    return gain * x / np.sqrt((x**2).mean(axes, keepdims=True) + config.norm_epsilon)


def soft_capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def attention(q, k, v, divisor=1, window=None, cap=None):
    """Equations 8 and 21, causal, over one document: [batch, seq, heads, head_dim]."""
    length = q.shape[1]
    logits = np.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(q.shape[-1]) / divisor
    logits = soft_capped(logits, cap)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    logits = np.where(seen, logits, -np.inf)
    return np.einsum("bhnm,bmhd->bnhd", softmax(logits, -1), v)


def softmax(logits, axis):
    weights = np.exp(logits - logits.real.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x):
    return np.where(x.real > 0, x, 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gated(core, gate, up):
    """The hidden neurons of a layer with a gate."""
    if core.activation != "situ":
        return ACTIVATIONS[core.activation](gate) * up
    if core.situ_linear_beta is not None:
        up = core.situ_linear_beta * np.tanh(up / core.situ_linear_beta)
    return core.situ_beta * np.tanh(gate / core.situ_beta) * sigmoid(gate) * up


ACTIVATIONS = {
    "gelu_tanh": gelu,
    "relu2": lambda x: relu(x) ** 2,
    "swiglu": silu,
    "geglu": gelu,
}


def rms_norm(x, gain, config, epsilon=None):
    epsilon = config.norm_epsilon if epsilon is None else epsilon
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def rotated(x, positions, dims=None):
    """Pairs of the first `dims` numbers of each head, turned by how far the token is."""
    if not isinstance(positions, cfg.Rope):
        return x
    dims = dims or x.shape[-1]
    angles = np.arange(x.shape[1])[:, None] * positions.base ** (-2 * np.arange(dims // 2) / dims)
    turn = np.exp(1j * angles)[:, None]  # as cos and sin: x may be complex itself
    a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
    turned = [a * turn.real - b * turn.imag, b * turn.real + a * turn.imag]
    return np.concatenate([*turned, x[..., dims:]], axis=-1)


def of_groups(x, core):
    """What queries, keys and values are read from, and gates if there are any."""
    return x if isinstance(x, list) else [x] * len(core.reads.heads)


class Vector:
    """Reads and writes of the Transformer: equations 7 and 9."""

    def __init__(self, config):
        pass

    def heads(self, x, site, core):
        split = lambda x: x.reshape(*x.shape[:2], -1, core.head_dim)
        weights = (*site["read"], *site.get("read_fewer", ()))
        return [split(x @ w) for x, w in zip(of_groups(x, core), weights, strict=True)]

    def write_heads(self, heads, site):
        return heads.reshape(*heads.shape[:2], -1) @ site["write"]

    def read(self, x, site):
        return x

    def whole(self, x, site, core):
        return x

    def write(self, y, site):
        return y


class Matrix:
    """Reads and writes of the RMT: equations 12, 13 and 18 to 27."""

    def __init__(self, config):
        self.R, self.V = config.data_shape

    def heads(self, x, site, core):
        ends = np.cumsum(core.reads.heads)[:-1]
        keys = np.split(site["read_keys"][: sum(core.reads.heads)], ends)
        read = zip(keys, of_groups(x, core), strict=True)
        return [np.einsum("hk,bnkv->bnhv", r, x) for r, x in read]

    def whole(self, x, site, core):
        return self.read(x, {"read_keys": site["read_keys"][sum(core.reads.heads) :]})

    def write_heads(self, heads, site):
        return np.einsum("hk,bnhv->bnkv", site["store_keys"], heads)

    def read(self, x, site):
        vectors = np.einsum("hk,bnkv->bnhv", site["read_keys"], x)
        return vectors.swapaxes(-1, -2).reshape(*x.shape[:2], -1)

    def write(self, y, site):
        separate = y.reshape(*y.shape[:-1], self.V, self.R).swapaxes(-1, -2)
        return self.write_heads(separate, site)


def attention_core(core, params, store, site, x, index, config):
    *gates, q, k, v = store.heads(x, site, core)
    v = store.values(site, v)
    if core.bias:
        ends = np.cumsum(core.qkv_heads)[:-1]
        q, k, v = (a + b for a, b in zip((q, k, v), np.split(params["bias"], ends), strict=True))
    if core.query_key_norm:
        q = heads_norm(q, params["query_gain"], core, config)
        k = heads_norm(k, params["key_gain"], core, config)
    q, k = (rotated(a, core.positions, getattr(core.positions, "dims", None)) for a in (q, k))
    each = core.num_heads // core.kv_heads
    k, v = (a.repeat(each, axis=2) for a in (k, v))
    divisor = index // 2 + 1 if core.inverse_layer_scaling else 1
    if core.scale is not None:
        q = q * core.scale * np.sqrt(core.head_dim)
    y = attention(q, k, v, divisor, core.window, core.logit_cap)
    y = y * sigmoid(*gates) if gates else y
    if "w_out" not in params:
        return y
    y = y.reshape(*y.shape[:2], -1) @ params["w_out"] + params.get("output_bias", 0)
    return output_norm(y, params, config)


def heads_norm(x, gain, core, config):
    """Of each head, or of all of a token's heads as one vector."""
    if core.query_key_norm_over == "head":
        return rms_norm(x, gain, config)
    return rms_norm(x.reshape(*x.shape[:2], -1), gain.reshape(-1), config).reshape(x.shape)


def output_norm(y, params, config):
    return norm(y, params["output_gain"], config) if "output_gain" in params else y


def mla_core(core, params, store, site, x, index, config):
    x = store.read(x, site)
    split = lambda x: x.reshape(*x.shape[:2], core.num_heads, -1)
    q = x
    if core.query_rank is not None:
        q = rms_norm(x @ params["w_q_down"], params["q_gain"], config, core.latent_epsilon)
    q, down, own = split(q @ params["w_q"]), x @ params["w_kv_down"], core.head_dim
    latent = down[..., : core.kv_rank]
    latent = rms_norm(latent, params["kv_gain"], config, core.latent_epsilon)
    k, v = (split(latent @ w) for w in params["w_kv_up"])
    turned = lambda x: rotated(x, core.positions)
    k_rope = turned(down[:, :, None, core.kv_rank :]).repeat(core.num_heads, axis=2)
    q = np.concatenate([q[..., :own], turned(q[..., own:])], axis=-1)
    q = q if core.scale is None else q * core.scale * np.sqrt(core.query_dim)
    y = attention(q, np.concatenate([k, k_rope], axis=-1), v)
    return y * split(sigmoid(x @ params["w_gate"])) if core.output_gate else y


NONE = np.zeros((1, 0))


def kda_core(core, params, store, site, x, index, config):
    q, k, v, *gates = store.heads(x, site, core)
    x = store.whole(x, site, core)
    taps = [x for name in ("taps", "value_taps") for x in np.moveaxis(params.get(name, NONE), 1, 0)]
    q, k, v = (
        silu(convolved(a, own.reshape(core.conv_size, *a.shape[2:])))
        for a, own in zip((q, k, v), taps, strict=True)
    )
    q, k = (a.repeat(core.num_heads // core.key_heads, axis=2) for a in (q, k))
    unit = lambda a: a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)
    q, k = unit(q) / np.sqrt(core.head_dim), unit(k)
    split = lambda a: a.reshape(*v.shape)
    if core.decays == "channels":
        z = split(x @ params["w_decay_down"] @ params["w_decay_up"] + params["decay_bias"])
    else:
        z = (x @ params["w_decay"] + params["decay_bias"])[..., None]
    rate = np.exp(params["log_rate"])[:, None]
    bounded = core.lower_bound is not None
    g = core.lower_bound * sigmoid(rate * z) if bounded else -rate * np.log(1 + np.exp(z))
    beta = sigmoid(x @ params["w_beta"])
    state, read = 0 * k[:, 0, :, :, None] * v[:, 0, :, None], []
    for t in range(v.shape[1]):
        state = np.exp(g[:, t])[..., None] * state
        missing = v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + np.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], missing)
        read.append(np.einsum("bhk,bhkv->bhv", q[:, t], state))
    (gates,) = gates or [split(x @ params["w_gate_down"] @ params["w_gate_up"])]
    gates = sigmoid(gates) if core.gate_activation == "sigmoid" else silu(gates)
    return rms_norm(np.stack(read, axis=1), params["gain"], config) * gates


def convolved(x, taps):
    """Over the last tokens, that of the token itself being the last tap."""
    before = np.concatenate([np.zeros_like(x[:, : len(taps) - 1]), x], axis=1)
    return sum(tap * before[:, j : j + x.shape[1]] for j, tap in enumerate(taps))


def feed_forward_core(core, params, store, site, x, index, config):
    x = store.read(x, site)
    b_2 = params.get("b_2", 0)
    if core.gated:
        gate, up = (
            x @ w + b for w, b in zip(params["w_1"], params.get("b_1", (0, 0)), strict=True)
        )
        y = gated(core, gate, up) @ params["w_2"] + b_2
    else:
        hidden = ACTIVATIONS[core.activation](x @ params["w_1"] + params.get("b_1", 0))
        y = hidden @ params["w_2"] + b_2
    return output_norm(y, params, config)


def experts_core(core, params, store, site, x, index, config):
    """All experts of every token, and of what they give the weighted sum of those chosen."""
    x = store.read(x, site)
    logits = x @ params["w_router"]
    scores = sigmoid(logits) if core.scores == "sigmoid" else softmax(logits, -1)
    bias = core.balance.rate * params["load"] if core.balance.kind == "sign" else 0
    biased = (scores + bias).real
    if core.groups > 1:
        by_group = np.split(biased, core.groups, axis=-1)
        best_two = np.stack([np.sort(x, axis=-1)[..., -2:].sum(-1) for x in by_group], axis=-1)
        rank = np.argsort(np.argsort(-best_two, axis=-1), axis=-1)
        left_out = rank.repeat(core.num_experts // core.groups, axis=-1) >= core.top_groups
        biased = np.where(left_out, -np.inf, biased)
    chosen = np.argsort(-biased, axis=-1)[..., : core.top_k]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, np.take_along_axis(scores, chosen, -1), -1)
    weights = core.scale * weights / (weights.sum(-1, keepdims=True) if core.normalized else 1)
    read = x if core.latent_dim is None else x @ params["w_down"]
    gate, up = np.moveaxis(np.einsum("bnd,edgf->bnegf", read, params["w_1"]), 3, 0)
    y = np.einsum("bne,bnef,efd->bnd", weights, gated(core, gate, up), params["w_2"])
    if core.latent_norm:
        y = rms_norm(y, params["latent_gain"], config)
    y = y if core.latent_dim is None else y @ params["w_up"]
    if core.shared:
        gate, up = params["shared"]["w_1"]
        shared = gated(core, x @ gate, x @ up) @ params["shared"]["w_2"]
        y = y + (sigmoid(x @ params["w_shared_gate"]) if core.shared_gate else 1) * shared
    return y


CORES = {
    "attention": attention_core,
    "mla": mla_core,
    "kda": kda_core,
    "feed_forward": feed_forward_core,
    "experts": experts_core,
}


def model(params, tokens, config, mix=plain_sum, values=lambda site, v: v):
    """Logits: equations 1 to 11, and 14 to 27; of any cores.

    `values(site, v)` are the values that an attention sublayer uses in place of v, which it read.
    """
    store = Matrix(config) if isinstance(config.store, cfg.MatrixStore) else Vector(config)
    store.values = values
    sublayers = [
        jax.tree.map(lambda p, l=l: p[l], stack[k])
        for stack, of_stack in zip(params["stacks"].values(), config.stacks, strict=True)
        for l in range(of_stack.repeat)
        for k in range(len(of_stack.cores))
    ]
    sites = [sublayer.get("site", {}) for sublayer in sublayers] + [params["final_site"]]
    written = [_embedded(params, tokens, sites[0], store, config)]
    for k, (core, sublayer) in enumerate(zip(config.sublayers, sublayers, strict=True)):
        u, normed = mix(k, sites[k], written), lambda u, k=k: site_norm(u, sites[k], config)
        x = [normed(of_group) for of_group in u] if isinstance(u, list) else normed(u)
        y = CORES[core.kind](core, sublayer.get("core", {}), store, sites[k], x, k, config)
        write = store.write_heads if core.writes.heads else store.write
        written.append(write(y, sites[k + 1]))
    last = sites[-1]
    x = site_norm(mix(len(sublayers), last, written), last, config)
    tied = config.tied_embeddings
    w_u = params["embedding"]["tokens"].T if tied else params["unembedding"]["kernel"]
    return soft_capped(store.read(x, last) @ w_u, config.logit_cap)


def _embedded(params, tokens, first_site, store, config):
    embedding = params["embedding"]
    rows = config.embedding_scale * embedding["tokens"][np.asarray(tokens)]
    if config.learned_positions is None:
        return store.write(rows, first_site)
    positions = embedding["positions"][: tokens.shape[1]][None]
    if isinstance(store, Vector):
        return rows + positions
    at_positions = store.write(positions, {"store_keys": params["store"]["position_keys"]})
    return store.write(rows, first_site) + at_positions
