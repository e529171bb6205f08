"""recipes.check_device: a table, a record and an exit code."""

import json
import subprocess
import sys

import pytest

from tests import cli


def test_check(tmp_path):
    file = tmp_path / "new" / "device.json"
    flags = ("--op=token_rows,logits", "--notime", f"--output={file}")
    done = cli.succeed("check_device", *flags)
    assert "A CPU has no kernels" in done.stdout and "all 4 checks pass" in done.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [row["op"] for row in rows] == ["token_rows"] * 2 + ["logits"] * 2
    assert all(row["ok"] and row["implementation"] == "xla" for row in rows)


def test_a_full_disk_is_a_failure_in_one_line():
    done = cli.run("check_device", "--op=logits", "--notime", "--output=/dev/full")
    line = "error: --output=/dev/full cannot be written: No space left on device"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == line
    assert "Traceback" not in done.stderr


# A result that is twice what it has to be.
WRONG = """
import dataclasses, sys
from rmt_tpu.analysis import device_cases
def wrong(scale, right=device_cases.OPS["logits"]):
    for case in right(scale):
        function = lambda *args, f=case.function, **given: {
            name: 2 * x for name, x in f(*args, **given).items()
        }
        plain = lambda f=case.function, **given: f("xla", **given)
        yield dataclasses.replace(case, function=function, reference=plain)
device_cases.OPS["logits"] = wrong
from recipes import check_device
sys.argv = ["recipes/check_device.py", "--op=logits", "--notime"]
check_device.run()
"""


# The second case is interrupted, as by Ctrl-C.
INTERRUPTED = """
import dataclasses, sys
from rmt_tpu.analysis import device_cases
def interrupted(scale, right=device_cases.OPS["logits"]):
    def interrupt(*args, **given):
        raise KeyboardInterrupt
    first, second = right(scale)
    yield first
    yield dataclasses.replace(second, function=interrupt)
device_cases.OPS["logits"] = interrupted
from recipes import check_device
sys.argv = ["recipes/check_device.py", "--op=logits", "--notime", "--output=" + sys.argv[1]]
check_device.run()
"""


def python(*arguments):
    return subprocess.run(
        [sys.executable, "-c", *map(str, arguments)],
        cwd=cli.ROOT,
        env=cli.environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=cli.TIMEOUT,
    )


@pytest.mark.slow
def test_an_interrupted_check_keeps_the_results_that_it_has(tmp_path):
    done = python(INTERRUPTED, tmp_path / "device.json")
    assert done.returncode != 0 and "1/2 logits" in done.stderr
    assert len(json.loads((tmp_path / "device.json").read_text())["rows"]) == 1


def test_what_differs_is_exit_code_1():
    done = python(WRONG)
    assert done.returncode == 1
    assert "differs: " in done.stdout and "2 of 2 checks differ or fail" in done.stdout


def test_mistakes(tmp_path):
    assert "--op" in cli.fail("check_device", "--op=logit")
    (tmp_path / "file").write_text("")
    error = cli.fail("check_device", "--op=logits", f"--output={tmp_path}/file/record.json")
    assert "cannot be written" in error
    error = cli.fail("check_device", "--op=logits", "--output=gs://b/x.json")
    assert "--output=gs://b/x.json must be a path on this machine" in error
