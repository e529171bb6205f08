"""Further mixers and cores for `modeling_rmt_tpu`; only models that use them need this file.

A mixer is a generator. Its arguments are the initial residual h and a list of places (site, core,
core parameters), one per sublayer and one for the unembedding. It yields the input of each place.
After each sublayer it receives write(y), the update that the store adds to the residual.
"""

import itertools
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from .modeling_rmt_tpu import (
    At,
    Read,
    activate,
    attend,
    block_size,
    concatenate,
    depth_logits,
    feed_forward,
    groups,
    normalize,
    rotate,
    separate,
    unit,
    weighted,
    wide,
)
from .modeling_rmt_tpu import RmtTpuConfig as BaseConfig
from .modeling_rmt_tpu import RmtTpuForCausalLM as Base

# Mixers -----------------------------------------------------------------------------------------


def delta_attention(model, h, places):
    """Run the standard residual h, plus gated attention over each block's sum of outputs D.

    A sublayer reads `u = h + g sum_b a_b D_b`. The softmax may include a null source, which has a
    weight but adds nothing.
    """
    plain = {"query": "static", "key_norm": True, "num_heads": 1}
    o, depth = SimpleNamespace(**vars(model.options.mixer), **plain), len(places) - 1
    sums, block = [], []
    for k, (site, core, _) in enumerate(places):
        deltas, u = sums + ([sum(block)] if block else []), h
        if deltas:
            logits, null = depth_logits(o, site, deltas), site.mix.null_logit
            if null is not None:
                logits = torch.cat([logits, null.expand(1, *logits.shape[1:])])
            u = h + site.mix.gate * weighted(logits.softmax(0)[: len(deltas)], deltas)
        block.append((yield model.residual.read(u, site, core)))
        h = h + block[-1]
        if (k + 1) % block_size(o, depth) == 0 or k + 1 == depth:
            sums, block = [*sums, sum(block)], []


def dense(model, h, places):
    """Run DenseFormer: after every p-th layer i, `h = sum_j a_ij X_j` over every k-th output X."""
    o, outputs, used = model.options.mixer, [], 0
    for index, (site, core, _) in enumerate(places):
        if index % 2 == 0:
            outputs.append(h)
            i = index // 2
            if i and i % o.period == 0:
                chosen = outputs[i % o.dilation :: o.dilation]
                a, used = model.mixer.weights[used : used + len(chosen)], used + len(chosen)
                h = sum(weight * wide(x) for weight, x in zip(a, chosen, strict=True)).to(h.dtype)
        h = h + (yield model.residual.read(h, site, core))


