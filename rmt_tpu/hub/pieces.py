"""The correspondence between the hub's tensors and parameters."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from rmt_tpu import config as cfg
from rmt_tpu.hub.families import PARTIAL_ROPE, Family

Range = tuple[int, int]
Path = tuple[Any, ...]


class Part(NamedTuple):
    """The part of a tensor along one axis: from `begin`, of `total` rows or columns."""

    axis: int
    begin: int
    total: int


class Piece(NamedTuple):
    """The correspondence between a tensor in the hub's format and a slice of a parameter.

    Attributes:
      name: the name of the tensor.
      path: the path of the parameter in the tree of `nnx.to_pure_dict`.
      at: the (start, stop) of the slice along each axis of the parameter.
      transposed: whether the tensor's last two axes are swapped relative to the parameter's.
      part: the part of the tensor that the slice is; None if it is the whole tensor. The pieces of
        a tensor follow each other.
    """

    name: str
    path: Path
    at: tuple[Range, ...]
    transposed: bool = False
    part: Part | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the slice along the parameter's axes."""
        return tuple(stop - start for start, stop in self.at)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        shape = list(self.own_shape)
        if self.part is not None:
            shape[self.part.axis] = self.part.total
        return tuple(shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the piece in its tensor."""
        if self.part is None:
            return (slice(None),) * len(self.own_shape)
        axis, begin, _ = self.part
        index = [slice(None)] * len(self.own_shape)
        index[axis] = slice(begin, begin + self.own_shape[axis])
        return tuple(index)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the piece of the tensor."""
        *rows, last = self.sizes
        if self.name.endswith((".bias", "norm.weight")):
            return (math.prod(self.sizes),)
        row = math.prod(rows)
        return (last, row) if self.transposed else (row, last)


class Place(NamedTuple):
    """Where the parameters of one sublayer are: in a repeat of a core of a stack.

    Attributes:
      core: the config of the sublayer's core.
      path: the path of the sublayer's parameters, whose first axis counts repeats.
      repeat: the number of the repeat.
    """

    core: cfg.Core
    path: Path
    repeat: int

    def piece(self, name: str, path: str, *at: Range, transposed: bool = True) -> Piece:
        """Return the piece of the parameter "site/<name>" or "core/<name>" of this sublayer."""
        own = (self.repeat, self.repeat + 1)
        return Piece(name, (*self.path, *path.split("/")), (own, *at), transposed)


def places(model: cfg.ModelConfig) -> Iterator[Place]:
    """Yield the place of every sublayer, in the order of depth."""
    for number, stack in enumerate(model.stacks):
        for repeat in range(stack.repeat):
            for k, core in enumerate(stack.cores):
                yield Place(core, ("stacks", number, k), repeat)


def pieces(model: cfg.ModelConfig, family: Family) -> list[Piece]:
    """Return all tensors of a model of a kind, as slices of parameters.

    No numbers have to be reordered: the hub's format and the parameters agree on the order of heads
    along an axis and on RoPE, which rotates the two halves of a head. If the model has biases of
    queries, keys and values, or norms of queries and keys, their tensors are included.
    """
    dim, vocab = model.store.dim, model.vocab_size
    tensors = [
        Piece("model.embed_tokens.weight", ("embedding", "tokens"), _full(vocab, dim)),
        Piece("model.norm.weight", ("final_site", "gain"), _full(dim)),
        Piece("lm_head.weight", ("unembedding", "kernel"), _full(dim, vocab), True),
    ]
    sublayers = list(places(model))
    for layer, (attention, mlp) in enumerate(zip(sublayers[::2], sublayers[1::2], strict=True)):
        name = f"model.layers.{layer}."
        tensors += _attention_pieces(name, attention, dim, family)
        tensors += _mlp_pieces(name, mlp, attention, dim, family)
    return tensors


def _joined(name: str, parts: list[Piece], axis: int = 0) -> list[Piece]:
    """Return pieces as consecutive parts, along `axis`, of one tensor."""
    sizes = [piece.own_shape[axis] for piece in parts]
    begins = itertools.accumulate(sizes, initial=0)
    return [
        piece._replace(name=name, part=Part(axis, begin, sum(sizes)))
        for piece, begin in zip(parts, begins, strict=False)
    ]


def _full(*sizes: int) -> tuple[Range, ...]:
    return tuple((0, size) for size in sizes)


def _attention_pieces(layer: str, place: Place, dim: int, family: Family) -> Iterator[Piece]:
    """Yield the tensors of an attention sublayer, but for W_O."""
    core, size = place.core, place.core.head_dim
    equal = core.num_heads == core.kv_heads
    yield place.piece(f"{layer}input_layernorm.weight", "site/gain", (0, dim))
    begin, projections = 0, []
    for number, (letter, count) in enumerate(zip("qkv", core.reads.heads, strict=True)):
        name, fewer = f"{layer}self_attn.{letter}", number > 0 and not equal
        path, index = "site/read_fewer" if fewer else "site/read", number - fewer
        at = (index, index + 1), *_full(dim, count * size)
        projections.append(place.piece(f"{name}_proj.weight", path, *at))
        if core.bias:
            yield place.piece(f"{name}_proj.bias", "core/bias", (begin, begin + count), (0, size))
        begin += count
    if PARTIAL_ROPE in family.traits:
        projections = _joined(f"{layer}self_attn.qkv_proj.weight", projections)
    yield from projections
    if core.query_key_norm:
        for letter, gain in (("q", "query_gain"), ("k", "key_gain")):
            yield place.piece(f"{layer}self_attn.{letter}_norm.weight", f"core/{gain}", (0, size))


def _mlp_pieces(
    layer: str, place: Place, attention: Place, dim: int, family: Family
) -> Iterator[Piece]:
    """Yield the tensors of a feed-forward sublayer, and the W_O of the attention before it.

    A feed-forward sublayer's site writes what the attention before it computes.
    """
    core, width = place.core, attention.core.num_heads * attention.core.head_dim
    yield place.piece(f"{layer}self_attn.o_proj.weight", "site/write", *_full(width, dim))
    yield place.piece(f"{layer}post_attention_layernorm.weight", "site/gain", (0, dim))
    projections = [
        place.piece(
            f"{layer}mlp.{name}_proj.weight", "core/w_1", (k, k + 1), *_full(dim, core.hidden_dim)
        )
        for k, name in enumerate(("gate", "up"))
    ]
    if PARTIAL_ROPE in family.traits:
        projections = _joined(f"{layer}mlp.gate_up_proj.weight", projections)
    yield from projections
    down = _full(core.hidden_dim, dim)
    yield place.piece(f"{layer}mlp.down_proj.weight", "core/w_2", *down)
