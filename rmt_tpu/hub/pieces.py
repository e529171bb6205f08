"""The correspondence between the hub's tensors and parameters."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from rmt_tpu import config as cfg

Range = tuple[int, int]
Path = tuple[Any, ...]


class Piece(NamedTuple):
    """The correspondence between a tensor in the hub's format and a slice of a parameter.

    Attributes:
      name: the name of the tensor.
      path: the path of the parameter in the tree of `nnx.to_pure_dict`.
      at: the (start, stop) of the slice along each axis of the parameter.
      transposed: whether the tensor's last two axes are swapped relative to the parameter's.
    """

    name: str
    path: Path
    at: tuple[Range, ...]
    transposed: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the slice along the parameter's axes."""
        return tuple(stop - start for start, stop in self.at)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
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


def pieces(model: cfg.ModelConfig) -> list[Piece]:
    """Return all tensors of a model of the hub, as slices of parameters.

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
        tensors += _attention_pieces(name, attention, dim)
        tensors += _mlp_pieces(name, mlp, attention, dim)
    return tensors


def _full(*sizes: int) -> tuple[Range, ...]:
    return tuple((0, size) for size in sizes)


def _attention_pieces(layer: str, place: Place, dim: int) -> Iterator[Piece]:
    """Yield the tensors of an attention sublayer, but for W_O."""
    core, size = place.core, place.core.head_dim
    equal = core.num_heads == core.kv_heads
    yield place.piece(f"{layer}input_layernorm.weight", "site/gain", (0, dim))
    begin = 0
    for number, (letter, count) in enumerate(zip("qkv", core.reads.heads, strict=True)):
        name, fewer = f"{layer}self_attn.{letter}", number > 0 and not equal
        path, index = "site/read_fewer" if fewer else "site/read", number - fewer
        at = (index, index + 1), *_full(dim, count * size)
        yield place.piece(f"{name}_proj.weight", path, *at)
        if core.bias:
            yield place.piece(f"{name}_proj.bias", "core/bias", (begin, begin + count), (0, size))
        begin += count
    if core.query_key_norm:
        for letter, gain in (("q", "query_gain"), ("k", "key_gain")):
            yield place.piece(f"{layer}self_attn.{letter}_norm.weight", f"core/{gain}", (0, size))


def _mlp_pieces(layer: str, place: Place, attention: Place, dim: int) -> Iterator[Piece]:
    """Yield the tensors of a feed-forward sublayer, and the W_O of the attention before it.

    A feed-forward sublayer's site writes what the attention before it computes.
    """
    core, width = place.core, attention.core.num_heads * attention.core.head_dim
    matrix = _full(dim, core.hidden_dim)
    yield place.piece(f"{layer}self_attn.o_proj.weight", "site/write", *_full(width, dim))
    yield place.piece(f"{layer}post_attention_layernorm.weight", "site/gain", (0, dim))
    yield place.piece(f"{layer}mlp.gate_proj.weight", "core/w_1", (0, 1), *matrix)
    yield place.piece(f"{layer}mlp.up_proj.weight", "core/w_1", (1, 2), *matrix)
    yield place.piece(f"{layer}mlp.down_proj.weight", "core/w_2", *_full(core.hidden_dim, dim))
