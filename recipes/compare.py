"""Train models on the same tokens with the same seeds, and compare them.

    python -m recipes.compare --presets=gpt2-tiny,rmt-tiny --workdir=runs/compare
    python -m recipes.compare --presets='*-tiny' --seeds=0,1,2 --workdir=runs/systems

Each model trains in <workdir>/<preset>, or in <workdir>/<preset>/seed-<n> if there are several
seeds. An interrupted command resumes when it is repeated. A run that diverges has no losses in the
table, and does not train again until its config changes. All models use the batch size, steps and
data of the first preset, and each has the optimizer of its own preset: --learning_rate=0.01 gives
all of them one rate.

The command writes comparison.md, comparison.json (with every run) and comparison.png. The picture
shows loss against tokens and against FLOPs. For more than four presets, it shows the final losses,
and curves.png shows the loss curves.
"""

import dataclasses
import datetime
import fnmatch
import time

from absl import flags

from recipes import common, effects, program, several
from rmt_tpu.config.presets import presets
from rmt_tpu.errors import UsageError, flag_errors, unknown
from rmt_tpu.storage import Folder, open_folder

_PRESETS = flags.DEFINE_list(
    "presets",
    ["gpt2-tiny", "rmt-tiny"],
    "names of presets to train, or quoted patterns like '*-tiny'",
)
several.define_seeds_flag()
_BY_LOSS = flags.DEFINE_bool(
    "by_loss", False, "sort the table by loss, lowest first, instead of in the order of --presets"
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/compare", "folder for the run folders, local or gs://"
)
common.define_run_flags()


def main() -> int:
    """Train the models of --presets with each seed, compare them, and return the exit code."""
    names = _names(_PRESETS.value)
    seeds = several.seeds()
    # All models train with the batch size, steps and data of the first preset.
    shared = common.base_config(names[0], None)
    with flag_errors("workdir"):
        folder = open_folder(_WORKDIR.value)
        folder.check()
    configs = {}
    for name in names:
        own = common.base_config(name, None)
        train = dataclasses.replace(shared.train, optimizer=own.train.optimizer)
        base = dataclasses.replace(shared, model=own.model, train=train)
        stored_config = several.stored_config_within(folder.child(name))(name)
        configs[name] = common.run_config(common.with_warm_start(base, stored_config))
        effects.check_effects(configs[name])
    runs = {
        name: several.seed_trials(name, config, folder.child(name), seeds)
        for name, config in configs.items()
    }
    return _train_and_compare(runs, folder)


def _train_and_compare(runs: dict[str, list[several.Trial]], folder: Folder) -> int:
    from rmt_tpu.analysis.compare import write_comparison
    from rmt_tpu.analysis.sweep import try_run

    started = time.monotonic()
    trials = [trial for trials in runs.values() for trial in trials]
    if (code := several.train_all(trials, try_run)) is not None:
        return code
    workdirs = {name: [trial.folder for trial in trials] for name, trials in runs.items()}
    print(write_comparison(workdirs, folder, by_loss=_BY_LOSS.value))
    print(f"picture: {folder}/comparison.png")
    seconds = round(time.monotonic() - started)
    print(f"{len(trials)} runs in {datetime.timedelta(seconds=seconds)}")
    return 0


def _names(requested: list[str]) -> list[str]:
    """Return the presets that --presets names or matches with patterns, without duplicates."""
    plain = [name for name in requested if not _is_pattern(name)]
    if not requested or len(set(plain)) < len(plain):
        raise UsageError(
            f"--presets={','.join(requested)} is empty or repeats a name; "
            "legal: one or more different names"
        )
    names: list[str] = []
    for name in requested:
        if _is_pattern(name):
            matches = fnmatch.filter(presets(), name)
            if not matches:
                raise UsageError(unknown("--presets", name, presets()))
            names += [match for match in matches if match not in (*names, *plain)]
        else:
            names.append(name)
    return names


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


def run() -> None:
    """Run `main` as a program; `rmt-compare` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
