"""The training of several runs, in turn or at the same time, and the flag --seeds.

This module does not import jax, because the import is slow.
"""

import contextlib
import dataclasses
import glob
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from absl import flags

from recipes import common, program
from rmt_tpu.config import RunConfig, TrainConfig
from rmt_tpu.config.checks import ranges
from rmt_tpu.errors import RmtError, UsageError, one_line, shown
from rmt_tpu.storage import Folder
from rmt_tpu.training import signals

# The flags defined here count as flags of the recipe that calls these functions, so that its --help
# lists them.
flags.disclaim_key_flags()


class Trial(NamedTuple):
    """A run to train, with its folder and the label under which its progress is printed."""

    label: str
    folder: Folder
    config: RunConfig


def define_seeds_flag() -> None:
    """Define the flag --seeds: see `seeds`."""
    flags.DEFINE_list(
        "seeds",
        None,
        "list of seeds, like 0,1,2; every model is trained once per seed; the default is --seed",
    )


def seeds() -> list[int] | None:
    """Return the seeds in --seeds, or None if the flag is not set.

    Raises:
      UsageError: a seed is not valid or is repeated, or --seed or --set also sets the seed.
    """
    texts = flags.FLAGS.seeds
    if texts is None:
        return None
    value = ",".join(texts)
    if flags.FLAGS.seed is not None:
        raise UsageError(
            f"--seeds={value} and --seed={flags.FLAGS.seed} both set the seed; give one"
        )
    check_sets(f"--seeds={value}", "train.seed", "--set=", common.assigned())
    try:
        numbers = [int(seed) for seed in texts]
    except ValueError:
        raise UsageError(f"--seeds={value} must be whole numbers, like 0,1,2") from None
    if out_of_range := [seed for seed in numbers if seed not in ranges(TrainConfig)["seed"]]:
        raise UsageError(
            f"--seeds={shown(out_of_range[0])} must be {ranges(TrainConfig)['seed'].words}"
        )
    if not numbers or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--seeds={value} is empty or repeats a seed; legal: one or more different numbers"
        )
    return numbers


def check_sets(flag: str, path: str, other: str, paths: Iterable[str]) -> None:
    """Check that a flag and another flag do not set the same part of the config.

    Args:
      flag: the flag that sets `path`, as written on the command line.
      path: a config path.
      other: the text of the other flag up to the path, like "--set=".
      paths: the paths that the other flag sets.

    Raises:
      UsageError: one of `paths` equals, contains, or is contained in `path`.
    """
    for other_path in paths:
        if f"{other_path}.".startswith(f"{path}.") or f"{path}.".startswith(f"{other_path}."):
            raise UsageError(f"{flag} and {other}{other_path} both set {path}; give one")


def stored_config_within(folder: Folder) -> Callable[[str], RunConfig | None]:
    """Return a function to pass to `common.selected_config` as `stored_config`.

    If a run in `folder` has started from the weights of --init_from, the function returns the
    config of such a run, which no longer needs the folder of --init_from. Otherwise it returns
    None. The function does not import jax if `folder` does not exist.
    """

    def stored_config(name: str) -> RunConfig | None:
        if folder.local_path is not None and not os.path.exists(folder.local_path):
            return None
        from rmt_tpu.runs import workdir

        return workdir.find_warm_started_config(folder)

    return stored_config


def seed_trials(
    label: str, config: RunConfig, folder: Folder, seeds: list[int] | None
) -> list[Trial]:
    """Return one trial per seed; several trials have their own folders inside `folder`."""
    with_seed = lambda seed: dataclasses.replace(
        config, train=dataclasses.replace(config.train, seed=seed)
    )
    if seeds is None:
        return [Trial(label, folder, config)]
    if len(seeds) == 1:
        return [Trial(label, folder, with_seed(seeds[0]))]
    return [
        Trial(f"{label} seed-{seed}", folder.child(f"seed-{seed}"), with_seed(seed))
        for seed in seeds
    ]


def train_all(trials: list[Trial], train: Callable, first: int = 1, total: int | None = None):
    """Train trials one after the other, and print a line before each.

    Args:
      trials: the trials, in the order in which they train.
      train: `training.trainer.train`, or a function with the same arguments. It may return None for
        a run that it does not train, or that diverges.
      first: the number to print for the first trial.
      total: the total number of trials to print; None means the number of `trials`.

    Returns:
      None, or the program's exit code if a signal stopped a run. In that case, the command that
      resumes is printed.
    """
    total = len(trials) if total is None else total
    for number, trial in enumerate(trials, start=first):
        if total > 1:
            print(f"run {number} of {total}: {trial.label}", file=sys.stderr, flush=True)
        outcome = train(trial.config, trial.folder, label=trial.label)
        if outcome is not None and outcome.stopped_by:
            print(f"stopped; to resume:\n  {program.resume_command()}")
            return program.exit_code(outcome.stopped_by)
    return None


