"""Hyperparameter searches over a grid, at random, or by successive halving.

A point is a choice of a value for each searched config path.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rmt_tpu.config import RunConfig, TrainConfig, overrides
from rmt_tpu.data import load_tokenizer
from rmt_tpu.data.datasets import load_datasets
from rmt_tpu.errors import DivergedError, UsageError, shown
from rmt_tpu.runs.metrics import read_metrics, series
from rmt_tpu.runs.plots import line_style, save_picture
from rmt_tpu.runs.side_files import DIVERGED, is_complete
from rmt_tpu.runs.workdir import holds_run, open_checkpoints, read_config, resume_overrides
from rmt_tpu.storage import Folder, Location, open_folder
from rmt_tpu.streams import log_line
from rmt_tpu.tables import markdown
from rmt_tpu.training.remat_choice import Devices
from rmt_tpu.training.run import resolve_auto
from rmt_tpu.training.start import text_of
from rmt_tpu.training.trainer import Outcome, train

# A point of a search maps dotted config paths to values.
Point = dict[str, Any]

# Pictures cut off losses that are more than this number of nats above the lowest loss.
_HEIGHT = 1.5

# The number of significant digits of points that are not listed one by one.
_DIGITS = 4

# The largest number of points in a range, and in a grid.
_MOST_POINTS = 10_000

# A random search for n distinct points gives up after n times this number of draws.
_DRAWS = 100


@dataclass(frozen=True)
class Choices:
    """A list of values to try for one config path."""

    path: str
    values: tuple[Any, ...]

    def grid(self) -> list[Any]:
        """Return all values to try, in order."""
        return list(self.values)

    def draw(self, rng: np.random.Generator) -> Any:
        """Return a random value from the list."""
        return self.values[rng.integers(len(self.values))]


@dataclass(frozen=True)
class NumberRange:
    """A range of numbers to try for one config path.

    Attributes:
      path: the dotted path in the config.
      low, high: the ends of the range.
      log: whether the scale is logarithmic rather than linear.
      count: the number of values in a grid, or None if it is not given.
    """

    path: str
    low: float
    high: float
    log: bool
    count: int | None

    def grid(self) -> list[float]:
        """Return `count` numbers, evenly spaced on the scale of the range, including both ends.

        They have four significant digits, or more if some of them would otherwise be equal.

        Raises:
          UsageError: `count` is not given, or the range has fewer numbers.
        """
        if self.count is None:
            raise UsageError(
                f"--sweep={self.path} needs a number of points for a grid, such as "
                f"{self.path}=log:1e-4..1e-1:7; without it, use --search=random, or "
                "--search=halving with --trials"
            )
        exact = (np.geomspace if self.log else np.linspace)(self.low, self.high, self.count)
        for digits in range(_DIGITS, 18):
            numbers = [_short(x, digits) for x in exact]
            if len(set(numbers)) == self.count:
                return numbers
        raise UsageError(
            f"--sweep={self.path} asks for more points than there are numbers from {self.low} to "
            f"{self.high}; legal: fewer points"
        )

    def draw(self, rng: np.random.Generator) -> float:
        """Return a random number in the range."""
        if self.log:
            return _short(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return _short(rng.uniform(self.low, self.high))


Space = Choices | NumberRange


def _short(x: float, digits: int = _DIGITS) -> float:
    """Return a number rounded to some significant digits, short enough for a folder name."""
    return float(f"{x:.{digits}g}")


def parse_space(text: str) -> Space:
    """Parse a space such as `path=log:1e-4..1e-1:7`, `path=linear:0..0.2` or `path=3e-3,1e-2`.

    Raises:
      UsageError: the text has none of these forms.
    """
    path, equals, values_text = (part.strip() for part in text.partition("="))
    legal = "legal: path=log:1e-4..1e-1:7, path=linear:0..0.2:5 or path=1,2,4"
    if not (path and equals and values_text):
        raise UsageError(f"--sweep={shown(text)} has no path or no values; {legal}")
    kind, colon, rest = values_text.partition(":")
    if kind not in ("log", "linear") or not colon:
        values = tuple(overrides.parse_assignment(f"{path}={v}")[1] for v in values_text.split(","))
        if len(set(map(str, values))) < len(values):
            raise UsageError(f"--sweep={shown(text)} repeats a value; {legal}")
        return Choices(path, values)
    ends, _, count = rest.partition(":")
    try:
        low, high = map(float, ends.split(".."))
        number = int(count) if count else None
    except ValueError:
        raise UsageError(f"--sweep={shown(text)} is not a range; {legal}") from None
    finite, points = math.isfinite(low) and math.isfinite(high), 2 if number is None else number
    if not finite or low >= high or (kind == "log" and low <= 0) or not 2 <= points <= _MOST_POINTS:
        raise UsageError(
            f"--sweep={shown(text)} is not a legal range; legal: two numbers, the second larger "
            f"(for log, both above 0), and 2 to {_MOST_POINTS} points"
        )
    return NumberRange(path, low, high, kind == "log", number)


def grid(spaces: Sequence[Space]) -> list[Point]:
    """Return all combinations of the spaces' values; the last space varies fastest.

    Raises:
      UsageError: there are too many points, or two have the same `name_of`, and thus the same
        folder.
    """
    axes = [space.grid() for space in spaces]
    if (number := math.prod(map(len, axes))) > _MOST_POINTS:
        raise UsageError(
            f"--sweep has {number} points; legal: at most {_MOST_POINTS} in a grid, or "
            "--search=random with --trials"
        )
    values = itertools.product(*axes)
    points = [dict(zip([s.path for s in spaces], point, strict=True)) for point in values]
    counts = Counter(map(name_of, points))
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise UsageError(
            f"--sweep has two points that share the folder {repeated[0]}; legal: values with "
            "different names"
        )
    return points


def random_points(spaces: Sequence[Space], count: int, seed: int) -> list[Point]:
    """Return `count` distinct random points of the search space.

    Raises:
      UsageError: the spaces have fewer than `count` distinct points.
    """
    rng, points = np.random.default_rng(seed), {}
    for _ in range(_DRAWS * count):
        point = {space.path: space.draw(rng) for space in spaces}
        points.setdefault(name_of(point), point)
        if len(points) == count:
            return list(points.values())
    raise UsageError(
        f"--trials={count} is more than the number of distinct points of --sweep; legal: up to "
        f"{len(points)}"
    )


def rungs(count: int, steps: int, factor: int) -> list[tuple[int, int]]:
    """Return the number of points and of steps in each rung of successive halving.

    The first rung trains `count` points. One in `factor` points advances to the next rung, which
    trains for `factor` times as many steps. The last rung trains one point for all `steps`. See
    Jamieson and Talwalkar (2016).

    Raises:
      UsageError: two rungs would train for the same number of steps.
    """
    counts = [count]
    while counts[-1] > 1:
        counts.append(-(-counts[-1] // factor))
    last = len(counts) - 1
    steps_of = [max(1, round(steps / factor ** (last - rung))) for rung in range(len(counts))]
    if len(set(steps_of)) < len(counts):
        raise UsageError(
            f"--steps={steps} are too few for --search=halving with {count} points and a factor of "
            f"{factor}; legal: {factor**last} or more, or fewer points"
        )
    return list(zip(counts, steps_of, strict=True))


def name_of(point: Point) -> str:
    """Return the folder name of a point, like "learning_rate=0.01,depth_rate=0.3".

    Config paths are shortened to their last components, unless two of them would then be equal.
    """
    last = [path.rpartition(".")[2] for path in point]
    names = last if len(set(last)) == len(last) else list(point)
    pairs = (f"{name}={_text(value)}" for name, value in zip(names, point.values(), strict=True))
    return ",".join(pairs).replace("/", "_")


def _text(value: Any) -> str:
    """Return a value as a short text; a number keeps all digits that tell it from others."""
    if not isinstance(value, float):
        return str(value)
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


@dataclass(frozen=True)
class SweepRow:
    """The result of training a variant of a model with the config values of one point.

    Attributes:
      variant: the name of the variant, such as a preset.
      point: the config values of the point.
      steps: the number of training steps.
      seeds, losses: the seeds, and the held-out loss of each seed. It is None if this loss or the
        training loss was not finite.
    """

    variant: str
    point: Point
    steps: int
    seeds: list[int]
    losses: list[float | None]

    @property
    def loss(self) -> float:
        """The mean loss over seeds, or infinity if any seed failed."""
        if any(loss is None for loss in self.losses):
            return math.inf
        return math.fsum(self.losses) / len(self.losses)

    @property
    def searches_steps(self) -> bool:
        """Whether the number of steps is one of the searched values."""
        return not self.point.keys().isdisjoint(("train", "train.steps"))


def best(rows: Iterable[SweepRow], count: int = 1) -> list[SweepRow]:
    """Return the `count` results with the lowest loss, best first."""
    return sorted(rows, key=lambda row: row.loss)[:count]


# Trials --------------------------------------------------------------------------------------


def try_run(config: RunConfig, folder: Folder, *, label: str, **options) -> Outcome | None:
    """Train a run unless it is settled (complete or diverged).

    For a settled run, a line is printed that says so.

    Returns:
      The outcome of training, or None if the run was settled before or has diverged now.

    Raises:
      UsageError: the run was settled before, with another text.
    """
    if is_settled(config, folder):
        _check_text(config, folder)
        diverged = folder.read(DIVERGED) is not None
        how = "diverged before" if diverged else f"is complete at step {config.train.steps}"
        log_line(f"{folder} {how}")
        return None
    try:
        return train(config, folder, label=label, **options)
    except DivergedError as error:
        log_line(f"{label}: {error}")
        return None


def _check_text(config: RunConfig, folder: Folder) -> None:
    """Check that a run that is not trained again has read the text of its config.

    Raises:
      UsageError: it has read another text.
    """
    checkpoints = open_checkpoints(folder)
    if not checkpoints.steps():
        return
    train = TrainConfig(batch_size=config.train.batch_size, seed=config.train.seed)
    held_out = _held_out(dataclasses.replace(config, train=train))
    if checkpoints.meta().get("held_out", held_out) != held_out:
        flag = "--mixture" if config.data.mixture else f"--data={config.data.source}"
        raise UsageError(
            f"{flag} is not the text that the run in {folder} has read; legal: that text, or "
            "another --workdir"
        )


@functools.lru_cache(maxsize=16)
def _held_out(config: RunConfig) -> dict[str, int]:
    """Return `Text.held_out` of the text of a config; the trials of a sweep share it."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    return dict(text_of(tokenizer, load_datasets(config, tokenizer)).held_out)


