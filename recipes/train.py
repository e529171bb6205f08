"""Train a decoder.

    python -m recipes.train --preset=rmt-tiny --data=stdlib --workdir=runs/rmt-tiny

An interrupted run resumes when the command is repeated. To train on several hosts, run the same
command on each host: see docs/guides/pods.md. The run folder is a local path or gs://bucket/path.
It contains config.json, metrics.jsonl, checkpoints/, plots/loss.png, samples.txt and:

- starts.jsonl: the command, versions and commit of each start.
- kernel_blocks.json: the block sizes of the run's kernels, which later changes of the tables do not
  affect.
- kernels.json: the ops that use plain JAX, because a kernel's results are wrong on a device.
- tensorboard/: the values for TensorBoard, if tensorboardX is installed.
"""

import os
import threading

from absl import flags

from recipes import common, effects, members, program
from rmt_tpu.config import RunConfig
from rmt_tpu.errors import UsageError, flag_errors
from rmt_tpu.storage import Folder, open_folder
from rmt_tpu.training import signals

common.define_model_flags()
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "run folder, local or gs://bucket/path; the default is runs/<preset>, or runs/<name of the "
    "folder of --init_from> if that alone selects the model",
)
_CHANGE_CONFIG = flags.DEFINE_bool(
    "change_config",
    False,
    "let the run in the folder continue with a different batch size, optimizer, mixture, number "
    "of steps or dtype, or a larger D_k (model.store.key_dim)",
)
_FROM_STEP = flags.DEFINE_integer(
    "from_step",
    None,
    "resume from the checkpoint of this earlier step; later checkpoints are deleted",
)
_PROFILE_STEPS = flags.DEFINE_integer(
    "profile_steps", 0, "number of steps to trace; traces go to <workdir>/profile", lower_bound=0
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "print the model, its size and the amount of training, and exit"
)
_CHECK_KERNELS = flags.DEFINE_enum(
    "check_kernels",
    "auto",
    ["auto", "off"],
    "auto: compare the results of the step's kernels with those of plain JAX, once per kind of "
    "device, and use plain JAX for an op whose results differ; off: do not compare",
)
_STOPPED_EXIT_CODE = flags.DEFINE_integer(
    "stopped_exit_code",
    0,
    "exit code of a run that a signal other than Ctrl-C stopped before its last step, with a "
    "checkpoint; a supervisor that restarts only failed runs, such as a Kubernetes Job, needs a "
    "code other than 0",
    lower_bound=0,
    upper_bound=125,
)
common.define_run_flags()
members.define_distributed_flags()

# Set once this process has connected to other processes.
_is_distributed = threading.Event()


def main() -> int:
    """Train a run with the config that the flags describe, and return the exit code."""
    with signals.exit_on_signal(_end) as notice:
        code = _train(notice)
        if _is_distributed.is_set():
            from rmt_tpu.distributed import processes

            # Wait in the `with` body, so that a signal still ends the processes that wait here for
            # process 0 to write its sample.
            processes.finish()
        return code


def _train(notice: signals.ExitNotice) -> int:
    name, base = common.selected_config(_stored_config)
    config = common.run_config(base)
    effects.check_effects(config)
    if flags.FLAGS.config and _WORKDIR.value is None and not _DRY_RUN.value:
        raise UsageError(f"--config={name} needs --workdir")
    folder = _folder(name)
    _check_origin(config, folder)
    if _DRY_RUN.value:
        from rmt_tpu.analysis.dry_run import dry_run

        members.check_member()
        options = {"change_config": _CHANGE_CONFIG.value, "from_step": _FROM_STEP.value}
        print(dry_run(config, name, folder, **options))
        return 0
    from rmt_tpu.distributed import processes
    from rmt_tpu.training.trainer import train

    members.join_processes()
    if processes.num_processes() > 1:
        _is_distributed.set()
        members.hush_gloo()
    outcome = train(
        config,
        folder,
        change_config=_CHANGE_CONFIG.value,
        from_step=_FROM_STEP.value,
        profile_steps=_PROFILE_STEPS.value,
        label=folder.name,
        on_saved=notice.on_saved,
        check_kernels=_CHECK_KERNELS.value,
    )
    if outcome.stopped_by and outcome.step < config.train.steps:
        if processes.is_first():
            everywhere = ", on every host" if processes.num_processes() > 1 else ""
            print(f"stopped at step {outcome.step}, saved in {folder}. To resume{everywhere}:")
            print(f"  {program.resume_command()}")
        return program.exit_code(outcome.stopped_by, _STOPPED_EXIT_CODE.value)
    if processes.is_first():
        print(f"done: {outcome.step} steps in {folder}")
    return 0


def _folder(name: str) -> Folder:
    with flag_errors("workdir"):
        return open_folder(f"runs/{name}" if _WORKDIR.value is None else _WORKDIR.value)


def _check_origin(config: RunConfig, folder: Folder) -> None:
    """Check that a new run does not begin in the folder from which it takes its parameters.

    Without --workdir and --preset, the folder of --init_from=runs/a is also the default run folder.

    Raises:
      UsageError: the two folders are the same.
    """
    if not config.train.init_from:
        return
    with flag_errors("init_from"):
        origin = open_folder(config.train.init_from)
    if _real(origin) != _real(folder):
        return
    is_given = _WORKDIR.value is not None
    named = f"--workdir={folder}" if is_given else f"{folder}, the default of --workdir,"
    raise UsageError(
        f"{named} is the folder of --init_from={config.train.init_from}, whose parameters a new "
        "run takes; legal: --workdir with another folder for the new run"
    )


def _real(folder: Folder) -> str:
    """Return a text that two folders have in common only if they are the same folder."""
    return folder.url if folder.local_path is None else str(folder.local_path.resolve())


def _stored_config(name: str) -> RunConfig | None:
    """Return the stored config of a run that was started before, or None.

    See `common.selected_config`. The function does not import jax if the folder contains no run.
    """
    folder = _folder(name)
    if folder.local_path is not None and not os.path.exists(folder.local_path / "config.json"):
        return None
    from rmt_tpu.runs.workdir import warm_started_config

    return warm_started_config(folder)


def _end(line: str, code: int) -> None:
    """Print `line`, and exit the process at once with the exit code `code`.

    This function also works while the main thread is importing modules.
    """
    if _is_distributed.is_set():
        from rmt_tpu.distributed import processes

        processes.fail(line, code)
    signals.end_process(line, code)


def run() -> None:
    """Run `main` as a program; `rmt-train` calls this function."""
    program.start(main)


if __name__ == "__main__":
    run()
