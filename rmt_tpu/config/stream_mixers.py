"""Configs of mixers whose state, such as several residual streams, passes through all sublayers.

Each mixer is implemented in its own file in `rmt_tpu/residual/`. The file states the mixer's
equations and their sources.
"""

from dataclasses import dataclass
from math import factorial
from typing import ClassVar, Literal

from rmt_tpu.config.checks import Decay, Finite, NonNegative, Size
from rmt_tpu.config.core import Computes, Heads
from rmt_tpu.config.cores import Attention, FeedForward
from rmt_tpu.config.mixer_base import Sizes, System
from rmt_tpu.config.plain_start import PlainStart
from rmt_tpu.errors import UsageError


class _Streams(System):
    """The base class of mixers with several residual vectors, which each sublayer reads and writes.

    Attributes:
      streams: number of residual vectors (m).
    """

    one_residual: ClassVar[bool] = False
    streams: Size

    @property
    def kept_residuals(self) -> int:
        """Half of the streams before a layer, rounded up, and what the sublayer writes."""
        return -(-self.streams // 2) + 1


@dataclass(frozen=True)
class HyperConnections(_Streams):
    """Hyper-connections: several residual vectors, with learned reads, writes and mixing.

    Attributes:
      streams: number of residual vectors (m).
      dynamic: whether the coefficients also depend on the streams.
      tanh: whether a tanh bounds the part of the coefficients that depends on the streams.
    """

    kind: ClassVar[str] = "hyper_connections"
    note: ClassVar[str] = (
        "starts as the plain model; no sqrt(m) on outputs, unlike its paper; projections decay, "
        "static coefficients and scales do not"
    )
    streams: Size = 4
    dynamic: bool = True
    tanh: bool = True

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return True: a new model computes the same as a model with a standard residual.

        At the start, every stream equals the standard residual at every depth.
        """
        return PlainStart(True, "all streams are equal to the standard residual")

    def parameters(self, model: Sizes) -> int:
        """Return the number of parameters in all sublayers.

        A sublayer has static coefficients and, if `dynamic`, a gain, a projection and two scales.
        """
        m, size = self.streams, model.residual_size
        return model.num_sublayers * (m * (m + 2) + (size + size * (m + 2) + 2) * self.dynamic)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the projections and of reading, writing and mixing streams."""
        m, size = self.streams, model.residual_size
        projection = 2 * m * size * (m + 2) if self.dynamic else 0
        return model.num_sublayers * (projection + _streams_flops(m, size))


def _projected_parameters(m: int, coefficients: int, model: Sizes) -> int:
    """Return the number of parameters of a mixer that projects all streams at once.

    Each sublayer has a gain, a projection with biases to `coefficients` numbers, and three scales.
    """
    per_site = m * model.residual_size * (1 + coefficients) + coefficients + 3
    return model.num_sublayers * per_site


def _projected_flops(m: int, coefficients: int, model: Sizes) -> int:
    """Return the FLOPs of the projections and of reading, writing and mixing streams."""
    size = model.residual_size
    return model.num_sublayers * (2 * m * size * coefficients + _streams_flops(m, size))


@dataclass(frozen=True)
class Mhc(_Streams):
    """mHC: hyper-connections with mixing matrices made doubly stochastic by Sinkhorn iterations.

    Attributes:
      streams: number of residual vectors (m).
      rounds: number of Sinkhorn iterations.
    """

    kind: ClassVar[str] = "mhc"
    note: ClassVar[str] = (
        "starts as the plain model; no sqrt(m) on outputs; projections decay, biases do not"
    )
    streams: Size = 4
    rounds: Size = 20

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return whether a new model computes the same as a model with a standard residual.

        It does if every core normalises its input. All streams then equal the standard residual,
        and the norm removes the sum of the read weights, which is not 1.
        """
        return _equal_streams(model)

    @property
    def _coefficients(self) -> int:
        """Number of coefficients per sublayer: for reading, writing and mixing the streams."""
        return self.streams * (2 + self.streams)

    def parameters(self, model: Sizes) -> int:
        """Return the number of parameters in gains, projections, their biases, and scales."""
        return _projected_parameters(self.streams, self._coefficients, model)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the projections and of reading, writing and mixing streams."""
        return _projected_flops(self.streams, self._coefficients, model)


@dataclass(frozen=True)
class MhcLite(_Streams):
    """mHC-lite: hyper-connections whose mixing matrix is a convex combination of permutations.

    Attributes:
      streams: number of residual vectors (m); there are m! permutations.
      init: "paper" initialises as the paper's code does. "prenorm" initialises the model to compute
        the same as a model with a standard residual.
    """

    kind: ClassVar[str] = "mhc_lite"
    streams: Size = 4
    init: Literal["paper", "prenorm"] = "paper"

    @property
    def note(self) -> str:
        """One line for reports: how the model differs from one with a standard residual."""
        starts = {
            "paper": "starts as its paper's code does, not as the plain model",
            "prenorm": "starts as the plain model",
        }
        return f"{starts[self.init]}; no sqrt(m) on outputs; projections decay, biases do not"

    def __post_init__(self):
        super().__post_init__()
        if self.streams > 6:
            raise UsageError(
                f"MhcLite.streams={self.streams} needs {self.streams}! permutations; legal: 1 to 6"
            )

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return whether a new model computes the same as a model with a standard residual.

        It does with `init="prenorm"` if every core normalises its input. The norm then removes the
        sum of the read weights, which is not 1.
        """
        if self.init == "paper":
            return PlainStart(False, "with init=paper streams are written with unequal weights")
        return _equal_streams(model)

    @property
    def _coefficients(self) -> int:
        """Number of coefficients per sublayer: for reading, for writing and for permutations."""
        return 2 * self.streams + factorial(self.streams)

    def parameters(self, model: Sizes) -> int:
        """Return the number of parameters in gains, projections, their biases, and scales."""
        return _projected_parameters(self.streams, self._coefficients, model)

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of projections, weighted sums of streams, and sums of permutations."""
        permutations = 2 * factorial(self.streams) * self.streams**2
        flops = _projected_flops(self.streams, self._coefficients, model)
        return flops + model.num_sublayers * permutations


@dataclass(frozen=True)
class WideStreams(_Streams):
    """Wide streams: several residuals per token, each with its own read and write weights.

    Attributes:
      streams: number of residuals (K).
      spread: initial spread of the write weights (s). A weight is `2 sigmoid(beta)`, and the values
        of beta go from -s for the first stream to s for the last, in equal steps. The default 1
        gives weights from 0.54 to 1.46.
      forget: the largest share of a stream that can be forgotten before a sublayer writes to it
        (c). With 0, nothing is forgotten; other values must be at least 0.002.
    """

    kind: ClassVar[str] = "wide_streams"
    on_matrix: ClassVar[bool] = True
    note: ClassVar[str] = "starts as the plain model if `forget` is 0; its weights do not decay"
    streams: Size = 4
    spread: NonNegative = 1.0
    forget: Decay = 0.0

    def __post_init__(self):
        super().__post_init__()
        if 0 < self.forget < 0.002:
            raise UsageError(
                f"WideStreams.forget={self.forget} is too small: new streams forget the share "
                "0.001 at each write, and the limit must be larger; legal: 0, or at least 0.002 "
                "and below 1"
            )

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return whether a new model computes the same as a model with a standard residual.

        It does if streams forget nothing, because their mean is then the standard residual.
        """
        if self.forget:
            return PlainStart(False, f"forget={self.forget:g} lets streams forget a part of writes")
        return PlainStart(True, "the mean of the streams is the standard residual")

    def parameters(self, model: Sizes) -> int:
        """Return the number of read weights, write weights and, if set, logits of forgetting."""
        return model.num_sublayers * self.streams * (2 + (self.forget > 0))

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the weighted reads and writes, and of forgetting."""
        forgetting = (self.forget > 0) * model.num_sublayers
        reads = writes = 2 * (model.num_sublayers + 1)
        return (reads + writes + forgetting) * self.streams * model.residual_size


@dataclass(frozen=True)
class ResidualScalars(System):
    """The standard residual with learned factors per layer, and a value residual for attention.

    Each option can be used alone. With the default initial values, a new model computes the same as
    a model with a standard residual. Zhou et al. (2024) start both factors of values at 0.5.

    Attributes:
      scalars: whether each layer begins by replacing the residual h by `a h + b x_0`, where x_0 is
        the residual after the embedding was written.
      values: whether attention replaces its values V by `l1 V_1 + l2 V`, where V_1 are the values
        that the first attention sublayer reads.
      residual_scale: initial value of the factor a. The option `train.depth_rate` multiplies the
        learning rate of a.
      embedding_scale: initial value of the factor b.
      first_value_scale: initial value of the factor l1.
      value_scale: initial value of the factor l2.
    """

    kind: ClassVar[str] = "residual_scalars"
    on_matrix: ClassVar[bool] = True
    # The residual, x_0, V_1 and the values of each layer: 5 vectors for two sublayers.
    kept_residuals: ClassVar[int | None] = 3
    scalars: bool = True
    values: bool = True
    residual_scale: Finite = 1.0
    embedding_scale: Finite = 0.0
    first_value_scale: Finite = 0.0
    value_scale: Finite = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not (self.scalars or self.values):
            raise UsageError(
                "ResidualScalars.scalars=False with values=False leaves no factor to learn; legal: "
                "at least one of them True, or mixer=sum for a standard residual"
            )

    @property
    def note(self) -> str:
        """One line for reports: how the model differs from one with a standard residual."""
        starts = "does not start" if self._changed_factors else "starts"
        return f"{starts} as the plain model; its factors do not decay"

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return whether a new model computes the same as a model with a standard residual.

        It does if all factors start at values that have no effect.
        """
        if changed := self._changed_factors:
            return PlainStart(False, f"{', '.join(changed)} changes the residual or values")
        return PlainStart(True, "all factors have their values in the plain model")

    @property
    def _changed_factors(self) -> list[str]:
        """The factors with initial values that have an effect, as texts like "name=0.5"."""
        of_plain = {"residual_scale": 1.0, "embedding_scale": 0.0} if self.scalars else {}
        of_plain |= {"first_value_scale": 0.0, "value_scale": 1.0} if self.values else {}
        own = {name: getattr(self, name) for name in of_plain}
        return [f"{name}={own[name]:g}" for name in own if own[name] != of_plain[name]]

    @property
    def by_layers(self) -> bool:
        """Whether two consecutive sublayers form one layer; True if factors a and b are used."""
        return self.scalars

    def check(self, model: Sizes) -> None:
        """Raise UsageError if `values` is set, but layers lack values or differ in their shape."""
        cores = [core for core in model.sublayers if isinstance(core, Heads)]
        shapes = {(core.kv_heads, core.head_dim) for core in cores if isinstance(core, Attention)}
        alike = len(shapes) == 1 and all(isinstance(core, Attention) for core in cores)
        if self.values and not alike:
            kinds = sorted({core.kind for core in cores} - {Attention.kind})
            sizes = sorted(f"attention with {heads} value heads of {d}" for heads, d in shapes)
            raise UsageError(
                f"ResidualScalars.values=True needs attention in all layers, with value heads of "
                f"one shape, but the model has {', '.join(sizes + kinds) or 'no attention'}; "
                "legal: False"
            )

    def parameters(self, model: Sizes) -> int:
        """Return the number of factors: a and b per layer, l1 and l2 per attention sublayer."""
        attentions = sum(isinstance(core, Attention) for core in model.sublayers)
        return 2 * self.scalars * model.num_layers + 2 * self.values * attentions

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the weighted sums of two residuals and of two arrays of values."""
        values = [core.kv_heads * core.head_dim for core in model.sublayers if self._mixes(core)]
        return 4 * (self.scalars * model.num_layers * model.residual_size + sum(values))

    def logit_terms(self, model: Sizes) -> dict[str, int]:
        """Return the number of factors a under the name of their parameter, or {} without factors.

        The product of the factors a of all layers scales the final residual. The logarithm of this
        scale is a sum with one term per layer. It is treated like a logit of attention over depth.
        The factors b, l1 and l2 learn at the rate of the model's gains.
        """
        return {"residual_scale": model.num_layers} if self.scalars else {}

    def _mixes(self, core: Computes) -> bool:
        return self.values and isinstance(core, Attention)


@dataclass(frozen=True)
class Highway(System):
    """Highway Transformer: a self-gating unit in parallel with every sublayer.

    Attributes:
      input: input of the unit, which is either the normed input of the sublayer ("normed") or the
        residual ("raw").
      activation: activation function of the gate.
      form: how the unit's output `T * v` is used, where T is the gate and v is the value. The
        output is always added to the residual. "carry" also multiplies the old residual by `1 - T`,
        and "gated" multiplies the sublayer's output by `1 - T`.
    """

    kind: ClassVar[str] = "highway"
    note: ClassVar[str] = "gates and values are drawn like other weights, decay and have no biases"
    kept_residuals: ClassVar[int | None] = 2
    input: Literal["normed", "raw"] = "normed"
    activation: Literal["sigmoid", "tanh"] = "sigmoid"
    form: Literal["add", "carry", "gated"] = "add"

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return False: a new model does not compute the same as a model with a standard residual.

        The weights of gates and values are drawn at random.
        """
        return PlainStart(False, "the weights of gates and values are drawn at random")

    def parameters(self, model: Sizes) -> int:
        """Return the number of weights in the matrices W_1 and W_2 of all units."""
        return model.num_sublayers * 2 * model.residual_size**2

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the products with W_1 and W_2."""
        return 2 * self.parameters(model)


@dataclass(frozen=True)
class DepthLstm(System):
    """Depth-wise LSTM: an LSTM cell per layer, run over depth, replaces the residual stream.

    The cell includes the layer's feed-forward sublayer.

    Attributes:
      forget_offset: constant added to the logits of the forget gate.
      cell_start: initial cell state, either "zero" or the "embedding".
    """

    kind: ClassVar[str] = "depth_lstm"
    one_residual: ClassVar[bool] = False
    by_layers: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False
    second_input: ClassVar[int] = 2
    note: ClassVar[str] = (
        "W_O and W_2 do not start smaller by depth; gates decay and have no biases"
    )
    forget_offset: Finite = 0.0
    cell_start: Literal["zero", "embedding"] = "zero"

    def check(self, model: Sizes) -> None:
        """Raise UsageError unless the second sublayer of every layer is a feed-forward layer."""
        second = list(model.sublayers)[1::2]
        others = sorted({core.kind for core in second if not isinstance(core, FeedForward)})
        if others:
            raise UsageError(
                f"ModelConfig.mixer=depth_lstm needs layers that end with feed_forward, but some "
                f"end with {', '.join(others)}; legal: layers of a core followed by feed_forward"
            )

    def plain_start(self, model: Sizes) -> PlainStart:
        """Return False: an LSTM cell replaces the standard residual, which is a sum over depth."""
        return PlainStart(False, "an LSTM cell replaces the sum over depth")

    def parameters(self, model: Sizes) -> int:
        """Return the number of parameters in gates, their norms, and the feed-forward norms."""
        size = model.residual_size
        hidden = sum(core.hidden_dim for core in list(model.sublayers)[1::2])
        return model.num_layers * (6 * size**2 + 3 * size) + hidden

    def flops(self, model: Sizes) -> int:
        """Return the FLOPs of the gates."""
        return model.num_layers * 12 * model.residual_size**2


def _streams_flops(streams: int, size: int) -> int:
    """Return the FLOPs per sublayer of reading, writing and mixing `streams` vectors of `size`."""
    return 2 * size * (streams**2 + 2 * streams)


def _equal_streams(model: Sizes) -> PlainStart:
    """Return whether a model with equal streams computes the same as with a standard residual.

    The sum of the read weights is not 1, so the input of a core is scaled by this sum. The scale
    has no effect if every core normalises its input.
    """
    if not all(core.reads.normed for core in model.sublayers):
        return PlainStart(False, "read weights scale the streams, and a core reads without a norm")
    return PlainStart(True, "all streams are equal to the standard residual")
