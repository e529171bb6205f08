"""Train models on the same tokens with the same seeds, and compare them.

    python -m recipes.compare --presets=gpt2-tiny,rmt-tiny --workdir=runs/compare
    python -m recipes.compare --presets='*-tiny' --seeds=0,1,2 --workdir=runs/systems

Each trains in <workdir>/<preset>, or with several seeds in <workdir>/<preset>/seed-<n>, and resumes
there. Leaves comparison.png (loss against tokens and against FLOPs; of more than four presets, what
each reached, and its curve in curves.png), comparison.md and comparison.json (every run). The
batch, steps and data are those of the first preset.
"""

import dataclasses
import datetime
import fnmatch
import sys
import time

from absl import flags

from recipes import common, program
from rmt_tpu.config import RunConfig, TrainConfig
from rmt_tpu.config.checks import ranges
from rmt_tpu.config.presets import presets
from rmt_tpu.errors import UsageError, of_flag, shown, unknown
from rmt_tpu.storage import Folder, open_folder

_PRESETS = flags.DEFINE_list(
    "presets", ["gpt2-tiny", "rmt-tiny"], "names of models; quoted patterns like '*-tiny' too"
)
_SEEDS = flags.DEFINE_list("seeds", None, "train each once a seed, like 0,1,2; default --seed")
_BY_LOSS = flags.DEFINE_bool("by_loss", False, "the table's best first, not in the given order")
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/compare", "folder of the run folders, local or gs://"
)
common.define_run_flags()


def main() -> int:
    names = _names(_PRESETS.value)
    seeds = _seeds()
    # The first preset's batch, steps and data are everybody's.
    shared = common.base_config(names[0], None)
    configs = {
        name: common.run_config(
            common.of_origin(
                dataclasses.replace(shared, model=common.base_config(name, None).model)
            )
        )
        for name in names
    }
    with of_flag("workdir"):
        folder = open_folder(_WORKDIR.value)
    runs = {name: _seeded(config, folder.child(name), seeds) for name, config in configs.items()}
    return _train_and_compare(runs, folder)


def _train_and_compare(runs: dict[str, dict[Folder, RunConfig]], folder: Folder) -> int:
    from rmt_tpu.analysis.compare import write_comparison
    from rmt_tpu.training.trainer import train

    started = time.monotonic()
    total = sum(map(len, runs.values()))
    numbers = iter(range(1, total + 1))
    for name, of_name in runs.items():
        for workdir, config in of_name.items():
            label = name if len(of_name) == 1 else f"{name} {workdir.name}"
            print(f"run {next(numbers)} of {total}: {label}", file=sys.stderr, flush=True)
            if stopped_by := train(config, workdir, label=label).stopped_by:
                print(f"stopped; to go on:\n  {program.resume_command()}")
                return program.exit_code_of(stopped_by)
    workdirs = {name: list(of_name) for name, of_name in runs.items()}
    print(write_comparison(workdirs, folder, by_loss=_BY_LOSS.value))
    print(f"picture: {folder}/comparison.png")
    print(f"{total} runs in {datetime.timedelta(seconds=round(time.monotonic() - started))}")
    return 0


def _names(given: list[str]) -> list[str]:
    """The presets, with patterns as the names that match and have not been named."""
    plain = [name for name in given if not _is_pattern(name)]
    if not given or len(set(plain)) < len(plain):
        raise UsageError(f"--presets={','.join(given)} must be different names, at least one")
    names: list[str] = []
    for name in given:
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


def _seeds() -> list[int] | None:
    """Those of --seeds; None if it is not given."""
    given = _SEEDS.value
    if given is None:
        return None
    text = f"--seeds={','.join(given)}"
    if flags.FLAGS.seed is not None:
        raise UsageError(f"{text} and --seed={flags.FLAGS.seed} both set the seed; give one")
    try:
        seeds = [int(seed) for seed in given]
    except ValueError:
        raise UsageError(f"{text} must be whole numbers, like 0,1,2") from None
    if illegal := [seed for seed in seeds if seed not in ranges(TrainConfig)["seed"]]:
        raise UsageError(f"--seeds={shown(illegal[0])} must be {ranges(TrainConfig)['seed'].words}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"{text} must be different numbers, at least one")
    return seeds


def _seeded(config: RunConfig, folder: Folder, seeds: list[int] | None) -> dict[Folder, RunConfig]:
    """The run of each seed, by its folder."""
    if seeds is None:
        return {folder: config}
    with_seed = {
        seed: dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        for seed in seeds
    }
    if len(seeds) == 1:
        return {folder: with_seed[seeds[0]]}
    return {folder.child(f"seed-{seed}"): run for seed, run in with_seed.items()}


def run() -> None:
    program.start(main)


if __name__ == "__main__":
    run()
