"""The training runs of an experiment's plan: their configs, folders, state and results."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rmt_tpu import data
from rmt_tpu.analysis import sweep
from rmt_tpu.analysis.sweep import SweepRow, name_of
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.data.prepare import prepare
from rmt_tpu.errors import UsageError
from rmt_tpu.experiments import results
from rmt_tpu.experiments.plan import Arm, Plan, Point, before_growth
from rmt_tpu.experiments.records import Record, Records, read_record
from rmt_tpu.runs.side_files import DIVERGED
from rmt_tpu.storage import Folder
from rmt_tpu.training.trainer import Outcome


class PlannedRun(NamedTuple):
    """One training run of an experiment's plan.

    Attributes:
      label: the name of the run in progress messages.
      folder: the run folder.
      config: the run config, including the seed.
      grows_from: the key size D_k at the start of a run whose residual grows; see `plan.Arm`.
      is_read: whether a report reads the run folder, so that a record does not replace it.
    """

    label: str
    folder: Folder
    config: RunConfig
    grows_from: int | None
    is_read: bool = False


_TEXT = "text.json"  # The name of the file with the checksum of the runs' training text.


class ExperimentText:
    """The token store that all runs of an experiment read.

    All runs read one store, so that runs with different seeds hold out the same part of the text.

    Args:
      config: the config of any of the runs.
      folder: the folder for a new store, if the text is not a token store yet.
    """

    def __init__(self, config: RunConfig, folder: Folder):
        if config.data.mixture:
            raise UsageError("--mixture cannot be used for experiments; legal: --data")
        self._config = config.data
        is_store = data.is_store(config.data.source)
        self.store = config.data.source if is_store else folder.url
        self._is_there = is_store

    def prepare(self) -> None:
        """Create the token store, unless it exists.

        Raises:
          UsageError, RunError: see `data.prepare.prepare`.
        """
        if not self._is_there:
            source, share = self._config.source, self._config.eval_fraction
            how = {"eval_fraction": share, "workers": 1, "text_field": self._config.text_field}
            how |= {"kind": self._config.format, "chat_template": self._config.chat_template}
            try:
                prepare(source, self._config.tokenizer, self.store, **how)
            except UsageError as error:
                raise UsageError(_data_error(str(error), source)) from None
            self._is_there = True

    def checksum(self) -> int:
        """Return the checksum of the training tokens."""
        self.prepare()
        return data.open_store(self.store).train.checksum()

    def check(self, runs: Folder) -> None:
        """Check that the runs in a folder, if there are any, read this text.

        Raises:
          UsageError: the runs read a different text, or were made by an older version of this
            program.
        """
        if (found := runs.read(_TEXT)) is None:
            if runs.names("runs") or runs.names("rates"):
                raise UsageError(
                    f"--workdir={runs} has runs of an older version, which initialized weights "
                    "differently; legal: another --workdir"
                )
        elif json.loads(found.data) != self.checksum():
            raise UsageError(
                f"--data={self._config.source} is not the text that the runs of {runs} read; "
                "legal: that text, or another --workdir"
            )

    def mark(self, runs: Folder) -> None:
        """Write the checksum of the training text into a folder, before its first run starts."""
        runs.write(_TEXT, json.dumps(self.checksum()).encode())


def _data_error(message: str, source: str) -> str:
    """Return an error message of `data.prepare` with the flags of recipes.experiment.

    The flags --data and --workdir replace --input and --output.
    """
    if not message.startswith("--output="):
        return message.replace("--input=", "--data=", 1)
    what = message.partition(": ")[2].partition(". ")[0]
    return (
        f"--data={source} is not what other runs of this --workdir read ({what}); legal: the same "
        "text and --tokenizer, or another --workdir"
    )


class PlannedRuns:
    """The training runs of a plan. All plans of the same scale share one folder.

    Args:
      plan: the plan, with its arms and searches.
      seeds: the seeds of the arms (models).
      configured: a function that applies the command's flags to a config of the plan.
      folder: the folder that contains the run folders.
      records: the records of runs that finished on any machine, or None if no records are kept.
      has_reports: whether reports read the folder of each arm's first run.
    """

    def __init__(
        self,
        plan: Plan,
        seeds: Sequence[int],
        configured: Callable[[RunConfig], RunConfig],
        folder: Folder,
        records: Records | None,
        has_reports: bool = False,
    ):
        self.has_reports = has_reports
        self.plan, self.seeds, self.folder, self.records = plan, seeds, folder, records
        self._configs = {arm.name: configured(arm.config) for arm in plan.arms}
        self._searches = {
            name: replace(search, config=configured(search.config))
            for name, search in plan.searches.items()
        }

    def search_runs(self) -> list[PlannedRun]:
        """Return all training runs of the plan's hyperparameter searches."""
        return [run for name in self._searches for _, runs in self._points(name) for run in runs]

    def rows(self) -> dict[str, list[SweepRow]]:
        """Return a dict from the name of each finished search to its results."""
        found = {}
        for name, search in self._searches.items():
            points = list(self._points(name))
            if all(self.settled(run) for _, runs in points for run in runs):
                found[name] = [
                    SweepRow(
                        name,
                        point,
                        search.config.train.steps,
                        list(search.seeds),
                        [self.record(run).loss for run in runs],
                    )
                    for point, runs in points
                ]
        return found

    def arm_runs(
        self, rows: Mapping[str, Sequence[SweepRow]]
    ) -> list[tuple[Arm, list[PlannedRun]]]:
        """Return the arms (models) whose searches have finished, each with its runs.

        `rows` are the results of the searches; the arms' configs get the best values.
        """
        found = []
        for arm in self.plan.arms:
            if not rows.keys() >= {*self.plan.searches_of(arm)}:
                continue
            config = results.with_best(self._configs[arm.name], self.plan, arm, rows)
            folder = self.folder.child("runs").child(arm.name)
            seeds = self.seeds[: arm.num_seeds]
            runs = _seeded(arm.name, config, folder, seeds, arm.grows_from)
            if self.has_reports:
                runs[0] = runs[0]._replace(is_read=True)
            found.append((replace(arm, config=config), runs))
        return found

    def settled(self, run: PlannedRun) -> bool:
        """Return whether a run is complete or has diverged, according to its folder or a record.

        If a settled run has no record yet, its record is added. A record is not enough for a run
        whose folder a report reads.
        """
        if self.is_recorded(run) and not run.is_read:
            return True
        if not sweep.is_settled(run.config, run.folder):
            return False
        self.add_record(run)
        return True

    def is_recorded(self, run: PlannedRun) -> bool:
        """Return whether there is a record of a run, from this machine or another one."""
        records = self.records
        return records is not None and records.find(run.config, run.grows_from) is not None

    def add_record(self, run: PlannedRun) -> None:
        """Add the record of a run that finished in its folder, unless the file already has it."""
        if self.records is None:
            return
        # Another process may have added the record since this process last read the file.
        self.records.read()
        if self.records.find(run.config, run.grows_from) is None:
            self.records.add(run.label, run.config, read_record(run.folder), run.grows_from)

    def record(self, run: PlannedRun) -> Record:
        """Return the record of a finished run."""
        known = None
        if self.records is not None:
            known = self.records.find(run.config, run.grows_from)
        return read_record(run.folder) if known is None else known

    def _points(self, name: str) -> Iterator[tuple[Point, list[PlannedRun]]]:
        search = self._searches[name]
        for point in search.points:
            label = f"searches/{name}/{name_of(point)}"
            folder = self.folder.child("searches").child(name).child(name_of(point))
            config = overrides.apply(search.config, point)
            yield point, _seeded(label, config, folder, search.seeds, None)


