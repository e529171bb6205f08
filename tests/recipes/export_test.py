"""recipes.export: what is left of an export that did not end well."""

import signal

import pytest

from tests import cli

pytestmark = pytest.mark.xdist_group("recipes")

# When the weights are written, and config.json is not.
INTERRUPTED = """
import os, signal
from rmt_tpu.hub import weights
usual = weights.write
def write(*args):
    usual(*args)
    os.kill(os.getpid(), signal.{name})
weights.write = write
"""


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("SIGTERM", 143, "error: stopped by SIGTERM"),
        pytest.param("SIGINT", 130, "error: interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_no_folder(trained, tmp_path, name, code, line):
    assert code == 128 + getattr(signal, name)
    flags = (f"--workdir={trained}", f"--output={tmp_path}/out", "--kind=rmt_tpu")
    process = cli.start("export", *flags, first=INTERRUPTED.format(name=name))
    output, said = process.communicate()
    assert (process.returncode, output, said.splitlines()) == (code, "", [line])
    assert not list(tmp_path.iterdir())
