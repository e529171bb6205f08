"""The config of a run: the model, its training, and its data."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from rmt_tpu.config.checks import (
    Checked,
    Count,
    Decay,
    NonNegative,
    Positive,
    Range,
    Seed,
    Share,
    Size,
)
from rmt_tpu.config.cores import Learned
from rmt_tpu.config.mixture import MixtureSource, check_mixture
from rmt_tpu.config.model import ModelConfig, MuP
from rmt_tpu.config.resume import changeable, fixed, free
from rmt_tpu.errors import UsageError, shown
from sharding.spec import parse_mesh

# The number of sampled tokens is limited, because the cache holds their keys and values.
_SampleTokens = Annotated[int, Range(f"at least 0, at most {2**20}", 0, 2**20)]
_HeldOut = Annotated[float, Range("above 0, at most 0.5", 0, 0.5, open_low=True)]

Role = Literal[
    "gain", "embedding", "unembedding", "keys", "hidden", "load", "balance_steps", "histogram"
]
TRACKERS = ("tensorboard", "wandb")
# Roles of parameters that are statistics and not weights. Their "gradients" are the experts' shares
# of the tokens.
STATISTIC_ROLES = ("load", "balance_steps", "histogram")


@dataclass(frozen=True)
class AdamW(Checked):
    """AdamW (Loshchilov and Hutter 2019), after the gradient's norm is clipped to `clip_norm`.

    Attributes:
      learning_rate: peak learning rate. A linear warmup over `warmup_fraction` of the steps leads
        to the peak, and a decay leads to `final_fraction` of the peak.
      schedule: "cosine" decays from the end of the warmup on. "wsd" (warmup, stable, decay) keeps
        the peak, and decays linearly in the last `decay_fraction` of the steps (Hu et al. 2024). A
        run with "wsd" can be continued for more steps from a checkpoint before its decay.
      weight_decay: coefficient of the weight decay, which is multiplied by the learning rate unless
        `independent_weight_decay` is True.
      independent_weight_decay: whether each step reduces a weight by the fraction `weight_decay`,
        whatever the learning rate and its schedule. In Wortsman et al. (2023) the fraction follows
        the schedule. After `freeze_steps`, the fraction of a parameter that was frozen grows
        linearly during its own warm-up.
      decay_exclude: roles of parameters that have no weight decay.
      moment_dtype: dtype in which the first moment or the momentum is stored. It is computed in
        float32. bfloat16 saves 2 of 12 bytes per parameter.
    """

    kind: ClassVar[str] = "adamw"
    implied: ClassVar[bool] = True  # an optimizer without "kind", as in old files, is AdamW
    learning_rate: Positive = 2e-3
    warmup_fraction: Share = 0.05
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_fraction: Share = 0.2
    final_fraction: Share = 0.1
    b1: Decay = 0.9
    b2: Decay = 0.95
    epsilon: Positive = 1e-8
    clip_norm: Positive = 1.0
    weight_decay: NonNegative = 1e-4
    independent_weight_decay: bool = fixed(False)
    decay_exclude: tuple[Role, ...] = ("gain", "embedding", "unembedding")
    moment_dtype: Literal["float32", "bfloat16"] = fixed("float32")


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon (Jordan 2024) for matrices, as in Moonlight (Liu et al. 2025), and AdamW for the rest.

    Muon trains the matrices W [A, B] of role "hidden", separately for each layer, expert and
    projection. The gates and values of the mixers depth_lstm and highway are one matrix. The
    Nesterov momentum M of a matrix is made nearly orthogonal, with all singular values near 1, and
    the update is

        W -= learning_rate * (update_rms * sqrt(max(A, B)) * orthogonal(M) + weight_decay * W)

    The entries of W then change about as much as with AdamW at the same learning rate and weight
    decay. AdamW trains all other parameters: the embedding, the unembedding, key vectors, gains and
    small weights of residual mixers.

    Attributes:
      momentum: decay factor of the momentum.
      iterations: number of Newton-Schulz iterations, which use a quintic polynomial.
      update_rms: root mean square of a matrix's update at a learning rate of 1.
    """

    kind: ClassVar[str] = "muon"
    implied: ClassVar[bool] = False
    momentum: Decay = 0.95
    iterations: Size = 5
    update_rms: Positive = 0.2


