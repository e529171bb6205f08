"""Configs of mixers, which turn the outputs of earlier sublayers into the next one's input.

`rmt_tpu.config` re-exports them. A file of `rmt_tpu/residual/` builds each mixer, and has its
equations and their sources. `L` layers are `2L` sublayers. The `note` of a mixer says what it
changes in addition to its equations, and what therefore differs in a comparison.
"""

from dataclasses import dataclass
from math import factorial
from typing import ClassVar, Literal, Protocol, runtime_checkable

from rmt_tpu.config.checks import Checked, Finite, Positive, Size
from rmt_tpu.errors import UsageError


@runtime_checkable
class Sizes(Protocol):
    """The part of a `ModelConfig` that a mixer's cost depends on."""

    num_sublayers: int
    num_layers: int
    residual_size: int


class System(Checked):
    """Properties that a mixer's config states, in addition to its fields.

    Attributes:
      note: what it changes in addition to the equations of its name.
      on_matrix: whether it is defined for a matrix store.
      remats: legal values of `ModelConfig.remat`.
      by_layers: whether it counts layers of two sublayers each, instead of sublayers.
      banked: whether it keeps what was written in a bank of rows.
      adds_up: whether writes are added up over depth. If so, weights that write start smaller by
        depth, and the input of sublayers is normed.
      second_input: width of the input of a layer's second sublayer, in widths of the store's data
        vectors; beyond 1 its hidden layer is normed.
    """

    note: ClassVar[str] = ""
    on_matrix: ClassVar[bool] = False
    remats: ClassVar[tuple[str, ...]] = ("none", "dots", "full")
    by_layers: ClassVar[bool] = False
    banked: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True
    second_input: ClassVar[int] = 1

    def check(self, num_sublayers: int, residual_size: int) -> None:
        """Raise UsageError if the sizes do not fit a model of this depth and residual."""

    def parameters(self, model: Sizes) -> int:
        """Return the number of parameters that it adds to a model, at its sites and elsewhere."""
        return 0

    def flops(self, model: Sizes) -> int:
        """Return its FLOPs for one token in a forward pass: see `rmt_tpu.cost`."""
        return 0

    def logit_terms(self, residual_size: int) -> dict[str, int]:
        """Return the number of terms of order 1 in a logit over depth, by the name of the weight.

        The result is empty for a mixer that has no such logits.
        """
        return {}

    def chunk_multiple(self, num_sublayers: int) -> int | None:
        """Return a number that divides a pipeline chunk's sublayers; None if it has no pipeline."""
        return 2 if self.by_layers else 1


class _BankedSystem(System):
    """A mixer that keeps what was written in a bank of rows."""

    on_matrix: ClassVar[bool] = True
    remats: ClassVar[tuple[str, ...]] = ("full", "blocks")
    banked: ClassVar[bool] = True


@dataclass(frozen=True)
class Sum(System):
    """The plain residual stream: all writes are added up."""

    kind: ClassVar[str] = "sum"
    on_matrix: ClassVar[bool] = True
    remats: ClassVar[tuple[str, ...]] = ("none", "dots", "full", "reversible")


