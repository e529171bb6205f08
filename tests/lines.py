"""Record which lines each test file runs, for `tests.mutations`: `pytest -p tests.lines`.

The environment names a folder; each process leaves a file there when it ends. A line that runs when
its module is imported is recorded for no test file or for the first one.
"""

import atexit
import json
import os
from collections import Counter
from pathlib import Path

import pytest

FOLDER = "RMT_TPU_TESTS_LINES"
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rmt_tpu", "pallas_kernels", "sharding", "recipes")


class Recorder:
    """Records the lines, the outcomes and the seconds of this process's tests."""

    def __init__(self, folder: str):
        from coverage import Coverage

        self._results = Path(folder) / f"results.{os.getpid()}.json"
        self.passed, self.seconds = {}, Counter()
        self.coverage = Coverage(
            data_file=str(Path(folder) / "lines"),
            data_suffix=True,
            config_file=False,
            source=[str(ROOT / package) for package in PACKAGES],
        )
        self.coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self.coverage.start()
        atexit.register(self.save)

    def save(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        self._results.write_text(json.dumps([self.passed, self.seconds]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid.split("::")[0])

    def pytest_runtest_logreport(self, report):
        self.passed[report.nodeid] = not report.failed and self.passed.get(report.nodeid, True)
        self.seconds[report.nodeid.split("::")[0]] += report.duration


def pytest_configure(config):
    if not getattr(config.option, "numprocesses", None):  # xdist's workers run the tests
        config.pluginmanager.register(Recorder(os.environ[FOLDER]))


def record_for_its_test() -> None:
    """Record the lines of a process that a test has started, if the tests' own are recorded."""
    if FOLDER in os.environ:
        file = os.environ["PYTEST_CURRENT_TEST"].split("::")[0]
        Recorder(os.environ[FOLDER]).coverage.switch_context(file)


def read(folder: Path, root: Path):
    """Return what was recorded.

    Returns:
      lines: for each file, for each line that ran, the test files that ran it.
      passed: for each test whether it did.
      seconds: for each test file.
    """
    from coverage import CoverageData

    lines, passed, seconds = {}, {}, Counter()
    for file in folder.glob("lines.*"):
        data = CoverageData(str(file))
        data.read()
        for measured in data.measured_files():
            ran = lines.setdefault(str(Path(measured).relative_to(root)), {})
            for line, tests in data.contexts_by_lineno(measured).items():
                ran.setdefault(line, set()).update(tests)
    for file in folder.glob("results.*"):
        of_process, its_seconds = json.loads(file.read_text("utf-8"))
        passed |= of_process
        seconds.update(its_seconds)
    return lines, passed, seconds
