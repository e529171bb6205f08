"""Reproduce the papers' tables and figures, each with one command.

    python -m recipes.experiment --list
    python -m recipes.experiment rmt-moments
    python -m recipes.experiment rmt-scaling --scale=tiny --jobs=2 --workdir=runs/experiments
    python -m recipes.experiment attnres-scaling --scale=paper --data=gs://bucket/tokens \\
      --mesh=fsdp=-1 --workdir=gs://bucket/experiments

An arm is a model that an experiment trains once per seed. It trains in the run folder
<workdir>/<scale>/runs/<arm>/seed-<n>, which all experiments with this arm share. Each point of a
hyperparameter search trains in <workdir>/<scale>/searches/<name>/<point>/seed-<n>. An interrupted
command resumes when it is repeated. With --outcomes=FILE, it also resumes on another machine: the
file gets a line for each finished run. Flags that describe runs, like --data, apply to every run.

The text is first converted to the token store <workdir>/<scale>/text, unless it is a token store
already. All seeds then hold out the same part of the text.

The command writes <workdir>/<scale>/<experiment>/results.md, results.json and pictures.
"""

import dataclasses
import datetime
import fnmatch
import json
import os
import shlex
import subprocess
import sys
import time

from absl import flags

from recipes import common, local, program, several
from rmt_tpu.config import RunConfig, overrides
from rmt_tpu.errors import RunError, UsageError, flag_errors
from rmt_tpu.experiments import catalog
from rmt_tpu.experiments.plan import Experiment, Page, Plan, before_growth
from rmt_tpu.storage import Folder, open_folder, open_parent, writable_file

# Maps each scale to the compute dtype that replaces "auto", whose dtype depends on the machine.
_DTYPES = {"tiny": "float32", "paper": "bfloat16"}
_NAME = flags.DEFINE_string(
    "name", None, "name of the experiment; it may be given alone, without --name="
)
_SCALE = flags.DEFINE_enum("scale", "tiny", ["tiny", "paper"], "size of the models and runs")
_JOBS = flags.DEFINE_integer(
    "jobs", 1, "number of runs to train at the same time, on CPUs", lower_bound=1
)
_ONLY = flags.DEFINE_string(
    "only",
    None,
    "train only runs whose names match this pattern, like 'rmt-32/*', and write no results; use "
    "it to divide an experiment over several machines",
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/experiments", "folder for runs and results, local or gs://"
)
_OUTCOMES = flags.DEFINE_string(
    "outcomes", None, "file, local or gs://, that gets a line for each finished run; runs with a "
    "line in it are not trained again, unless a report reads their folder"
)  # fmt: skip
_COMMANDS = flags.DEFINE_string(
    "commands", None, "instead of training, write the recipes.train commands of the next runs to "
    "this shell script, for example to run it on every host of a pod; after the script has "
    "finished, repeat this command"
)  # fmt: skip
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    "hub",
    "folder with <task>.jsonl files for the tasks; the value hub downloads the data from the "
    "Hugging Face hub",
)
several.define_seeds_flag()
common.define_run_flags()
flags.DEFINE_flag(program.PrintAndExit("list", "list the experiments, and exit", catalog.table))


def main() -> int:
    """Run the experiment that --name names, write its page of results, and return the exit code."""
    if _NAME.value is None:
        raise UsageError(f"an experiment is needed; legal: {', '.join(catalog.EXPERIMENTS)}")
    experiment = catalog.experiment(_NAME.value)
    with flag_errors("workdir"):
        workdir = open_folder(_WORKDIR.value)
        workdir.check()
    folder = workdir.child(_SCALE.value)
    # Report missing task data before anything is trained.
    _tasks(experiment)
    if experiment.plan is not None:
        return _PlanTrainer(experiment, folder).run()
    if _ONLY.value is not None:
        raise UsageError(f"--only={_ONLY.value} selects runs, but {experiment.name} trains no runs")
    with flag_errors("workdir"):
        folder.check(write=True)
    page = experiment.compute() if experiment.compute else None
    return _write(experiment, page, folder, lambda arm: "")


