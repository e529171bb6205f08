"""Configs of mixers whose sublayers read a weighted sum of several earlier outputs.

Each mixer is implemented in its own file in `rmt_tpu/residual/`, which has its equations and their
sources.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Finite, Positive, Size
from rmt_tpu.config.cores import Attention
from rmt_tpu.config.mixer_base import BankedSystem, Sizes, System
from rmt_tpu.config.plain_start import PlainStart
from rmt_tpu.errors import UsageError


@dataclass(frozen=True)
class _DepthAttention(BankedSystem):
    """The base class of Full and Block Attention Residuals.

    A site is a place where a sublayer or the unembedding reads the residual. There a learned query
    attends over sources: the embedding, and earlier outputs or sums of outputs. Other options than
    the defaults are ablations in Table 4 of the paper, or come from released models and other
    trainers (see `rmt_tpu.residual.depth_attention`).

    Attributes:
      query: how a site scores its sources. "static" uses a learned query vector, and "input" adds a
        projection of the last output to it. "scalars" replaces the query by one learned logit per
        source. "none" gives all sources the same weight and has no parameters.
      weights: how logits become weights. "softmax" is over the sources, and "sigmoid" is of each
        logit.
      key_norm: whether keys are RMS-normalised.
      key_gain: whether the norm of the keys has a learned gain.
      num_heads: number of heads. Each head is an equal part of the residual, with its own softmax
        over the sources.
      newest_bias: initial value of a learned bias on the logit of the newest source, one per site;
        None means no bias.
      cumulative: whether the source of a block is the sum of the embedding and all outputs up to
        its end, instead of the sum of its own outputs. Every site then has one more source, the sum
        of the embedding and all outputs so far. Right after a block, it equals the source of that
        block.
      output_site: what the unembedding reads. "attention" reads as at every other site, and only
        this choice has parameters. "sum" reads the sum of the embedding and all outputs. "newest"
        reads the newest source.
      normed_embedding: whether the source that is the embedding is RMS-normalised, without a gain.
      epsilon: constant added to the mean square in the norm of the keys, and of the embedding.
    """

    note: ClassVar[str] = (
        "queries start at zero, so that sites first read a plain mean, and do not decay"
    )
    query: Literal["static", "input", "scalars", "none"] = "static"
    weights: Literal["softmax", "sigmoid"] = "softmax"
    key_norm: bool = True
    key_gain: bool = True
    num_heads: Size = 1
    newest_bias: Finite | None = None
    cumulative: bool = False
    output_site: Literal["attention", "sum", "newest"] = "attention"
    normed_embedding: bool = False
    epsilon: Positive = 1e-6

    def __post_init__(self):
        super().__post_init__()
        keyless = self.query in ("none", "scalars")
        if keyless and not (self.key_norm and self.num_heads == 1):
            raise UsageError(
                f"{type(self).__name__}.query={self.query!r} has no keys, but key_norm="
                f"{self.key_norm} and num_heads={self.num_heads}; legal: key_norm=True and "
                "num_heads=1"
            )

    def check(self, model: Sizes) -> None:
        """Raise UsageError if blocks do not fit the depth, or heads do not fit the residual."""
        self.sublayers_a_block(model.num_sublayers)
        size = model.residual_size
        if size % self.num_heads:
            raise UsageError(
                f"{type(self).__name__}.num_heads={self.num_heads} does not divide the "
                f"residual's {size} numbers; legal: a divisor of {size}"
            )

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return whether a new model equals the plain model, which sums all outputs.

        All logits start at zero, so a site reads the mean of all sources. This is the plain sum
        divided by a number, which the norm before the read removes. The models differ only if an
        option gives some outputs other weights.
        """
        window = getattr(self, "window", None)
        if window is not None and window < model.num_sublayers:
            return PlainStart(False, f"window={window} excludes earlier outputs from sums")
        if self.cumulative:
            return PlainStart(False, "cumulative sources contain earlier outputs more often")
        if self.newest_bias:
            return PlainStart(False, f"newest_bias={self.newest_bias:g} weighs the newest output")
        if self.normed_embedding:
            return PlainStart(False, "the embedding is normalised before it is a source")
        if self.output_site == "newest":
            return PlainStart(False, "the unembedding reads the newest block's outputs alone")
        return PlainStart(True, "queries of zero read the mean of all outputs, which is normed")

    def parameters(self, model: Sizes) -> int:
        """Return the number of parameters: by default a query and a key gain per site.

        A site is the place where a sublayer or the unembedding reads the residual.
        """
        size = model.residual_size
        sources = self._attended(model.num_sublayers)
        biases = len(sources) * (self.newest_bias is not None)
        if self.query == "scalars":
            return sum(sources) + biases
        if self.query == "none":
            return biases
        projection = size**2 if self.query == "input" else 0
        key_gain = size if self.key_norm and self.key_gain else 0
        return len(sources) * (size + key_gain + projection) + biases

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the logits, the weighted sums of sources, and any projections."""
        size, scored = model.residual_size, self.query not in ("scalars", "none")
        sources, rows = self._attended(model.num_sublayers), self.sources(model.num_sublayers)[-1]
        projection = len(sources) * 2 * size**2 if self.query == "input" else 0
        attended = sum(sources) + self._repeated(model.num_sublayers)
        adds = size * sum(sources) if self.cumulative else 0
        if self.output_site == "sum" or (self.output_site == "newest" and self.cumulative):
            adds += size * rows
        return attended * 2 * size * (1 + scored) + projection + adds

    def logit_terms(self, model: Sizes) -> dict[str, int]:
        """Return a dict from parameter name to the number of terms of order 1 in a logit.

        For queries and key gains, the number is the size of a head, which is the residual's size
        divided by `num_heads`. For projections, it is the size of a head times that of the
        residual. For learned logits, it is 1.
        """
        if self.query == "none":
            return {}
        if self.query == "scalars":
            return {"logits": 1}
        terms = model.residual_size // self.num_heads
        terms_by_name = {"query": terms}
        if self.key_norm and self.key_gain:
            terms_by_name["key_gain"] = terms
        if self.query == "input":
            terms_by_name["project"] = terms * model.residual_size
        return terms_by_name

    def sources(self, num_sublayers: int) -> list[int]:
        """Return the number of sources at each site, in the order of depth.

        Sites are the inputs of sublayers, and of the unembedding at the end.
        """
        block, window = self.sublayers_a_block(num_sublayers), getattr(self, "window", None)
        completed = [-(-site // block) for site in range(num_sublayers + 1)]
        return [1 + (count if window is None else min(count, window)) for count in completed]

    def _attended(self, num_sublayers: int) -> list[int]:
        """Return the number of sources at each site that attends to them."""
        sources = self.sources(num_sublayers)
        return sources if self.output_site == "attention" else sources[:-1]

    def _repeated(self, num_sublayers: int) -> int:
        """Return the number of attending sites that attend to their newest source twice.

        With cumulative sources, the sum of all outputs so far is a source at every site. Before the
        first sublayer and right after a block, it equals the newest of the other sources.
        """
        if not self.cumulative:
            return 0
        block, sites = self.sublayers_a_block(num_sublayers), len(self._attended(num_sublayers))
        return sum(site % block == 0 or site == num_sublayers for site in range(sites))

    @property
    def fused(self) -> bool:
        """Whether kernels can compute this mixer; most ablations have no kernels."""
        options = (self.weights, self.key_norm, self.num_heads, self.newest_bias, self.cumulative)
        plain = ("softmax", True, 1, None, False)
        return self.query in ("static", "none") and options == plain

    @property
    def undivided(self) -> str | None:
        """The option that a mesh cannot divide over D_k, with its legal value, or None.

        A head is a part of the whole residual, and so is each column of a query's projection.
        """
        if self.query == "input":
            return "query='input'; legal: query=static, scalars or none"
        if self.num_heads > 1:
            return f"num_heads={self.num_heads}; legal: num_heads=1"
        return None

    @property
    def decode_kernels(self) -> bool:
        """Whether kernels for decode steps can compute this mixer; always equal to `fused`."""
        return self.fused


@dataclass(frozen=True)
class FullAttention(_DepthAttention):
    """Full Attention Residuals: attention over the embedding and every sublayer's output.

    Attributes:
      window: number of most recent outputs that are sources, in addition to the embedding; None
        uses all outputs.
      phase_layers: number of layers whose sites share one pass over the earlier outputs. It affects
        memory traffic but not results. None chooses a number automatically.
    """

    kind: ClassVar[str] = "full_attention"
    window: Size | None = None
    phase_layers: Size | None = None

    @property
    def fused(self) -> bool:
        """Whether kernels can compute this mixer: only with default options and no window."""
        return super().fused and self.window is None

    def sublayers_a_block(self, num_sublayers: int) -> int:
        """Return the number of sublayers per block (S): 1, because every output is its own block.

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
            fits = f"1 to {num_layers}, or " if num_layers else ""
            raise UsageError(
                f"FullAttention.phase_layers={self.phase_layers} is more than num_layers="
                f"{num_layers}; legal: {fits}null for an automatic choice"
            )
        return 1