def is_started(config: RunConfig, folder: Folder) -> bool:
    """Return whether this run has been started in the folder.

    The config stored there may differ in values that do not affect results, such as file paths.
    """
    return holds_run(folder, resolve_auto(config, resume_overrides(folder), Devices.here()))


def is_settled(config: RunConfig, folder: Folder) -> bool:
    """Return whether the folder has this run, and the run is complete or has diverged."""
    if not is_started(config, folder):
        return False
    complete = is_complete(folder, config, config.train.steps)
    return complete or folder.read(DIVERGED) is not None


def held_out_loss(folder: Folder) -> float | None:
    """Return the last held-out loss of a settled run, or None if the run diverged."""
    if folder.read(DIVERGED) is not None:
        return None
    steps, losses = series(read_metrics(folder), "eval/loss")
    return losses[-1] if steps and steps[-1] == read_config(folder).train.steps else None


# Reports -------------------------------------------------------------------------------------


def write_sweep(rows: Sequence[SweepRow], spaces: Sequence[Space], folder: Location) -> str:
    """Write sweep.png, sweep.md and sweep.json to a folder, and return the Markdown tables."""
    folder = open_folder(folder)
    text = f"{table(rows)}\n{transfer(rows)}"
    folder.write("sweep.md", text.encode())
    numbers = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    folder.write("sweep.json", numbers.encode())
    _draw(rows, spaces, folder)
    return text