def train_in_processes(
    trials: list[Trial], jobs: int, settled: Callable[[Trial], bool]
) -> int | None:
    """Train each trial in its own process, `jobs` at a time. They share the cores equally.

    Each process runs this program with --only=<label> and --jobs=1. Its stderr is forwarded
    immediately.

    Args:
      trials: the trials, in the order in which they start.
      jobs: the number of processes that run at a time.
      settled: returns whether a trial is complete or has diverged. A process that somebody stopped
        with a signal ends with 0, like one whose run is complete.

    Returns:
      None, or the program's exit code if a run failed or a signal was received. In that case, the
      other runs are stopped and saved, and the command that resumes is printed. After a second
      Ctrl-C they are stopped at once, without a checkpoint. The code of a run that a signal killed
      is 128 + the signal's number, as in a shell.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    parts = [cores[i % max(len(cores), 1) :: jobs] for i in range(jobs)]
    queue, running, failed = list(enumerate(trials, 1)), {}, []
    stopped: list[int] = []
    handlers = {
        s: signal.signal(s, lambda number, _: stopped.append(number))
        for s in signals.STOPS.values()
        # A program under nohup ignores SIGHUP, and must continue to ignore it.
        if signal.getsignal(s) is not signal.SIG_IGN
    }
    try:
        while queue or running:
            while queue and len(running) < jobs and not stopped and not failed:
                number, trial = queue.pop(0)
                part = next(i for i in range(jobs) if i not in running)
                print(f"run {number} of {len(trials)}: {trial.label}", file=sys.stderr, flush=True)
                running[part] = _Child(trial, parts[part], settled)
            if stopped or failed:
                queue.clear()
                for child in running.values():
                    child.terminate(times=2 if stopped.count(signal.SIGINT) > 1 else 1)
            for part, child in list(running.items()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if code := child.wait(0.2):
                        failed.append(code)
                    del running[part]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if stopped or failed:
        print(f"stopped; to resume:\n  {program.resume_command()}")
        # The runs that failed later may have failed because they were stopped.
        return program.exit_code(signal.Signals(stopped[0])) if stopped else failed[0]
    return None


class _Child:
    """A process that trains one trial.

    Args:
      trial: the trial.
      cores: the numbers of the CPU cores on which the process runs; [] means any.
      settled: see `train_in_processes`.
    """

    def __init__(self, trial: Trial, cores: list[int], settled: Callable[[Trial], bool]):
        self._trial, self._settled, self._terms_sent = trial, settled, 0
        name = Path(sys.argv[0]).stem.removeprefix("rmt-").replace("-", "_")
        command = [sys.executable, "-m", f"recipes.{name}", *sys.argv[1:], "--jobs=1"]
        self._process = subprocess.Popen(
            [*command, f"--only={glob.escape(trial.label)}"],
            stdout=subprocess.DEVNULL,
            # The child runs in a new session, so that Ctrl-C in the terminal reaches only this
            # process, which then sends SIGTERM to all children.
            start_new_session=True,
        )
        if cores:
            os.sched_setaffinity(self._process.pid, cores)

    def terminate(self, times: int) -> None:
        """Send SIGTERM, unless it was sent this number of times before.

        The first one lets the process save a checkpoint, and the second one kills it.
        """
        if self._terms_sent < times:
            self._process.send_signal(signal.SIGTERM)
            self._terms_sent += 1

    def wait(self, seconds: float) -> int:
        """Wait for the end of the process, and return its exit code as a shell does.

        If the process was not asked to stop, and failed or ended before its run was settled, a line
        on stderr says so. In the second case the code is 1.

        Raises:
          TimeoutExpired: the process is still running after this number of seconds.
        """
        code = self._process.wait(timeout=seconds)
        how = None
        if code:
            name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            how = f"failed with exit code {code}" if code > 0 else f"was killed by {name}"
        elif not self._terms_sent and (how := self._unsettled()):
            code = 1
        if how and not self._terms_sent:
            print(f"error: run {self._trial.label} {how}", file=sys.stderr, flush=True)
        return code if code >= 0 else 128 - code

    def _unsettled(self) -> str | None:
        """Say that the run is not settled or cannot be read; return None if it is settled."""
        try:
            settled = self._settled(self._trial)
        except RmtError as error:  # The other runs must be saved.
            return f"cannot be read: {one_line(error)}"
        return None if settled else "was stopped by a signal before its last step"
