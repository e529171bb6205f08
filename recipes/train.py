"""Train a decoder.

    python -m recipes.train --preset=rmt-tiny --data=stdlib --workdir=runs/rmt-tiny

The same command again resumes. The run folder, local or gs://bucket/path, gets config.json,
metrics.jsonl, checkpoints/, plots/loss.png, samples.txt, starts.jsonl (command, versions and commit
of each start) and, if tensorboardX is installed, tensorboard/. On several hosts, the same command
on each: recipes/README.md.
"""

from absl import flags

from recipes import common
from rmt_tpu.distributed import processes
from rmt_tpu.errors import UsageError, of_flag

_PRESET = flags.DEFINE_string("preset", None, "a model of rmt_tpu.presets(); default rmt-tiny")
_CONFIG = flags.DEFINE_string("config", None, "config.json of a run to take instead of a preset")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "the run folder, local or gs://bucket/path; default runs/<preset>"
)
_CHANGE_CONFIG = flags.DEFINE_bool(
    "change_config",
    False,
    "let the run in the folder go on with another batch size, optimizer, number of steps or dtype, "
    "or a wider D_k",
)
_PROFILE_STEPS = flags.DEFINE_integer(
    "profile_steps", 0, "trace so many steps into profile/", lower_bound=0
)
common.define_run_flags()
common.define_distributed_flags()


def main() -> int:
    from rmt_tpu.storage import open_folder
    from rmt_tpu.training.trainer import train

    if _CONFIG.value and _PRESET.value:
        raise UsageError(f"--preset={_PRESET.value} and --config={_CONFIG.value}: give one of them")
    if _CONFIG.value and not _WORKDIR.value:
        raise UsageError(f"--config={_CONFIG.value} needs a --workdir")
    preset = _PRESET.value or "rmt-tiny"
    config = common.run_config(common.base_config(preset, _CONFIG.value))
    with of_flag("workdir"):
        folder = open_folder(_WORKDIR.value or f"runs/{preset}")
    common.join_processes()
    outcome = train(
        config,
        folder,
        change_config=_CHANGE_CONFIG.value,
        profile_steps=_PROFILE_STEPS.value,
        label=folder.name,
    )
    if outcome.stopped_by:
        if processes.is_first():
            everywhere = ", on every host" if processes.num_processes() > 1 else ""
            print(f"stopped at step {outcome.step}, saved in {folder}. To go on{everywhere}:")
            print(f"  {common.resume_command()}")
        return common.exit_code_of(outcome.stopped_by)
    if processes.is_first():
        print(f"done: {outcome.step} steps in {folder}")
    return 0


if __name__ == "__main__":
    common.start(main)
