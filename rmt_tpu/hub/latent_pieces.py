"""The tensors of models with latent attention, each mapped to a slice of a parameter.

`rmt_tpu.hub.latent` describes these models. A `Piece` is one such mapping (`rmt_tpu.hub.pieces`).
"""

from collections.abc import Iterable, Iterator

from rmt_tpu import config as cfg
from rmt_tpu.hub import kimi_k3
from rmt_tpu.hub.families import INTERLEAVED, KIMI, PACKED, Family
from rmt_tpu.hub.pieces import Part, Piece, Place, full, joined, places

# Name prefixes of feed-forward tensors: `_SPARSE` for Kimi Linear's layers with experts, and
# `_DENSE` for all other layers.
_DENSE, _SPARSE = "mlp.", "block_sparse_moe."


def pieces(model: cfg.ModelConfig, family: Family, names: Iterable[str] | None) -> Iterator[Piece]:
    """Yield all tensors of a Kimi Linear or DeepSeek-V3 model, as slices of parameters.

    If a file's RoPE rotates pairs of adjacent numbers, the rows are reordered. A parameter has
    the first numbers of all pairs, followed by the second numbers.

    For layers without experts, files of Kimi Linear may use the name prefix of layers with experts,
    as the transformers library does. `names`, the tensor names of an existing folder, shows which
    prefix its files use.
    """
    has_other = names is not None and any(
        name.endswith(f".{_SPARSE}gate_proj.weight") for name in names
    )
    dense_name = _SPARSE if has_other else _DENSE
    dim, vocab = model.store.dim, model.vocab_size
    yield Piece("model.embed_tokens.weight", ("embedding", "tokens"), full(vocab, dim))
    yield Piece("model.norm.weight", ("final_site", "gain"), full(dim))
    yield Piece("lm_head.weight", ("unembedding", "kernel"), full(dim, vocab), True)
    over_depth = isinstance(model.mixer, cfg.BlockAttention)
    if over_depth:
        yield from kimi_k3.output_pieces(dim)
    sublayers = list(places(model))
    for layer, (mixing, mlp) in enumerate(zip(sublayers[::2], sublayers[1::2], strict=True)):
        name = f"model.layers.{layer}."
        for place, norm in ((mixing, "input"), (mlp, "post_attention")):
            yield place.piece(f"{name}{norm}_layernorm.weight", "site/gain", (0, dim))
        for place, sublayer in ((mixing, "self_attention"), (mlp, "mlp")) if over_depth else ():
            yield from kimi_k3.site_pieces(name, place, sublayer, dim)
        attention = f"{name}self_attn."
        if mixing.core.kind == cfg.Kda.kind:
            yield from _delta_attention_pieces(attention, mixing, dim)
        else:
            yield from _latent_attention_pieces(
                attention, mixing, dim, INTERLEAVED in family.traits
            )
        width = mixing.core.num_heads * mixing.core.head_dim
        yield mlp.piece(f"{attention}o_proj.weight", "site/write", *full(width, dim))
        if mlp.core.kind == cfg.Experts.kind:
            yield from _expert_pieces(name, mlp, dim, family)
        else:
            yield from _gated_pieces(f"{name}{dense_name}", mlp, "core/", dim, mlp.core.hidden_dim)


def _delta_attention_pieces(name: str, place: Place, dim: int) -> Iterator[Piece]:
    core, rank, taps = place.core, place.core.rank, place.core.conv_size
    heads, width = core.num_heads, core.num_heads * core.head_dim
    for group, letter in enumerate("qkv"):
        own = group, group + 1
        yield place.piece(f"{name}{letter}_proj.weight", "site/read", own, *full(dim, width))
        at = (0, taps), own, (0, width)
        convolved = place.piece(f"{name}{letter}_conv1d.weight", "core/taps", *at)
        yield convolved._replace(ones=(1,))
    low_rank = [("f", "decay"), ("g", "gate")]
    if core.gates == "full":
        low_rank.pop()
        yield place.piece(f"{name}g_proj.weight", "site/read", (3, 4), *full(dim, width))
    for letter, gate in low_rank:
        yield place.piece(f"{name}{letter}_a_proj.weight", f"core/w_{gate}_down", *full(dim, rank))
        yield place.piece(f"{name}{letter}_b_proj.weight", f"core/w_{gate}_up", *full(rank, width))
    yield place.piece(f"{name}b_proj.weight", "core/w_beta", *full(dim, heads))
    rates = place.piece(f"{name}A_log", "core/log_rate", (0, heads))
    yield rates._replace(ones=(0, 1, 3), exact=True, padded=True)
    biases = place.piece(f"{name}dt_bias", "core/decay_bias", (0, width))
    yield biases._replace(exact=True)
    yield place.piece(f"{name}o_norm.weight", "core/gain", (0, core.head_dim))


