"""Qwen3-Next and Qwen3.5 in the hub's format: layers of Gated DeltaNet and of gated attention.

In Qwen3.5, either all of the layers or none of them have experts. Its tensors differ from
Qwen3-Next's: the projections of Gated DeltaNet are separate tensors, and the matrices of all
experts are stacked.

This module does not import JAX.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from rmt_tpu import config as cfg
from rmt_tpu.errors import UsageError
from rmt_tpu.hub.families import APART, EXPERTS, Family
from rmt_tpu.hub.fields import Fields
from rmt_tpu.hub.pieces import Piece, Place, full, joined, places
from rmt_tpu.hub.ropes import FULL, Ropes, read_ropes, rope_values

_LINEAR = "linear_attention"
_STACKED = "experts.gate_up_proj"


def kind_of(model: cfg.ModelConfig) -> str | None:
    """Return the model type for a model with Gated DeltaNet or gated attention, or else None.

    A model with experts is written as Qwen3-Next, unless the caller requests a different type.
    """
    gated = (getattr(core, "output_gate", False) for core in model.cores)
    if not model.cores_of_kind(cfg.Kda.kind) and not any(gated):
        return None
    return "qwen3_next" if model.cores_of_kind(cfg.Experts.kind) else "qwen3_5_text"


def model_config(fields: Fields, family: Family, layers: int) -> cfg.ModelConfig:
    """Convert the config.json of a Qwen3-Next or Qwen3.5 model to a model config.

    Raises:
      UsageError: the model needs an operation that is not supported here.
    """
    fields.only("attention_bias", False)
    fields.only("quantization_config", None)
    fields.only("hidden_act", "silu")
    default = fields.size("full_attention_interval", 4)
    kinds = fields.texts("layer_types", layers, FULL, _LINEAR)
    if kinds is None:
        kinds = [FULL if (layer + 1) % default == 0 else _LINEAR for layer in range(layers)]
    mixing = {FULL: _attention(fields, family), _LINEAR: _delta_net(fields)}
    seconds = _feed_forward(fields, family, layers)
    return cfg.ModelConfig(
        cfg.stacks([(mixing[kind], second) for kind, second in zip(kinds, seconds, strict=True)]),
        cfg.VectorStore(fields.size("hidden_size")),
        vocab_size=fields.size("vocab_size"),
        norm="rmsnorm",
        norm_epsilon=fields.positive("rms_norm_eps", 1e-6),
    )


def _feed_forward(fields: Fields, family: Family, layers: int) -> list[cfg.Core]:
    """Return the feed-forward core or the experts of each layer."""
    if APART in family.traits and EXPERTS in family.traits:
        return layers * [_experts(fields, normalized=True)]
    dense = cfg.FeedForward(fields.size("intermediate_size"), "swiglu")
    if APART in family.traits:
        return layers * [dense]
    experts = _experts(fields, normalized=fields.flag("norm_topk_prob"))
    step, without = fields.size("decoder_sparse_step"), fields.layers("mlp_only_layers", layers)
    has_experts = ((n + 1) % step == 0 and n not in without for n in range(layers))
    return [experts if has else dense for has in has_experts]


def _attention(fields: Fields, family: Family) -> cfg.Attention:
    heads, groups = fields.size("num_attention_heads"), fields.size("num_key_value_heads")
    if heads % groups:
        raise fields.wrong("num_key_value_heads", groups, f"a divisor of the {heads} heads")
    size = fields.size("head_dim")
    return cfg.Attention(
        heads,
        size,
        read_ropes(fields, family, size).full,
        inverse_layer_scaling=False,
        num_kv_heads=groups,
        query_key_norm=True,
        output_gate=True,
    )


def _delta_net(fields: Fields) -> cfg.Kda:
    names = "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim"
    heads, groups, size = map(fields.size, names)
    if fields.size("linear_value_head_dim") != size:
        value = fields.size("linear_value_head_dim")
        raise fields.wrong("linear_value_head_dim", value, f"linear_key_head_dim={size}")
    if heads % groups:
        raise fields.wrong("linear_num_key_heads", groups, f"a divisor of the {heads} value heads")
    return cfg.Kda(
        heads,
        size,
        conv_size=fields.size("linear_conv_kernel_dim"),
        num_key_heads=groups,
        decays="heads",
        gates="full",
        gate_activation="silu",
    )


def _experts(fields: Fields, normalized: bool) -> cfg.Experts:
    count, top_k = fields.size("num_experts"), fields.size("num_experts_per_tok")
    if top_k > count:
        raise fields.wrong("num_experts_per_tok", top_k, f"at most num_experts={count}")
    hidden, shared = (fields.size(f"{name}_intermediate_size") for name in ("moe", "shared_expert"))
    if shared % hidden:
        legal = f"a multiple of moe_intermediate_size={hidden}"
        raise fields.wrong("shared_expert_intermediate_size", shared, legal)
    return cfg.Experts(
        count,
        top_k,
        hidden,
        shared=shared // hidden,
        shared_gate=True,
        scores="softmax",
        normalized=normalized,
        balance=cfg.BalanceLoss(fields.not_negative("router_aux_loss_coef")),
    )


def config_values(model: cfg.ModelConfig, family: Family, max_length: int) -> dict[str, Any]:
    """Return the fields of config.json that describe a model.

    The caller must read the fields back and compare the result with the model.

    Raises:
      UsageError: the model has no attention or no Gated DeltaNet, or it has no experts although the
        model type requires them.
    """
    cores = list(model.sublayers)
    attention, net = (_first(model, kind) for kind in (cfg.Attention.kind, cfg.Kda.kind))
    dense = [n for n, core in enumerate(cores[1::2]) if core.kind == cfg.FeedForward.kind]
    hidden = cores[2 * dense[0] + 1].hidden_dim if dense else 1
    rope = attention.positions if isinstance(attention.positions, cfg.Rope) else cfg.Rope()
    dims, size = rope.dims or attention.head_dim, attention.head_dim
    values = {
        "hidden_size": model.store.dim,
        "intermediate_size": hidden,
        "num_hidden_layers": len(cores) // 2,
        "layer_types": [_LINEAR if core.kind == cfg.Kda.kind else FULL for core in cores[::2]],
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": size,
        "linear_num_value_heads": net.num_heads,
        "linear_num_key_heads": net.key_heads,
        "linear_key_head_dim": net.head_dim,
        "linear_value_head_dim": net.head_dim,
        "linear_conv_kernel_dim": net.conv_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": max_length,
        "vocab_size": model.vocab_size,
        "attention_bias": False,
        # Readers truncate factor * size. Adding 0.5 makes the truncated product equal dims.
        "partial_rotary_factor": min((dims + 0.5) / size, 1.0),
        **rope_values(family, Ropes(rope, rope)),
    }
    if APART in family.traits and EXPERTS not in family.traits:
        return values
    experts = _first(model, cfg.Experts.kind)
    return values | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.hidden_dim,
        "shared_expert_intermediate_size": max(experts.shared, 1) * experts.hidden_dim,
        "norm_topk_prob": experts.normalized,
        "router_aux_loss_coef": getattr(experts.balance, "weight", 0.0),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _first(model: cfg.ModelConfig, kind: str) -> Any:
    found = model.cores_of_kind(kind)
    if not found:
        raise UsageError(
            f"a model without {kind} cannot be written as qwen3_next or qwen3_5; legal: a model "
            "with attention layers and kda layers, and with experts if written as qwen3_next"
        )
    return found[0]


def pieces(model: cfg.ModelConfig, family: Family, names: Iterable[str] | None) -> Iterator[Piece]:
    """Yield all tensors of a model, each mapped to a slice of a parameter.

    Files store norm gains minus one, except the gain in Gated DeltaNet. Qwen3.5 stacks the matrices
    of all experts in one tensor. The transformers library can also write one tensor per expert.
    `names`, the tensor names of an existing folder or None, shows which form its files have.
    """
    apart = APART in family.traits
    stacked = apart and (names is None or any(name.endswith(_STACKED) for name in names))
    dim, vocab = model.store.dim, model.vocab_size
    yield Piece("model.embed_tokens.weight", ("embedding", "tokens"), full(vocab, dim))
    yield Piece("model.norm.weight", ("final_site", "gain"), full(dim), offset=1.0)
    yield Piece("lm_head.weight", ("unembedding", "kernel"), full(dim, vocab), True)
    sublayers = list(places(model))
    for layer, (mixing, mlp) in enumerate(zip(sublayers[::2], sublayers[1::2], strict=True)):
        name = f"model.layers.{layer}."
        for place, norm in ((mixing, "input"), (mlp, "post_attention")):
            gain = place.piece(f"{name}{norm}_layernorm.weight", "site/gain", (0, dim))
            yield gain._replace(offset=1.0)
        if mixing.core.kind == cfg.Kda.kind:
            yield from (_apart if apart else _ordered_by_heads)(name, mixing, dim)
            yield from _net_pieces(name, mixing)
        else:
            yield from _attention_pieces(name, mixing, dim)
        own = "linear_attn.out_proj" if mixing.core.kind == cfg.Kda.kind else "self_attn.o_proj"
        width = mixing.core.num_heads * mixing.core.head_dim
        yield mlp.piece(f"{name}{own}.weight", "site/write", *full(width, dim))
        yield from _mlp_pieces(f"{name}mlp.", mlp, dim, stacked)


def _read(place: Place, group: int, begin: int, end: int, dim: int) -> Piece:
    """Return a piece for columns `begin` to `end` of the projection to one group of heads.

    Groups are numbered as in `core.reads.heads`. In attention they are gates, queries, keys and
    values, in this order.
    """
    counts = place.core.reads.heads
    alike = next((n for n, count in enumerate(counts) if count != counts[0]), len(counts))
    path, index = ("site/read", group) if group < alike else ("site/read_fewer", group - alike)
    return place.piece("", path, (index, index + 1), (0, dim), (begin, end))


def _attention_pieces(layer: str, place: Place, dim: int) -> Iterator[Piece]:
    """Yield the tensors of gated attention. In `q_proj`, a gate follows each query."""
    core, size, name = place.core, place.core.head_dim, f"{layer}self_attn."
    heads = ((head * size, (head + 1) * size) for head in range(core.num_heads))
    queries = [_read(place, group, *head, dim) for head in heads for group in (1, 0)]
    yield from joined(f"{name}q_proj.weight", queries)
    for letter, group in (("k", 2), ("v", 3)):
        matrix = _read(place, group, 0, core.kv_heads * size, dim)
        yield matrix._replace(name=f"{name}{letter}_proj.weight")
    for letter, gain in (("q", "query"), ("k", "key")):
        norm = place.piece(f"{name}{letter}_norm.weight", f"core/{gain}_gain", (0, size))
        yield norm._replace(offset=1.0)


def _apart(layer: str, place: Place, dim: int) -> Iterator[Piece]:
    """Yield the projections of Gated DeltaNet in Qwen3.5: four separate tensors."""
    core, size, name = place.core, place.core.head_dim, f"{layer}linear_attn."
    widths = (size * count for count in core.reads.heads)
    *of_values, gates = (_read(place, n, 0, width, dim) for n, width in enumerate(widths))
    yield from joined(f"{name}in_proj_qkv.weight", of_values)
    yield gates._replace(name=f"{name}in_proj_z.weight")
    for letter, path in (("b", "core/w_beta"), ("a", "core/w_decay")):
        yield place.piece(f"{name}in_proj_{letter}.weight", path, *full(dim, core.num_heads))


def _ordered_by_heads(layer: str, place: Place, dim: int) -> Iterator[Piece]:
    """Yield the projections of Gated DeltaNet in Qwen3-Next: two tensors, grouped by key head."""
    core, size, name = place.core, place.core.head_dim, f"{layer}linear_attn."
    each = core.num_heads // core.key_heads
    projections, numbers = [], []
    for head in range(core.key_heads):
        for group, count in ((0, 1), (1, 1), (2, each), (3, each)):
            width = count * size
            projections.append(_read(place, group, head * width, (head + 1) * width, dim))
        for path in ("core/w_beta", "core/w_decay"):
            at = (0, dim), (head * each, (head + 1) * each)
            numbers.append(place.piece("", path, *at))
    yield from joined(f"{name}in_proj_qkvz.weight", projections)
    yield from joined(f"{name}in_proj_ba.weight", numbers)


def _net_pieces(layer: str, place: Place) -> Iterator[Piece]:
    """Yield Gated DeltaNet's convolution weights, decay parameters and norm gain."""
    core, size, name = place.core, place.core.head_dim, f"{layer}linear_attn."
    taps = core.conv_size
    alike = core.key_heads == core.num_heads
    of_values = ("core/taps", 2) if alike else ("core/value_taps", 0)
    groups = ("core/taps", 0), ("core/taps", 1), of_values
    widths = (size * count for count in (core.key_heads, core.key_heads, core.num_heads))
    convolved = [
        place.piece("", path, (0, taps), (index, index + 1), (0, width))._replace(ones=(1,))
        for (path, index), width in zip(groups, widths, strict=True)
    ]
    yield from joined(f"{name}conv1d.weight", convolved)
    yield place.piece(f"{name}A_log", "core/log_rate", (0, core.num_heads))
    yield place.piece(f"{name}dt_bias", "core/decay_bias", (0, core.num_heads))
    yield place.piece(f"{name}norm.weight", "core/gain", (0, size))


