"""The config of a decoder, and the parametrisations that it can have."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

from rmt_tpu.config import overrides
from rmt_tpu.config.checks import LARGEST_SIZE, Checked, Positive, Size
from rmt_tpu.config.cores import (
    RESIDUAL_PORT,
    Attention,
    Core,
    FeedForward,
    Learned,
    Port,
    Stack,
)
from rmt_tpu.config.mixers import Mixer, Sum
from rmt_tpu.config.resume import changeable
from rmt_tpu.config.stores import DType, MatrixStore, Store, VectorStore
from rmt_tpu.errors import UsageError, shown

RematPolicy = Literal[
    "auto", "none", "dots", "offload", "full", "reversible", "reversible_dots", "blocks"
]
# The policies with which the backward pass rebuilds the residual.
REVERSIBLE = ("reversible", "reversible_dots")
Kernels = Literal["auto", "xla", "pallas", "mosaic_gpu"]


@dataclass(frozen=True)
class Standard:
    """A parametrisation without multipliers; attention logits have scale `1 / sqrt(head_dim)`."""

    kind: ClassVar[str] = "standard"


@dataclass(frozen=True)
class MuP(Checked):
    """Maximal update parametrisation (Yang et al. 2022): learning rates transfer across widths.

    The base model has the sizes in `base`, and otherwise this config. If all multipliers are 1, it
    is the same as in the standard parametrisation. A model with other sizes differs from it as
    follows:

    - Matrices, key vectors and the queries of attention over depth have the learning rate
      `learning_rate * base fan-in / fan-in`. Adam changes each entry of a weight by about
      `learning_rate`, and the changes are correlated with the input. Without the factor, a sum over
      the fan-in would change by about `fan-in * learning_rate`. The fan-in is D_k for key vectors
      that read, R for key vectors that write, and the size of the residual for the queries. Weight
      decay is not scaled in this way.
    - Gains, biases and embeddings are not summed over a fan-in, and have the rate `learning_rate`.
    - The unembedding also has the rate `learning_rate`, and is initialised with the standard
      deviation of the base model. Instead, logits are multiplied by
      `output_multiplier * base width / width`.
    - Attention logits are multiplied by `attention_multiplier * sqrt(base size) / size`, where the
      sizes are those of a query. The factor is constant if all models have heads of the same size.
    - Embeddings are multiplied by `input_multiplier`.

    The RMT paper's search found 9.76, 0.25 and 5.52 for its Transformer's input, attention and
    output multipliers, with `init_std=0.15` and a learning rate of 6.5e-3 (appendix C.2.1).

    Attributes:
      base: sizes of the base model that differ from this model, like
        "store.dim=128,attention.num_heads=4". The paths are those in ModelConfig. If empty, the
        base model is this model.
      input_multiplier: factor by which embeddings are multiplied.
      attention_multiplier: factor by which attention logits are multiplied.
      output_multiplier: factor by which the output logits are multiplied.
    """

    kind: ClassVar[str] = "mup"
    base: tuple[str, ...] = ()
    input_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    output_multiplier: Positive = 1.0


Parametrization = Standard | MuP


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The config of a decoder. The RMT paper calls `num_layers` L and `vocab_size` V.

    A core is the function of one sublayer, such as attention. JSON and `replace` use a short form
    if the model repeats one layer with two cores of different kinds. It has no `stacks`. Instead,
    `num_layers` is the number of repeats, and each core is a field named after its kind.

    Attributes:
      stacks: the sublayers, as repeated groups of cores in the order of depth; see `config.stacks`.
      store: shape and dtype of the residual.
      mixer: how the outputs of sublayers are combined over depth.
      vocab_size: number of token ids.
      norm: norm over a token's whole residual, applied before every read, with a gain.
      norm_epsilon: constant added to the variance or mean square.
      norm_bias: whether these norms also have a bias (only for a vector store).
      embedding_scale: factor by which token embeddings are multiplied, in addition to muP's factor.
      tied_embeddings: whether the unembedding has the embeddings of tokens as its weights. They are
        then initialised like an unembedding.
      logit_cap: a soft cap c on the model's logits: each logit x becomes `c tanh(x / c)`. None
        means no cap.
      init_std: initial standard deviation of embeddings; that of weights is `init_std /
        sqrt(fan-in)`. Key vectors are initialised differently (see `layers.parameters`).
      parametrization: how learning rates and multipliers depend on the width.
      compute_dtype: dtype of the matrix products; "auto" is bfloat16 on accelerators, float32 on
        CPU. Parameters are always float32.
      remat: what the backward pass recomputes within a layer: nothing ("none"), everything but
        attention's result and, in a vector store, the residual ("full"), or everything but these
        and the products with weights in attention, feed-forward layers and experts ("dots").
        "offload" is like "dots", but on TPUs these products wait in the host's memory. "reversible"
        (only for a matrix store) keeps the outputs of sublayers and rebuilds the residual from
        them, so that memory does not grow with `key_dim`. "reversible_dots" also keeps the products
        with weights within a core, such as the first product of a feed-forward layer. Attention
        over depth, DenseFormer and MUDD have only "dots", "offload", "full" and "blocks". With the
        first three, they also keep the bank of earlier outputs and the running sum before each
        layer. "blocks" keeps only the bank, and runs the forward pass twice. Block Attention
        Residuals on a matrix store keep the outputs of sublayers in place of running sums, which
        are larger, and sum them again. "auto" is "reversible" for training an RMT without pipeline
        stages, and otherwise "full". On TPUs where keeping products is faster, and the memory
        suffices, it is "reversible_dots" for an RMT, and "dots" for a residual vector, plain or
        with a bank, and for residual matrices in blocks of whole layers; see
        `training.remat_choice`.
      kernels: how operations are computed on TPUs and GPUs. "auto" uses kernels on a TPU. On a GPU
        it uses cuDNN's attention, the kernel of grouped matrix products, and the kernels in a table
        of measured times. "xla" is plain JAX. "pallas" uses all kernels. "mosaic_gpu" is like
        "auto", but key-vector operations and depth attention always use kernels. On GPUs of
        compute capability 9.0 and 10.0 these are written in Pallas's Mosaic GPU where possible.
        Elsewhere they are the same as with "pallas".
    """

    stacks: tuple[Stack, ...]
    store: Store
    mixer: Mixer = Sum()
    vocab_size: Size = 50257
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_epsilon: Positive = 1e-6
    norm_bias: bool = False
    embedding_scale: Positive = 1.0
    tied_embeddings: bool = False
    logit_cap: Positive | None = None
    init_std: Positive = 1.0
    parametrization: Parametrization = Standard()
    compute_dtype: DType = changeable("auto")
    remat: RematPolicy = changeable("auto")
    kernels: Kernels = changeable("auto")

    # Maps the name of each field that only the short form has to the field's type.
    short_names: ClassVar[dict[str, Any]] = {
        "num_layers": int,
        **{core.kind: core for core in get_args(Core)},
    }

    def __post_init__(self):
        super().__post_init__()
        if not self.stacks:
            raise UsageError("ModelConfig.stacks is empty; legal: one stack or more")
        self._check_ports()
        self._check_norms()
        self._check_sizes()
        self._check_mixer()
        self._check_base()
        dtype = self.store.dtype
        if self.rebuilds_residual and isinstance(self.store, VectorStore):
            raise UsageError(
                f"ModelConfig.remat={self.remat!r} needs a matrix store; legal for a vector store: "
                "none, dots, offload, full, auto"
            )
        if self.rebuilds_residual and dtype == "bfloat16":
            raise UsageError(
                f"MatrixStore.dtype='bfloat16' with remat={self.remat!r} would let the rebuilt "
                "residual drift by several percent; legal: auto, int16, float32, float64"
            )
        if not self.rebuilds_residual and dtype == "int16":
            raise UsageError(
                f"MatrixStore.dtype='int16' supports gradients only with remat='reversible' or "
                f"'reversible_dots', but remat is {self.remat!r}; legal: auto, float32, bfloat16, "
                "float64"
            )

    def _check_ports(self):
        """Check that the cores' ports fit the store, and that stacks can repeat.

        The first site of a period writes the output of the core before it. In the first repeat,
        that core precedes the stack. In later repeats, it is the last core of the period. Both
        cores must write the same number of vectors, because all repeats have parameters of the same
        shape.

        Raises:
          UsageError: a port does not fit the store, or a stack cannot repeat.
        """
        matrix = isinstance(self.store, MatrixStore)
        size = self.data_shape[1]
        previous = RESIDUAL_PORT  # the embedding is written before the first sublayer
        for index, stack in enumerate(self.stacks):
            if stack.repeat > 1 and self._write_size(previous) != self._write_size(
                stack.cores[-1].writes
            ):
                raise UsageError(
                    f"ModelConfig.stacks.{index} cannot repeat: its last core writes other vectors "
                    "than the core before the stack; legal: a separate stack for its first period"
                )
            for core in stack.cores:
                for port in (core.reads, core.writes):
                    if matrix and port.heads and port.head_dim != size:
                        raise UsageError(
                            f"ModelConfig.{core.kind}.head_dim={port.head_dim} must be the size of "
                            f"the residual's data vectors, store.vector_dim={size}"
                        )
                previous = core.writes

    def _check_norms(self):
        """Raise UsageError if biases, or norms of outputs, do not fit the store or the mixer."""
        needs = {"norm_bias": self.norm_bias}
        for core in self.cores:
            if getattr(core, "output_bias", False):
                needs[f"{core.kind}.output_bias"] = True
            elif getattr(core, "projects", False) or not core.reads.normed:
                needs[f"{core.kind}.normed"] = core.normed
        for name, value in needs.items():
            if value and isinstance(self.store, MatrixStore):
                raise UsageError(f"ModelConfig.{name}={value} needs a vector store; legal: vector")
        if hasattr(self.mixer, "fused") and not all(core.reads.normed for core in self.cores):
            raise UsageError(
                f"ModelConfig.mixer={self.mixer.kind} needs a norm before every core, but a core "
                "has normed='output'; legal: input, both"
            )

    def _write_size(self, port: Port) -> Any:
        """Return what two ports must have in common to be written with the same parameters.

        A matrix store has one key vector per written vector, so the result is the number of
        vectors. A vector store has projections, and the result is the port itself.
        """
        if isinstance(self.store, MatrixStore):
            return port.vectors(self.data_shape[0])
        return port

    def _check_sizes(self):
        """Raise UsageError if a token has too many numbers in a matrix store."""
        if not isinstance(self.store, MatrixStore):
            return
        core = next((core for core in self.cores if core.reads.heads or core.writes.heads), None)
        heads = "num_key_heads" if getattr(core, "num_key_heads", None) else "num_heads"
        count = f"{core.kind}.{heads}" if self.store.vectors is None else "store.vectors"
        size = f"{core.kind}.head_dim" if self.store.vector_dim is None else "store.vector_dim"
        products = {f"{count} * {size}": self.width, f"store.key_dim * {size}": self.residual_size}
        for name, product in products.items():
            if product > LARGEST_SIZE:
                raise UsageError(
                    f"ModelConfig.{name} = {shown(product)} must be at most {LARGEST_SIZE}"
                )

    def _check_mixer(self):
        mixer, kind = self.mixer, self.mixer.kind
        if mixer.by_layers and any(len(stack.cores) % 2 for stack in self.stacks):
            raise UsageError(
                f"ModelConfig.mixer={kind} needs layers of two sublayers; legal: stacks whose "
                "periods have an even number of cores"
            )
        mixer.check(self)
        second = (core for stack in self.stacks for core in stack.cores[1::2])
        if mixer.second_input > 1 and any(getattr(core, "gated", False) for core in second):
            raise UsageError(
                f"ModelConfig.mixer={kind} needs a feed-forward layer without a gate; legal for "
                "feed_forward.activation: gelu_tanh, gelu_exact, relu2"
            )
        if isinstance(self.store, MatrixStore) and not mixer.on_matrix:
            raise UsageError(
                f"ModelConfig.mixer={kind} is defined for a vector store only; legal for a matrix "
                f"store: {', '.join(m.kind for m in get_args(Mixer) if m.on_matrix)}"
            )
        if self.remat not in ("auto", *mixer.remats):
            raise UsageError(
                f"ModelConfig.remat={self.remat!r} cannot be used with mixer={kind}; legal: "
                f"{', '.join(mixer.remats)}, auto"
            )

    def _check_base(self):
        """Raise UsageError if a size of muP's base model or a core's logit scale is illegal."""
        scaled = isinstance(self.parametrization, MuP)
        attends = (core for core in self.cores if core.softmax is not None)
        own = next((core.kind for core in attends if core.scale is not None), None)
        if scaled and own is not None:
            raise UsageError(
                f"ModelConfig.{own}.scale sets the factor of attention logits, which muP "
                "sets itself; legal: null, or parametrization=standard"
            )
        _ = self.base_model  # raises UsageError if a size is illegal

    # The short form -----------------------------------------------------------------------------

    def short_form(self) -> dict[str, Any]:
        """Return a dict from field name to value, in the short form if the model has one.

        The short form has other fields in place of `stacks`.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        layer = self.stacks[0].cores
        if len(self.stacks) > 1 or len(layer) != 2 or layer[0].kind == layer[1].kind:
            return values
        del values["stacks"]
        return {"num_layers": self.stacks[0].repeat, **{c.kind: c for c in layer}, **values}

    @classmethod
    def from_short(cls, **values: Any) -> "ModelConfig":
        """Return a config with the given fields of the short or the long form.

        Raises:
          UsageError: the fields of the short form are not exactly two cores and `num_layers`.
        """
        short_values = {name: values.pop(name) for name in list(values) if name in cls.short_names}
        if not short_values:
            return cls(**values)
        if "stacks" in values:
            raise UsageError(
                f"ModelConfig.{next(iter(short_values))} and ModelConfig.stacks both set what "
                "sublayers compute; set only one of them"
            )
        cls.check_short(short_values)
        num_layers = short_values.pop("num_layers")
        try:
            stack = Stack(tuple(short_values.values()), num_layers)
        except UsageError as error:
            raise UsageError(str(error).replace("Stack.repeat", "ModelConfig.num_layers")) from None
        return cls(stacks=(stack,), **values)

    @classmethod
    def check_short(cls, names: Iterable[str]) -> None:
        """Raise UsageError unless `names` consists of `num_layers` and two kinds of cores."""
        cores = [name for name in names if name != "num_layers"]
        if len(cores) != 2 or "num_layers" not in names:
            raise UsageError(
                f"the model has the fields {', '.join(names)}; legal: num_layers and two cores, "
                "like attention and feed_forward, or model.stacks"
            )

    def replace(self, **changes: Any) -> "ModelConfig":
        """Return the config with some fields replaced, including fields of the short form."""
        if "stacks" in changes:
            return replace(self, **changes)
        return self.from_short(**(self.short_form() | changes))

    # Derived properties -------------------------------------------------------------------------

    @property
    def sublayers(self) -> Iterator[Core]:
        """An iterator over the core of every sublayer, in the order of depth."""
        for stack in self.stacks:
            for _ in range(stack.repeat):
                yield from stack.cores

    @property
    def num_sublayers(self) -> int:
        """Number of sublayers in all stacks, which is 2L in the models of the papers."""
        return sum(stack.num_sublayers for stack in self.stacks)

    @property
    def num_layers(self) -> int:
        """Number of layers (L), with two sublayers per layer."""
        return self.num_sublayers // 2

    @property
    def attention(self) -> Attention:
        """The model's attention config.

        Reading it raises AttributeError unless the model has exactly one.
        """
        return self._core(Attention)

    @property
    def feed_forward(self) -> FeedForward:
        """The model's feed-forward config.

        Reading it raises AttributeError unless the model has exactly one.
        """
        return self._core(FeedForward)

    def _core(self, cls: type) -> Any:
        matches = self.cores_of_kind(cls.kind)
        if len(matches) != 1:
            raise AttributeError(
                f"the model has {len(matches)} different {cls.kind!r} cores; legal: exactly 1"
            )
        return matches[0]

    @property
    def cores(self) -> tuple[Core, ...]:
        """The distinct core configs, in the order of depth."""
        return tuple(dict.fromkeys(core for stack in self.stacks for core in stack.cores))

    @property
    def aux(self) -> tuple[str, ...]:
        """Sorted names of the scalars that the cores return in addition to their outputs."""
        return tuple(sorted({name for core in self.cores for name in core.aux}))

    def cores_of_kind(self, kind: str) -> tuple[Core, ...]:
        """Return the model's distinct cores of the given kind."""
        return tuple(core for core in self.cores if core.kind == kind)

    @property
    def learned_positions(self) -> Learned | None:
        """The config of learned positions, or None if the model has none."""
        positions = {getattr(core, "positions", None) for core in self.cores}
        learned = [positions for positions in positions if isinstance(positions, Learned)]
        return max(learned, key=lambda p: p.max_length, default=None)

    @property
    def rebuilds_residual(self) -> bool:
        """Whether the backward pass rebuilds the residual from the outputs of sublayers."""
        return self.remat in REVERSIBLE

    @property
    def data_shape(self) -> tuple[int, int]:
        """Number and size of the data vectors of a token.

        The embedding writes data vectors, and a read of the whole residual returns data vectors. A
        Transformer has one of size D, and an RMT has R of size D_v.
        """
        match self.store:
            case VectorStore(dim=dim):
                return 1, dim
            case MatrixStore(vectors=vectors, vector_dim=vector_dim):
                if vectors is not None and vector_dim is not None:
                    return vectors, vector_dim
                ports = (port for core in self.cores for port in (core.reads, core.writes))
                port = next((port for port in ports if port.heads), None)
                if port is None:
                    raise UsageError(
                        f"MatrixStore.vectors={vectors} and MatrixStore.vector_dim={vector_dim} "
                        "must be set, because no core of the model has heads; legal: whole numbers"
                    )
                return vectors or port.heads[0], vector_dim or port.head_dim

    @property
    def width(self) -> int:
        """Total size of a token's data vectors: D, or `R * D_v` in an RMT."""
        count, size = self.data_shape
        return count * size

    @property
    def residual_size(self) -> int:
        """Number of entries in one token's residual: D, or `D_k * D_v` in an RMT."""
        return math.prod(self.residual_shape)

    @property
    def residual_shape(self) -> tuple[int, ...]:
        """Shape of one token's residual: (D,), or (D_k, D_v) in an RMT."""
        match self.store:
            case VectorStore(dim=dim):
                return (dim,)
            case MatrixStore(key_dim=key_dim):
                return key_dim, self.data_shape[1]

    @property
    def base_model(self) -> "ModelConfig":
        """The base model of muP, or this model in the standard parametrisation.

        Raises:
          UsageError: a value in `parametrization.base` is not a size, or an illegal one.
        """
        if not getattr(self.parametrization, "base", ()):
            return self
        try:
            sizes = dict(map(overrides.parse_assignment, self.parametrization.base))
            for path, size in sizes.items():
                if type(size) is not int:
                    raise UsageError(
                        f"{path}={shown(size)} is not a size; legal: whole numbers, like "
                        "store.dim=128"
                    )
            return overrides.apply(replace(self, parametrization=Standard()), sizes)
        except UsageError as error:
            text = str(error).removeprefix("--set=")
            raise UsageError(f"ModelConfig.parametrization.base: {text}") from None

    @property
    def width_ratio(self) -> float:
        """Width divided by the width of the base model; 1 in the standard parametrisation."""
        return self.width / self.base_model.width
