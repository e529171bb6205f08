"""The definition of an experiment.

An experiment either trains models (called arms), each of them once per seed, or computes values.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rmt_tpu import cost
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.errors import UsageError

Scale = Literal["tiny", "paper"]
Point = dict[str, Any]  # A map from dotted config paths to values.

RATE = "train.optimizer.learning_rate"
DEPTH_RATE = "train.depth_rate"
SEEDS = (0, 1, 2)
# The fraction of an H100's peak FLOP/s that measured train steps reach on average, for estimates of
# hours (docs/guides/reproduce.md).
H100_SHARE = 0.23


@dataclass(frozen=True)
class Search:
    """A hyperparameter search for a system; the point with the lowest mean loss over seeds wins.

    Attributes:
      config: the run config, in which each point replaces some values.
      points: the points to try. Each point maps the same config paths to values.
      seeds: the seeds with which each point is trained; no arm uses them.
    """

    config: RunConfig
    points: tuple[Point, ...]
    seeds: tuple[int, ...] = (100,)


@dataclass(frozen=True)
class Arm:
    """A model that an experiment trains, once per seed.

    Attributes:
      name: the arm's name, used for its table row and its folder.
      config: the run config. Its seed is replaced. If there is a search, its best values are set,
        too.
      system: the name of the system (kind of residual). Arms of one system are fitted together, and
        use the search with the system's name.
      against: the name of the arm that its loss is compared with, seed by seed, or None.
      x: the value of the varied size, in an experiment that varies one size.
      paper: the loss that the paper reports for this model.
      grows_from: the key size D_k of the residual matrix during the first quarter of the steps.
        None means the config's D_k for all steps.
      searches: the names of the searches to use instead of the system's. The arm uses the geometric
        mean of their best points.
      num_seeds: train with only the first `num_seeds` of the plan's seeds; None means all seeds.
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
      searches: the searches by name, usually the name of a system. Arms without a search keep the
        values in their configs.
      seeds: the default seeds of the arms.
      registered: the names of the arms whose difference (see `Arm.against`) was chosen for a test
        before any training. Holm's procedure adjusts these tests. All other differences are
        exploratory.
      x: the label of the size that `Arm.x` contains, or "" if the experiment varies no size.
      fits: whether to fit each system's losses over FLOPs and over parameters.
      notes: lines to print on the page, for example about differences from the paper.
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
    """The page with the results of an experiment.

    Attributes:
      text: the results as Markdown.
      numbers: the results as JSON values.
      pictures: maps the file name of each picture to a function that draws it.
    """

    text: str
    numbers: object
    pictures: dict[str, Callable] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """An experiment: a table or figure of the papers, or a question that neither paper asks.

    Attributes:
      name: the experiment's name on the command line.
      shows: a one-line description of the results.
      source: the paper, and the table or figure in it.
      plan: a function that returns the plan of runs at a scale, or None if nothing is trained.
      compute: a function that computes the page of results without training, or None.
      reports: a function that returns commands of other recipes, whose output is added to the page.
        Its arguments are the scale and a function that returns the folder of an arm's first run.
        None means no reports.
      tasks: the evaluation tasks that the reports run with `recipes.evaluate`.
      takes: how long the experiment takes, as text, if nothing is trained.
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
    """Return the run config with its peak learning rate set to `rate`."""
    return overrides.apply(config, {RATE: rate})


def points(**values: Sequence[float]) -> tuple[Point, ...]:
    """Return all combinations of values for the learning rate (`rate`) and `depth_rate`."""
    paths = {"rate": RATE, "depth_rate": DEPTH_RATE}
    return tuple(
        dict(zip([paths[name] for name in values], point, strict=True))
        for point in itertools.product(*values.values())
    )


def geometric_mean(found: Sequence[Point]) -> Point:
    """Return, for each config path, the geometric mean of its values in the points."""
    mean = lambda values: math.exp(math.fsum(map(math.log, values)) / len(values))
    if len(found) == 1:
        return found[0]
    return {path: float(f"{mean([point[path] for point in found]):.4g}") for path in found[0]}


def before_growth(config: RunConfig, key_dim: int) -> RunConfig:
    """Return the config of the first quarter of a run, before its residual grows.

    In this quarter, D_k is `key_dim`. The learning rate warms up over as many steps as in the whole
    run, and then stays at its peak.

    Raises:
      UsageError: the run has fewer than four steps.
    """
    if (steps := config.train.steps // 4) == 0:
        raise UsageError(
            f"--steps={config.train.steps} is too few for a model that grows; legal: 4 or more"
        )
    changes = {"model.store.key_dim": key_dim, "train.steps": steps}
    warmup = config.train.optimizer.warmup_fraction * config.train.steps / steps
    changes["train.optimizer.warmup_fraction"] = min(1.0, warmup)
    return overrides.apply(config, changes | {"train.optimizer.final_fraction": 1.0})


def tokens(config: RunConfig) -> int:
    """Return the number of tokens that a run trains on."""
    return config.train.steps * config.train.batch_size * config.data.seq_len


def flops(config: RunConfig) -> float:
    """Return a run's training FLOPs, forward and backward, as `rmt_tpu.cost` counts them."""
    forward = cost.flops_per_token(config.model, config.data.seq_len)
    return float(cost.train_flops(forward, tokens(config)))


def all_runs(plan: Plan) -> Iterator[RunConfig]:
    """Yield the configs of all runs of an experiment's plan, including its searches."""
    for search in plan.searches.values():
        yield from [search.config] * (len(search.points) * len(search.seeds))
    for arm in plan.arms:
        yield from [arm.config] * len(plan.seeds[: arm.num_seeds])
