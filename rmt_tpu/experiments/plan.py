"""Experiments: arms that are trained once per seed, or numbers that are computed."""

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
    """Points that are tried for a system, with the same seeds each; the least mean loss wins.

    Attributes:
      config: the run, with any values at the paths of the points.
      points: the points, all over the same paths.
      seeds: the seeds of each point's runs.
    """

    config: RunConfig
    points: tuple[Point, ...]
    seeds: tuple[int, ...] = SEEDS[:1]


@dataclass(frozen=True)
class Arm:
    """One model of an experiment.

    Attributes:
      name: the name of its row and of its folder.
      config: the run with any seed, and with the rate that is used if none is searched.
      system: the system whose fit it is a point of, and whose search gives its values.
      against: the arm that its loss is compared with, seed by seed; None for no comparison.
      x: its place on the picture's axis, in an experiment that varies one size.
      paper: the loss that the paper prints for it.
      grows_from: D_k for the first quarter of its steps, which are at the peak rate; None is the
        config's D_k for all steps.
      searches: the searches that give its values instead; with several, the geometric mean is used.
      num_seeds: how many of the plan's first seeds it is trained with; None is all.
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
    """The runs of an experiment at one scale.

    Attributes:
      arms: the arms, in the order of the table.
      searches: the searches by name, mostly a system's; arms without one keep their configs'
        values.
      seeds: the seeds of the arms, if the command names none.
      registered: arms whose difference was chosen to be tested before anything was trained; all are
        tested together by Holm's procedure, and other differences are exploratory.
      x: the name of `Arm.x`; "" if the experiment varies no size.
      fits: whether losses are fitted over FLOPs and parameters, for each system.
      notes: lines for the page, such as differences from the paper.
    """

    arms: tuple[Arm, ...]
    searches: dict[str, Search] = field(default_factory=dict)
    seeds: tuple[int, ...] = SEEDS
    registered: tuple[str, ...] = ()
    x: str = ""
    fits: bool = False
    notes: tuple[str, ...] = ()

    def searches_of(self, arm: Arm) -> tuple[str, ...]:
        """Return the names of the searches that an arm takes its values from."""
        return arm.searches or tuple(name for name in self.searches if name == arm.system)


@dataclass(frozen=True)
class Page:
    """The results of an experiment.

    Attributes:
      text: the results as Markdown.
      numbers: the results as JSON values.
      pictures: functions that draw the pictures, by their file names.
    """

    text: str
    numbers: object
    pictures: dict[str, Callable] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One of the papers' tables or figures, or a question that neither paper asks.

    Attributes:
      name: its name on the command line.
      shows: its subject, in a line.
      source: the paper, and the place in it.
      plan: returns the plan of its runs by scale; None if nothing is trained.
      compute: returns its page if it is computed; None if nothing is.
      reports: returns other recipes with their flags, whose output goes on the page, from the scale
        and a function that gives the folder of an arm's first run; None if there are none.
      tasks: the tasks that `recipes.evaluate` asks in the reports.
      takes: how long it takes, if nothing is trained.
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
    """Return the run with another peak learning rate."""
    return overrides.apply(config, {RATE: rate})


def points(**values: Sequence[float]) -> tuple[Point, ...]:
    """Return all combinations of rates and factors: `points(rate=..., depth_rate=...)`."""
    paths = {"rate": RATE, "depth_rate": DEPTH_RATE}
    return tuple(
        dict(zip([paths[name] for name in values], point, strict=True))
        for point in itertools.product(*values.values())
    )


def between(found: Sequence[Point]) -> Point:
    """Return the geometric mean of points over the same paths."""
    mean = lambda values: math.exp(math.fsum(map(math.log, values)) / len(values))
    if len(found) == 1:
        return found[0]
    return {path: float(f"{mean([of[path] for of in found]):.4g}") for path in found[0]}


def before_growth(config: RunConfig, key_dim: int) -> RunConfig:
    """Return the first quarter of a run whose residual then grows, with the peak rate to its end.

    Its warm-up has as many steps as the whole run's.

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
    """Return the number of tokens that a run reads."""
    return config.train.steps * config.train.batch_size * config.data.seq_len


def flops(config: RunConfig) -> float:
    """Return the FLOPs of training a run, forward and backward, by `rmt_tpu.cost`."""
    forward = cost.flops_per_token(config.model, config.data.seq_len)
    return float(cost.train_flops(forward, tokens(config)))


def all_runs(plan: Plan) -> Iterator[RunConfig]:
    """Yield every run of a plan, including those of its searches."""
    for search in plan.searches.values():
        yield from [search.config] * (len(search.points) * len(search.seeds))
    for arm in plan.arms:
        yield from [arm.config] * len(plan.seeds[: arm.num_seeds])