@dataclass(frozen=True)
class _DepthAttention(_BankedSystem):
    """The common part of Full and Block Attention Residuals; the options are Table 4's ablations.

    Attributes:
      query: the pseudo-query of a site: a learned vector ("static"), that plus a projection of the
        last write ("input"), or no query but a learned logit for each source ("scalars").
      weights: weights of the sources: a "softmax" over them, or a "sigmoid" for each.
      key_norm: whether keys are RMS-normalised.
      key_gain: whether that norm has a learned gain.
      num_heads: number of parts of the residual, each with a softmax of its own.
      epsilon: epsilon of the keys' norm.
    """

    note: ClassVar[str] = (
        "queries start at zero, so that sites first read a plain mean, and do not decay"
    )
    query: Literal["static", "input", "scalars"] = "static"
    weights: Literal["softmax", "sigmoid"] = "softmax"
    key_norm: bool = True
    key_gain: bool = True
    num_heads: Size = 1
    epsilon: Positive = 1e-6

    def check(self, num_sublayers: int, residual_size: int) -> None:
        """Raise UsageError if blocks or heads do not fit."""
        self.sublayers_a_block(num_sublayers)
        if residual_size % self.num_heads:
            raise UsageError(
                f"{type(self).__name__}.num_heads={self.num_heads} does not divide the "
                f"residual's {residual_size} numbers"
            )

    def parameters(self, model: Sizes) -> int:
        """Return the size of the query and gain of every site, or of an ablation's parameters."""
        size = model.residual_size
        if self.query == "scalars":
            return sum(self.sources(model.num_sublayers))
        projection = size**2 if self.query == "input" else 0
        key_gain = size if self.key_norm and self.key_gain else 0
        return (model.num_sublayers + 1) * (size + key_gain + projection)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of a logit and a weighted term for every source, and of projections."""
        size, scored = model.residual_size, self.query != "scalars"
        projection = (model.num_sublayers + 1) * 2 * size**2 if self.query == "input" else 0
        return sum(self.sources(model.num_sublayers)) * 2 * size * (1 + scored) + projection

    def logit_terms(self, residual_size: int) -> dict[str, int]:
        """Return the size of a head's part of the residual for each weight.

        It is multiplied by the size of the whole residual for a projection, and is 1 for logits.
        """
        if self.query == "scalars":
            return {"logits": 1}
        terms = residual_size // self.num_heads
        found = {"query": terms}
        if self.key_norm and self.key_gain:
            found["key_gain"] = terms
        if self.query == "input":
            found["project"] = terms * residual_size
        return found

    def sources(self, num_sublayers: int) -> list[int]:
        """Return the number of sources that each site attends over."""
        block, window = self.sublayers_a_block(num_sublayers), getattr(self, "window", None)
        done = [-(-site // block) for site in range(num_sublayers + 1)]
        return [1 + (count if window is None else min(count, window)) for count in done]

    def chunk_multiple(self, num_sublayers: int) -> int | None:
        """Return the number of sublayers in a block, or None for a model with ablations."""
        return self.sublayers_a_block(num_sublayers) if self.fused else None

    @property
    def fused(self) -> bool:
        """Whether the kernels compute this mixer, which is so only without ablations."""
        options = (self.query, self.weights, self.key_norm, self.num_heads)
        return options == ("static", "softmax", True, 1)


@dataclass(frozen=True)
class FullAttention(_DepthAttention):
    """Full Attention Residuals: attention over the embedding and every sublayer's output.

    Attributes:
      window: number of last outputs that are sources, in addition to the embedding; None is all of
        them.
      phase_layers: number of layers whose sites share one pass over the outputs before them. It
        changes memory traffic, not results. None chooses it automatically.
    """

    kind: ClassVar[str] = "full_attention"
    window: Size | None = None
    phase_layers: Size | None = None

    @property
    def fused(self) -> bool:
        return super().fused and self.window is None

    def sublayers_a_block(self, num_sublayers: int) -> int:
        """Return S = 1: every output is a block of its own.

        Raises:
          UsageError: the window or phase does not fit the depth.
        """
        num_layers = num_sublayers // 2
        if self.window is not None and self.window > num_sublayers:
            raise UsageError(
                f"FullAttention.window={self.window} is more than the {num_sublayers} sublayers "
                f"of num_layers={num_layers}; legal: 1 to {num_sublayers}, or null for all"
            )
        if self.phase_layers is not None and self.phase_layers > num_layers:
            raise UsageError(
                f"FullAttention.phase_layers={self.phase_layers} is more than num_layers="
                f"{num_layers}; legal: 1 to {num_layers}, or null to pick"
            )
        return 1


@dataclass(frozen=True)
class BlockAttention(_DepthAttention):
    """Block Attention Residuals: attention over the embedding and the sums of blocks of sublayers.

    At most one of the three sizes may be given; the last block has the remaining sublayers. Without
    any there are 8 blocks, or one for each sublayer if that is fewer.

    Attributes:
      num_blocks: N, the number of blocks of `ceil(2L / N)` sublayers.
      sublayers_per_block: S, the paper's block size.
      layers_per_block: the block size as released models count it (`attn_res_block_size`): a layer
        is two sublayers.
    """

    kind: ClassVar[str] = "block_attention"
    num_blocks: Size | None = None
    sublayers_per_block: Size | None = None
    layers_per_block: Size | None = None

    def __post_init__(self):
        super().__post_init__()
        sizes = ("num_blocks", "sublayers_per_block", "layers_per_block")
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            both = " and ".join(f"{name}={getattr(self, name)}" for name in given)
            raise UsageError(f"BlockAttention.{both} both set the blocks' size; give one of them")

    def sublayers_a_block(self, num_sublayers: int) -> int:
        """Return S for a model of this depth.

        Raises:
          UsageError: the blocks do not fit the depth.
        """
        sublayers, num_layers = num_sublayers, num_sublayers // 2
        for name, size in (
            ("sublayers_per_block", self.sublayers_per_block),
            ("layers_per_block", self.layers_per_block and 2 * self.layers_per_block),
        ):
            if size is not None:
                if size > sublayers:
                    most = sublayers if name == "sublayers_per_block" else num_layers
                    raise UsageError(
                        f"BlockAttention.{name}={getattr(self, name)} is more than the depth of "
                        f"num_layers={num_layers}; legal: 1 to {most}"
                    )
                return size
        blocks = min(8, sublayers) if self.num_blocks is None else self.num_blocks
        size = -(-sublayers // min(blocks, sublayers))
        if -(-sublayers // size) != blocks and self.num_blocks is not None:
            fit = sorted({-(-sublayers // s) for s in range(1, sublayers + 1)})
            nearest = sorted(fit, key=lambda n: abs(n - blocks))[:2]
            raise UsageError(
                f"BlockAttention.num_blocks={blocks} does not divide {sublayers} sublayers into "
                f"equal blocks and a last one that is no larger; nearest legal: "
                f"{' or '.join(map(str, sorted(nearest)))}"
            )
        return size


@dataclass(frozen=True)
class Dense(_BankedSystem):
    """DenseFormer: a layer reads a learned weighted sum of all layers' outputs.

    Attributes:
      dilation: k, such that only every k-th earlier output counts.
      period: p, such that there is a sum only after every p-th layer.
    """

    kind: ClassVar[str] = "dense"
    by_layers: ClassVar[bool] = True
    note: ClassVar[str] = "starts as the plain model; its weights over depth do not decay"
    dilation: Size = 1
    period: Size = 1

    def parameters(self, model: Sizes) -> int:
        """Return the number of weights: one for every output in a sum."""
        ends = range(self.period, model.num_layers + 1, self.period)
        return sum((end + self.dilation) // self.dilation for end in ends)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of one weighted term for each weight."""
        return 2 * model.residual_size * self.parameters(model)


