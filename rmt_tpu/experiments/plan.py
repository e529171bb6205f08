"""What an experiment is: arms that are trained once a seed, or numbers that are computed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from rmt_tpu import cost
from rmt_tpu.config import RunConfig, overrides

Scale = Literal["tiny", "paper"]

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Arm:
    """One model of an experiment.

    Attributes:
      name: of its row and of its folder.
      config: with any seed; with the rate that is taken where none is searched.
      system: whose rate it has, and whose fit it is a point of.
      against: the arm whose loss its own is compared with, seed by seed; None is none.
      x: where the picture has it, of an experiment that varies one size.
      paper: the loss that the paper prints for it.
      grows_from: D_k until the middle of its steps; None is that of the config.
    """

    name: str
    config: RunConfig
    system: str
    against: str | None = None
    x: int | float | None = None
    paper: float | None = None
    grows_from: int | None = None


@dataclass(frozen=True)
class Plan:
    """What is trained at one scale.

    Attributes:
      arms: in the order of the table.
      searches: by system, the run whose rate is searched among `rates` with the first seed; systems
        that are not here keep the rates of their configs.
      rates: peak learning rates, rising.
      x: what `Arm.x` is; "" is nothing.
      fits: whether losses are fitted over FLOPs and parameters, a system at a time.
      notes: lines for the page: what differs from the paper.
    """

    arms: tuple[Arm, ...]
    searches: dict[str, RunConfig] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    x: str = ""
    fits: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """Results: `text` is Markdown, `numbers` is JSON, `draw` makes pictures by their file names."""

    text: str
    numbers: object
    pictures: dict[str, Callable] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One of the papers' tables or figures, or a question that neither asks.

    Attributes:
      name: on the command line.
      shows: in a line.
      source: where it is in which paper.
      plan: of what is trained, by scale; None if nothing is.
      compute: its page, of what is computed; None if nothing is.
      reports: other recipes with their flags, whose output goes on the page, by the scale and the
        folder of an arm's first run; None if there are none.
      tasks: what `recipes.evaluate` among the reports asks.
      takes: how long, of what is not trained.
    """

    name: str
    shows: str
    source: str
    plan: Callable[[Scale], Plan] | None = None
    compute: Callable[[], Page] | None = None
    reports: Callable[[Scale, Callable[[str], str]], list[list[str]]] | None = None
    tasks: tuple[str, ...] = ()
    takes: str = ""


def with_rate(config: RunConfig, rate: float) -> RunConfig:
    """The run with another peak learning rate."""
    return overrides.apply(config, {"train.optimizer.learning_rate": rate})


def before_growth(config: RunConfig, key_dim: int) -> RunConfig:
    """The first half of a run whose residual then grows: after the warm-up at its peak rate."""
    changes = {"model.store.key_dim": key_dim, "train.steps": config.train.steps // 2}
    return overrides.apply(config, changes | {"train.optimizer.final_fraction": 1.0})


def tokens(config: RunConfig) -> int:
    """That the run reads."""
    return config.train.steps * config.train.batch_size * config.data.seq_len


def flops(config: RunConfig) -> float:
    """Of training it, forward and backward, by `rmt_tpu.cost`."""
    forward = cost.flops_per_token(config.model, config.data.seq_len)
    return float(cost.train_flops(forward, tokens(config)))


def all_runs(plan: Plan, seeds: tuple[int, ...]) -> Iterator[RunConfig]:
    """Every run of a plan, searches too."""
    for config in plan.searches.values():
        yield from [config] * len(plan.rates)
    for arm in plan.arms:
        yield from [arm.config] * len(seeds)
