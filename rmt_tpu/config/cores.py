"""Configs of cores (the functions that sublayers compute), and of stacks of cores.

`rmt_tpu.config` re-exports these classes. Each core is implemented in its own file in
`rmt_tpu/cores/`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Checked, LogDecay, Positive, Size
from rmt_tpu.config.core import (
    RESIDUAL_PORT,
    Computes,
    Heads,
    Normed,
    Port,
    Softmax,
    check_situ,
)
from rmt_tpu.config.experts import Experts
from rmt_tpu.config.positions import Alibi, Learned, NoPositions, Positions, Rope
from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class Attention(Heads):
    """Softmax attention.

    Attributes:
      positions: how the attention uses the positions of tokens.
      inverse_layer_scaling: whether the logits in layer l are divided by l + 1.
      num_kv_heads: number of key heads, and of value heads. Each one is shared by `num_heads /
        num_kv_heads` adjacent query heads (grouped queries). None means `num_heads`.
      query_key_norm: whether queries and keys are RMS-normalised with a gain, before RoPE rotates
        them.
      query_key_norm_over: what this norm normalises. With "head", it normalises each head
        separately, with the same gain for all heads. With "heads", it normalises all heads of a
        token as one vector.
      bias: whether queries, keys and values have biases.
      output_bias: whether the output has a bias, a vector of the residual's size.
      output_gate: whether each head's output is multiplied elementwise by the sigmoid of a gate.
        The gate is a vector that is read from the residual like a query (Qiu et al. 2025, Gated
        Attention for Large Language Models).
      normed: whether the model's norm is applied to the core's "input", its "output", or "both".
      window: the number of tokens to which each token attends: itself and the tokens directly
        before it in its document. None means all earlier tokens. Layers may have different windows.
      scale: factor by which products of queries and keys are multiplied; None means `1 /
        sqrt(head_dim)`, or muP's factor.
      logit_cap: a soft cap c on logits: each logit x becomes `c tanh(x / c)`. None means no cap. On
        GPUs, attention with a cap is computed in plain JAX.

    With an output bias or an output norm, W_O is a parameter of the core, and the model needs a
    vector store.
    """

    kind: ClassVar[str] = "attention"
    letter: ClassVar[str] = "A"
    positions: Positions = Learned()
    inverse_layer_scaling: bool = True
    num_kv_heads: Size | None = None
    query_key_norm: bool = False
    query_key_norm_over: Literal["head", "heads"] = "head"
    bias: bool = False
    output_bias: bool = False
    output_gate: bool = False
    normed: Normed = "input"
    window: Size | None = None
    scale: Positive | None = None
    logit_cap: Positive | None = None

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.positions, Rope):
            self._check_rope(self.positions.dims)
        if self.query_key_norm_over == "heads" and not self.query_key_norm:
            raise UsageError(
                "Attention.query_key_norm_over='heads' requires query_key_norm; set "
                "query_key_norm=true, or set query_key_norm_over=head"
            )
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
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def softmax(self) -> Softmax:
        """The sizes of the core's softmax attention."""
        alibi = isinstance(self.positions, Alibi)
        sizes = self.num_heads, self.kv_heads, self.head_dim, self.head_dim
        return Softmax(*sizes, alibi, self.window, self.logit_cap)

    def kept_numbers(self, width: int, *, rebuilt: bool = False) -> int:
        """Return the count of queries, keys, values, outputs and log-sums.

        Gates are kept too. The product with W_QKV is kept as well if queries and keys are normed,
        and the core's output if it is normed. If the residual is rebuilt, queries, keys and values
        are read from it again, unless there are gates.
        """
        # A log-sum in float32 takes the memory of two numbers in bfloat16.
        qkv, out, log_sums = sum(self.qkv_heads), self.num_heads, 2 * self.num_heads
        if rebuilt:
            return log_sums + self.output_gate * (qkv + 2 * out) * self.head_dim
        heads = qkv + out + self.output_gate * out
        heads += self.query_key_norm * (qkv + self.output_gate * out)
        return heads * self.head_dim + log_sums + (self.normed != "input") * width

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        """Number of query heads, of key heads and of value heads."""
        return self.num_heads, self.kv_heads, self.kv_heads

    @property
    def reads(self) -> Port:
        """The vectors that the core reads: gates (with `output_gate`), queries, keys and values."""
        heads = self.output_gate * (self.num_heads,) + self.qkv_heads
        return Port(heads=heads, head_dim=self.head_dim, normed=self.normed != "output")

    @property
    def projects(self) -> bool:
        """Whether the core has and applies the output projection W_O."""
        return self.output_bias or self.normed != "input"

    @property
    def writes(self) -> Port:
        """The vectors that the core writes: one per head, or W_O's output if it applies W_O."""
        return RESIDUAL_PORT if self.projects else super().writes

    @property
    def divided_heads(self) -> dict[str, int]:
        """A dict from field name to number of heads.

        It has an entry for each number that must be divisible by the number of devices.
        """
        return {"num_heads": self.num_heads, "num_kv_heads": self.kv_heads}

    def sharing_heads(self, devices: int) -> "Attention":
        """Return an equivalent core whose key and value heads can be sharded over `devices`."""
        if self.kv_heads % devices == 0:
            return self
        return replace(self, num_kv_heads=math.lcm(self.kv_heads, devices))

    def parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters in gains, biases, and W_O if the core applies it.

        The config of the store counts the matrices or key vectors that read queries, keys and
        values.
        """
        biases = sum(self.qkv_heads) if self.bias else 0
        of_output = (self.output_bias + (self.normed != "input")) * width
        own = self._projection(width) + of_output
        each = self.query_key_norm_over == "head"
        gains = self.query_key_norm * (2 if each else self.num_heads + self.kv_heads)
        return (gains + biases) * self.head_dim + own

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs per token for logits, softmax (3 per logit) and weighted values.

        A token attends to `seq_len` tokens, or to `window` tokens if that is fewer. The product
        with W_O is included if the core applies W_O.
        """
        tokens = seq_len if self.window is None else min(seq_len, self.window)
        attended = 4 * tokens * self.num_heads * self.head_dim + 3 * tokens * self.num_heads
        return attended + 2 * self._projection(width)

    def _projection(self, width: int) -> int:
        return self.projects * self.num_heads * self.head_dim * width