@dataclass(frozen=True)
class TrainConfig(Checked):
    """Options of training.

    Attributes:
      steps: number of optimizer steps.
      batch_size: number of sequences per step, over all devices and accumulation steps.
      accumulate: number of parts into which a batch is split for gradient accumulation. None lets
        the run choose: it is 1 unless a residual matrix of the whole batch does not fit in a TPU's
        VMEM, and one of a part does (see `rmt_tpu.execution.plan`).
      optimizer: the optimizer with its hyperparameters.
      depth_rate: factor of the learning rate for the parameters of mixers that weight earlier
        outputs. In full_attention, block_attention and delta_attention, they are queries and
        similar parameters. In mudd, they are the second projections of the networks. In
        residual_scalars, they are the factors of the residual. They have no weight decay. None
        keeps the factor that a resumed run was given. Otherwise, None uses the rule in
        `rmt_tpu.training.depth_rate` with the present learning rate and batch.
      freeze: patterns of paths of parameters that are not trained, such as `stacks/0/1/core/*`; a
        pattern with a leading `!` excludes its matches (see `rmt_tpu.training.freeze`).
      freeze_steps: number of initial steps during which these parameters are not trained; None
        means the whole run.
      z_loss: coefficient of `logsumexp(logits)^2` in the loss.
      init_from: a run folder or a Hugging Face model folder from which a new run gets its initial
        parameters. Once the run has a checkpoint, this folder is no longer read, and the option
        cannot change.
      with_optimizer: whether the new run continues from the last checkpoint of `init_from`. It then
        also gets the optimizer's moments, the number of steps, the position in the text and the
        random key.
      seed: seed of the parameters and of the order of the data.
      mesh: axes of the device mesh, like "data=2,fsdp=4"; -1 uses all remaining devices.
      microbatches: number of microbatches into which a pipeline splits the rows of each device. It
        is a multiple of the number of stages P (mesh axis `stage`); 0 means P. A step has
        `microbatches * virtual_stages + P - 1` ticks, and a stage idles for P - 1 of them. Memory
        does not grow beyond 2 P microbatches of the same size.
      virtual_stages: number of chunks of layers on each stage of a pipeline.
      log_every: number of steps between rows of metrics.
      checkpoint_every, eval_every: number of steps between checkpoints, and between evaluations on
        held-out text; 0 means only at the end.
      checkpoint_seconds: a checkpoint is also saved after this number of seconds; 0 disables this.
      checkpoint_compression: lossless compression of the arrays in a checkpoint.
      keep_checkpoints: number of most recent checkpoints to keep.
      keep_every: checkpoints at multiples of this number of steps are always kept; 0 disables this.
      keep_best: number of checkpoints with the lowest loss on held-out text to keep. Losses are
        compared as they are, also if the text has changed in between.
      eval_tokens: number of held-out tokens per evaluation, rounded to whole windows; all tokens
        are used if there are fewer.
      eval_batches: number of batches per evaluation, in place of `eval_tokens`; 0 uses
        `eval_tokens`.
      eval_tasks: comma-separated names of tasks in `rmt_tpu.evaluation`.
      eval_tasks_every: number of steps between evaluations of tasks; 0 evaluates only at the end.
      eval_tasks_limit: maximum number of documents per task, counted from the first.
      eval_data_dir: location of the tasks' data, either a folder or "hub".
      max_bad_steps: number of consecutive non-finite steps after which the run stops.
      spike_deviations: a gradient norm is a spike if its logarithm is more than this number of
        standard deviations above the mean. Both are taken over about the last 200 steps.
      spike_restarts: how many times the run may go back to its last checkpoint after a spike. It
        then skips the data up to the spike. With 0, spikes are only printed.
      sample_every: number of steps between text samples; 0 samples only at the end.
      sample_prompt, sample_tokens, sample_temperature: prompt, number of tokens and temperature of
        the text samples; 0 tokens disables them.
      tracker: comma-separated names of trackers that show the run: tensorboard, wandb.
      tensorboard: whether TensorBoard shows the run, in addition to the trackers in `tracker`;
        "auto" means that it does if tensorboardX is installed.
    """

    steps: Size = changeable(1000)
    batch_size: Size = changeable(64)
    accumulate: Size | None = changeable(None)
    optimizer: AdamW | Muon = changeable(AdamW())
    depth_rate: Positive | None = changeable(None)
    freeze: tuple[str, ...] = changeable(())
    freeze_steps: Size | None = changeable(None)
    z_loss: NonNegative = changeable(1e-4)
    seed: Seed = 0
    init_from: str = free("")
    with_optimizer: bool = free(False)
    mesh: str = free("data=-1")
    microbatches: Count = free(0)
    virtual_stages: Size = free(1)
    log_every: Size = free(1)
    checkpoint_every: Count = free(1000)
    checkpoint_seconds: NonNegative = free(0.0)
    checkpoint_compression: Literal["none", "zstd"] = free("none")
    keep_checkpoints: Size = free(3)
    keep_every: Count = free(0)
    keep_best: Count = free(0)
    eval_every: Count = free(1000)
    eval_tokens: Size = free(2**19)
    eval_batches: Count = free(0)
    eval_tasks: str = free("")
    eval_tasks_every: Count = free(0)
    eval_tasks_limit: Size = free(500)
    eval_data_dir: str = free("")
    max_bad_steps: Size = free(5)
    spike_deviations: Positive = changeable(8.0)
    spike_restarts: Count = changeable(0)
    sample_every: Count = free(0)
    sample_prompt: str = free("")
    sample_tokens: _SampleTokens = free(256)
    sample_temperature: NonNegative = free(0.8)
    tracker: str = free("")
    tensorboard: Literal["auto", "on", "off"] = free("auto")

    def __post_init__(self):
        super().__post_init__()
        parse_mesh(self.mesh)
        if self.freeze_steps is not None and not self.freeze:
            raise UsageError(
                f"train.freeze_steps={self.freeze_steps} requires train.freeze (the patterns of "
                "the parameters that are not trained); set train.freeze, or set "
                "train.freeze_steps=null"
            )
        if self.with_optimizer and not self.init_from:
            raise UsageError(
                "--with_optimizer needs --init_from=RUN, the folder of the run to continue"
            )
        names = self.tracker_names
        if not {*names} <= {*TRACKERS} or len({*names}) < len(names):
            raise UsageError(
                f"train.tracker={shown(self.tracker)} is not supported; legal: "
                f"{', '.join(TRACKERS)}, or both with a comma between them"
            )
        if self.tensorboard == "off" and "tensorboard" in names:
            raise UsageError(
                f"train.tracker={shown(self.tracker)} and --tensorboard=off contradict each other; "
                "set only one of them"
            )

    @property
    def parts(self) -> int:
        """The number of parts in which a batch is computed: `accumulate`, or 1 if it is None."""
        return self.accumulate or 1

    @property
    def tracker_names(self) -> tuple[str, ...]:
        """The names of the trackers in the field `tracker`."""
        return tuple(name.strip() for name in self.tracker.split(",")) if self.tracker else ()


