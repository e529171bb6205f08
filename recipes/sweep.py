"""Search over config values with a grid, random points or successive halving, at several widths.

    python -m recipes.sweep --preset=rmt-tiny --set=model.parametrization=mup --seeds=0,1 \\
      --sweep=train.optimizer.learning_rate=log:1e-3..1e-1:5 --workdir=runs/sweep \\
      --variant="x1" --variant="x2 model.attention.num_heads=8 model.feed_forward.hidden_dim=1024"

--sweep can be repeated. It is a config path with a list of values (1e-3,1e-2) or a range
(log:1e-4..1e-1:7, linear:0..0.2:5). The last number of a range is its number of points in a grid.
Each --variant has a name and config changes, and is searched separately. In muP, the first variant
is the base of the others, unless a base is given.

Each trial is a run in the folder <workdir>/<variant>/<values>. The folder contains seed-<n> folders
if there are several seeds. With successive halving, each rung is a separate run with a complete
schedule. An interrupted command resumes when it is repeated. A run that diverges is reported, and
ranks last.

The command writes sweep.md, sweep.json and sweep.png. sweep.md has every point, and the loss of
each variant at the first variant's best point.

With --coordinates, no search is run. Each variant trains for a few steps on one random batch. Then
coordinates.md, .json and .png show how activations change with width. For muP, the standard
parametrisation is shown too.
"""

import dataclasses
import datetime
import shlex
import time
from typing import Any

from absl import flags

from recipes import common, program, several
from rmt_tpu.config import MuP, RunConfig, Standard, overrides
from rmt_tpu.errors import RunError, UsageError, flag_errors, shown
from rmt_tpu.storage import Folder, open_folder

common.define_model_flags()
_SWEEP = flags.DEFINE_multi_string(
    "sweep",
    [],
    "config path and its values, as a list (path=1e-3,1e-2) or a range (path=log:1e-4..1e-1:7)",
)
_SEARCH = flags.DEFINE_enum(
    "search", "grid", ["grid", "random", "halving"], "how the points of --sweep are chosen"
)
_TRIALS = flags.DEFINE_integer(
    "trials",
    None,
    "number of random points; with --search=halving, they are used instead of the grid",
    lower_bound=1,
)
_SEARCH_SEED = flags.DEFINE_integer(
    "search_seed", 0, "seed of the random choice of --trials points", lower_bound=0
)
_FACTOR = flags.DEFINE_integer(
    "halving_factor",
    3,
    "factor by which each rung of halving reduces the number of points",
    lower_bound=2,
)
_VARIANT = flags.DEFINE_multi_string(
    "variant", [], "a name and config changes, like 'x2 model.num_layers=8'"
)
_COORDINATES = flags.DEFINE_integer(
    "coordinates",
    0,
    "run a coordinate check with this many training steps instead of a sweep; 0 means no check",
    lower_bound=0,
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/sweep", "folder for the run folders, local or gs://"
)
several.define_seeds_flag()
common.define_run_flags()


def main() -> int:
    """Train the trials of --sweep, or check --coordinates, and return the exit code."""
    with flag_errors("workdir"):
        folder = open_folder(_WORKDIR.value)
        folder.check()
    config = common.run_config(_base_run(folder))
    variants = _variants(config)
    seeds = several.seeds()
    if _COORDINATES.value:
        return _check_coordinates(variants, folder)
    return _Sweep(variants, seeds, folder).run()


def _base_run(folder: Folder) -> RunConfig:
    """Return the run config that the flags describe.

    If --init_from alone selects the model, its folder must exist even after trials have started.
    """
    if flags.FLAGS.init_from and not (flags.FLAGS.preset or flags.FLAGS.config):
        return common.selected_config()[1]
    return common.selected_config(several.stored_config_within(folder))[1]


# Reading the variants --------------------------------------------------------------------------


def _variants(config: RunConfig) -> dict[str, RunConfig]:
    """Return the run config of each variant by name; without --variant, there is only one."""
    configs = {}
    changes = dict(map(_parsed_variant, _VARIANT.value)) or {"model": {}}
    if len(changes) < max(1, len(_VARIANT.value)):
        raise UsageError("--variant: two variants have the same name; legal: different names")
    for name, variant_changes in changes.items():
        if not configs:
            first = _changed(config, variant_changes, f"--variant={name}")
        configs[name] = _changed(
            config, variant_changes | _base(config, first, changes), f"--variant={name}"
        )
    return configs


