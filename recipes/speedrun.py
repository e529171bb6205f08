"""Measure the seconds and FLOPs of training until a model reaches a fixed loss on a fixed text.

    pip download --no-deps django==5.2.8
    python -m recipes.speedrun --track=cpu --text=django-5.2.8-py3-none-any.whl \\
        --presets=gpt2-tiny,rmt-tiny --seeds=0,1,2 --workdir=runs/speedrun

A track fixes the text, the loss and the machine. --list prints the tracks, and
docs/guides/speedrun.md has the rules. Each preset trains in <workdir>/<preset>/seed-<n>. A run
stops at the first evaluation that reaches the loss. An interrupted command resumes when it is
repeated. The flags of recipes.train apply to all presets, but cannot change what the track fixes.
The command writes speedrun.json, with every run, and the table speedrun.md.
"""

import dataclasses
from collections.abc import Callable

from absl import flags

from recipes import common, effects, program, several
from rmt_tpu.config import RunConfig
from rmt_tpu.config.presets import presets
from rmt_tpu.data import is_store
from rmt_tpu.errors import UsageError, flag_errors, unknown
from rmt_tpu.storage import Folder, open_folder


def _list() -> str:
    from rmt_tpu.experiments.speedrun import list_tracks

    return list_tracks()


_TRACK = flags.DEFINE_enum(
    "track",
    "cpu",
    ["cpu", "tpu", "gpu"],
    "track, which fixes the text, the loss to reach and the machine; see --list",
)
_PRESETS = flags.DEFINE_list(
    "presets", None, "names of presets to train; the default is the track's first entry"
)
_TEXT = flags.DEFINE_string(
    "text", None, "wheel file with the text of the track cpu; not needed once the text is prepared"
)
several.define_seeds_flag()
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/speedrun", "folder for the text and the run folders"
)
flags.DEFINE_flag(program.PrintAndExit("list", "list the tracks, and exit", _list))
common.define_run_flags()


def main() -> int:
    """Train the entries of --presets with each seed, print the table, and return the exit code."""
    from rmt_tpu.experiments import speedrun

    track = speedrun.TRACKS[_TRACK.value]
    names = _PRESETS.value or [track.preset]
    for name in names:
        if name not in presets():
            raise UsageError(unknown("--presets", name, presets()))
    if len(set(names)) < len(names):
        raise UsageError(f"--presets={','.join(names)} repeats a name; legal: different names")
    speedrun.check_fixed(track, common.given_paths())
    seeds = several.seeds()
    with flag_errors("workdir"):
        folder = open_folder(_WORKDIR.value)
    if track.text is not None:
        source = speedrun.prepare_text(track, _TEXT.value, folder)
    elif flags.FLAGS.data is None:
        raise UsageError(f"--track={track.name} needs --data, a token store of {track.source}")
    else:
        source = flags.FLAGS.data
        if not is_store(source):
            raise UsageError(
                f"--data={source} is no token store; legal with --track={track.name}: one of "
                f"{track.source}"
            )
    trials = []
    for name in names:
        config = speedrun.entry(track, common.base_config(name, None), source)
        config = common.run_config(config)
        effects.check_effects(config)
        # A speedrun does not use samples, and generating them takes time.
        training = dataclasses.replace(config.train, sample_tokens=0)
        config = dataclasses.replace(config, train=training)
        trials += [
            (name, trial) for trial in several.seed_trials(name, config, folder.child(name), seeds)
        ]
    if (
        code := several.train_all([trial for _, trial in trials], _train_to(track.loss))
    ) is not None:
        return code
    results = [speedrun.measure(track, name, trial.folder) for name, trial in trials]
    print(speedrun.write_results(track, results, folder))
    return 0


def _train_to(loss: float) -> Callable:
    """Return a function that trains a run until its held-out loss is at most `loss`.

    The function does not train a run that has already reached this loss. It refuses a folder with a
    run of another config, because the table would show the other run's figures.
    """
    from rmt_tpu.experiments import speedrun
    from rmt_tpu.training.trainer import train

    def train_to_loss(config: RunConfig, folder: Folder, label: str):
        if speedrun.has_reached(config, folder, loss):
            return None
        return train(config, folder, label=label, stop_loss=loss)

    return train_to_loss


def run() -> None:
    """Run `main` as a program; `rmt-speedrun` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
