"""The runs of a plan: which exist, which have ended, and their results."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rmt_tpu import data
from rmt_tpu.analysis import sweep
from rmt_tpu.analysis.sweep import Row, name_of
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.data.prepare import prepare
from rmt_tpu.errors import UsageError
from rmt_tpu.experiments import results
from rmt_tpu.experiments.plan import Arm, Plan, Point, before_growth
from rmt_tpu.experiments.records import Record, Records, of_folder
from rmt_tpu.runs.side_files import DIVERGED
from rmt_tpu.storage import Folder
from rmt_tpu.training.trainer import Outcome


class Run(NamedTuple):
    """One run of a plan.

    Attributes:
      label: the name that its progress is shown with.
      folder: the folder of the run.
      config: the config, with its seed.
      grows_from: see `plan.Arm`.
    """

    label: str
    folder: Folder
    config: RunConfig
    grows_from: int | None


_TEXT = "text.json"  # the checksum of the text that all runs in a folder read


class Text:
    """The token store that all runs read, so that all seeds hold out the same part of it.

    Args:
      config: the config of one of the runs.
      folder: the folder of the store, if the text is not a store yet.
    """

    def __init__(self, config: RunConfig, folder: Folder):
        self._config = config.data
        is_store = data.is_store(config.data.source)
        self.store = config.data.source if is_store else folder.url
        self._is_there = is_store

    def prepare(self) -> None:
        """Make the store, unless it is there.

        Raises:
          UsageError, RunError: see `data.prepare.prepare`.
        """
        if not self._is_there:
            source, share = self._config.source, self._config.eval_fraction
            how = {"eval_fraction": share, "workers": 1}
            try:
                prepare(source, self._config.tokenizer, self.store, **how)
            except UsageError as error:
                raise UsageError(_of_data(str(error), source)) from None
            self._is_there = True

    def checksum(self) -> int:
        """Return the checksum of the tokens to train on."""
        self.prepare()
        return data.open_store(self.store).train.checksum()

    def check(self, runs: Folder) -> None:
        """Check that the runs in a folder, if there are any, read this text.

        Raises:
          UsageError: the runs read another text, or an older version made them.
        """
        if (found := runs.read(_TEXT)) is None:
            if runs.names("runs") or runs.names("rates"):
                raise UsageError(
                    f"--workdir={runs} has runs of an older version, whose weights were drawn "
                    "otherwise; legal: another --workdir"
                )
        elif json.loads(found.data) != self.checksum():
            raise UsageError(
                f"--data={self._config.source} is not the text that the runs of {runs} read; "
                "legal: that text, or another --workdir"
            )

    def mark(self, runs: Folder) -> None:
        """Write into a folder which text its runs read, before the first of them begins."""
        runs.write(_TEXT, json.dumps(self.checksum()).encode())


def _of_data(message: str, source: str) -> str:
    """Return a message of `prepare` with --data and --workdir in place of --input and --output."""
    if not message.startswith("--output="):
        return message.replace("--input=", "--data=", 1)
    what = message.partition(": ")[2].partition(". ")[0]
    return (
        f"--data={source} is not what other runs of this --workdir read ({what}); legal: the same "
        "text and --tokenizer, or another --workdir"
    )


class Runs:
    """The runs of a plan, in a folder that other plans of the same scale share.

    Args:
      plan: the plan, with its arms and searches.
      seeds: the seeds of its arms.
      configured: changes each config of the plan.
      folder: the folder that the run folders are in.
      records: the records of runs that have ended here or elsewhere; None if none are kept.
    """

    def __init__(
        self,
        plan: Plan,
        seeds: Sequence[int],
        configured: Callable[[RunConfig], RunConfig],
        folder: Folder,
        records: Records | None,
    ):
        self.plan, self.seeds, self.folder, self.records = plan, seeds, folder, records
        self._configs = {arm.name: configured(arm.config) for arm in plan.arms}
        self._searches = {
            name: replace(search, config=configured(search.config))
            for name, search in plan.searches.items()
        }

    def of_searches(self) -> list[Run]:
        """Return all runs of all searches."""
        return [run for name in self._searches for _, runs in self._points(name) for run in runs]

    def rows(self) -> dict[str, list[Row]]:
        """Return the results of the searches that have ended, by name."""
        found = {}
        for name, search in self._searches.items():
            points = list(self._points(name))
            if all(self.settled(run) for _, runs in points for run in runs):
                found[name] = [
                    Row(
                        name,
                        point,
                        search.config.train.steps,
                        list(search.seeds),
                        [self.record(run).loss for run in runs],
                    )
                    for point, runs in points
                ]
        return found

    def of_arms(self, rows: Mapping[str, Sequence[Row]]) -> list[tuple[Arm, list[Run]]]:
        """Return the arms whose searches have ended, with the best values, and the runs of each."""
        found = []
        for arm in self.plan.arms:
            if not rows.keys() >= {*self.plan.searches_of(arm)}:
                continue
            config = results.with_best(self._configs[arm.name], self.plan, arm, rows)
            folder = self.folder.child("runs").child(arm.name)
            seeds = self.seeds[: arm.num_seeds]
            runs = _seeded(arm.name, config, folder, seeds, arm.grows_from)
            found.append((replace(arm, config=config), runs))
        return found

    def settled(self, run: Run) -> bool:
        """Return whether a run has ended, here or by its record.

        A run that ended here gets a record.
        """
        if self.records is not None and self.records.find(run.config, run.grows_from):
            return True
        if not sweep.settled(run.config, run.folder):
            return False
        self.keep(run)
        return True

    def keep(self, run: Run) -> None:
        """Write the record of a run that has ended here."""
        if self.records is not None:
            self.records.add(run.label, run.config, of_folder(run.folder), run.grows_from)

    def record(self, run: Run) -> Record:
        """Return the record of a run that has ended."""
        known = None
        if self.records is not None:
            known = self.records.find(run.config, run.grows_from)
        return of_folder(run.folder) if known is None else known

    def _points(self, name: str) -> Iterator[tuple[Point, list[Run]]]:
        search = self._searches[name]
        for point in search.points:
            label = f"searches/{name}/{name_of(point)}"
            folder = self.folder.child("searches").child(name).child(name_of(point))
            config = overrides.apply(search.config, point)
            yield point, _seeded(label, config, folder, search.seeds, None)


def _seeded(
    label: str, config: RunConfig, folder: Folder, seeds: Sequence[int], grows_from: int | None
) -> list[Run]:
    return [
        Run(
            f"{label}/seed-{seed}",
            folder.child(f"seed-{seed}"),
            overrides.apply(config, {"train.seed": seed}),
            grows_from,
        )
        for seed in seeds
    ]


def train(run: Run) -> Outcome | None:
    """Train a run, or resume it; return None if it diverged. See `sweep.try_run`."""
    if run.grows_from is None:
        return sweep.try_run(run.config, run.folder, label=run.label)
    if not sweep.begun(run.config, run.folder):
        first = before_growth(run.config, run.grows_from)
        outcome = sweep.try_run(first, run.folder, label=f"{run.label} before it grows")
        if outcome is not None and outcome.stopped_by:
            return outcome
        if run.folder.read(DIVERGED) is not None:
            return None
    return sweep.try_run(run.config, run.folder, label=run.label, change_config=True)


def write_commands(runs: Sequence[Run], script: Path) -> None:
    """Write a shell script that trains runs with recipes.train, one after the other.

    Their configs are written to a folder next to it that has its name. The script's arguments are
    passed on to each command, such as `--distributed` on every host of a pod. A run that fails, for
    example by diverging, ends with 1, and the next one begins; a signal or a wrong flag ends the
    script.

    Args:
      runs: the runs, in their order; none of them grows.
      script: a local file, which may exist.
    """
    configs = script.absolute().with_suffix(".configs")
    configs.mkdir(parents=True, exist_ok=True)
    lines = ["#!/usr/bin/env bash"]
    for run in runs:
        path = configs / f"{run.label.replace('/', '_')}.json"
        config = json.dumps(overrides.to_json(run.config), indent=1)
        path.write_text(f"{config}\n", encoding="utf-8")
        given = [f"--config={path}", f"--workdir={run.folder.url}"]
        command = shlex.join(["python", "-m", "recipes.train", *given])
        lines.append(f'{command} "$@" || (($? == 1)) || exit')
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