@dataclass(frozen=True)
class DataConfig(Checked):
    """The text to train on.

    The paths of the text and of the tokenizer may change when a run resumes, because the run checks
    both by checksums.

    Attributes:
      source: "stdlib" (Python's standard library), a token store, or comma-separated .txt, .jsonl,
        .parquet and .arrow files and globs.
      tokenizer: "byte", a folder with encoder.json and vocab.bpe, or a tokenizer.json.
      seq_len: number of tokens in a training window (N).
      eval_fraction: fraction of the text that is held out for evaluation, in whole documents.
      text_field: name of the field of .jsonl files, or of the column of .parquet and .arrow files,
        that has the text of a document. A token store ignores it.
      format: what a document is. "text" is plain text. "messages" is a conversation in the field
        `messages`, which the chat template renders. The loss is on the assistant's messages.
        "completion" has the fields `prompt` and `completion`, and the loss is on the completion. A
        token store ignores it.
      chat_template: path of a chat template in place of the tokenizer's.
      mixture: texts that are mixed in given shares, in place of `source`; () means only `source`.
    """

    source: str = free("stdlib")
    tokenizer: str = free("byte")
    seq_len: Size = 512
    eval_fraction: _HeldOut = 0.02
    text_field: str = free("text")
    format: Literal["text", "messages", "completion"] = free("text")
    chat_template: str = free("")
    mixture: tuple[MixtureSource, ...] = changeable(())

    def __post_init__(self):
        super().__post_init__()
        check_mixture(self.mixture)


@dataclass(frozen=True)
class RunConfig:
    """The whole config of a run, as stored in `config.json` in the run folder."""

    model: ModelConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self):
        if isinstance(self.train.optimizer, Muon) and isinstance(self.model.parametrization, MuP):
            raise UsageError(
                "train.optimizer=muon cannot be used with model.parametrization=mup, whose rates "
                "are for Adam; legal: train.optimizer=adamw, or model.parametrization=standard"
            )
        match self.model.learned_positions:
            case Learned(max_length=max_length) if self.data.seq_len > max_length:
                raise UsageError(
                    f"--seq_len={self.data.seq_len} is more than the model's {max_length} learned "
                    f"positions; legal: at most {max_length}, or "
                    f"--set=model.attention.positions.max_length={self.data.seq_len}, "
                    "or positions alibi, rope or none"
                )
