"""A run: what to train, how, and on what."""

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

# A cache holds keys and values of all of them.
_SampleTokens = Annotated[int, Range(f"at least 0, at most {2**20}", 0, 2**20)]
_HeldOut = Annotated[float, Range("above 0, at most 0.5", 0, 0.5, open_low=True)]

Role = Literal[
    "gain", "embedding", "unembedding", "keys", "hidden", "load", "balance_steps", "histogram"
]
# Those of no weights: as a gradient they get shares of the tokens, of experts.
COUNTED = ("load", "balance_steps", "histogram")


@dataclass(frozen=True)
class AdamW(Checked):
    """AdamW (Loshchilov and Hutter 2019) after clipping the gradient to a norm of `clip_norm`.

    Attributes:
      learning_rate: the peak. Linear warmup over `warmup_fraction` of the steps, then a cosine
        down to `final_fraction` of the peak.
      weight_decay: multiplied by the learning rate, unless `independent_weight_decay`.
      independent_weight_decay: whether each step takes the share `weight_decay` off a weight,
        whatever the learning rate and its schedule are. In Wortsman et al. (2023) that share
        follows the schedule, so that the last steps decay less.
      decay_exclude: roles of parameters that do not decay.
    """

    kind: ClassVar[str] = "adamw"
    implied: ClassVar[bool] = True  # config.json had no kind of optimizer at first
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
    """Muon (Jordan 2024) for matrices, as Moonlight has it (Liu et al. 2025), AdamW for the rest.

    Of each matrix W [A, B] of role "hidden", of each layer, expert and projection: the momentum M
    after Nesterov's step is made near orthogonal, all its singular values near 1, and

        W -= learning_rate * (update_rms * sqrt(max(A, B)) * orthogonal(M) + weight_decay * W)

    so that its numbers move as those under AdamW do, at the same rate and decay. Embedding,
    unembedding, key vectors, gains and small weights of residual mixers are AdamW's.

    Attributes:
      momentum: of the gradients' sum.
      iterations: of Newton and Schulz's quintic.
      update_rms: root mean square of a matrix's update, at a rate of 1.
    """

    kind: ClassVar[str] = "muon"
    implied: ClassVar[bool] = False
    momentum: Decay = 0.95
    iterations: Size = 5
    update_rms: Positive = 0.2


@dataclass(frozen=True)
class TrainConfig(Checked):
    """How to train.

    Attributes:
      steps: optimizer steps.
      batch_size: sequences a step, over all devices and accumulation steps.
      accumulate: parts that a batch is computed in, one after the other.
      depth_rate: what the rate is multiplied by for queries over depth, and all that weighs sources
        with them, of full_attention and block_attention; none of it decays. None is what the run
        that goes on has, or else by the rule of `rmt_tpu.training.depth_rate`.
      z_loss: coefficient of `logsumexp(logits)^2` in the loss.
      init_from: a run folder or one of the hub's form whose parameters are taken at the start. Once
        there is a checkpoint it is not looked at, and stays what it was.
      with_optimizer: the run goes on as that of `init_from`, from its last checkpoint: with the
        optimizer's moments, the number of steps, the place in the text and the key.
      seed: of the parameters and of the order of the data.
      mesh: axes of devices, like "data=2,fsdp=4"; -1 fills.
      microbatches: parts of a device's rows that a pipeline (`stage`) works on at a time, a
        multiple of the stages P; 0 is as many. More of the same size idle less (P - 1 of
        `microbatches * virtual_stages + P - 1` ticks) and take no more memory than 2 P.
      virtual_stages: chunks of layers on each stage of a pipeline.
      checkpoint_every, eval_every: in steps; 0 is only at the end.
      checkpoint_seconds: a checkpoint also when so many have passed since the last; 0 is never.
      checkpoint_compression: of its arrays, without loss.
      keep_checkpoints: how many of the last ones stay.
      keep_every: those of steps divisible by it stay for good; 0 is none.
      keep_best: how many with the least loss on held-out text stay.
      eval_tokens: of held-out text at an evaluation, in whole windows; or all if there are fewer.
      eval_batches: 0, or the batches that are read in place of `eval_tokens`; how much text that is
        follows the batch size.
      eval_tasks: names of tasks of `rmt_tpu.evaluation`, with commas between.
      eval_tasks_every: in steps; 0 is only at the end.
      eval_tasks_limit: documents of each, the first so many.
      eval_data_dir: where they are: a folder, or "hub".
      max_bad_steps: the run stops after so many non-finite steps in a row.
      sample_every: in steps; 0 is only at the end.
      sample_prompt, sample_tokens, sample_temperature: of the text that is then generated; 0 tokens
        are none.
      tensorboard: whether to write its files too; "auto" is where tensorboardX is installed.
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
    """What to train on.

    A run that is resumed knows its text by a checksum of the tokens, and its tokenizer by a
    fingerprint: where they lie may change.

    Attributes:
      source: "stdlib", a token store, or comma-separated .txt and .jsonl files and globs.
      tokenizer: "byte", a folder with encoder.json and vocab.bpe, or a tokenizer.json.
      seq_len: tokens in a window (N).
      eval_fraction: share of the text that is held out, by document.
    """

    source: str = free("stdlib")
    tokenizer: str = free("byte")
    seq_len: Size = 512
    eval_fraction: _HeldOut = 0.02


@dataclass(frozen=True)
class RunConfig:
    """All of a run: what `config.json` in a run folder holds."""

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