@dataclass(frozen=True)
class FeedForward(Computes):
    """A feed-forward layer `W_2 f(W_1 z)` with `hidden_dim` (D_FF) hidden neurons.

    Attributes:
      hidden_dim: number of hidden neurons.
      activation: the function f. Functions without a gate are gelu ("gelu_exact"), its
        approximation by tanh ("gelu_tanh"), and `relu(x)^2` ("relu2"). For functions with a gate,
        W_1 consists of a gate projection and an up projection. They are `silu(gate) * up`
        ("swiglu"), `gelu_tanh(gate) * up` ("geglu"), and SiTU ("situ", see
        `rmt_tpu.layers.activations`).
      situ_beta: SiTU's bound b on the gate factor.
      situ_linear_beta: SiTU's bound c on the up factor; None means no bound.
      bias: whether the products with W_1 and W_2 have biases.
      normed: whether the model's norm is applied to the core's "input", its "output", or "both".
    """

    kind: ClassVar[str] = "feed_forward"
    letter: ClassVar[str] = "F"
    hidden_dim: Size
    activation: Literal["gelu_tanh", "gelu_exact", "relu2", "swiglu", "geglu", "situ"] = "gelu_tanh"
    bias: bool = False
    normed: Normed = "input"
    situ_beta: Positive = 4.0
    situ_linear_beta: Positive | None = 25.0

    def __post_init__(self):
        super().__post_init__()
        check_situ(self)

    def kept_numbers(self, width: int, *, rebuilt: bool = False) -> int:
        """Return the count of the product with W_1, and of the output if it is normed."""
        return (1 + self.gated) * self.hidden_dim + (self.normed != "input") * width

    @property
    def gated(self) -> bool:
        """Whether W_1 has a gate in addition to the up projection."""
        return self.activation in ("swiglu", "geglu", "situ")

    @property
    def reads(self) -> Port:
        """The vectors that the core reads: all data vectors, which represent the whole residual."""
        return RESIDUAL_PORT._replace(normed=self.normed != "output")

    @property
    def writes(self) -> Port:
        """The vectors that the core writes: all data vectors (see `ModelConfig.data_shape`)."""
        return RESIDUAL_PORT

    @property
    def divided_heads(self) -> dict[str, int]:
        """An empty dict, because the core has no heads to shard."""
        return {}

    def parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters in W_1, W_2, biases and the gain of an output norm.

        Args:
          width: width of the output.
          read_width: width of the input.
        """
        biases = self.bias * ((1 + self.gated) * self.hidden_dim + width)
        return self._weights(width, read_width) + biases + (self.normed != "input") * width

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs per token for the matrix products with W_1 and W_2."""
        return 2 * self._weights(width, read_width)

    def _weights(self, width: int, read_width: int) -> int:
        return ((1 + self.gated) * read_width + width) * self.hidden_dim