def _mlp_pieces(name: str, place: Place, dim: int, stacked: bool) -> Iterator[Piece]:
    core, own = place.core, ""
    if core.kind == cfg.Experts.kind:
        yield place.piece(f"{name}gate.weight", "core/w_router", *full(dim, core.num_experts))
        firsts, downs = [], []
        for e in range(core.num_experts):
            for k, matrix in enumerate(("gate", "up")):
                at = (e, e + 1), (0, dim), (k, k + 1), (0, core.hidden_dim)
                expert = f"{name}experts.{e}.{matrix}_proj.weight"
                firsts.append(place.piece(expert, "core/w_1", *at))
            down = (e, e + 1), *full(core.hidden_dim, dim)
            downs.append(place.piece(f"{name}experts.{e}.down_proj.weight", "core/w_2", *down))
        if stacked:
            firsts, downs = (
                [piece._replace(stacked=core.num_experts) for piece in joined(name + end, parts)]
                for end, parts in ((_STACKED, firsts), ("experts.down_proj", downs))
            )
        yield from firsts + downs
        yield place.piece(f"{name}shared_expert_gate.weight", "core/w_shared_gate", *full(dim, 1))
        name, own = f"{name}shared_expert.", "shared/"
    hidden = core.hidden_dim * (core.shared if own else 1)
    for k, matrix in enumerate(("gate", "up")):
        at = (k, k + 1), *full(dim, hidden)
        yield place.piece(f"{name}{matrix}_proj.weight", f"core/{own}w_1", *at)
    yield place.piece(f"{name}down_proj.weight", f"core/{own}w_2", *full(hidden, dim))
