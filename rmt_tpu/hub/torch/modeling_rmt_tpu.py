"""Transformers, RMTs and Attention Residuals in PyTorch, as models of the transformers library.

    h = write(embedding);   for each sublayer:  z = read(norm(mix(h, ..)));  y = core(z);  write(y)

A store defines a token's residual h (a vector, or a matrix in an RMT). A core is the function of a
sublayer. A mixer combines earlier outputs into a sublayer's input. A site has the parameters before
a core, which write and read h. This file has the equations without a cache or kernels. The
transformers library runs it (`trust_remote_code=True`).

In config.json, `model` is the model's config in rmt_tpu's format, and `tensors` has the shape of
each parameter. `factors` has the factors for the embeddings, the attention logits (per sublayer)
and the output logits. The parameters of a stack of layers have a leading axis over the layers.
"""

import json
import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import can_return_tuple

# Outputs that this code does not have; `forward` refuses to be asked for them.
WITHHELD = ("output_attentions", "output_hidden_states")


class RmtTpuConfig(PretrainedConfig):
    """The content of config.json."""

    model_type = "rmt_tpu"

    def __init__(self, model=None, tensors=None, factors=None, **others):
        self.model, self.tensors, self.factors = model or {}, tensors or {}, factors or {}
        super().__init__(**others)


class At:
    """Access to a module's parameters for one layer of a stack; a missing name gives None."""

    def __init__(self, module, layer=None):
        self._module, self._layer = module, layer

    def __getattr__(self, name):
        found = getattr(self._module, name, None)
        if isinstance(found, nn.Module):
            return At(found, self._layer)
        return found if found is None or self._layer is None else found[self._layer]


class Read(NamedTuple):
    """A core's input: heads and data vectors, each [batch, seq, vectors, size] or None."""

    heads: torch.Tensor | None
    data: torch.Tensor | None


class Context(NamedTuple):
    """Positions, distances i - j, whether token i attends to token j, and which tokens are real."""

    positions: torch.Tensor
    distances: torch.Tensor
    seen: torch.Tensor
    real: torch.Tensor


def wide(x):
    """Return x in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def concatenate(x):
    """Interleave data vectors x [.., R, size] into one vector, whose entry `i R + r` is x[r, i]."""
    return x.transpose(-1, -2).flatten(-2)


def separate(x, vectors):
    """Split one vector into data vectors; this is the inverse of `concatenate`."""
    return x.unflatten(-1, (-1, vectors)).transpose(-1, -2)


def normalize(x, gain, epsilon, kind="rmsnorm", bias=None):
    """Return `gain x / sqrt(mean(x^2) + epsilon) + bias`; a layernorm first subtracts the mean."""
    axes, y = tuple(range(-gain.ndim, 0)), wide(x)
    y = y - y.mean(axes, keepdim=True) if kind == "layernorm" else y
    y = y * torch.rsqrt(y.square().mean(axes, keepdim=True) + epsilon) * gain
    return (y if bias is None else y + bias).to(x.dtype)


# Stores: the residual of a token, and how to write and read it -----------------------------------


class Vector:
    """A vector residual: `h += W_O y; z = W_QKV norm(h)`; cores without heads use no matrices."""

    def __init__(self, options):
        self.norm = {"epsilon": options.norm_epsilon, "kind": options.norm}

    def term(self, y, site):
        """Return the update that the vectors y add to the residual."""
        return y.flatten(-2) if site.write is None else y.flatten(-2) @ site.write

    def normed(self, h, site):
        """Normalize the residual h, if the site has a norm."""
        return h if site.gain is None else normalize(h, site.gain, bias=site.bias, **self.norm)

    def project(self, x, site, core):
        """Compute a core's input from the normed residual x."""
        weights = [w for part in (site.read, site.read_fewer) if part is not None for w in part]
        heads = [(x @ w).unflatten(-1, (-1, core.head_dim)) for w in weights]
        return Read(torch.cat(heads, -2) if heads else None, x[..., None, :])

    def read(self, h, site, core):
        """Normalize the residual h and compute a core's input from it."""
        return self.project(self.normed(h, site), site, core)


class Matrix(Vector):
    """A matrix residual: `X += w^T y; z = r norm(X)`; storage keys w, retrieval keys r [R, D_k]."""

    def term(self, y, site):
        """Return the sum of the outer products of the storage keys w and the vectors y."""
        return torch.einsum("rk,...rv->...kv", site.store_keys, y)

    def project(self, x, site, core):
        """Read vectors from the normed matrix x with the retrieval keys r."""
        z, heads = torch.einsum("rk,...kv->...rv", site.read_keys, x), sum(groups(core))
        return Read(z[..., :heads, :], z[..., heads:, :])