@dataclass(frozen=True)
class Mla(Heads):
    """Multi-head latent attention.

    Attributes:
      kv_rank: size of the latent vector from which the keys and values of all heads are computed.
      rope_dim: size of an additional part of each query and key (D_r), to which RoPE applies. All
        heads share the key's additional part.
      query_rank: size of the latent vector from which the queries are computed. With None, they are
        computed from the input.
      positions: whether RoPE rotates the additional parts ("rope").
      scale: factor by which products of queries and keys are multiplied; None means `1 /
        sqrt(head_dim + rope_dim)`, or muP's factor.
      latent_epsilon: the epsilon in the norms of the latent vectors, which is 1e-6 in Kimi Linear
        and DeepSeek-V3; None means the model's `norm_epsilon`.
      output_gate: whether each head's output is multiplied elementwise by the sigmoid of a gate
        vector. The gate is a linear function of the input.
    """

    kind: ClassVar[str] = "mla"
    letter: ClassVar[str] = "M"
    kv_rank: Size
    rope_dim: Size
    query_rank: Size | None = None
    positions: Rope | NoPositions = Rope()
    scale: Positive | None = None
    latent_epsilon: Positive | None = None
    output_gate: bool = False

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
        """Size of each query and each key."""
        return self.head_dim + self.rope_dim

    @property
    def softmax(self) -> Softmax:
        """The sizes of the softmax attention, with expanded keys and values."""
        return Softmax(self.num_heads, self.num_heads, self.query_dim, self.head_dim)

    @property
    def reads(self) -> Port:
        """The vectors that the core reads: all data vectors, which represent the whole residual."""
        return RESIDUAL_PORT

    def parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters in the matrices and norms."""
        return self._weights(read_width) + self.kv_rank + (self.query_rank or 0)

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs per token for matrices, logits, softmax and weighted values.

        Keys and values are expanded from the latents for every head.
        """
        per_head = 2 * self.query_dim + 2 * self.head_dim + 3
        return 2 * self._weights(read_width) + seq_len * self.num_heads * per_head

    def _weights(self, width: int) -> int:
        queries = self.num_heads * self.query_dim
        rank = self.query_rank
        query_weights = width * queries if rank is None else rank * (width + queries)
        values = self.num_heads * self.head_dim
        up, gate = self.kv_rank * 2 * values, self.output_gate * width * values
        return query_weights + width * (self.kv_rank + self.rope_dim) + up + gate


