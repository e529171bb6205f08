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
from rmt_tpu.config.model import ModelConfig, MuP
from rmt_tpu.config.resume import changeable, free
from rmt_tpu.errors import UsageError
from sharding.spec import parse_mesh

# A limit, because a cache holds the keys and values of all sampled tokens.
_SampleTokens = Annotated[int, Range(f"at least 0, at most {2**20}", 0, 2**20)]
_HeldOut = Annotated[float, Range("above 0, at most 0.5", 0, 0.5, open_low=True)]

Role = Literal[
    "gain", "embedding", "unembedding", "keys", "hidden", "load", "balance_steps", "histogram"
]
# Roles of statistics, which are not weights: their gradients are experts' shares of the tokens.
COUNTED = ("load", "balance_steps", "histogram")


@dataclass(frozen=True)
class AdamW(Checked):
    """AdamW (Loshchilov and Hutter 2019) after clipping the gradient to a norm of `clip_norm`.

    Attributes:
      learning_rate: the peak of the learning rate, which has a linear warmup over `warmup_fraction`
        of the steps, and then a cosine decay to `final_fraction` of the peak.
      weight_decay: coefficient of the decay, multiplied by the learning rate unless
        `independent_weight_decay`.
      independent_weight_decay: whether each step reduces a weight by the fraction `weight_decay`,
        whatever the learning rate and its schedule are. In Wortsman et al. (2023) that fraction
        follows the schedule, so that the last steps decay less.
      decay_exclude: roles of parameters that do not decay.
    """

    kind: ClassVar[str] = "adamw"
    implied: ClassVar[bool] = True  # an early config.json had no kind of optimizer
    learning_rate: Positive = 2e-3
    warmup_fraction: Share = 0.05
    final_fraction: Share = 0.1
    b1: Decay = 0.9
    b2: Decay = 0.95
    epsilon: Positive = 1e-8
    clip_norm: Positive = 1.0
    weight_decay: NonNegative = 1e-4
    independent_weight_decay: bool = False
    decay_exclude: tuple[Role, ...] = ("gain", "embedding", "unembedding")


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon (Jordan 2024) for matrices, in Moonlight's form (Liu et al. 2025); AdamW for the rest.

    For each matrix W [A, B] of role "hidden", of each layer, expert and projection, the momentum M
    after Nesterov's step is made nearly orthogonal, with all singular values near 1, and

        W -= learning_rate * (update_rms * sqrt(max(A, B)) * orthogonal(M) + weight_decay * W)

    so that its entries change about as much as under AdamW, at the same rate and decay. AdamW
    trains the embedding, the unembedding, key vectors, gains and small weights of residual mixers.

    Attributes:
      momentum: decay of the gradients' sum.
      iterations: number of iterations of Newton-Schulz's quintic.
      update_rms: root mean square of a matrix's update, at a rate of 1.
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
      batch_size: number of sequences in a step, over all devices and accumulation steps.
      accumulate: number of parts in which a batch is computed, one after the other.
      depth_rate: factor of the learning rate of queries over depth, and of all other weights of
        sources over depth, in full_attention and block_attention; none of them decays. None is the
        factor of the run that is resumed, or else that of the rule in
        `rmt_tpu.training.depth_rate`.
      z_loss: coefficient of `logsumexp(logits)^2` in the loss.
      init_from: a run folder, or a folder in the hub's form, whose parameters are taken at the
        start. Once the run has a checkpoint, it is not read any more and cannot change.
      with_optimizer: whether the run continues that of `init_from` from its last checkpoint, with
        the optimizer's moments, the number of steps, the position in the text and the key.
      seed: seed of the parameters and of the order of the data.
      mesh: axes of the device mesh, like "data=2,fsdp=4"; -1 uses all remaining devices.
      microbatches: number of parts of a device's rows that a pipeline (`stage`) processes one after
        the other, a multiple of the number of stages P; 0 is P. With more parts of the same size,
        stages idle less (P - 1 of `microbatches * virtual_stages + P - 1` ticks), and take no more
        memory than with 2 P.
      virtual_stages: number of chunks of layers on each stage of a pipeline.
      checkpoint_every, eval_every: number of steps between two; 0 is only at the end.
      checkpoint_seconds: number of seconds after which there is also a checkpoint; 0 is never.
      checkpoint_compression: lossless compression of a checkpoint's arrays.
      keep_checkpoints: number of last checkpoints that are kept.
      keep_every: checkpoints of steps divisible by it are kept for good; 0 is none.
      keep_best: number of checkpoints with the least loss on held-out text that are kept.
      eval_tokens: number of held-out tokens in an evaluation, in whole windows, or all if there are
        fewer.
      eval_batches: 0, or the number of batches to read in place of `eval_tokens`; the amount of
        text then depends on the batch size.
      eval_tasks: comma-separated names of tasks of `rmt_tpu.evaluation`.
      eval_tasks_every: number of steps between evaluations of tasks; 0 is only at the end.
      eval_tasks_limit: number of documents of each task, from its first on.
      eval_data_dir: where the tasks' data is: a folder, or "hub".
      max_bad_steps: the run stops after this many non-finite steps in a row.
      sample_every: number of steps between samples; 0 is only at the end.
      sample_prompt, sample_tokens, sample_temperature: prompt, number of tokens and temperature of
        the generated text; 0 tokens generate none.
      tensorboard: whether to also write TensorBoard's files; "auto" writes them if tensorboardX is
        installed.
    """

    steps: Size = changeable(1000)
    batch_size: Size = changeable(64)
    accumulate: Size = changeable(1)
    optimizer: AdamW | Muon = changeable(AdamW())
    depth_rate: Positive | None = changeable(None)
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
    sample_every: Count = free(0)
    sample_prompt: str = free("")
    sample_tokens: _SampleTokens = free(256)
    sample_temperature: NonNegative = free(0.8)
    tensorboard: Literal["auto", "on", "off"] = free("auto")

    def __post_init__(self):
        super().__post_init__()
        parse_mesh(self.mesh)
        if self.with_optimizer and not self.init_from:
            raise UsageError(
                "--with_optimizer needs --init_from=RUN, the folder of the run that is copied"
            )


@dataclass(frozen=True)
class DataConfig(Checked):
    """The text to train on.

    A resumed run recognises its text by a checksum of the tokens, and its tokenizer by a
    fingerprint, so the paths of both may change.

    Attributes:
      source: "stdlib", a token store, or comma-separated .txt and .jsonl files and globs.
      tokenizer: "byte", a folder with encoder.json and vocab.bpe, or a tokenizer.json.
      seq_len: number of tokens in a window (N).
      eval_fraction: share of the text that is held out, by document.
    """

    source: str = free("stdlib")
    tokenizer: str = free("byte")
    seq_len: Size = 512
    eval_fraction: _HeldOut = 0.02


@dataclass(frozen=True)
class RunConfig:
    """The whole config of a run, which `config.json` in a run folder contains."""

    model: ModelConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self):
        if isinstance(self.train.optimizer, Muon) and isinstance(self.model.parametrization, MuP):
            raise UsageError(
                "train.optimizer=muon with model.parametrization=mup is not defined: the rates are "
                "Adam's, and Muon's matrices would need others; legal: train.optimizer=adamw, or "
                "model.parametrization=standard"
            )
        match self.model.learned_positions:
            case Learned(max_length=max_length) if self.data.seq_len > max_length:
                raise UsageError(
                    f"--seq_len={self.data.seq_len} is beyond the model's {max_length} learned "
                    f"positions; legal: at most {max_length}, or "
                    f"--set=model.attention.positions.max_length={self.data.seq_len}, "
                    "or positions alibi, rope or none"
                )