@dataclass(frozen=True)
class HyperConnections(System):
    """Hyper-connections: `streams` (m) residual vectors, with learned reads, writes and mixing.

    Attributes:
      dynamic: whether the coefficients also depend on the streams.
      tanh: whether a tanh is applied to that dependence.
    """

    kind: ClassVar[str] = "hyper_connections"
    note: ClassVar[str] = (
        "starts as the plain model; no sqrt(m) on outputs, unlike its paper; projections decay, "
        "static coefficients and scales do not"
    )
    streams: Size = 4
    dynamic: bool = True
    tanh: bool = True

    def parameters(self, model: Sizes) -> int:
        """Return the number of static coefficients, and of a gain, a projection and two scales."""
        m, size = self.streams, model.residual_size
        return model.num_sublayers * (m * (m + 2) + (size + size * (m + 2) + 2) * self.dynamic)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the projection and the streams."""
        m, size = self.streams, model.residual_size
        projection = 2 * m * size * (m + 2) if self.dynamic else 0
        return model.num_sublayers * (projection + _streams_flops(m, size))


def _projected_parameters(m: int, coefficients: int, model: Sizes) -> int:
    """Return the parameters of sites with one projection of all streams.

    Each site has a gain, the projection, its biases, and three scales.
    """
    of_site = m * model.residual_size * (1 + coefficients) + coefficients + 3
    return model.num_sublayers * of_site


def _projected_flops(m: int, coefficients: int, model: Sizes) -> int:
    """Return the FLOPs of the projection and the streams."""
    size = model.residual_size
    return model.num_sublayers * (2 * m * size * coefficients + _streams_flops(m, size))


@dataclass(frozen=True)
class Mhc(System):
    """mHC: hyper-connections whose mixing matrix Sinkhorn's iteration makes doubly stochastic."""

    kind: ClassVar[str] = "mhc"
    note: ClassVar[str] = (
        "starts as the plain model; no sqrt(m) on outputs; projections decay, biases do not"
    )
    streams: Size = 4
    rounds: Size = 20

    @property
    def _coefficients(self) -> int:
        """Number of coefficients of reads, writes and the mixing matrix."""
        return self.streams * (2 + self.streams)

    def parameters(self, model: Sizes) -> int:
        """Return the parameters of the norm's gain, the projection, its biases, and 3 scales."""
        return _projected_parameters(self.streams, self._coefficients, model)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the projection and the streams."""
        return _projected_flops(self.streams, self._coefficients, model)


@dataclass(frozen=True)
class MhcLite(System):
    """mHC-lite: the mixing matrix is a convex combination of all `streams!` permutations.

    Attributes:
      init: "paper" starts like the paper's code, "prenorm" such that the model starts as the plain
        one.
    """

    kind: ClassVar[str] = "mhc_lite"
    streams: Size = 4
    init: Literal["paper", "prenorm"] = "paper"

    @property
    def note(self) -> str:
        starts = {
            "paper": "starts as its paper's code does, not as the plain model",
            "prenorm": "starts as the plain model",
        }
        return f"{starts[self.init]}; no sqrt(m) on outputs; projections decay, biases do not"

    def __post_init__(self):
        super().__post_init__()
        if self.streams > 6:
            raise UsageError(
                f"MhcLite.streams={self.streams} would take {self.streams}! permutations; "
                "legal: 1 to 6"
            )

    @property
    def _coefficients(self) -> int:
        """Number of coefficients of reads, writes and the permutations' weights."""
        return 2 * self.streams + factorial(self.streams)

    def parameters(self, model: Sizes) -> int:
        """Return the parameters of the norm's gain, the projection, its biases, and 3 scales."""
        return _projected_parameters(self.streams, self._coefficients, model)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the projection, the streams, and the sum of the permutations."""
        permutations = 2 * factorial(self.streams) * self.streams**2
        flops = _projected_flops(self.streams, self._coefficients, model)
        return flops + model.num_sublayers * permutations


@dataclass(frozen=True)
class Highway(System):
    """Highway Transformer: a self-gating unit next to every sublayer.

    Attributes:
      input: input of the unit: that of the sublayer ("normed"), or the "raw" residual.
      activation: activation of its gate.
      form: whether the unit's output is added ("add"), or replaces the residual ("carry") or the
        sublayer's output ("gated") as far as the gate opens.
    """

    kind: ClassVar[str] = "highway"
    note: ClassVar[str] = "gates and values are drawn like other weights, decay and have no biases"
    input: Literal["normed", "raw"] = "normed"
    activation: Literal["sigmoid", "tanh"] = "sigmoid"
    form: Literal["add", "carry", "gated"] = "add"

    def parameters(self, model: Sizes) -> int:
        """Return the number of weights in W_1 and W_2 of every unit."""
        return model.num_sublayers * 2 * model.residual_size**2

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of products with these matrices."""
        return 2 * self.parameters(model)