class _PlanTrainer:
    """The trainer of all runs of an experiment.

    `run` first trains the hyperparameter searches, and then the arms (the compared models).
    """

    def __init__(self, experiment: Experiment, folder: Folder):
        self.experiment, self.folder = experiment, folder
        self.plan: Plan = experiment.plan(_SCALE.value)
        self.seeds = several.seeds() or list(self.plan.seeds)
        if flags.FLAGS.seed is not None:
            raise UsageError(
                f"--seed={flags.FLAGS.seed}: experiments train each model with several seeds; "
                "legal: --seeds, like --seeds=0,1"
            )
        several.check_sets("--seeds", "train.seed", "--set=", common.assigned())
        # Report errors in flags and configs before anything is trained.
        self._check_searched()
        for source in (*self.plan.arms, *self.plan.searches.values()):
            config = common.run_config(source.config)
        for arm in self.plan.arms:
            if arm.grows_from is not None:
                before_growth(common.run_config(arm.config), arm.grows_from)
        from rmt_tpu.experiments.records import Records
        from rmt_tpu.experiments.runs import ExperimentText, PlannedRuns

        self.text, records = ExperimentText(config, folder.child("text")), None
        self.text.check(folder)
        if _OUTCOMES.value is not None:
            outcomes_folder, name = _outcomes_file(_OUTCOMES.value)
            records = Records(outcomes_folder, name, self.text.checksum())
            if records.has_only_other_texts:
                print(
                    f"--outcomes={_OUTCOMES.value} has runs, but none that read this text (that of "
                    "--data=stdlib differs between installations of Python); all runs are trained",
                    flush=True,
                )

        def configured(config: RunConfig) -> RunConfig:
            config = common.run_config(config)
            changes = {"data.source": self.text.store}
            # Replace "auto", because the dtype that it selects depends on the machine.
            if config.model.compute_dtype == "auto":
                changes["model.compute_dtype"] = _DTYPES[_SCALE.value]
            return overrides.apply(config, changes)

        reports = experiment.reports is not None
        self.runs = PlannedRuns(self.plan, self.seeds, configured, folder, records, reports)
        self.matched = 0

    def _check_searched(self) -> None:
        """Check that the flags do not conflict with the plan's searches.

        Raises:
          UsageError: a flag sets a value that is searched, or --seeds contains a search's seed.
        """
        searches = self.plan.searches.values()
        for path in {path for search in searches for point in search.points for path in point}:
            if (flag := common.given_paths().get(path)) is not None:
                raise UsageError(
                    f"{flag} cannot be given, because {self.experiment.name} searches {path}"
                )
        used = {seed for search in searches for seed in search.seeds}
        if overlap := used.intersection(self.seeds):
            raise UsageError(
                f"--seeds contains {min(overlap)}, which a search uses; legal: other seeds"
            )

    def run(self) -> int:
        started = time.monotonic()
        if (code := self._train(self.runs.search_runs())) is not None:
            return code
        rows = self.runs.rows()
        arms = self.runs.arm_runs(rows)
        if (code := self._train([run for _, arm_runs in arms for run in arm_runs])) is not None:
            return code
        if _ONLY.value is not None:
            return self._matched()
        from rmt_tpu.experiments import results
        from rmt_tpu.experiments.outcomes import arm_outcome

        outcomes = [
            arm_outcome(arm, [self.runs.record(run) for run in arm_runs]) for arm, arm_runs in arms
        ]
        searches = [row for search_rows in rows.values() for row in search_rows]
        changed = [flag for path, flag in common.given_paths().items() if path != "data.source"]
        notes = self.plan.notes + (f"Changed by flags: {', '.join(changed)}.",) * bool(changed)
        plan = dataclasses.replace(self.plan, notes=notes)
        page = results.page(plan, self.seeds, outcomes, searches)
        first = {arm.name: str(arm_runs[0].folder) for arm, arm_runs in arms}
        code = _write(self.experiment, page, self.folder, first.__getitem__)
        print(f"took {datetime.timedelta(seconds=round(time.monotonic() - started))}")
        return code

    def _train(self, runs: list) -> int | None:
        """Train the runs that match --only, or all runs if --only is not set.

        Returns:
          None if all runs have finished, otherwise the program's exit code.
        """
        if _ONLY.value is not None:
            runs = [r for r in runs if fnmatch.fnmatchcase(r.label, _ONLY.value)]
            self.matched += len(runs)
        pending = {run.label: run for run in runs if not self.runs.settled(run)}
        trials = [several.Trial(run.label, run.folder, run.config) for run in pending.values()]
        if again := [label for label, run in pending.items() if self.runs.is_recorded(run)]:
            print(
                f"--outcomes has {', '.join(again)}, but {self.experiment.name} also reads the run "
                "folder, which is missing or incomplete here; training again",
                flush=True,
            )
        if trials:
            with flag_errors("workdir"):
                self.folder.check(write=True)
            self.text.mark(self.folder)
        if _COMMANDS.value is not None:
            self._commands(list(pending.values()))
            if pending:
                return 0
        if _JOBS.value > 1:
            settled = lambda trial: self.runs.settled(pending[trial.label])
            code = several.train_in_processes(trials, _JOBS.value, settled)
            if self.runs.records is not None:
                # Read the records that the child processes have added.
                self.runs.records.read()
            return code
        from rmt_tpu.experiments.runs import train

        def train_and_keep(config: RunConfig, folder: Folder, *, label: str):
            outcome = train(pending[label])
            if outcome is None or not outcome.stopped_by:
                # A run whose last metrics were not written has no record, and is evaluated again.
                self.runs.settled(pending[label])
            return outcome

        return several.train_all(trials, train_and_keep)

    def _commands(self, runs: list) -> None:
        """Write the commands of the remaining runs to the script --commands."""
        from rmt_tpu.experiments.runs import write_commands

        local.path("commands", _COMMANDS.value)
        if grows := [run.label for run in runs if run.grows_from is not None]:
            raise UsageError(
                f"--commands cannot be used for runs that grow during training, like {grows[0]}; "
                "legal: train them here, without --commands"
            )
        script = local.file("commands", _COMMANDS.value)
        with local.writing("commands", script):
            write_commands(runs, script)
        if runs:
            print(f"runs to train: {len(runs)}, in {script}. When they have finished, repeat:")
            print(f"  {program.resume_command()}")

    def _matched(self) -> int:
        if not self.matched:
            raise UsageError(
                f"--only={_ONLY.value} matches no run of {self.experiment.name} that can be "
                "trained now; legal: searches/<name>/<point>/seed-<n>, or <arm>/seed-<n> once the "
                "arm's searches have finished; * matches any part"
            )
        return 0


