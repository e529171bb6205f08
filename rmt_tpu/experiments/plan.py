"""What an experiment is: arms that are trained once a seed, or numbers that are computed."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rmt_tpu import cost
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.errors import UsageError

Scale = Literal["tiny", "paper"]
Point = dict[str, Any]  # values of a config by their paths

RATE = "train.optimizer.learning_rate"
DEPTH_RATE = "train.depth_rate"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Search:
    """Points that are tried for a system, each with the same seeds; the least mean loss wins.

    Attributes:
      config: with any values at the paths of the points.
      points: all over the same paths.
      seeds: of each point's runs.
    """

    config: RunConfig
    points: tuple[Point, ...]
    seeds: tuple[int, ...] = SEEDS[:1]


@dataclass(frozen=True)
class Arm:
    """One model of an experiment.

    Attributes:
      name: of its row and of its folder.
      config: with any seed; with the rate that is taken where none is searched.
      system: whose fit it is a point of, and whose search it takes its values from.
      searches: from which it takes them instead: of several the geometric mean.
      against: the arm whose loss its own is compared with, seed by seed; None is none.
      x: where the picture has it, of an experiment that varies one size.
      paper: the loss that the paper prints for it.
      grows_from: D_k for the first quarter of its steps, which are at the peak rate; None is that
        of the config.
      num_seeds: it is trained with the first so many seeds only; None is all.
    """

    name: str
    config: RunConfig
    system: str
    against: str | None = None
    x: int | float | None = None
    paper: float | None = None
    grows_from: int | None = None
    searches: tuple[str, ...] = ()
    num_seeds: int | None = None


@dataclass(frozen=True)
class Plan:
    """What is trained at one scale.

    Attributes:
      arms: in the order of the table.
      searches: by name, most often a system's; arms of others keep the values of their configs.
      seeds: of its arms where the command names none.
      registered: arms whose difference to another was chosen to be tested before anything was
        trained, all of them together by Holm's procedure; other differences are exploratory.
      x: what `Arm.x` is; "" is nothing.
      fits: whether losses are fitted over FLOPs and parameters, a system at a time.
      notes: lines for the page: what differs from the paper.
    """

    arms: tuple[Arm, ...]
    searches: dict[str, Search] = field(default_factory=dict)
    seeds: tuple[int, ...] = SEEDS
    registered: tuple[str, ...] = ()
    x: str = ""
    fits: bool = False
    notes: tuple[str, ...] = ()

    def searches_of(self, arm: Arm) -> tuple[str, ...]:
        """The names of those that an arm takes its values from."""
        return arm.searches or tuple(name for name in self.searches if name == arm.system)


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
    return overrides.apply(config, {RATE: rate})


def points(**values: Sequence[float]) -> tuple[Point, ...]:
    """Every combination of rates and factors: `points(rate=..., depth_rate=...)`."""
    paths = {"rate": RATE, "depth_rate": DEPTH_RATE}
    return tuple(
        dict(zip([paths[name] for name in values], point, strict=True))
        for point in itertools.product(*values.values())
    )


def between(found: Sequence[Point]) -> Point:
    """The geometric mean of points over the same paths."""
    mean = lambda values: math.exp(math.fsum(map(math.log, values)) / len(values))
    if len(found) == 1:
        return found[0]
    return {path: float(f"{mean([of[path] for of in found]):.4g}") for path in found[0]}


def before_growth(config: RunConfig, key_dim: int) -> RunConfig:
    """The first quarter of a run whose residual then grows: after the warm-up at its peak rate.

    The warm-up is as many steps long as the whole run's.

    Raises:
      UsageError: the run has fewer than four steps.
    """
    if (steps := config.train.steps // 4) == 0:
        raise UsageError(f"--steps={config.train.steps} is too few to grow in: legal: 4 or more")
    changes = {"model.store.key_dim": key_dim, "train.steps": steps}
    warmup = config.train.optimizer.warmup_fraction * config.train.steps / steps
    changes["train.optimizer.warmup_fraction"] = min(1.0, warmup)
    return overrides.apply(config, changes | {"train.optimizer.final_fraction": 1.0})


def tokens(config: RunConfig) -> int:
    """Number of tokens that a run reads."""
    return config.train.steps * config.train.batch_size * config.data.seq_len


def flops(config: RunConfig) -> float:
    """FLOPs of training a run, forward and backward, by `rmt_tpu.cost`."""
    forward = cost.flops_per_token(config.model, config.data.seq_len)
    return float(cost.train_flops(forward, tokens(config)))


def all_runs(plan: Plan) -> Iterator[RunConfig]:
    """Every run of a plan, searches too."""
    for search in plan.searches.values():
        yield from [search.config] * (len(search.points) * len(search.seeds))
    for arm in plan.arms:
        yield from [arm.config] * len(plan.seeds[: arm.num_seeds])