@dataclass(frozen=True)
class DepthLstm(System):
    """Depth-wise LSTM: a cell for each layer in place of residuals; it has the feed-forward layer.

    Attributes:
      forget_offset: constant added to the forget gate's logits.
      cell_start: the first cell: "zero", or the "embedding".
    """

    kind: ClassVar[str] = "depth_lstm"
    by_layers: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False
    second_input: ClassVar[int] = 2
    note: ClassVar[str] = (
        "W_O and W_2 do not start smaller by depth; gates decay and have no biases"
    )
    forget_offset: Finite = 0.0
    cell_start: Literal["zero", "embedding"] = "zero"

    def parameters(self, model: Sizes) -> int:
        """Return the parameters of gates, their norms, and the norm in the feed-forward layer."""
        size = model.residual_size
        return model.num_layers * (6 * size**2 + 3 * size + model.feed_forward.hidden_dim)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the gates."""
        return model.num_layers * 12 * model.residual_size**2


@dataclass(frozen=True)
class Hierarchical(System):
    """Hierarchical aggregation: a node above every `every` layers feeds the next ones.

    Attributes:
      hidden_dim: hidden size of a node; 128 matches the parameter count in the RMT paper's row,
        with D_FF as published.
      every: number of layers below a node.
      shared: whether all nodes with the same number of inputs share their weights.
    """

    kind: ClassVar[str] = "hierarchical"
    by_layers: ClassVar[bool] = True
    note: ClassVar[str] = "nodes, which norm the sum, decay and have no biases"
    hidden_dim: Size = 128
    every: Size = 2
    shared: bool = False

    def check(self, num_sublayers: int, residual_size: int) -> None:
        """Raise UsageError if the first node would be above the last layer."""
        if self.every > num_sublayers // 2:
            raise UsageError(
                f"Hierarchical.every={self.every} is more than num_layers={num_sublayers // 2}"
            )

    def parameters(self, model: Sizes) -> int:
        """Return the parameters of the nodes; shared weights count once."""
        nodes, size = self.node_inputs(model.num_layers), model.residual_size
        kept = set(nodes) if self.shared else nodes
        return sum((inputs + 1) * size * self.hidden_dim + size for inputs in kept)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of all nodes."""
        nodes = self.node_inputs(model.num_layers)
        return sum(2 * (inputs + 1) * model.residual_size * self.hidden_dim for inputs in nodes)

    def node_inputs(self, num_layers: int) -> list[int]:
        """Return how many residuals each node has below it."""
        return [self.every + (node > 0) for node in range(num_layers // self.every)]


def _streams_flops(streams: int, size: int) -> int:
    """Return the FLOPs of a read, a write and the mixing of hyper-connections."""
    return 2 * size * (streams**2 + 2 * streams)


Mixer = (
    Sum
    | FullAttention
    | BlockAttention
    | Dense
    | HyperConnections
    | Mhc
    | MhcLite
    | Highway
    | DepthLstm
    | Hierarchical
)