def _parsed_variant(text: str) -> tuple[str, dict[str, Any]]:
    try:
        name, *assignments = shlex.split(text)
    except ValueError:
        raise UsageError(
            f"--variant={shown(text)} must be a name and path=value, separated by spaces"
        ) from None
    if "=" in name or "/" in name:
        raise UsageError(f"--variant={shown(text)} has no name before its values, like 'x2 ...'")
    return name, dict(map(overrides.parse_assignment, assignments))


def _base(
    config: RunConfig, first: RunConfig, changes: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the config change that makes the first variant the base model of muP.

    The base gets the first variant's values of all sizes of the model that any variant changes.
    Nothing is changed if the parametrisation is not muP, or if the config sets a base.
    """
    parametrization = config.model.parametrization
    if not isinstance(parametrization, MuP) or parametrization.base:
        return {}
    paths = dict.fromkeys(path for variant_changes in changes.values() for path in variant_changes)
    values = {
        path.removeprefix("model."): overrides.value_at(first, path)
        for path in paths
        if path.startswith("model.") and not path.startswith("model.parametrization")
    }
    sizes = [f"{path}={value}" for path, value in values.items() if type(value) is int]
    return {"model.parametrization.base": sizes}


def _changed(config: RunConfig, changes: dict[str, Any], flag: str) -> RunConfig:
    try:
        return overrides.apply(config, changes)
    except UsageError as error:
        raise UsageError(f"{flag} is not legal: {error}") from None


# Searching over values -------------------------------------------------------------------------


class _Sweep:
    """The search over the values of --sweep, for all variants and all rungs of halving."""

    def __init__(self, variants: dict[str, RunConfig], seeds: list[int] | None, folder: Folder):
        from rmt_tpu.analysis import sweep

        self.sweep = sweep
        if not _SWEEP.value:
            raise UsageError(
                "--sweep is needed, like train.optimizer.learning_rate=log:1e-3..1e-1:5, or "
                "--coordinates=4"
            )
        self.spaces = [sweep.parse_space(text) for text in _SWEEP.value]
        paths = [space.path for space in self.spaces]
        if len(set(paths)) < len(paths):
            raise UsageError("--sweep has a path twice; give each path once, with all its values")
        for number, path in enumerate(paths):
            several.check_sets(f"--sweep={path}", path, "--sweep=", paths[:number])
        _check_sets(paths, seeds)
        self.variants, self.seeds, self.folder = variants, seeds, folder
        self.points = self._points()
        steps = next(iter(variants.values())).train.steps
        self.rungs = [(len(self.points), steps)]
        if _SEARCH.value == "halving":
            self.rungs = sweep.rungs(len(self.points), steps, _FACTOR.value)
        # Report config errors before anything is trained.
        for name in variants:
            self._trials(name, self.points, self.rungs[0][1])

    def run(self) -> int:
        started, count_done, rows = time.monotonic(), 0, []
        seed_count = len(self.seeds or [None])
        total = len(self.variants) * seed_count * sum(count for count, _ in self.rungs)
        for variant in self.variants:
            points = self.points
            for count, steps in self.rungs:
                trials = self._trials(variant, points[:count], steps)
                flat = [trial for point_trials in trials for trial in point_trials]
                code = several.train_all(flat, self.sweep.try_run, count_done + 1, total)
                if code is not None:
                    return code
                count_done += len(flat)
                variant_rows = [
                    self._row(variant, point, point_trials)
                    for point, point_trials in zip(points, trials, strict=False)
                ]
                rows += variant_rows
                points = [row.point for row in self.sweep.best(variant_rows, len(variant_rows))]
        print(self.sweep.write_sweep(rows, self.spaces, self.folder))
        print(f"picture: {self.folder}/sweep.png")
        seconds = round(time.monotonic() - started)
        print(f"{total} runs in {datetime.timedelta(seconds=seconds)}")
        return 0

    def _points(self) -> list[dict[str, Any]]:
        if _SEARCH.value == "grid" and _TRIALS.value is not None:
            raise UsageError(
                f"--trials={_TRIALS.value} has no effect on a grid, which uses all its points; "
                "legal: --search=random or halving"
            )
        if _SEARCH.value == "random" and _TRIALS.value is None:
            raise UsageError("--trials, the number of points, is needed with --search=random")
        if _TRIALS.value is None:
            return self.sweep.grid(self.spaces)
        return self.sweep.random_points(self.spaces, _TRIALS.value, _SEARCH_SEED.value)

    def _trials(self, variant: str, points: list, steps: int) -> list[list[several.Trial]]:
        """Return a list of trials for each point, with one trial per seed."""
        base, folder = self.variants[variant], self.folder.child(variant)
        if _SEARCH.value == "halving":
            base = dataclasses.replace(base, train=dataclasses.replace(base.train, steps=steps))
            folder = folder.child(f"{steps}-steps")
        trials = []
        for point in points:
            name = self.sweep.name_of(point)
            config = _changed(base, point, _as_flags(point))
            trials.append(
                several.seed_trials(f"{variant} {name}", config, folder.child(name), self.seeds)
            )
        return trials

    def _row(self, variant: str, point: dict, trials: list[several.Trial]):
        losses = [self.sweep.held_out_loss(trial.folder) for trial in trials]
        for trial, loss in zip(trials, losses, strict=True):
            if loss is None and not self.sweep.is_settled(trial.config, trial.folder):
                raise RunError(
                    f"{trial.folder}: the last metrics could not be written; repeat the command"
                )
        return self.sweep.SweepRow(
            variant,
            point,
            trials[0].config.train.steps,
            [trial.config.train.seed for trial in trials],
            losses,
        )


def _as_flags(point: dict[str, Any]) -> str:
    """Return the flags that set the values of a point, as text."""
    return " ".join(f"--sweep={path}={value}" for path, value in point.items())


def _check_sets(swept: list[str], seeds: list[int] | None) -> None:
    """Check that no other flag sets a swept path.

    Raises:
      UsageError: another flag also sets a swept path, so that one of the two would have no effect.
    """
    variant_changes = dict(map(_parsed_variant, _VARIANT.value))
    for path in swept:
        for other_path, flag in common.given_paths().items():
            if f"{other_path}.".startswith(f"{path}."):
                raise UsageError(f"--sweep={path} and {flag} both set {path}; give one")
    set_paths = {f"--sweep={path}": path for path in swept}
    if seeds is not None:
        several.check_sets("--seeds", "train.seed", "--sweep=", swept)
        set_paths["--seeds"] = "train.seed"
    if _SEARCH.value == "halving":
        several.check_sets("--search=halving", "train.steps", "--sweep=", swept)
        set_paths["--search=halving"] = "train.steps"
    for flag, path in set_paths.items():
        for name, changes in variant_changes.items():
            several.check_sets(flag, path, f"--variant={name} ", changes)


# Checking coordinates --------------------------------------------------------------------------


def _check_coordinates(variants: dict[str, RunConfig], folder: Folder) -> int:
    from rmt_tpu.analysis import coordinates

    if len(variants) < 2:
        raise UsageError("--coordinates needs two or more widths; give a --variant for each")
    kinds = {"as given": lambda model: model}
    first = next(iter(variants.values())).model
    if isinstance(first.parametrization, MuP):
        standard = lambda model: dataclasses.replace(model, parametrization=Standard())
        kinds = {"muP": lambda model: model, "standard": standard}
    ratio = lambda model: max(model.width / first.width, model.residual_size / first.residual_size)
    if len({ratio(config.model) for config in variants.values()}) < len(variants):
        raise UsageError(
            "--coordinates needs variants of different widths; two variants have the same width"
        )
    batch = coordinates.random_batch(first.vocab_size)
    measured = {}
    for kind, change in kinds.items():
        measured[kind] = {}
        for name, config in variants.items():
            print(f"{kind}, {name}", flush=True)
            model = change(config.model)
            config = dataclasses.replace(config, model=model)
            of_width = coordinates.measure(config, batch, steps=_COORDINATES.value)
            measured[kind][ratio(model)] = of_width
    print(coordinates.write_check(measured, folder))
    print(f"picture: {folder}/coordinates.png")
    return 0


def run() -> None:
    """Run `main` as a program; `rmt-sweep` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
