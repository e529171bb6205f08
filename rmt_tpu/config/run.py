"""A run: what to train, how, and on what."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

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
from rmt_tpu.config.model import ModelConfig
from rmt_tpu.errors import UsageError
from sharding.spec import parse_mesh

_HeldOut = Annotated[float, Range("above 0, at most 0.5", 0, 0.5, open_low=True)]

Role = Literal["gain", "embedding", "unembedding", "keys", "hidden"]


@dataclass(frozen=True)
class AdamW(Checked):
    """AdamW after clipping the gradient to a global norm of `clip_norm`.

    Attributes:
      learning_rate: the peak. Linear warmup over `warmup_fraction` of the steps, then a cosine
        down to `final_fraction` of the peak.
      weight_decay: multiplied by the learning rate, unless `independent_weight_decay`.
      decay_exclude: roles of parameters that do not decay.
    """

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
class TrainConfig(Checked):
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
      sample_prompt, sample_tokens: of the text generated at the end; 0 tokens are none.
    """

    steps: Size = 1000
    batch_size: Size = 64
    accumulate: Size = 1
    optimizer: AdamW = AdamW()
    z_loss: NonNegative = 1e-4
    seed: Seed = 0
    mesh: str = "data=-1"
    microbatches: Count = 0
    virtual_stages: Size = 1
    log_every: Size = 1
    checkpoint_every: Count = 1000
    checkpoint_seconds: NonNegative = 0.0
    checkpoint_compression: Literal["none", "zstd"] = "none"
    keep_checkpoints: Size = 3
    keep_every: Count = 0
    keep_best: Count = 0
    eval_every: Count = 1000
    eval_batches: Size = 16
    max_bad_steps: Size = 5
    sample_prompt: str = ""
    sample_tokens: Count = 256

    def __post_init__(self):
        super().__post_init__()
        parse_mesh(self.mesh)


@dataclass(frozen=True)
class DataConfig(Checked):
    """What to train on.

    Attributes:
      source: "stdlib", a token store, or comma-separated .txt and .jsonl files and globs.
      tokenizer: "byte", a folder with encoder.json and vocab.bpe, or a tokenizer.json.
      seq_len: tokens in a window (N).
      eval_fraction: share of the text that is held out, by document.
    """

    source: str = "stdlib"
    tokenizer: str = "byte"
    seq_len: Size = 512
    eval_fraction: _HeldOut = 0.02


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