def mudd(model, h, places):
    """Run MUDD: queries, keys, values and the residual read different sums of layer outputs X.

    Each token computes its weights `A = gelu(rmsnorm(X_i) W_1) W_2 + a` from the newest output X_i.
    """
    outputs, read = [], model.residual.read
    networks = model.get_submodule("mixer.connections").get_submodule

    def sums(p):
        hidden = unit(outputs[-1], model.epsilon).flatten(2) @ wide(p.project_in).flatten(0, -2)
        hidden = F.gelu(hidden, approximate="tanh")
        a = torch.einsum("bsn,ncj->cjbs", hidden, wide(p.project_out)) + p.static[..., None, None]
        return [weighted(weights[..., None], outputs) for weights in a]

    for index, (site, core, _) in enumerate(places):
        if index % 2 == 0:
            outputs.append(h)
            *ways, h = sums(networks(str(index // 2 - 1))) if index else [h] * 4
        z = read(h, site, core)
        if index % 2 == 0 and groups(core):
            heads = [read(u, site, core).heads.split(groups(core), 2) for u in ways]
            z = Read(torch.cat([heads[way][way] for way in range(3)], 2), z.data)
        h = h + (yield z)


def residual_scalars(model, h, places):
    """Scale the residual, `h = a h + b x_0`, and mix in layer 1's values, `l_1 V_1 + l_2 V`."""
    x_0 = h
    v_1 = None
    for site, core, _ in places:
        mix = site.mix or SimpleNamespace(residual_scale=None, value_scale=None)
        if mix.residual_scale is not None:
            h = (mix.residual_scale * h + mix.embedding_scale * x_0).to(h.dtype)
        z = model.residual.read(h, site, core)
        if mix.value_scale is not None:
            *others, v = z.heads.split(groups(core), 2)
            mixed = v if v_1 is None else mix.first_value_scale * v_1 + mix.value_scale * v
            v_1 = v if v_1 is None else v_1
            z = Read(torch.cat([*others, mixed.to(v.dtype)], 2), z.data)
        h = h + (yield z)


def wide_streams(model, h, places):
    """Run K streams: read `u = sum_i r_i X_i`; `X_i = rho_i X_i + 2 sigmoid(beta_i) write(y)`."""
    o = model.options.mixer
    x = h[None].expand(o.streams, *h.shape)
    by_stream = lambda weights: wide(weights).view(-1, *[1] * h.ndim)
    for site, core, _ in places:
        u = wide(x).mean(0) if site.mix is None else (by_stream(site.mix.read) * wide(x)).sum(0)
        term = yield model.residual.read(u.to(h.dtype), site, core)
        forgotten, w = site.mix.forget_logits, 2 * by_stream(site.mix.write_logits).sigmoid()
        rho = 1 if forgotten is None else 1 - o.forget * by_stream(forgotten).sigmoid()
        x = (rho * x + w * term).to(h.dtype)


def hyper_connections(model, h, places):
    """Run m streams: read `u = sum_i alpha_i X_i`; `X_i = sum_j A_ij X_j + beta_i write(y)`."""
    o = model.options.mixer
    x = h[:, :, None].expand(-1, -1, o.streams, -1)
    coefficients = dynamic if o.kind == "hyper_connections" else projected
    for site, core, _ in places:
        if site.mix is None:  # this is the site of the unembedding
            yield model.residual.read(wide(x).sum(2).to(h.dtype), site, core)
        alpha, beta, a = coefficients(model, wide(x), site.mix)
        u = (alpha[..., None] * wide(x)).sum(-2).to(h.dtype)
        term = yield model.residual.read(u, site, core)
        x = (a @ wide(x) + beta[..., None] * term[:, :, None]).to(h.dtype)


def dynamic(model, x, p):
    """Return alpha, beta and A of hyper-connections: constants, or computed from x [.., m, D]."""
    o = model.options.mixer
    if not o.dynamic:
        return wide(p.read), wide(p.write), wide(p.mix)
    w = normalize(x, p.gain, **model.residual.norm) @ wide(p.w)
    w, (s_a, s_b), static = w.tanh() if o.tanh else w, p.scales, p.static
    mixed = static.mix + s_a * w[..., 2:].transpose(-1, -2)
    return static.read + s_a * w[..., 0], static.write + s_b * w[..., 1], mixed


def projected(model, x, p):
    """Compute alpha, beta and A of mHC or mHC-lite from all streams x [.., m, D] together."""
    o, m = model.options.mixer, x.shape[-2]
    w = torch.einsum("bsmd,mdc->bsc", normalize(x, p.gain, model.epsilon), wide(p.w))
    a_pre, a_post, a_res = p.scales
    alpha = (a_pre * w[..., :m] + p.read_bias).sigmoid()
    beta = 2 * (a_post * w[..., m : 2 * m] + p.write_bias).sigmoid()
    logits = a_res * w[..., 2 * m :] + p.mix_bias
    if o.kind == "mhc_lite":  # A is a weighted mean of all m! permutation matrices
        permutations = torch.eye(m).to(logits)[torch.tensor([*itertools.permutations(range(m))])]
        return alpha, beta, torch.einsum("kij,bsk->bsij", permutations, logits.softmax(-1))
    a = logits.unflatten(-1, (m, m))
    a = (a - a.amax(-2, keepdim=True)).clip(-60).exp()
    for _ in range(o.rounds):  # Sinkhorn iteration: A becomes nearly doubly stochastic
        a = a / a.sum(-2, keepdim=True)
        a = a / a.sum(-1, keepdim=True)
    return alpha, beta, a


def highway(model, h, places):
    """Add a gated term: `h = h + y + T v`; some forms scale h or y by `1 - T`."""
    o = model.options.mixer
    for site, core, _ in places:
        x = model.residual.normed(h, site)
        y = yield model.residual.project(x, site, core)
        x = x if o.input == "normed" else h
        gate, v = (x @ site.mix.gate_and_value).chunk(2, -1)
        gate = gate.sigmoid() if o.activation == "sigmoid" else gate.tanh()
        h, y = (
            (1 - gate) * h if o.form == "carry" else h,
            (1 - gate) * y if o.form == "gated" else y,
        )
        h = h + y + gate * v


def depth_lstm(model, h, places):
    """Run an LSTM over depth: `c = g c + i t; o = q c`; gates g, i, q read `[attention; o]`."""
    options = model.options.mixer
    o, c = h, h if options.cell_start == "embedding" else torch.zeros_like(h)
    for index, (site, core, _) in enumerate(places):
        if index % 2 == 0:
            a = yield model.residual.read(o, site, core)
            continue
        z = torch.cat([a, o], -1)
        gates = zip((z @ site.mix.gates).chunk(3, -1), site.mix.gate_gains, strict=True)
        i, g, q = (normalize(x, gain, **model.residual.norm) for x, gain in gates)
        t = yield Read(None, z[..., None, :])
        c = (g + options.forget_offset).sigmoid() * c + i.sigmoid() * t
        o = q.sigmoid() * c


def hierarchical(model, h, places):
    """Merge after every e-th layer: `h = norm(sigmoid([x_1; ..] W_a) W_b + x_1 + ..)`.

    The inputs x are the outputs of these e layers and, if there is one, the previous merge.
    """
    o, layers, node, nodes = model.options.mixer, [], [], 0
    for index, (site, core, _) in enumerate(places):
        if index and index % 2 == 0:
            layers.append(h)
            if len(layers) == o.every:
                p = model.mixer.first
                if nodes:
                    p = At(model.mixer.others, 0 if o.shared else nodes - 1)
                x = [*layers, *node]
                total = (torch.cat(x, -1) @ p.w_a).sigmoid() @ p.w_b + sum(x)
                h = normalize(total, p.gain, **model.residual.norm)
                layers, node, nodes = [], [h], nodes + 1
        h = h + (yield model.residual.read(h, site, core))


# Cores: the functions of sublayers --------------------------------------------------------------


def mla(model, z, p, core, context, scale):
    """Compute latent attention: keys and values are projections of one latent vector per token."""
    x, part, epsilon = concatenate(z.data), core.rope_dim, core.latent_epsilon or model.epsilon
    q = x if p.w_q_down is None else normalize(x @ p.w_q_down, p.q_gain, epsilon)
    q = (q @ p.w_q).unflatten(-1, (core.num_heads, -1))
    latent, shared = (x @ p.w_kv_down).split([core.kv_rank, part], -1)
    latent = normalize(latent, p.kv_gain, epsilon)
    k, v = ((latent @ w).unflatten(-1, (core.num_heads, -1)) for w in p.w_kv_up)
    k = torch.cat([k, shared[:, :, None].expand(-1, -1, core.num_heads, -1)], -1)
    turn = lambda x: rotate(x[..., -part:], context.positions, core.positions)
    q, k = (torch.cat([x[..., :-part], turn(x)], -1) for x in (q, k))
    y = attend(q, k, v, scale, context, core)
    return y if p.w_gate is None else y * wide(x @ p.w_gate).sigmoid().view(y.shape).to(y.dtype)


def convolve(x, taps):
    """Convolve each channel of x [batch, seq, C] causally over the tokens, and apply silu."""
    before = F.pad(x, (0, 0, len(taps) - 1, 0))
    return F.silu(sum(tap * before[:, j : j + x.shape[1]] for j, tap in enumerate(taps)))


def kda(model, z, p, core, context, scale):
    """Compute Kimi Delta Attention or Gated DeltaNet; each head has a recurrent state S.

    `S = Diag(e^g) S + beta k (v - k^T Diag(e^g) S)^T; o = S^T q / sqrt(D_h)`
    """
    x, real, heads = concatenate(z.data), context.real[..., None], core.num_heads
    q, k, v, *gates = z.heads.split(groups(core), 2)
    taps = [w for part in (p.taps, p.value_taps) if part is not None for w in part.unbind(1)]
    runs = (convolve(run.flatten(2) * real, w) for run, w in zip((q, k, v), taps, strict=True))
    q, k, v = (wide(run).unflatten(-1, (-1, core.head_dim)) for run in runs)
    lengths = lambda x: (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k = ((y / lengths(y)).repeat_interleave(heads // y.shape[2], 2) for y in (q, k))
    decay = x @ p.w_decay if p.w_decay_down is None else x @ p.w_decay_down @ p.w_decay_up
    decay, rate = wide(decay + p.decay_bias).unflatten(-1, (heads, -1)), wide(p.log_rate).exp()
    decay, bound = rate[:, None] * decay if core.lower_bound else decay, core.lower_bound
    g = bound * decay.sigmoid() if bound else -rate[:, None] * F.softplus(decay)
    kept, beta = (g * real[..., None]).exp(), wide(x @ p.w_beta).sigmoid() * real
    state, read = v.new_zeros(len(x), heads, core.head_dim, core.head_dim), []
    for t in range(x.shape[1]):
        state = kept[:, t, ..., None] * state
        change = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + (beta[:, t, :, None] * k[:, t])[..., None] * change[:, :, None]
        read.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    o = normalize(core.head_dim**-0.5 * torch.stack(read, 1), p.gain, model.epsilon).to(x.dtype)
    gate = gates[0] if gates else (x @ p.w_gate_down @ p.w_gate_up).unflatten(-1, (heads, -1))
    activation = torch.sigmoid if core.gate_activation == "sigmoid" else F.silu
    return o * activation(wide(gate)).to(o.dtype)


def balance_bias(p, core):
    """Return the bias that is added to each expert's score when experts are chosen."""
    if core.balance.kind != "quantiles":
        return core.balance.rate * wide(p.load) if core.balance.kind == "sign" else 0.0
    seen = wide(p.seen)
    above = seen.flip(1).cumsum(1).flip(1)
    target = core.top_k / core.num_experts * above[:, :1]
    at = (above >= target).sum(1, keepdim=True) - 1
    within = (above.gather(1, at) - target) / seen.gather(1, at).clip(torch.finfo(seen.dtype).tiny)
    edge = (at + within.clip(0, 1)) * (4 / seen.shape[1]) - 2
    if core.scores == "softmax":  # bins of softmax scores are narrower near 0
        edge = 2 * (edge / 2) ** 3
    return (edge.mean() - edge)[:, 0]


def experts(model, z, p, core, context, scale):
    """Compute a mixture of experts: each token uses the k experts with the largest scores."""
    x = concatenate(z.data).flatten(0, 1)
    logits = wide(x) @ wide(p.w_router)
    scores = logits.softmax(-1) if core.scores == "softmax" else logits.sigmoid()
    biased = scores + balance_bias(p, core)
    if core.groups > 1:  # keep the groups with the largest sums of their two best scores
        by_group = biased.unflatten(1, (core.groups, -1))
        best = by_group.topk(2).values.sum(-1).topk(core.top_groups).indices
        others = torch.ones(best.shape[0], core.groups).to(biased).scatter(1, best, 0.0).bool()
        biased = by_group.masked_fill(others[..., None], -torch.inf).flatten(1)
    chosen = biased.topk(core.top_k).indices
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) if core.normalized else weights
    l = x if p.w_down is None else x @ p.w_down
    y = torch.zeros_like(wide(l))
    for e in chosen.unique():
        token, place = torch.where(chosen == e)
        hidden = activate(core, *(l[token] @ w for w in p.w_1[e].unbind(1)))
        y = y.index_add(0, token, core.scale * weights[token, place, None] * (hidden @ p.w_2[e]))
    y = y.to(x.dtype) if p.latent_gain is None else normalize(y, p.latent_gain, model.epsilon)
    y = y if p.w_up is None else y.to(x.dtype) @ p.w_up
    y = separate(y.view(*z.data.shape[:2], -1), z.data.shape[-2])
    if p.shared is None:
        return y
    of_all = feed_forward(model, z, p.shared, core, context, scale)
    if p.w_shared_gate is not None:
        of_all = of_all * wide(x @ p.w_shared_gate).sigmoid().to(y.dtype).view(*y.shape[:2], 1, 1)
    return y + of_all


# The names of parameters that stay in float32, which are narrow in no folder.
EXACT = {"decay_bias", "load", "log_rate", "seen"}


class RmtTpuConfig(BaseConfig):
    """The content of config.json; transformers allows each config class only one model class."""


class RmtTpuForCausalLM(Base):
    """A causal language model with the mixers and cores of both files."""

    config_class = RmtTpuConfig
    mixers = Base.mixers | {
        "delta_attention": delta_attention,
        "dense": dense,
        "mudd": mudd,
        "residual_scalars": residual_scalars,
        "wide_streams": wide_streams,
        "hyper_connections": hyper_connections,
        "mhc": hyper_connections,
        "mhc_lite": hyper_connections,
        "highway": highway,
        "depth_lstm": depth_lstm,
        "hierarchical": hierarchical,
    }
    cores = Base.cores | {"mla": mla, "kda": kda, "experts": experts}

    def post_init(self):
        """Name the model's parameters that stay in float32; some versions refuse other names."""
        names = {name.rpartition(".")[2] for name in self.config.tensors}
        self._keep_in_fp32_modules_strict = sorted(names & EXACT)
        super().post_init()
