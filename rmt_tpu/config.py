"""What a run is: frozen dataclasses, nested. A choice between systems is a choice between classes.

Every class of a choice carries a `kind`, the name it has in JSON and on the command line
(`--set=model.store=vector`, `--set=model.attention.positions=rope`).
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rmt_tpu.errors import UsageError
from rmt_tpu.mixers import (
    Banked,
    BlockAttention,
    Dense,
    DepthLstm,
    FullAttention,
    Hierarchical,
    Highway,
    HyperConnections,
    Mhc,
    MhcLite,
    Mixer,
    Sum,
)

__all__ = [  # of what is only passed on
    "Banked",
    "BlockAttention",
    "Dense",
    "DepthLstm",
    "FullAttention",
    "Hierarchical",
    "Highway",
    "HyperConnections",
    "Mhc",
    "MhcLite",
    "Mixer",
    "Sum",
]

DType = Literal["auto", "float32", "bfloat16", "float64"]
StateDType = Literal["auto", "float32", "bfloat16", "float64", "int16"]
RematPolicy = Literal["none", "dots", "full", "reversible", "blocks"]
Role = Literal["gain", "embedding", "unembedding", "keys", "hidden"]


def _positive(config, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:  # NaN is not
            raise UsageError(
                f"{type(config).__name__}.{name}={getattr(config, name)} must be positive"
            )


# Positions of tokens -------------------------------------------------------------------------


@dataclass(frozen=True)
class Learned:
    """A learned vector for each of `max_length` (N) positions, written with the embedding."""

    kind: ClassVar[str] = "learned"
    max_length: int = 512

    def __post_init__(self):
        _positive(self, "max_length")


@dataclass(frozen=True)
class Alibi:
    """Attention logits fall with distance, by slope `2^(-8 (h + 1) / num_heads)` in head h."""

    kind: ClassVar[str] = "alibi"


@dataclass(frozen=True)
class Rope:
    """Queries and keys are rotated by their position, at frequencies `base^(-2 i / head_dim)`."""

    kind: ClassVar[str] = "rope"
    base: float = 10_000.0

    def __post_init__(self):
        _positive(self, "base")


@dataclass(frozen=True)
class NoPositions:
    """Order is known from the causal mask alone."""

    kind: ClassVar[str] = "none"


Positions = Learned | Alibi | Rope | NoPositions

# Stores: what one token's residual is --------------------------------------------------------


@dataclass(frozen=True)
class VectorStore:
    """A vector of size `dim` (D): the Transformer. `dtype` "auto" is the compute dtype."""

    kind: ClassVar[str] = "vector"
    dim: int
    dtype: DType = "auto"

    def __post_init__(self):
        _positive(self, "dim")


@dataclass(frozen=True)
class MatrixStore:
    """A matrix `key_dim x head_dim` (D_k x D_v): the Residual Matrix Transformer.

    Sublayers write `num_heads` (R) outer products into it and read it with key vectors.
    `dtype` "auto" is the compute dtype, or int16 for bfloat16 with `remat="reversible"`. "int16" is
    fixed point in steps of 1/512 up to 64; a token whose residual goes beyond makes the loss NaN.
    """

    kind: ClassVar[str] = "matrix"
    key_dim: int
    dtype: StateDType = "auto"

    def __post_init__(self):
        _positive(self, "key_dim")


Store = VectorStore | MatrixStore

# Parametrisations ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Standard:
    """No multipliers; attention logits are scaled by `1 / sqrt(head_dim)`."""

    kind: ClassVar[str] = "standard"


@dataclass(frozen=True)
class MuP:
    """Maximal update parametrisation: multipliers and rates that transfer over width.

    Hidden weights learn at `learning_rate * base_width / width`, logits are multiplied by
    `output_multiplier * base_width / width`, attention logits by
    `attention_multiplier * sqrt(base_head_dim) / head_dim`, embeddings by `input_multiplier`.
    Defaults: what the paper's search found for its Transformer (appendix C.2.1), for use with
    `init_std=0.15` and a learning rate of 6.5e-3.
    """

    kind: ClassVar[str] = "mup"
    base_width: int = 256
    base_head_dim: int = 32
    input_multiplier: float = 9.76
    attention_multiplier: float = 0.25
    output_multiplier: float = 5.52

    def __post_init__(self):
        _positive(self, "base_width", "base_head_dim")


Parametrization = Standard | MuP

# The model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """`num_heads` (H, or R in an RMT) heads of size `head_dim` (D_h, or D_v in an RMT).

    `inverse_layer_scaling` divides the logits of layer l by l + 1.
    """

    num_heads: int
    head_dim: int
    positions: Positions = Learned()
    inverse_layer_scaling: bool = True

    def __post_init__(self):
        _positive(self, "num_heads", "head_dim")
        if isinstance(self.positions, Rope) and self.head_dim % 2:
            raise UsageError(
                f"Attention.head_dim={self.head_dim} must be even for rope positions, "
                f"like {self.head_dim + 1}"
            )


@dataclass(frozen=True)
class FeedForward:
    """`W_2 gelu(W_1 z)` with `hidden_dim` (D_FF) hidden neurons."""

    hidden_dim: int
    activation: Literal["gelu_tanh", "gelu_exact"] = "gelu_tanh"

    def __post_init__(self):
        _positive(self, "hidden_dim")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. Symbols in the paper: `num_layers` L, `vocab_size` V.

    Attributes:
      norm: over a token's whole residual, before every read, with a gain and no bias.
      norm_epsilon: added to the variance or mean square.
      init_std: weights are drawn with standard deviation `init_std / sqrt(fan in)`, embeddings
        with `init_std`. Key vectors do not follow it (see `layers.parameters`).
      compute_dtype: of the matrix products; "auto" is bfloat16 on accelerators, float32 on CPU.
        Parameters are float32 whatever it is.
      remat: what the backward pass recomputes within a layer: "none" of it, everything but
        matrix products with weights ("dots"), or the "full" layer. "reversible" (an RMT only) keeps
        what sublayers wrote and rebuilds the residual from it, so that its memory does not grow
        with `key_dim`. Attention over depth and DenseFormer always recompute the full layer; they
        keep the bank and the running sum before each layer ("full"), or with "blocks" the bank
        alone, for a second forward pass.
    """

    num_layers: int
    attention: Attention
    feed_forward: FeedForward
    store: Store
    mixer: Mixer = Sum()
    vocab_size: int = 50257
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_epsilon: float = 1e-6
    init_std: float = 1.0
    parametrization: Parametrization = Standard()
    compute_dtype: DType = "auto"
    remat: RematPolicy = "full"

    def __post_init__(self):
        _positive(self, "num_layers", "vocab_size", "norm_epsilon", "init_std")
        dtype = self.store.dtype
        self._check_mixer()
        if self.remat == "reversible" and isinstance(self.store, VectorStore):
            raise UsageError(
                "ModelConfig.remat='reversible' needs a matrix store; legal for a vector store: "
                "none, dots, full"
            )
        if self.remat == "reversible" and dtype == "bfloat16":
            raise UsageError(
                "MatrixStore.dtype='bfloat16' with remat='reversible' would drift by percents when "
                "rebuilt; legal: auto, int16, float32, float64"
            )
        if self.remat != "reversible" and dtype == "int16":
            raise UsageError(
                f"MatrixStore.dtype='int16' has gradients only with remat='reversible', and remat "
                f"is {self.remat!r}; legal: auto, float32, bfloat16, float64"
            )

    def _check_mixer(self):
        mixer, kind = self.mixer, self.mixer.kind
        banked = isinstance(mixer, Banked)
        if isinstance(mixer, FullAttention | BlockAttention):
            mixer.sublayers_a_block(self.num_layers)
            if self.residual_size % mixer.num_heads:
                raise UsageError(
                    f"{type(mixer).__name__}.num_heads={mixer.num_heads} does not divide the "
                    f"residual's {self.residual_size} numbers"
                )
        if isinstance(self.store, MatrixStore) and not (banked or isinstance(mixer, Sum)):
            raise UsageError(
                f"ModelConfig.mixer={kind} is defined for a vector store only; legal for a matrix "
                "store: sum, full_attention, block_attention, dense"
            )
        if isinstance(mixer, Hierarchical) and mixer.every > self.num_layers:
            raise UsageError(
                f"Hierarchical.every={mixer.every} is more than num_layers={self.num_layers}"
            )
        legal: tuple[str, ...] = ("full", "blocks") if banked else ("none", "dots", "full")
        legal += ("reversible",) if isinstance(mixer, Sum) else ()
        if self.remat not in legal:
            raise UsageError(
                f"ModelConfig.remat={self.remat!r} is not for mixer={kind}; legal: "
                f"{', '.join(legal)}"
            )

    @property
    def data_shape(self) -> tuple[int, int]:
        """Number and size of the data vectors that an embedding or feed-forward layer writes.

        One vector of size D in the Transformer, R vectors of size D_v in an RMT.
        """
        match self.store:
            case VectorStore(dim=dim):
                return 1, dim
            case MatrixStore():
                return self.attention.num_heads, self.attention.head_dim

    @property
    def width(self) -> int:
        """Size of all these data vectors together: D, or `R * D_v` in an RMT."""
        count, size = self.data_shape
        return count * size

    @property
    def residual_size(self) -> int:
        """Numbers in one token's residual: D, or `D_k * D_v` in an RMT."""
        match self.store:
            case VectorStore(dim=dim):
                return dim
            case MatrixStore(key_dim=key_dim):
                return key_dim * self.attention.head_dim

    @property
    def width_ratio(self) -> float:
        """Width over the muP base width; 1 in the standard parametrisation."""
        match self.parametrization:
            case MuP(base_width=base_width):
                return self.width / base_width
            case Standard():
                return 1.0