def _seeded(
    label: str, config: RunConfig, folder: Folder, seeds: Sequence[int], grows_from: int | None
) -> list[PlannedRun]:
    return [
        PlannedRun(
            f"{label}/seed-{seed}",
            folder.child(f"seed-{seed}"),
            overrides.apply(config, {"train.seed": seed}),
            grows_from,
        )
        for seed in seeds
    ]


def train(run: PlannedRun) -> Outcome | None:
    """Train or resume a run.

    Return the outcome, or None if the run was settled before or has diverged now.
    """
    if run.grows_from is None:
        return sweep.try_run(run.config, run.folder, label=run.label)
    if not sweep.is_started(run.config, run.folder):
        first = before_growth(run.config, run.grows_from)
        outcome = sweep.try_run(first, run.folder, label=f"{run.label} before it grows")
        if outcome is not None and outcome.stopped_by:
            return outcome
        if run.folder.read(DIVERGED) is not None:
            return None
    return sweep.try_run(run.config, run.folder, label=run.label, change_config=True)


def write_commands(runs: Sequence[PlannedRun], script: Path) -> None:
    """Write a shell script that trains runs one after the other with `recipes.train`.

    The configs are written to a folder next to the script, with the same name. The script passes
    its arguments on to each command, for example `--distributed` on every host of a pod. If a run
    ends with exit code 1, for example because it diverged, the script continues with the next run.
    A signal or a wrong flag stops the script.

    Args:
      runs: the runs in order. Runs whose residual grows are not allowed.
      script: the path of the local file to write; an existing file is replaced.
    """
    configs = script.absolute().with_suffix(".configs")
    configs.mkdir(parents=True, exist_ok=True)
    lines = ["#!/usr/bin/env bash"]
    for run in runs:
        path = configs / f"{run.label.replace('/', '_')}.json"
        config = json.dumps(overrides.to_json(run.config), indent=1)
        path.write_text(f"{config}\n", encoding="utf-8")
        flags = [f"--config={path}", f"--workdir={run.folder.url}"]
        command = shlex.join(["python", "-m", "recipes.train", *flags])
        lines.append(f'{command} "$@" || (($? == 1)) || exit')
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