def table(rows: Sequence[SweepRow]) -> str:
    """Return a Markdown table of losses, with one row per point of the search."""
    paths = list(rows[0].point)
    lines = [["variant", *paths, "steps", "held-out loss"]]
    for row in rows:
        values = map(_text, row.point.values())
        lines.append([row.variant, *values, str(row.steps), _losses(row)])
    text = markdown(lines) + "\n"
    if len(rows[0].seeds) > 1:
        text += f"\nMean (min..max) over seeds {', '.join(map(str, rows[0].seeds))}.\n"
    return text


def _losses(row: SweepRow) -> str:
    known = [loss for loss in row.losses if loss is not None]
    if len(known) < len(row.losses):
        return f"not finite: {len(row.losses) - len(known)} of {len(row.losses)}"
    if len(known) == 1:
        return f"{row.loss:.4f}"
    return f"{row.loss:.4f} ({min(known):.4f}..{max(known):.4f})"


def transfer(rows: Sequence[SweepRow]) -> str:
    """Return a Markdown table with the best point of each variant.

    The table also shows the loss of each variant at the first variant's best point.
    """
    by_variant = _last_rungs(rows)
    (first, *_), *_ = (best(variant_rows) for variant_rows in by_variant.values())
    lines = [f"variant | best point | loss | loss with {name_of(first.point)} | difference"]
    for variant, variant_rows in by_variant.items():
        best_row = best(variant_rows)[0]
        same = next((row for row in variant_rows if row.point == first.point), None)
        known = same is not None and math.isfinite(same.loss) and math.isfinite(best_row.loss)
        cells = (f"{same.loss:.4f}", f"{same.loss - best_row.loss:.4f}") if known else ("", "")
        lines.append([variant, name_of(best_row.point), _losses(best_row), *cells])
    return markdown(lines) + "\n"