# The run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdamW:
    """AdamW after clipping the gradient to a global norm of `clip_norm`.

    Attributes:
      learning_rate: the peak. Linear warmup over `warmup_fraction` of the steps, then a cosine
        down to `final_fraction` of the peak.
      weight_decay: multiplied by the learning rate, unless `independent_weight_decay`.
      decay_exclude: roles of parameters that do not decay.
    """

    learning_rate: float = 2e-3
    warmup_fraction: float = 0.05
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    weight_decay: float = 1e-4
    independent_weight_decay: bool = False
    decay_exclude: tuple[Role, ...] = ("gain", "embedding", "unembedding")

    def __post_init__(self):
        _positive(self, "learning_rate", "epsilon", "clip_norm")
        for name in ("warmup_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"AdamW.{name}={getattr(self, name)} must be between 0 and 1")


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
      steps: optimizer steps.
      batch_size: sequences a step, over all devices and accumulation steps.
      accumulate: parts that a batch is computed in, one after the other.
      z_loss: coefficient of `logsumexp(logits)^2` in the loss.
      seed: of the parameters and of the order of the data.
      mesh: axes of devices, like "data=2,fsdp=4"; -1 fills.
      microbatches: parts of a device's rows that a pipeline (`stage`) works on at a time; 0 is as
        many as stages.
      virtual_stages: chunks of layers on each stage of a pipeline.
      checkpoint_every, eval_every: in steps; 0 is only at the end.
      checkpoint_seconds: a checkpoint also when so many have passed since the last; 0 is never.
      checkpoint_compression: of its arrays, without loss.
      keep_checkpoints: how many of the last ones stay.
      keep_every: those of steps divisible by it stay for good; 0 is none.
      keep_best: how many with the least loss on held-out text stay.
      eval_batches: batches of held-out text at an evaluation, or fewer if there are fewer.
      max_bad_steps: the run stops after so many non-finite steps in a row.
      sample_prompt, sample_tokens: of the text generated at the end.
    """

    steps: int = 1000
    batch_size: int = 64
    accumulate: int = 1
    optimizer: AdamW = AdamW()
    z_loss: float = 1e-4
    seed: int = 0
    mesh: str = "data=-1"
    microbatches: int = 0
    virtual_stages: int = 1
    log_every: int = 1
    checkpoint_every: int = 1000
    checkpoint_seconds: float = 0.0
    checkpoint_compression: Literal["none", "zstd"] = "none"
    keep_checkpoints: int = 3
    keep_every: int = 0
    keep_best: int = 0
    eval_every: int = 1000
    eval_batches: int = 16
    max_bad_steps: int = 5
    sample_prompt: str = ""
    sample_tokens: int = 256

    def __post_init__(self):
        _positive(
            self, "steps", "batch_size", "accumulate", "virtual_stages", "log_every",
            "keep_checkpoints", "eval_batches", "max_bad_steps",
        )  # fmt: skip
        for name in ("checkpoint_seconds", "keep_every", "keep_best"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"TrainConfig.{name}={getattr(self, name)} must not be negative")
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"TrainConfig.batch_size={self.batch_size} is not divisible by "
                f"accumulate={self.accumulate}; nearest legal batch sizes: "
                f"{nearest_multiples(self.batch_size, self.accumulate)}"
            )


@dataclass(frozen=True)
class DataConfig:
    """What to train on.

    Attributes:
      source: "stdlib", a token store, or comma-separated .txt and .jsonl files and globs.
      tokenizer: "byte", a folder with encoder.json and vocab.bpe, or a tokenizer.json.
      seq_len: tokens in a window (N).
      eval_fraction: share of the text that is held out, by document.
    """

    source: str = "stdlib"
    tokenizer: str = "byte"
    seq_len: int = 512
    eval_fraction: float = 0.02

    def __post_init__(self):
        _positive(self, "seq_len")
        if not 0 < self.eval_fraction <= 0.5:
            raise UsageError(
                f"DataConfig.eval_fraction={self.eval_fraction} must be above 0, at most 0.5"
            )


@dataclass(frozen=True)
class RunConfig:
    """All of a run: what `config.json` in a run folder holds."""

    model: ModelConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self):
        match self.model.attention.positions:
            case Learned(max_length=max_length) if self.data.seq_len > max_length:
                raise UsageError(
                    f"--seq_len={self.data.seq_len} is beyond the model's {max_length} learned "
                    f"positions; legal: at most {max_length}, or "
                    f"--set=model.attention.positions.max_length={self.data.seq_len}, "
                    "or positions alibi, rope or none"
                )


def nearest_multiples(value: int, divisor: int) -> str:
    """The legal sizes just below and above `value`, for an error message."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