def _latent_attention_pieces(
    name: str, place: Place, dim: int, interleaved: bool
) -> Iterator[Piece]:
    core, rank, latent = place.core, place.core.query_rank, place.core.kv_rank
    query, inputs = "q_proj", dim
    if rank is not None:
        query, inputs = "q_b_proj", rank
        yield place.piece(f"{name}q_a_proj.weight", "core/w_q_down", *full(dim, rank))
        yield place.piece(f"{name}q_a_layernorm.weight", "core/q_gain", (0, rank))
    turned = core.rope_dim if interleaved else 0
    sizes = core.num_heads * [core.head_dim, core.rope_dim]
    yield from _rotated(f"{name}{query}.weight", place, "core/w_q", inputs, sizes, turned)
    sizes, down = [latent, core.rope_dim], f"{name}kv_a_proj_with_mqa.weight"
    yield from _rotated(down, place, "core/w_kv_down", dim, sizes, turned)
    yield place.piece(f"{name}kv_a_layernorm.weight", "core/kv_gain", (0, latent))
    size = core.head_dim
    if core.output_gate:
        width = core.num_heads * size
        yield place.piece(f"{name}g_proj.weight", "core/w_gate", *full(dim, width))
    # In the file, the keys of each head are followed by the values of that head.
    heads = [
        place.piece("", "core/w_kv_up", (k, k + 1), (0, latent), (head * size, (head + 1) * size))
        for head in range(core.num_heads)
        for k in range(2)
    ]
    yield from joined(f"{name}kv_b_proj.weight", heads)


def _rotated(
    name: str, place: Place, path: str, inputs: int, sizes: list[int], turned: int
) -> Iterator[Piece]:
    """Yield the pieces of a matrix in which outputs without RoPE alternate with outputs with RoPE.

    Args:
      name: the name of the tensor.
      place: the location of the sublayer's parameters.
      path: the path of the parameter.
      inputs: the number of the matrix's inputs.
      sizes: the sizes of the output parts, alternately without and with RoPE.
      turned: the size of an output part with RoPE if the file stores it as adjacent pairs;
        otherwise 0.
    """
    total, begin = sum(sizes), 0
    if not turned:
        yield place.piece(name, path, *full(inputs, total))
        return
    for number, size in enumerate(sizes):
        step = 1 + number % 2
        for first in range(step):
            start, count = begin + first * (size // step), size // step
            piece = place.piece(name, path, (0, inputs), (start, start + count))
            yield piece._replace(part=Part(0, begin + first, total, step))
        begin += size


def _expert_pieces(layer: str, place: Place, dim: int, family: Family) -> Iterator[Piece]:
    core, hidden, is_kimi = place.core, place.core.hidden_dim, KIMI in family.traits
    size, packed = core.latent_dim or dim, PACKED in family.traits
    name = f"{layer}{_SPARSE if is_kimi else _DENSE}"
    matrices = ("w1", "w3", "w2") if is_kimi else ("gate_proj", "up_proj", "down_proj")
    yield place.piece(f"{name}gate.weight", "core/w_router", *full(dim, core.num_experts))
    biases = place.piece(f"{name}gate.e_score_correction_bias", "core/load", (0, core.num_experts))
    yield biases._replace(factor=core.balance.rate, exact=True)
    for e in range(core.num_experts):
        own = e, e + 1
        for k, matrix in enumerate(matrices[:2]):
            at = own, (0, size), (k, k + 1), (0, hidden)
            piece = place.piece(f"{name}experts.{e}.{matrix}.weight", "core/w_1", *at)
            yield piece._replace(packed=packed)
        at = own, *full(hidden, size)
        piece = place.piece(f"{name}experts.{e}.{matrices[2]}.weight", "core/w_2", *at)
        yield piece._replace(packed=packed)
    yield from kimi_k3.latent_pieces(name, place, dim)
    if core.shared:
        shared = core.shared * hidden
        yield from _gated_pieces(f"{name}shared_experts.", place, "core/shared/", dim, shared)


def _gated_pieces(name: str, place: Place, path: str, dim: int, hidden: int) -> Iterator[Piece]:
    for k, matrix in enumerate(("gate", "up")):
        at = (k, k + 1), *full(dim, hidden)
        yield place.piece(f"{name}{matrix}_proj.weight", f"{path}w_1", *at)
    yield place.piece(f"{name}down_proj.weight", f"{path}w_2", *full(hidden, dim))
