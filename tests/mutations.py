"""Do the tests notice? One slip at a time in a copy of the project, and the tests that should.

    python -m tests.mutations [--group=GROUP ...] [--jobs=2] [--output=docs/mutations.md]

For each slip of `tests.slips`: the tests that should notice, of the fast tier; if they do not, all
of the fast tier; if that does not, the rest of those files, and at last of all. The tests that
noticed must pass without a slip. Prints a page in Markdown. Exit code 1 if more than one in twenty
is not noticed by the fast tier, or one by none.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from tests.slips import SLIPS, Slip

ROOT = Path(__file__).resolve().parents[1]
FAST, REST = "not slow and not compile", "slow or compile"
SECONDS = 1800  # of the tests that a slip names; it may make them wait for ever
SECONDS_OF_ALL = 6 * 3600
NO_END = "(no end)"
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """Who noticed a slip.

    Attributes:
      slip: that was made.
      test: its name; None if nobody did.
      tier: "fast", "fast, another file", or "night".
      seconds: that it took.
    """

    slip: Slip
    test: str | None
    tier: str
    seconds: float


def copy_project(to: Path) -> None:
    """All that git knows of, and the programs that tests have compiled already."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (to / ".cache").symlink_to(ROOT / ".cache")


def noticed(project: Path, files: Iterable[str], marks: str, seconds: int = SECONDS) -> str | None:
    """The first test that fails, of these files."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    # All but the one that looks whether slips have been made.
    command += ["-n", "0", "-m", marks, "--ignore=tests/mutations_test.py", *files]
    try:
        run = subprocess.run(
            command, cwd=project, capture_output=True, encoding="utf-8", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return NO_END
    if run.returncode in (0, 5):  # all pass, or there are none of these marks
        return None
    found = FAILED.search(run.stdout)
    if found is None:
        raise SystemExit(f"{' '.join(command)}\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    return found[1]


def try_slip(project: Path, slip: Slip, *, elsewhere: bool) -> Outcome:
    """Makes a slip in a copy of the project, asks the tests, and takes it back.

    Args:
      project: the copy.
      slip: to make.
      elsewhere: whether to ask the tests that the slip does not name, too: of the fast tier, then
        those of the night.
    """
    file, start = project / slip.file, time.monotonic()
    text = file.read_text(encoding="utf-8")
    if text.count(slip.old) != 1:
        raise SystemExit(f"{slip.file} has {text.count(slip.old)} times: {slip.old}")
    file.write_text(text.replace(slip.old, slip.new), encoding="utf-8")
    try:
        other = (
            ("fast, another file", ["tests"], FAST),
            ("night", slip.tests, REST),
            ("night, another file", ["tests"], REST),
        )
        for tier, files, marks in other if elsewhere else (("fast", slip.tests, FAST),):
            seconds = SECONDS if files == slip.tests else SECONDS_OF_ALL
            if test := noticed(project, files, marks, seconds):
                return Outcome(slip, test, tier, time.monotonic() - start)
        return Outcome(slip, None, "", time.monotonic() - start)
    finally:
        file.write_text(text, encoding="utf-8")


def table(outcomes: list[Outcome]) -> str:
    """The slips of a group, in Markdown."""
    shown = lambda text: f"`{' '.join(text.split())}`".replace("|", "\\|") if text else "nothing"
    lines = ["| in | was | becomes | noticed by | tier |", "|---|---|---|---|---|"]
    for slip, test, tier, _ in outcomes:
        test = (test or "**nobody**").removeprefix("tests/").replace("::", " ").replace("|", "/")
        where = slip.file.removeprefix("rmt_tpu/")
        lines.append(f"| {where} | {shown(slip.old)} | {shown(slip.new)} | {test} | {tier} |")
    return "\n".join(lines)


def summary(outcomes: list[Outcome]) -> tuple[str, bool]:
    """A line, and whether enough is noticed."""
    fast, night, nobody = counts = count(outcomes)
    line = f"{sum(counts)} slips: {fast} noticed by the fast tier, {night} at night, {nobody} not"
    return line, nobody == 0 and fast >= 0.95 * len(outcomes)


def count(outcomes: list[Outcome]) -> tuple[int, int, int]:
    """Slips that are noticed by the fast tier, at night, and not."""
    fast = sum(outcome.tier.startswith("fast") for outcome in outcomes)
    night = sum(outcome.tier.startswith("night") for outcome in outcomes)
    return fast, night, len(outcomes) - fast - night


def page(outcomes: dict[str, list[Outcome]], conditions: str) -> str:
    """All slips by group, in Markdown, below what was run, and how long it took."""
    every = [outcome for of_group in outcomes.values() for outcome in of_group]
    groups = [f"| {g} | {' | '.join(map(str, count(found)))} |" for g, found in outcomes.items()]
    totals = ["| group | fast tier | night | nobody |", "|---|---|---|---|", *groups]
    head = (
        "# Do the tests notice?\n\n"
        "One-line slips (`tests/slips.py`), made one at a time in a copy of the project, and the\n"
        "first test that fails of those that should notice. Without a slip each of these tests\n"
        "passes. Written by\n\n"
        "```bash\npython -m tests.mutations --output=docs/mutations.md\n```\n\n"
        f"{conditions}\n\n{summary(every)[0]}."
    )
    tables = [f"## {group[0].upper()}{group[1:]}\n\n{table(o)}" for group, o in outcomes.items()]
    return "\n\n".join([head, "\n".join(totals), *tables]) + "\n"


def conditions(jobs: int, seconds: float) -> str:
    """Date, versions, commit, machine, time."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    commit = subprocess.run(
        describe, cwd=ROOT, capture_output=True, check=True, encoding="utf-8"
    ).stdout.strip()
    return (
        f"{datetime.date.today()}, Python {platform.python_version()}, "
        f"jax {importlib.metadata.version('jax')}, commit {commit}; "
        f"{seconds / 60:.0f} minutes, {jobs} at a time on {os.cpu_count()} cores."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--group", action="append", choices=SLIPS, help="only these; default all")
    parser.add_argument("--jobs", type=int, default=2, help="slips tried at a time")
    parser.add_argument("--output", type=Path, help="file for the page; default none")
    arguments = parser.parse_args()
    groups = {g: slips for g, slips in SLIPS.items() if g in (arguments.group or SLIPS)}
    start = time.monotonic()

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as executor:
        projects: Queue[Path] = Queue()
        for number in range(arguments.jobs):
            project = Path(scratch) / str(number)
            copy_project(project)
            projects.put(project)

        def run(slip: Slip, elsewhere: bool) -> Outcome:
            project = projects.get()
            try:
                outcome = try_slip(project, slip, elsewhere=elsewhere)
            finally:
                projects.put(project)
            print(
                f"{outcome.seconds:.0f} s {outcome.tier or 'not noticed'}: {slip.file}: "
                f"{slip.old.splitlines()[0]!r} -> {outcome.test}",
                flush=True,
            )
            return outcome

        # First what takes seconds each.
        slips = [slip for of_group in groups.values() for slip in of_group]
        found = dict(zip(slips, executor.map(lambda s: run(s, False), slips), strict=True))
        print(summary([*found.values()])[0], flush=True)
        left = [slip for slip, outcome in found.items() if outcome.test is None]
        found |= zip(left, executor.map(lambda s: run(s, True), left), strict=True)
        tests = {outcome.test for outcome in found.values()} - {None, NO_END}
        if tests and (failed := noticed(projects.get(), sorted(tests), "", SECONDS_OF_ALL)):
            raise SystemExit(f"without a slip, too: {failed}")
    outcomes = {group: [found[slip] for slip in of_group] for group, of_group in groups.items()}
    text = page(outcomes, conditions(arguments.jobs, time.monotonic() - start))
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    return not summary([*found.values()])[1]


if __name__ == "__main__":
    sys.exit(main())
