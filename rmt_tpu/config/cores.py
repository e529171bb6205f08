"""Configs of cores, which are the computations of sublayers, of positions, and of stacks of cores.

`rmt_tpu.config` re-exports them. A file of `rmt_tpu/cores/` builds each core.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Checked, LogDecay, Positive, Size
from rmt_tpu.config.core import WHOLE, Computes, Heads, Port, Softmax
from rmt_tpu.config.experts import Experts
from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class Learned(Checked):
    """A learned vector for each of `max_length` (N) positions, written with the embedding."""

    kind: ClassVar[str] = "learned"
    max_length: Size = 512


@dataclass(frozen=True)
class Alibi:
    """Attention logits that fall with distance, by slope `2^(-8 (h + 1) / num_heads)` in head h."""

    kind: ClassVar[str] = "alibi"


@dataclass(frozen=True)
class Llama3Scaling(Checked):
    """A division of RoPE's low frequencies, for texts longer than those trained on (Llama 3.1).

    Frequencies f that turn fewer than `low` times within `original_length` tokens become
    `f / factor`, those that turn more than `high` times stay, and those between are interpolated.
    """

    kind: ClassVar[str] = "llama3"
    factor: Positive = 8.0
    low: Positive = 1.0
    high: Positive = 4.0
    original_length: Size = 8192

    def __post_init__(self):
        super().__post_init__()
        if self.low >= self.high:
            raise UsageError(
                f"Llama3Scaling.low={self.low} must be below high={self.high}, like low=1 high=4"
            )


@dataclass(frozen=True)
class Rope(Checked):
    """Rotation of queries and keys by their position, at frequencies `base^(-2 i / dims)`.

    Attributes:
      base: base of the frequencies.
      dims: how many of a head's first numbers are rotated; None is all of them.
      scaling: a change of frequencies, or None.
    """

    kind: ClassVar[str] = "rope"
    base: Positive = 10_000.0
    dims: Size | None = None
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True)
class NoPositions:
    """No positions: the order of tokens is known from the causal mask alone."""

    kind: ClassVar[str] = "none"


Positions = Learned | Alibi | Rope | NoPositions


@dataclass(frozen=True)
class Attention(Heads):
    """Softmax attention.

    Attributes:
      inverse_layer_scaling: whether the logits of layer l are divided by l + 1.
      num_kv_heads: number of heads of keys and values, each of which serves
        `num_heads / num_kv_heads` adjacent heads of queries (grouped queries); None is one for each
        head.
      query_key_norm: whether queries and keys are RMS-normalised over `head_dim` with a gain,
        before they are rotated.
      bias: whether a vector is added to every query, key and value.
    """

    kind: ClassVar[str] = "attention"
    letter: ClassVar[str] = "A"
    positions: Positions = Learned()
    inverse_layer_scaling: bool = True
    num_kv_heads: Size | None = None
    query_key_norm: bool = False
    bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.positions, Rope):
            self._check_rope(self.positions.dims)
        if self.num_heads % self.kv_heads:
            legal = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise UsageError(
                f"Attention.num_kv_heads={self.num_kv_heads} does not divide num_heads="
                f"{self.num_heads}; legal: {', '.join(map(str, legal))}"
            )

    def _check_rope(self, dims: int | None):
        if dims is None and self.head_dim % 2:
            raise UsageError(
                f"Attention.head_dim={self.head_dim} must be even for rope positions, "
                f"like {self.head_dim + 1}"
            )
        if dims is not None and (dims % 2 or dims > self.head_dim):
            raise UsageError(
                f"Attention.positions.dims={dims} must be even and at most head_dim={self.head_dim}"
            )

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def softmax(self) -> Softmax:
        """The softmax over every earlier token."""
        alibi = isinstance(self.positions, Alibi)
        return Softmax(self.num_heads, self.kv_heads, self.head_dim, self.head_dim, alibi)

    @property
    def reads(self) -> Port:
        """Queries, keys and values of every head."""
        heads = (self.num_heads, self.kv_heads, self.kv_heads)
        return Port(heads=heads, head_dim=self.head_dim)

    @property
    def divided_heads(self) -> dict[str, int]:
        """Numbers of heads, by field, that are divided among the devices that share tokens."""
        return {"num_heads": self.num_heads, "num_kv_heads": self.kv_heads}

    def sharing_heads(self, devices: int) -> "Attention":
        """Return the core with key and value heads repeated until `devices` divide them."""
        if self.kv_heads % devices == 0:
            return self
        return replace(self, num_kv_heads=math.lcm(self.kv_heads, devices))

    def parameters(self, width: int, read_width: int) -> int:
        """Return the number of gains and biases; the site has the queries' and keys' matrices."""
        biases = sum(self.reads.heads) if self.bias else 0
        return (2 * self.query_key_norm + biases) * self.head_dim

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs of one token: logits, weighted values, and 3 for each softmax term."""
        return 4 * seq_len * self.num_heads * self.head_dim + 3 * seq_len * self.num_heads