def _outcomes_file(path: str) -> tuple[Folder, str]:
    """Return the folder and the file name in --outcomes."""
    with flag_errors("outcomes"):
        folder, name = open_parent(path)
    local = folder.local_path
    if not name or (local is not None and os.path.isdir(local / name)):
        raise UsageError(f"--outcomes={path} is a folder; legal: a new or existing file")
    with flag_errors("outcomes"):
        return writable_file(path)


def _write(experiment: Experiment, page: Page | None, folder: Folder, folder_of_run) -> int:
    from rmt_tpu.runs.plots import save_picture
    from rmt_tpu.tables import fitted

    folder = folder.child(experiment.name)
    text = page.text if page else ""
    drawings = page.pictures if page else {}
    pictures = {name: save_picture(draw(), folder, name) for name, draw in drawings.items()}
    if text:
        print(fitted(text, 10**6))
    text += "".join(f"\n![{experiment.shows}]({name})\n" for name in pictures)
    commands = experiment.reports(_SCALE.value, folder_of_run) if experiment.reports else []
    text += "".join(_report(command, experiment) for command in commands)
    head = f"# {experiment.name}: {experiment.shows}\n\n{experiment.source}\n\n"
    folder.write("results.md", f"{head}{text}".encode())
    if page:
        folder.write("results.json", (json.dumps(page.numbers, indent=1) + "\n").encode())
    for path in pictures.values():
        print(f"picture: {path}")
    print(f"page: {folder}/results.md")
    return 0


def _tasks(experiment: Experiment) -> list[str]:
    """Return the experiment's tasks for which --data_dir has data."""
    from rmt_tpu.evaluation.documents import available_tasks

    return available_tasks(experiment.tasks, _DATA_DIR.value) if experiment.tasks else []


def _report(command: list[str], experiment: Experiment) -> str:
    """Run another recipe, and return its command line and its output as Markdown."""
    recipe, *arguments = command
    if recipe == "evaluate":
        arguments += [f"--tasks={','.join(_tasks(experiment))}", f"--data_dir={_DATA_DIR.value}"]
    line = shlex.join(["python", "-m", f"recipes.{recipe}", *arguments])
    print(line, flush=True)
    result = subprocess.run(
        [sys.executable, "-m", f"recipes.{recipe}", *arguments],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    print(result.stdout)
    if result.returncode:
        raise RunError(f"{line} failed with exit code {result.returncode}; see its messages above")
    return f"\n```bash\n{line}\n```\n\n{result.stdout}"


def run() -> None:
    """Run `main` as a program; `rmt-experiment` calls this function."""
    program.start(main, operand="name")


if __name__ == "__main__":
    run()