def groups(core):
    """Return the head counts of gates, queries, keys and values; the gates of KDA come last."""
    kind = core and core.kind
    if kind == "attention":
        pairs = core.num_kv_heads or core.num_heads
        return [core.num_heads] * (1 + core.output_gate) + [pairs, pairs]
    if kind == "kda":
        pairs = core.num_key_heads or core.num_heads
        return [pairs, pairs] + [core.num_heads] * (1 + (core.gates == "full"))
    return []


# Mixers: generators that yield the input of each sublayer, and then receive its output -----------


def plain(model, h, places):
    """Run the standard residual stream: `h += write(y); z = read(norm(h))`."""
    for site, core, _ in places:
        h = h + (yield model.residual.read(h, site, core))


def unit(x, epsilon):
    """Divide the residual x [batch, seq, ..] by each token's root mean square."""
    square = wide(x).square().mean(tuple(range(2, x.ndim)), keepdim=True)
    return wide(x) * torch.rsqrt(square + epsilon)


def block_size(o, depth):
    """Return the number of sublayers per block of attention over depth."""
    if o.kind == "full_attention":
        return 1
    size = o.sublayers_per_block or (o.layers_per_block and 2 * o.layers_per_block)
    return size or -(-depth // min(o.num_blocks or 8, depth))


def depth_logits(o, site, v):
    """Return each source's logit `<gain * query, v_i> / rms(v_i)`, [sources, .., heads]."""
    keys = torch.stack([unit(x, o.epsilon).flatten(2) for x in v])
    query, gain = wide(site.mix.query).flatten(), site.mix.key_gain
    if o.query == "input":
        query = query + keys[-1] @ wide(site.mix.project)
    query = query if gain is None else query * gain.flatten()
    keys = keys if o.key_norm else wide(torch.stack(v)).flatten(3)
    return (query * keys).unflatten(-1, (o.num_heads, -1)).sum(-1)


def weighted(weights, v):
    """Return the weighted sum of the sources v, with separate weights for each head's part of v."""
    parts = wide(torch.stack(v)).flatten(3).unflatten(-1, (weights.shape[-1], -1))
    return (weights[..., None] * parts).sum(0).reshape(v[0].shape).to(v[0].dtype)


def depth_attention(model, h, places):
    """Run attention over depth: `z = read(norm(sum_i softmax(logits)_i v_i))`.

    The sources v are the embedding and the output sum of each block, including the current one.
    """
    o, depth, scored = model.options.mixer, len(places) - 1, 0
    sums, block = [unit(h, o.epsilon).to(h.dtype) if o.normed_embedding else h], []
    for k, (site, core, _) in enumerate(places):
        v = [sum(sums[: n + 1]) for n in range(len(sums))] if o.cumulative else sums
        v = v[:1] + v[1:][-(getattr(o, "window", None) or depth) :]
        if block or o.cumulative:  # a cumulative source is the standard residual
            v = v + [sum(sums + block if o.cumulative else block)]
        if k == depth and o.output_site != "attention":
            u = v[-1] if o.output_site == "newest" or o.cumulative else sum(sums)
        else:
            if o.query in ("none", "scalars"):
                logits = torch.zeros(len(v), *h.shape[:2], 1).to(wide(h))
            else:
                logits = depth_logits(o, site, v)
            if o.query == "scalars":
                new = len(v) - (o.cumulative and not block)
                own, scored = model.mixer.logits[scored : scored + new], scored + new
                own = torch.cat([own, own[-1:]])[: len(v)]  # a repeated source keeps its logit
                logits = logits + own[:, None, None, None]
            if o.newest_bias is not None:
                logits = torch.cat([logits[:-1], logits[-1:] + site.mix.newest_bias])
            u = weighted(logits.sigmoid() if o.weights == "sigmoid" else logits.softmax(0), v)
        block.append((yield model.residual.read(u, site, core)))
        if (k + 1) % block_size(o, depth) == 0 or k + 1 == depth:
            sums, block = [*sums, sum(block)], []


# Cores: the functions y = core(z) of sublayers --------------------------------------------------


def capped(x, cap):
    """Apply the soft cap `cap tanh(x / cap)`, or return x if cap is None."""
    return x if cap is None else cap * (x / cap).tanh()


def scaled_share(rope, frequencies, dims):
    """Return how far context scaling applies to each RoPE frequency, from 0 (not) to 1 (fully)."""
    o, turn = rope.scaling, 2 * math.pi
    if o.kind == "llama3":
        turns = o.original_length * frequencies / turn
        return 1 - ((turns - o.low) / (o.high - o.low)).clip(0, 1)
    if o.kind == "linear":
        return torch.ones_like(frequencies)
    ends = [
        dims * math.log(o.original_length / (turn * n), rope.base) / 2 for n in (o.fast, o.slow)
    ]
    first, last = (math.floor(ends[0]), math.ceil(ends[1])) if o.whole else ends
    first, last = max(first, 0), min(last, dims - 1)
    numbers = torch.arange(dims // 2).to(frequencies)
    return ((numbers - first) / ((last - first) or 0.001)).clip(0, 1)


def rotate(x, positions, rope):
    """Apply RoPE: rotate pairs of each head's first entries by angles proportional to position."""
    if rope.kind != "rope":
        return x
    dims, factor = rope.dims or x.shape[-1], 1.0
    frequencies = rope.base ** (-torch.arange(dims // 2).to(wide(x)) / (dims // 2))
    if rope.scaling is not None:
        share = scaled_share(rope, frequencies, dims)
        frequencies = frequencies * (1 - share + share / rope.scaling.factor)
        if rope.scaling.kind == "yarn":
            factor = rope.scaling.magnitude or 0.1 * math.log(max(rope.scaling.factor, 1)) + 1
    angles = positions[:, :, None, None] * frequencies
    cos, sin = factor * angles.cos(), factor * angles.sin()
    a, b, rest = x.split([dims // 2, dims // 2, x.shape[-1] - dims], -1)
    return torch.cat([(a * cos - b * sin).to(x), (b * cos + a * sin).to(x), rest], -1)


def attend(q, k, v, scale, context, core):
    """Return causal attention `softmax(scale q . k) v`; queries may share keys and values."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    logits, seen = scale * wide(torch.einsum("bnhd,bmhd->bhnm", q, k)), context.seen
    logits = capped(logits, getattr(core, "logit_cap", None))
    if core.positions.kind == "alibi":
        slopes = 2.0 ** (-8.0 * torch.arange(1, q.shape[2] + 1).to(logits) / q.shape[2])
        logits = logits - slopes[:, None, None] * context.distances
    if getattr(core, "window", None):
        seen = seen & (context.distances < core.window)
    logits = logits.masked_fill(~seen[:, None], torch.finfo(logits.dtype).min)
    return torch.einsum("bhnm,bmhd->bnhd", logits.softmax(-1).to(v.dtype), v)


def output(y, bias, gain, model):
    """Add the output bias and apply the output norm, if the core has them."""
    y = y if bias is None else y + bias
    return y if gain is None else normalize(y, gain, **model.residual.norm)


def attention(model, z, p, core, context, scale):
    """Compute softmax attention, and apply W_O if the core (not the site) has it."""
    *gates, q, k, v = z.heads.split(groups(core), 2)
    if p.bias is not None:
        q, k, v = (x + b for x, b in zip((q, k, v), p.bias.split(groups(core)[-3:]), strict=True))
    if core.query_key_norm:
        q, k = (normalize(x, g, model.epsilon) for x, g in ((q, p.query_gain), (k, p.key_gain)))
    q, k = (rotate(x, context.positions, core.positions) for x in (q, k))
    y = attend(q, k, v, scale, context, core)
    y = y * wide(gates[0]).sigmoid().to(y.dtype) if gates else y
    if p.w_out is None:
        return y
    return output(y.flatten(-2) @ p.w_out, p.output_bias, p.output_gain, model)[..., None, :]


def activate(core, gate, up=1):
    """Apply the activation function to `gate`, and multiply by `up` if the layer is gated."""
    name = core.activation
    if name == "relu2":
        return gate.relu().square()
    if name == "situ":
        bounded = capped(wide(gate), core.situ_beta) * wide(gate).sigmoid()
        return (bounded * capped(wide(up), core.situ_linear_beta)).to(gate.dtype)
    if name == "swiglu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="none" if name == "gelu_exact" else "tanh") * up


def feed_forward(model, z, p, core, context, scale):
    """Compute `W_2 f(W_1 z)`; with a gated f, W_1 consists of a gate and an up projection."""
    x, w_1, b_1 = concatenate(z.data), p.w_1, p.b_1
    w_1, b_1 = (w_1, b_1) if w_1.ndim == 3 else (w_1[None], b_1 if b_1 is None else b_1[None])
    hidden = [x @ w if b_1 is None else x @ w + b_1[n] for n, w in enumerate(w_1)]
    if p.hidden_gain is not None:
        hidden = [normalize(x, p.hidden_gain, **model.residual.norm) for x in hidden]
    y = activate(core, *hidden) @ p.w_2
    return separate(output(y, p.b_2, p.output_gain, model), z.data.shape[-2])


# The model --------------------------------------------------------------------------------------


class RmtTpuForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model, built from the store, the mixer and the cores in its config."""

    config_class = RmtTpuConfig
    _supports_cache_class = False
    mixers = {"sum": plain, "full_attention": depth_attention, "block_attention": depth_attention}
    cores = {"attention": attention, "feed_forward": feed_forward}

    def __init__(self, config):
        super().__init__(config)
        for name, shape in config.tensors.items():
            *path, last = name.split(".")
            node = self
            for part in path:
                if part not in node._modules:
                    node.add_module(part, nn.Module())
                node = node._modules[part]
            node.register_parameter(last, nn.Parameter(torch.empty(shape)))
        as_object = lambda values: SimpleNamespace(**values)
        self.options = json.loads(json.dumps(config.model), object_hook=as_object)
        self.epsilon = self.options.norm_epsilon
        self.residual = {"vector": Vector, "matrix": Matrix}[self.options.store.kind](self.options)
        self.post_init()

    def _init_weights(self, module):
        """Do nothing, because all parameters are loaded from the folder."""

    def places(self):
        """Return (site, core, parameters) of each sublayer, and last of the unembedding."""
        found = []
        for s, stack in enumerate(self.options.stacks):
            for layer in range(stack.repeat):
                for c, core in enumerate(stack.cores):
                    parts = At(self.get_submodule(f"stacks.{s}.{c}"), layer)
                    found.append((parts.site or At(None), core, parts.core or At(None)))
        return [*found, (At(self.final_site), None, None)]

    def embed(self, tokens, positions, site):
        """Return the initial residual, which contains the token and position embeddings."""
        factors, table = self.config.factors, self.embedding
        rows = factors["tokens"] * table.tokens[tokens]
        vectors = 1
        if self.options.store.kind == "matrix":
            vectors = rows.shape[-1] // site.gain.shape[-1]
        h = self.residual.term(separate(rows, vectors), site)
        if getattr(table, "positions", None) is None:
            return h
        if (longest := int(positions.max()) + 1) > (size := len(table.positions)):
            raise ValueError(f"{longest} tokens are more than the model has positions for ({size})")
        rows = separate(factors["positions"] * table.positions[positions], vectors)
        keys = getattr(getattr(self, "store", None), "position_keys", None)
        return h + self.residual.term(rows, SimpleNamespace(write=None, store_keys=keys))

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, labels=None, position_ids=None, **others):
        """Return next-token logits [batch, seq, vocab] and, given labels, the next-token loss.

        All arguments are [batch, seq]; attention_mask is 1 for tokens, and 0 for padding.

        Raises:
          ValueError: position_ids are not the places of one text's tokens; or there are arguments
            that would have no effect; or there are more tokens than positions.
        """
        if any(others.pop(name, None) is not None for name in ("inputs_embeds", "past_key_values")):
            raise ValueError("inputs_embeds and past_key_values are not supported; legal: None")
        for name in WITHHELD:
            given = others.pop(name, None)
            if given or (given is None and getattr(self.config, name, None)):
                raise ValueError(f"{name}=True is not supported; legal: False")
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        i, positions = torch.arange(input_ids.shape[1]).to(real), (real.cumsum(1) - 1).clip(0)
        if position_ids is not None and ((position_ids != positions) & (real > 0)).any():
            raise ValueError("position_ids are not 0, 1, 2, ..; legal: one text in each row")
        distances = i[:, None] - i
        context = Context(positions, distances, (distances >= 0) & (real > 0)[:, None], real)
        places = self.places()
        h = self.embed(input_ids, positions, places[0][0])
        mixer = self.mixers[self.options.mixer.kind](self, h, places)
        z, scales = next(mixer), self.config.factors["attention"]
        for k, (_, core, parameters) in enumerate(places[:-1]):
            y = self.cores[core.kind](self, z, parameters, core, context, scales[k])
            z = mixer.send(self.residual.term(y, places[k + 1][0]))
        tied = self.options.tied_embeddings
        z = concatenate(z.data) @ (self.embedding.tokens.T if tied else self.unembedding.kernel)
        logits = capped(self.config.factors["logits"] * wide(z), self.options.logit_cap)
        loss = None
        if labels is not None:
            size = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=size, **others)
        return CausalLMOutput(loss=loss, logits=logits)

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **others):
        """Return all tokens so far, because there is no cache and each step needs all of them."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return inputs | {name: others[name] for name in WITHHELD if name in others}