@dataclass(frozen=True)
class FeedForward(Computes):
    """`W_2 f(W_1 z)` with `hidden_dim` (D_FF) hidden neurons.

    Attributes:
      activation: f, which is gelu ("gelu_exact"), its approximation by tanh ("gelu_tanh"), or
        `relu(x)^2` ("relu2"); or `silu(gate) * up` ("swiglu") or `gelu_tanh(gate) * up` ("geglu")
        of a gate and an up projection, which are two parts of W_1.
    """

    kind: ClassVar[str] = "feed_forward"
    letter: ClassVar[str] = "F"
    hidden_dim: Size
    activation: Literal["gelu_tanh", "gelu_exact", "relu2", "swiglu", "geglu"] = "gelu_tanh"

    @property
    def gated(self) -> bool:
        """Whether W_1 has a gate in addition to the up projection."""
        return self.activation in ("swiglu", "geglu")

    @property
    def reads(self) -> Port:
        """All of the store's data vectors."""
        return WHOLE

    @property
    def writes(self) -> Port:
        """All of the store's data vectors."""
        return WHOLE

    @property
    def divided_heads(self) -> dict[str, int]:
        """Empty: devices need not exchange tokens."""
        return {}

    def parameters(self, width: int, read_width: int) -> int:
        """Return the number of weights in W_1 and W_2, given the widths of its output and input."""
        return ((1 + self.gated) * read_width + width) * self.hidden_dim

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs of one token: two products with matrices."""
        return 2 * self.parameters(width, read_width)


@dataclass(frozen=True)
class Mla(Heads):
    """Multi-head latent attention.

    Attributes:
      kv_rank: rank of the latent from which keys and values of all heads are made.
      rope_dim: size of an additional part of queries and keys (D_r); all heads share the keys'
        part.
      query_rank: rank of a latent for the queries; None makes them directly from the input.
      positions: whether these additional parts are rotated ("rope").

    The norms of both latents have the model's `norm_epsilon`, like all its norms. In transformers,
    those of Kimi Linear and DeepSeek-V3 always have 1e-6, which makes a difference for weights from
    there whose latents are small. The hub's form has no such model.
    """

    kind: ClassVar[str] = "mla"
    letter: ClassVar[str] = "M"
    kv_rank: Size
    rope_dim: Size
    query_rank: Size | None = None
    positions: Rope | NoPositions = Rope()

    def __post_init__(self):
        super().__post_init__()
        rotated = isinstance(self.positions, Rope)
        if rotated and self.positions.dims not in (None, self.rope_dim):
            raise UsageError(
                f"Mla.positions.dims={self.positions.dims} must be rope_dim={self.rope_dim}"
            )
        if rotated and self.rope_dim % 2:
            raise UsageError(
                f"Mla.rope_dim={self.rope_dim} must be even for rope positions, "
                f"like {self.rope_dim + 1}"
            )

    @property
    def query_dim(self) -> int:
        """Size of a query, and of a key."""
        return self.head_dim + self.rope_dim

    @property
    def softmax(self) -> Softmax:
        """The softmax over every earlier token, with keys and values expanded from the latents."""
        return Softmax(self.num_heads, self.num_heads, self.query_dim, self.head_dim)

    @property
    def reads(self) -> Port:
        """All of the store's data vectors."""
        return WHOLE

    def parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters of its matrices and norms."""
        return self._weights(read_width) + self.kv_rank + (self.query_rank or 0)

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs of one token, expanded: matrices, logits, softmax, weighted values."""
        of_head = 2 * self.query_dim + 2 * self.head_dim + 3
        return 2 * self._weights(read_width) + seq_len * self.num_heads * of_head

    def _weights(self, width: int) -> int:
        queries = self.num_heads * self.query_dim
        rank = self.query_rank
        of_queries = width * queries if rank is None else rank * (width + queries)
        up = self.kv_rank * 2 * self.num_heads * self.head_dim
        return of_queries + width * (self.kv_rank + self.rope_dim) + up


