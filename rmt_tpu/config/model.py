"""A decoder, and its parametrisations."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rmt_tpu.config.checks import LARGEST_SIZE, Checked, Positive, Size
from rmt_tpu.config.cores import Attention, FeedForward
from rmt_tpu.config.mixers import (
    Banked,
    BlockAttention,
    FullAttention,
    Hierarchical,
    Mixer,
    Sum,
)
from rmt_tpu.config.resume import changeable
from rmt_tpu.config.stores import DType, MatrixStore, Store, VectorStore
from rmt_tpu.errors import UsageError, shown

RematPolicy = Literal["none", "dots", "full", "reversible", "blocks"]


@dataclass(frozen=True)
class Standard:
    """No multipliers; attention logits are scaled by `1 / sqrt(head_dim)`."""

    kind: ClassVar[str] = "standard"


@dataclass(frozen=True)
class MuP(Checked):
    """Maximal update parametrisation: multipliers and rates that transfer over width.

    Hidden weights learn at `learning_rate * base_width / width`, logits are multiplied by
    `output_multiplier * base_width / width`, attention logits by
    `attention_multiplier * sqrt(base_head_dim) / head_dim`, embeddings by `input_multiplier`.
    Defaults: what the paper's search found for its Transformer (appendix C.2.1), for use with
    `init_std=0.15` and a learning rate of 6.5e-3.
    """

    kind: ClassVar[str] = "mup"
    base_width: Size = 256
    base_head_dim: Size = 32
    input_multiplier: Positive = 9.76
    attention_multiplier: Positive = 0.25
    output_multiplier: Positive = 5.52


Parametrization = Standard | MuP


@dataclass(frozen=True)
class ModelConfig(Checked):
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

    num_layers: Size
    attention: Attention
    feed_forward: FeedForward
    store: Store
    mixer: Mixer = Sum()
    vocab_size: Size = 50257
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_epsilon: Positive = 1e-6
    init_std: Positive = 1.0
    parametrization: Parametrization = Standard()
    compute_dtype: DType = changeable("auto")
    remat: RematPolicy = changeable("full")

    def __post_init__(self):
        super().__post_init__()
        self._check_sizes()
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

    def _check_sizes(self):
        for what, size in {
            "attention.num_heads * attention.head_dim": self.width,
            "store.key_dim * attention.head_dim": self.residual_size,
        }.items():
            if size > LARGEST_SIZE:
                raise UsageError(
                    f"ModelConfig.{what} = {shown(size)} must be at most {LARGEST_SIZE}"
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