def _last_rungs(rows: Sequence[SweepRow]) -> dict[str, list[SweepRow]]:
    """Return a dict from variant to its results of the last rung of successive halving.

    The last rung has the variant's largest number of steps. A search over the number of steps has
    one rung.
    """
    most: dict[str, int] = {}
    for row in rows:
        most[row.variant] = max(row.steps, most.get(row.variant, 0))
    found: dict[str, list[SweepRow]] = {variant: [] for variant in most}
    for row in rows:
        if row.searches_steps or row.steps == most[row.variant]:
            found[row.variant].append(row)
    return found


def _draw(rows: Sequence[SweepRow], spaces: Sequence[Space], folder: Folder) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(1.5 + 5 * len(spaces), 4.5), layout="constrained")
    panels = figure.subplots(1, len(spaces), squeeze=False, sharey=True)[0]
    # A line joins the points only if a single path is searched. With several paths, neighboring
    # points also differ in other values. A path such as a seed, which is not a quantity, has no
    # line.
    joined = len(spaces) == 1 and spaces[0].path != "train.seed"
    line_of = lambda row: (row.variant, None if row.searches_steps else row.steps)
    lines = list(dict.fromkeys(map(line_of, rows)))
    several = len({steps for _, steps in lines}) > 1
    for axes, space in zip(panels, spaces, strict=True):
        at = {name_of(row.point): row.point[space.path] for row in rows}
        if not all(isinstance(value, int | float) for value in at.values()):
            at = {name: _text(value) for name, value in at.items()}
        for index, (variant, steps) in enumerate(lines):
            variant_rows = [row for row in rows if line_of(row) == (variant, steps)]
            style = line_style(index) | ({} if joined else {"linestyle": "none"})
            label = f"{variant}, {steps} steps" if several else variant
            done = [row for row in variant_rows if math.isfinite(row.loss)]
            done.sort(key=lambda row, at=at: at[name_of(row.point)])
            x, y = [at[name_of(row.point)] for row in done], [row.loss for row in done]
            below = [row.loss - min(row.losses) for row in done]
            above = [max(row.losses) - row.loss for row in done]
            axes.errorbar(x, y, yerr=(below, above), label=label, capsize=3, markersize=5, **style)
            failed = [at[name_of(row.point)] for row in variant_rows if not math.isfinite(row.loss)]
            top = axes.get_xaxis_transform()
            axes.plot(failed, [0.98] * len(failed), "x", color=style["color"], transform=top)
        if isinstance(space, NumberRange) and space.log:
            axes.set_xscale("log")
        if all(type(value) is int for value in at.values()):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel=space.path)
        axes.grid(alpha=0.3)
    # Cut off the losses of runs that hardly trained, which would take up most of the height.
    finite = [row.loss for row in rows if math.isfinite(row.loss)]
    if finite and max(finite) > min(finite) + _HEIGHT:
        panels[0].set_ylim(min(finite) - 0.05 * _HEIGHT, min(finite) + _HEIGHT)
    bars = "; bars: min to max over seeds" if len(rows[0].seeds) > 1 else ""
    panels[0].set_ylabel(f"held-out loss{bars}")
    panels[0].legend(fontsize=8, title="x at the top: loss not finite" if _failed(rows) else None)
    save_picture(figure, folder, "sweep.png")


def _failed(rows: Sequence[SweepRow]) -> bool:
    return any(math.isinf(row.loss) for row in rows)