@dataclass(frozen=True)
class _Blocks(BankedSystem):
    """The base class of mixers that divide the sublayers into blocks.

    A source is the sum of the outputs of a block. At most one of the three fields may be set. The
    last block may be smaller. If no field is set, there are 8 blocks. A model with fewer than 8
    sublayers then has one block per sublayer.

    Attributes:
      num_blocks: number of blocks (N), with `ceil(2L / N)` sublayers per block.
      sublayers_per_block: number of sublayers per block (S), the block size in the paper.
      layers_per_block: number of layers per block, with two sublayers per layer. The configs of
        released models have this number as `attn_res_block_size`.
    """

    num_blocks: Size | None = None
    sublayers_per_block: Size | None = None
    layers_per_block: Size | None = None

    def __post_init__(self):
        super().__post_init__()
        sizes = ("num_blocks", "sublayers_per_block", "layers_per_block")
        set_sizes = [name for name in sizes if getattr(self, name) is not None]
        if len(set_sizes) > 1:
            assignments = " and ".join(f"{name}={getattr(self, name)}" for name in set_sizes)
            raise UsageError(
                f"{type(self).__name__}.{assignments} both set the blocks' size; set only one"
            )

    def sublayers_a_block(self, num_sublayers: int) -> int:
        """Return the number of sublayers per block (S) in a model of this depth.

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
                    limit = sublayers if name == "sublayers_per_block" else num_layers
                    legal = f"1 to {limit}" if limit else "null, or sublayers_per_block=1"
                    raise UsageError(
                        f"{type(self).__name__}.{name}={getattr(self, name)} is more than the "
                        f"model's {limit} {name.split('_')[0]}; legal: {legal}"
                    )
                return size
        blocks = min(8, sublayers) if self.num_blocks is None else self.num_blocks
        size = -(-sublayers // min(blocks, sublayers))
        if -(-sublayers // size) != blocks and self.num_blocks is not None:
            legal = sorted({-(-sublayers // s) for s in range(1, sublayers + 1)})
            nearest = sorted(legal, key=lambda n: abs(n - blocks))[:2]
            raise UsageError(
                f"{type(self).__name__}.num_blocks={blocks} cannot divide {sublayers} sublayers "
                f"into equal blocks and a last block that is no larger; nearest legal: "
                f"{' or '.join(map(str, sorted(nearest)))}"
            )
        return size

    def chunk_multiple(self, num_sublayers: int) -> int:
        """Return the number of sublayers per block.

        It must divide the number of sublayers in each chunk of a pipeline. A chunk contains the
        layers that a stage runs consecutively.
        """
        return self.sublayers_a_block(num_sublayers)


@dataclass(frozen=True)
class BlockAttention(_Blocks, _DepthAttention):
    """Block Attention Residuals: attention over the embedding and sums of outputs within blocks.

    At most one of the fields num_blocks, sublayers_per_block and layers_per_block may be set.
    """

    kind: ClassVar[str] = "block_attention"


@dataclass(frozen=True)
class DeltaAttention(_Blocks):
    """Delta Attention Residuals: the sum of all outputs, plus attention over sums within blocks.

    The sum of a block's outputs is called the block's delta. Attention over the deltas is scaled by
    a learned gate per site, and added to the sum.

    Attributes:
      gate: initial value of every site's gate. With 0, a new model equals the plain model, which
        sums all outputs. The paper has no gate, as if it were always 1.
      null_source: initial value of the logit of a null source, a source that is always 0. Each site
        learns its own logit. None means no null source.
      key_gain: whether the norm of the keys has a learned gain.
      epsilon: constant added to the mean square in the norm of the keys.
    """

    kind: ClassVar[str] = "delta_attention"
    note: ClassVar[str] = "a learned gate per site, which starts at zero, as the plain model"
    # Delta attention lacks these options of other attention over depth. Shared code reads them, so
    # they are constants with their default values.
    query: ClassVar[str] = "static"
    key_norm: ClassVar[bool] = True
    num_heads: ClassVar[int] = 1
    newest_bias: ClassVar[float | None] = None
    cumulative: ClassVar[bool] = False
    output_site: ClassVar[str] = "attention"
    normed_embedding: ClassVar[bool] = False
    fused: ClassVar[bool] = True
    gate: Finite = 0.0
    null_source: Finite | None = None
    key_gain: bool = True
    epsilon: Positive = 1e-6

    def check(self, model: Sizes) -> None:
        """Raise UsageError if the blocks do not fit the depth."""
        self.sublayers_a_block(model.num_sublayers)

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return whether a new model equals the plain model, which sums all outputs.

        The result is True if gates start at zero.
        """
        if self.gate:
            return PlainStart(False, f"gate={self.gate:g} adds attention over deltas")
        return PlainStart(True, "gates of zero add nothing to the standard residual")

    def parameters(self, model: Sizes) -> int:
        """Return the number of parameters in queries, gates, key gains and learned logits."""
        a_site = model.residual_size * (1 + self.key_gain) + 1 + (self.null_source is not None)
        return (model.num_sublayers + 1) * a_site

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the logits, the weighted sums of deltas, and the gated sums."""
        size = model.residual_size
        return sum(4 * size * deltas + 2 * size for deltas in self.sources(model.num_sublayers))

    def logit_terms(self, model: Sizes) -> dict[str, int]:
        """Return a dict from parameter name to the number of terms that are summed in a logit.

        The number is the residual's size, for queries and key gains. Gates and the logits of null
        sources learn at the rate of other gains, and are not listed.
        """
        names = ("query", "key_gain") if self.key_gain else ("query",)
        return dict.fromkeys(names, model.residual_size)

    def sources(self, num_sublayers: int) -> list[int]:
        """Return the number of deltas (sums of outputs) at each site, in the order of depth."""
        block = self.sublayers_a_block(num_sublayers)
        return [-(-site // block) for site in range(num_sublayers + 1)]


@dataclass(frozen=True)
class Dense(BankedSystem):
    """DenseFormer: each layer reads a learned weighted sum of earlier layers' outputs.

    Attributes:
      dilation: a number k. A sum contains only every k-th earlier output.
      period: a number p. A weighted sum is computed only after every p-th layer.
    """

    kind: ClassVar[str] = "dense"
    by_layers: ClassVar[bool] = True
    note: ClassVar[str] = "starts as the plain model; its weights over depth do not decay"
    dilation: Size = 1
    period: Size = 1

    def check(self, model: Sizes) -> None:
        """Raise UsageError if the model has too few layers for a sum with an earlier output."""
        for name in ("dilation", "period"):
            if (value := getattr(self, name)) > model.num_layers:
                raise UsageError(
                    f"Dense.{name}={value} is more than num_layers={model.num_layers}; "
                    f"legal: 1 to {model.num_layers}"
                )

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return True: a new model equals the plain model, which sums all outputs.

        Every weighted sum at first contains only the newest output.
        """
        return PlainStart(True, "each weighted sum is its newest term alone")

    def parameters(self, model: Sizes) -> int:
        """Return the number of weights in all sums."""
        ends = range(self.period, model.num_layers + 1, self.period)
        return sum((end + self.dilation) // self.dilation for end in ends)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the weighted sums."""
        return 2 * model.residual_size * self.parameters(model)


# In MUDD, a layer reads a separate sum for each of its queries, keys, values and residual.
MUDD_WAYS = "qkvr"


@dataclass(frozen=True)
class Mudd(BankedSystem):
    """MUDD: queries, keys, values and the residual each read their own sum of outputs.

    The sums are weighted sums of the outputs of earlier layers. Their weights differ between
    tokens.
    """

    kind: ClassVar[str] = "mudd"
    by_layers: ClassVar[bool] = True
    note: ClassVar[str] = (
        "starts as the plain model; the first projections of its networks decay, its other weights "
        "do not"
    )

    def check(self, model: Sizes) -> None:
        """Raise UsageError unless every layer begins with attention."""
        first = [core for n, core in enumerate(model.sublayers) if n % 2 == 0]
        if any(getattr(core, "output_gate", False) for core in first):
            raise UsageError(
                "ModelConfig.mixer=mudd does not support attention.output_gate=True; legal: false"
            )
        others = sorted({core.kind for core in first if not isinstance(core, Attention)})
        if others:
            raise UsageError(
                f"ModelConfig.mixer=mudd needs layers that begin with attention, but some begin "
                f"with {', '.join(others)}; legal: layers of attention followed by another core"
            )

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return True: a new model equals the plain model, which sums all outputs.

        The static weights at first select the newest output, and W_2 is zero.
        """
        return PlainStart(True, "each weighted sum is its newest term alone")

    def parameters(self, model: Sizes) -> int:
        """Return the number of weights in the networks, plus the number of static weights."""
        size = model.residual_size
        return sum(size * n + n**2 + n for n in self._weights(model))

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the networks and of the weighted sums."""
        size = model.residual_size
        return sum(4 * size * n + 2 * n**2 for n in self._weights(model))

    def logit_terms(self, model: Sizes) -> dict[str, int]:
        """Return a dict from parameter name to the number of terms that are summed in a weight.

        The weights are outputs of networks. The number is the largest number of hidden units of a
        network. Only second projections are listed, because other parameters have the learning
        rates of their roles.
        """
        return {"project_out": max(self._weights(model))}

    def _weights(self, model: Sizes) -> list[int]:
        """Return the number of weights per token in layers 2 to L, and in the unembedding."""
        layers = range(2, model.num_layers + 1)
        return [*(len(MUDD_WAYS) * sources for sources in layers), model.num_layers + 1]


@dataclass(frozen=True)
class Hierarchical(System):
    """Hierarchical aggregation: after every few layers, a node combines their outputs.

    The output of a node is the input of the next layers.

    Attributes:
      hidden_dim: hidden size of a node. The default gives the parameter count in the RMT paper.
      every: number of layers per node.
      shared: whether nodes with the same number of inputs share their weights.
    """

    kind: ClassVar[str] = "hierarchical"
    by_layers: ClassVar[bool] = True
    note: ClassVar[str] = "nodes, which norm the sum, decay and have no biases"
    hidden_dim: Size = 128
    every: Size = 2
    shared: bool = False

    def check(self, model: Sizes) -> None:
        """Raise UsageError if the model has fewer layers than one node combines."""
        if self.every > model.num_layers:
            raise UsageError(
                f"Hierarchical.every={self.every} is more than num_layers={model.num_layers}; "
                f"legal: 1 to {model.num_layers}"
            )

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return False: a new model differs from the plain model, which sums all outputs.

        The weights of nodes are drawn at random.
        """
        return PlainStart(False, "the weights of nodes are drawn at random")

    def parameters(self, model: Sizes) -> int:
        """Return the number of parameters in all nodes, counting shared weights once."""
        nodes, size = self.node_inputs(model.num_layers), model.residual_size
        distinct = set(nodes) if self.shared else nodes
        return sum((inputs + 1) * size * self.hidden_dim + size for inputs in distinct)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of all nodes."""
        nodes = self.node_inputs(model.num_layers)
        return sum(2 * (inputs + 1) * model.residual_size * self.hidden_dim for inputs in nodes)

    def node_inputs(self, num_layers: int) -> list[int]:
        """Return the number of inputs of each node, in the order of depth."""
        return [self.every + (node > 0) for node in range(num_layers // self.every)]
