"""Mixers as configs: how what earlier sublayers wrote becomes what the next one reads.

Re-exported by `rmt_tpu.config`. Each is built by a file of `rmt_tpu/residual/`, which has its
equations and where they come from. `L` layers are `2L` sublayers. What a mixer changes beside the
equations that name it, and so differs in a comparison, is its `note`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Checked, Finite, Positive, Size
from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class Sum:
    """All writes are added up: the plain residual stream."""

    kind: ClassVar[str] = "sum"
    note: ClassVar[str] = ""


@dataclass(frozen=True)
class _DepthAttention(Checked):
    """What Full and Block Attention Residuals share; the options are the ablations of Table 4.

    Attributes:
      query: the pseudo-query of a site: a learned vector ("static"), that and a projection of what
        was written last ("input"), or no query but a learned logit a source ("scalars").
      weights: of the sources: "softmax" over them, or each its own "sigmoid".
      key_norm: whether keys are RMS-normalised.
      key_gain: whether that norm has a learned gain.
      num_heads: parts of the residual with softmaxes of their own.
      epsilon: of the keys' norm.
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

    @property
    def fused(self) -> bool:
        """Whether this is what the kernels compute: no ablation."""
        options = (self.query, self.weights, self.key_norm, self.num_heads)
        return options == ("static", "softmax", True, 1)


@dataclass(frozen=True)
class FullAttention(_DepthAttention):
    """Full Attention Residuals: attention over the embedding and every sublayer's output.

    Attributes:
      window: only the embedding and the last `window` outputs are sources; None is all of them.
      phase_layers: layers whose sites share one pass over the outputs before them; changes memory
        traffic, not results. None picks.
    """

    kind: ClassVar[str] = "full_attention"
    window: Size | None = None
    phase_layers: Size | None = None

    @property
    def fused(self) -> bool:
        return super().fused and self.window is None

    def sublayers_a_block(self, num_layers: int) -> int:
        """S: every output is a block of its own."""
        if self.window is not None and self.window > 2 * num_layers:
            raise UsageError(
                f"FullAttention.window={self.window} is more than the {2 * num_layers} sublayers "
                f"of num_layers={num_layers}; legal: 1 to {2 * num_layers}, or null for all"
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

    At most one of the three sizes is given; the last block holds what is left over. None of them is
    8 blocks, or one a sublayer if there are fewer.

    Attributes:
      num_blocks: N, of `ceil(2L / N)` sublayers.
      sublayers_per_block: S, the paper's block size.
      layers_per_block: the block size as released models count it (`attn_res_block_size`): a
        layer is two sublayers.
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

    def sublayers_a_block(self, num_layers: int) -> int:
        """S, of a model of this depth.

        Raises:
          UsageError: the blocks do not fit the depth.
        """
        sublayers = 2 * num_layers
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
class Dense(Checked):
    """DenseFormer: a layer reads a learned weighted sum of all layers' outputs.

    Attributes:
      dilation: k, only every k-th earlier output counts.
      period: p, only after every p-th layer is there such a sum.
    """

    kind: ClassVar[str] = "dense"
    note: ClassVar[str] = "starts as the plain model; its weights over depth do not decay"
    dilation: Size = 1
    period: Size = 1


@dataclass(frozen=True)
class HyperConnections(Checked):
    """Hyper-connections: `streams` (m) residual vectors, with learned reads, writes and mixing.

    Attributes:
      dynamic: whether the coefficients also depend on the streams.
      tanh: around that dependence.
    """

    kind: ClassVar[str] = "hyper_connections"
    note: ClassVar[str] = (
        "starts as the plain model; no sqrt(m) on outputs, unlike its paper; projections decay, "
        "static coefficients and scales do not"
    )
    streams: Size = 4
    dynamic: bool = True
    tanh: bool = True


@dataclass(frozen=True)
class Mhc(Checked):
    """mHC: hyper-connections whose mixing matrix Sinkhorn's iteration makes doubly stochastic."""

    kind: ClassVar[str] = "mhc"
    note: ClassVar[str] = (
        "starts as the plain model; no sqrt(m) on outputs; projections decay, biases do not"
    )
    streams: Size = 4
    rounds: Size = 20


@dataclass(frozen=True)
class MhcLite(Checked):
    """mHC-lite: the mixing matrix is a convex combination of all `streams!` permutations.

    Attributes:
      init: as the "paper"'s code starts, or so that the model starts as the plain one ("prenorm").
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


@dataclass(frozen=True)
class Highway:
    """Highway Transformer: a self-gating unit beside every sublayer.

    Attributes:
      input: what the unit reads: what the sublayer does ("normed"), or the "raw" residual.
      activation: of its gate.
      form: it is added ("add"), or takes the place of the residual ("carry") or of the sublayer's
        output ("gated") as far as the gate opens.
    """

    kind: ClassVar[str] = "highway"
    note: ClassVar[str] = "gates and values are drawn like other weights, decay and have no biases"
    input: Literal["normed", "raw"] = "normed"
    activation: Literal["sigmoid", "tanh"] = "sigmoid"
    form: Literal["add", "carry", "gated"] = "add"


@dataclass(frozen=True)
class DepthLstm(Checked):
    """Depth-wise LSTM: a cell per layer in place of residuals; it holds the feed-forward layer.

    Attributes:
      forget_offset: added to the forget gate's logits.
      cell_start: the first cell: "zero", or the "embedding".
    """

    kind: ClassVar[str] = "depth_lstm"
    note: ClassVar[str] = (
        "W_O and W_2 do not start smaller by depth; gates decay and have no biases"
    )
    forget_offset: Finite = 0.0
    cell_start: Literal["zero", "embedding"] = "zero"


@dataclass(frozen=True)
class Hierarchical(Checked):
    """Hierarchical aggregation: a node above every `every` layers feeds the next ones.

    Attributes:
      hidden_dim: of a node; 128 matches the size of the RMT paper's row, D_FF is as published.
      every: layers below a node.
      shared: one node's weights for all that have the same number of inputs.
    """

    kind: ClassVar[str] = "hierarchical"
    note: ClassVar[str] = "nodes, which norm the sum, decay and have no biases"
    hidden_dim: Size = 128
    every: Size = 2
    shared: bool = False


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
# Mixers that keep what was written in a bank of rows.
Banked = FullAttention | BlockAttention | Dense
