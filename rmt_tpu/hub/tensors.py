"""The tensors of a hub model, each mapped to a slice of a parameter (a `Piece`)."""

from collections.abc import Iterable, Iterator

from rmt_tpu import config as cfg
from rmt_tpu.hub import attnres, gpt2, latent_pieces, own, qwen3_next
from rmt_tpu.hub.families import (
    ATTNRES,
    EXPERTS,
    GEMMA,
    GPT2,
    LATENT,
    NEXT,
    OWN,
    PARTIAL_ROPE,
    Family,
)
from rmt_tpu.hub.pieces import Piece, Place, full, joined, places

UNEMBEDDING = "unembedding", "kernel"  # the path of W_U, the unembedding matrix


def pieces(
    model: cfg.ModelConfig, family: Family, names: Iterable[str] | None = None
) -> list[Piece]:
    """Return all tensors of a model, each mapped to a slice of a parameter.

    Hub tensors and parameters have the same order of heads. In both, RoPE rotates the two halves of
    a head, except in some models with latent attention, whose numbers are reordered. A model with
    tied embeddings has no tensor for W_U.

    Args:
      model: the model.
      family: the model type.
      names: the names of the tensors in an existing folder, or None. Some model types have two
        forms of files, and the names show which form a folder has.
    """
    tensors = _pieces(model, family, names)
    return [x for x in tensors if not model.tied_embeddings or x.path != UNEMBEDDING]


def _pieces(model: cfg.ModelConfig, family: Family, names: Iterable[str] | None) -> list[Piece]:
    """Return all tensors of a model, including one for W_U even if embeddings are tied."""
    if OWN in family.traits:
        return list(own.pieces(model))
    if GPT2 in family.traits:
        return list(gpt2.pieces(model))
    if NEXT in family.traits:
        return list(qwen3_next.pieces(model, family, names))
    if LATENT in family.traits:
        return list(latent_pieces.pieces(model, family, names))
    dim, vocab = model.store.dim, model.vocab_size
    tensors = [
        Piece("model.embed_tokens.weight", ("embedding", "tokens"), full(vocab, dim)),
        Piece("model.norm.weight", ("final_site", "gain"), full(dim)),
        Piece("lm_head.weight", ("unembedding", "kernel"), full(dim, vocab), True),
    ]
    sublayers = list(places(model))
    for layer, (attention, mlp) in enumerate(zip(sublayers[::2], sublayers[1::2], strict=True)):
        name = f"model.layers.{layer}."
        tensors += _attention_pieces(name, attention, dim, family)
        tensors += _mlp_pieces(name, mlp, attention, dim, family)
        if ATTNRES in family.traits:
            tensors += attnres.pieces(name, attention, "attn", dim)
            tensors += attnres.pieces(name, mlp, "mlp", dim)
    if GEMMA in family.traits:
        is_gain = lambda piece: piece.name.endswith("norm.weight")
        tensors = [piece._replace(offset=1.0) if is_gain(piece) else piece for piece in tensors]
    return tensors


def _attention_pieces(layer: str, place: Place, dim: int, family: Family) -> Iterator[Piece]:
    """Yield the tensors of an attention sublayer, except W_O."""
    core, size = place.core, place.core.head_dim
    equal = core.num_heads == core.kv_heads
    norms = {"input": "site/gain", "post_attention": "core/output_gain"}
    yield from _norm_pieces(layer, place, norms, dim)
    begin, projections = 0, []
    for number, (letter, count) in enumerate(zip("qkv", core.reads.heads, strict=True)):
        name, fewer = f"{layer}self_attn.{letter}", number > 0 and not equal
        path, index = "site/read_fewer" if fewer else "site/read", number - fewer
        at = (index, index + 1), *full(dim, count * size)
        projections.append(place.piece(f"{name}_proj.weight", path, *at))
        if core.bias:
            yield place.piece(f"{name}_proj.bias", "core/bias", (begin, begin + count), (0, size))
        begin += count
    if PARTIAL_ROPE in family.traits:
        projections = joined(f"{layer}self_attn.qkv_proj.weight", projections)
    yield from projections
    if core.query_key_norm:
        over_heads = core.query_key_norm_over == "heads"
        for letter, gain, count in (("q", "query", core.num_heads), ("k", "key", core.kv_heads)):
            at = full(count, size) if over_heads else full(size)
            name = f"{layer}self_attn.{letter}_norm.weight"
            yield place.piece(name, f"core/{gain}_gain", *at)


def _mlp_pieces(
    layer: str, place: Place, attention: Place, dim: int, family: Family
) -> Iterator[Piece]:
    """Yield the tensors of a feed-forward sublayer, and W_O of the attention before it.

    If the attention core projects its own output, W_O is a parameter of that core. Otherwise W_O
    belongs to the feed-forward sublayer's site, which writes the attention's output.
    """
    core, width = place.core, attention.core.num_heads * attention.core.head_dim
    owner, path = (attention, "core/w_out") if attention.core.projects else (place, "site/write")
    yield owner.piece(f"{layer}self_attn.o_proj.weight", path, *full(width, dim))
    first = "pre_feedforward" if GEMMA in family.traits else "post_attention"
    norms = {first: "site/gain", "post_feedforward": "core/output_gain"}
    yield from _norm_pieces(layer, place, norms, dim)
    if EXPERTS in family.traits and hasattr(core, "num_experts"):
        yield from _expert_pieces(layer, place, dim)
        return
    projections = [
        place.piece(
            f"{layer}mlp.{name}_proj.weight", "core/w_1", (k, k + 1), *full(dim, core.hidden_dim)
        )
        for k, name in enumerate(("gate", "up"))
    ]
    if PARTIAL_ROPE in family.traits:
        projections = joined(f"{layer}mlp.gate_up_proj.weight", projections)
    yield from projections
    down = full(core.hidden_dim, dim)
    yield place.piece(f"{layer}mlp.down_proj.weight", "core/w_2", *down)


def _norm_pieces(layer: str, place: Place, norms: dict[str, str], dim: int) -> Iterator[Piece]:
    """Yield the gains of a sublayer's input norm and output norm, if it has them."""
    normed = getattr(place.core, "normed", "input")
    has = {"site/gain": normed != "output", "core/output_gain": normed != "input"}
    for name, path in norms.items():
        if has[path]:
            yield place.piece(f"{layer}{name}_layernorm.weight", path, (0, dim))


def _expert_pieces(layer: str, place: Place, dim: int) -> Iterator[Piece]:
    """Yield the tensors of a layer's router and experts."""
    count, hidden = place.core.num_experts, place.core.hidden_dim
    yield place.piece(f"{layer}mlp.gate.weight", "core/w_router", *full(dim, count))
    for e in range(count):
        name, own = f"{layer}mlp.experts.{e}.", (e, e + 1)
        for k, matrix in enumerate(("gate", "up")):
            at = own, (0, dim), (k, k + 1), (0, hidden)
            yield place.piece(f"{name}{matrix}_proj.weight", "core/w_1", *at)
        yield place.piece(f"{name}down_proj.weight", "core/w_2", own, *full(hidden, dim))