@dataclass(frozen=True)
class Kda(Heads):
    """Kimi Delta Attention, a linear attention with one recurrent state per head.

    Attributes:
      conv_size: kernel size, in tokens, of the convolutions over queries, keys and values.
      gate_rank: rank of the matrices that compute decays and output gates; None means `head_dim`.
      lower_bound: lower bound of the log decays, like -5, or None. A log decay is the bound times a
        sigmoid. Without a bound, it is a negative softplus.
      num_key_heads: number of query heads, and of key heads. Each query and key head is shared by
        `num_heads / num_key_heads` adjacent value heads. None means `num_heads`.
      decays: number of decays: one for each channel of each head ("channels"), or one for each head
        ("heads").
      gates: whether output gates are computed by two matrices of rank `gate_rank` ("low_rank"), or
        read from the residual like values ("full").
      gate_activation: the activation function of the output gates.

    With `decays="heads"`, `gates="full"` and `gate_activation="silu"`, this is Gated DeltaNet
    (Yang, Kautz and Hatamizadeh 2024).
    """

    kind: ClassVar[str] = "kda"
    letter: ClassVar[str] = "K"
    by_ring: ClassVar[bool] = False
    conv_size: Size = 4
    gate_rank: Size | None = None
    lower_bound: LogDecay | None = None
    num_key_heads: Size | None = None
    decays: Literal["channels", "heads"] = "channels"
    gates: Literal["low_rank", "full"] = "low_rank"
    gate_activation: Literal["sigmoid", "silu"] = "sigmoid"

    def __post_init__(self):
        super().__post_init__()
        if self.num_heads % self.key_heads:
            legal = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise UsageError(
                f"Kda.num_key_heads={self.num_key_heads} does not divide num_heads="
                f"{self.num_heads}; legal: {', '.join(map(str, legal))}"
            )

    @property
    def key_heads(self) -> int:
        """Number of query heads, which is also the number of key heads."""
        return self.num_heads if self.num_key_heads is None else self.num_key_heads

    @property
    def divided_heads(self) -> dict[str, int]:
        """A dict from field name to number of heads.

        It has an entry for each number that must be divisible by the number of devices.
        """
        return {"num_heads": self.num_heads, "num_key_heads": self.key_heads}

    @property
    def rank(self) -> int:
        """Rank of the matrices that compute decays and output gates."""
        return self.head_dim if self.gate_rank is None else self.gate_rank

    @property
    def reads(self) -> Port:
        """The vectors that the core reads from the residual.

        They are queries, keys, values, full gates and all data vectors. Decays, betas and low-rank
        gates are computed from the data vectors.
        """
        of_values = (self.num_heads,) * (2 if self.gates == "full" else 1)
        heads = 2 * (self.key_heads,) + of_values
        return Port(heads=heads, head_dim=self.head_dim, residual=True)

    def parameters(self, width: int, read_width: int) -> int:
        """Return the number of parameters in the gates, the convolutions and the norm."""
        biases = self.num_heads * (self.head_dim if self.decays == "channels" else 1)
        vectors = self.conv_size * self._channels + biases + self.num_heads + self.head_dim
        return self._weights(read_width) + vectors

    def flops(self, width: int, read_width: int, seq_len: int) -> int:
        """Return the FLOPs per token for the gates, the convolutions and the chunked recurrence.

        The recurrence over chunks of C = 64 tokens takes `6 D_h^2 + 3 C D_h + C^2` FLOPs per token
        and head, as counted in the paper.
        """
        size, chunk = self.head_dim, 64
        per_head = 6 * size**2 + 3 * chunk * size + chunk**2
        convolutions = 2 * self.conv_size * self._channels
        return 2 * self._weights(read_width) + self.num_heads * per_head + convolutions

    @property
    def _channels(self) -> int:
        """Number of channels of queries, keys and values, all of which are convolved."""
        return (2 * self.key_heads + self.num_heads) * self.head_dim

    def _weights(self, width: int) -> int:
        low_rank = self.rank * (width + self.num_heads * self.head_dim)
        decays = low_rank if self.decays == "channels" else width * self.num_heads
        gates = low_rank if self.gates == "low_rank" else 0
        return decays + gates + width * self.num_heads


Core = Attention | FeedForward | Mla | Kda | Experts


@dataclass(frozen=True)
class Stack(Checked):
    """A sequence of sublayers, called the period, that is repeated in depth.

    Parameters have a leading axis of size `repeat`. A scan runs over this axis, and its body
    contains all sublayers of one period.

    Attributes:
      cores: the core of each sublayer in one period.
      repeat: number of repeats.
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
    """Convert layers, which are lists of cores, into stacks, by merging repeated layers.

    At the first layer, the function tries each number of layers as a period. It chooses the period
    whose repeats cover the most layers, and the shortest of those. Then it does the same after
    these repeats. A layer that does not repeat becomes a stack of its own.

        stacks([[kda, dense]] + 2 * ([[kda, experts]] * 3 + [[mla, experts]]))
    """
    layers = [tuple(layer) for layer in layers]
    merged: list[Stack] = []
    start = 0
    while start < len(layers):
        period, repeat = max(
            (
                (size, _repeats(layers, start, size))
                for size in range(1, (len(layers) - start) // 2 + 1)
            ),
            key=lambda choice: (choice[0] * choice[1] if choice[1] > 1 else 0, -choice[0]),
            default=(1, 1),
        )
        period = period if repeat > 1 else 1
        cores = tuple(core for layer in layers[start : start + period] for core in layer)
        merged.append(Stack(cores, repeat))
        start += period * repeat
    return tuple(merged)


def _repeats(layers: Sequence[tuple[Core, ...]], start: int, size: int) -> int:
    """Return how many times the `size` layers from `start` on occur in a row."""
    period, count = layers[start : start + size], 1
    while layers[start + count * size : start + (count + 1) * size] == period:
        count += 1
    return count
