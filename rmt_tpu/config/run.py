"""A run: what to train, how, and on what."""

from dataclasses import dataclass, field
from typing import Literal

from rmt_tpu.config.checks import nearest_multiples, positive
from rmt_tpu.config.cores import Learned
from rmt_tpu.config.model import ModelConfig
from rmt_tpu.errors import UsageError

Role = Literal["gain", "embedding", "unembedding", "keys", "hidden"]


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
        positive(self, "learning_rate", "epsilon", "clip_norm")
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
        positive(
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
        positive(self, "seq_len")
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