@dataclass(frozen=True)
class Kda(Heads):
    """Kimi Delta Attention, which has a state for each head.

    Attributes:
      conv_size: number of tokens that the convolutions of queries, keys and values see.
      gate_rank: rank of the matrices that make decays and output gates; None is `head_dim`.
      lower_bound: lower bound of log decays, like -5, which are then this bound times a sigmoid;
        None is no bound, and a softplus.
    """

    kind: ClassVar[str] = "kda"
    letter: ClassVar[str] = "K"
    by_ring: ClassVar[bool] = False
    conv_size: Size = 4
    gate_rank: Size | None = None
    lower_bound: LogDecay | None = None

    @property
    def rank(self) -> int:
        """Rank of the gates."""
        return self.head_dim if self.gate_rank is None else self.gate_rank

    @property
    def reads(self) -> Port:
        """Queries, keys and values of every head, and the store's data vectors for the gates."""
        return Port(heads=3 * (self.num_heads,), head_dim=self.head_dim, whole=True)

    def parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters of gates, convolutions and the norm."""
        size = self.num_heads * self.head_dim
        vectors = 3 * self.conv_size * size + size + self.num_heads + self.head_dim
        return self._weights(read_width) + vectors

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs of one token: gates, convolutions, and the state in chunks.

        With chunks of C = 64 tokens, the state takes `6 D_h^2 + 3 C D_h + C^2` for each head, as
        the paper counts them.
        """
        size, chunk = self.head_dim, 64
        of_head = 6 * size**2 + 3 * chunk * size + chunk**2 + 6 * self.conv_size * size
        return 2 * self._weights(read_width) + self.num_heads * of_head

    def _weights(self, width: int) -> int:
        size = self.num_heads * self.head_dim
        return 2 * self.rank * (width + size) + width * self.num_heads


Core = Attention | FeedForward | Mla | Kda | Experts


@dataclass(frozen=True)
class Stack(Checked):
    """The cores of one period's sublayers, repeated `repeat` times.

    Parameters have a leading axis of size `repeat`, and a scan runs over it with the period
    unrolled in its body.
    """

    cores: tuple[Core, ...]
    repeat: Size = 1

    def __post_init__(self):
        super().__post_init__()
        if not self.cores:
            raise UsageError("Stack.cores is empty; legal: one core or more")

    @property
    def num_sublayers(self) -> int:
        """Number of sublayers in all repeats."""
        return len(self.cores) * self.repeat


def stacks(layers: Sequence[Sequence[Core]]) -> tuple[Stack, ...]:
    """Return a plain list of layers, each a list of cores, as stacks, merging runs that repeat.

    Of the periods that a run can begin with, the one that covers the most layers is chosen, and the
    shortest of these. A layer that does not repeat is a stack of its own.

        stacks([[kda, dense]] + 2 * ([[kda, experts]] * 3 + [[mla, experts]]))
    """
    layers = [tuple(layer) for layer in layers]
    found: list[Stack] = []
    start = 0
    while start < len(layers):
        period, repeat = max(
            (
                (size, _repeats(layers, start, size))
                for size in range(1, (len(layers) - start) // 2 + 1)
            ),
            key=lambda of: (of[0] * of[1] if of[1] > 1 else 0, -of[0]),
            default=(1, 1),
        )
        period = period if repeat > 1 else 1
        cores = tuple(core for layer in layers[start : start + period] for core in layer)
        found.append(Stack(cores, repeat))
        start += period * repeat
    return tuple(found)


def _repeats(layers: Sequence[tuple[Core, ...]], start: int, size: int) -> int:
    """Return how often the `size` layers from `start` on come one after the other."""
    period, count = layers[start : start + size], 1
    while layers[start + count * size : start + (count + 1) * size] == period:
        count += 1
    return count
