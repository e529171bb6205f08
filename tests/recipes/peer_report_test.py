"""recipes.peer_report: what it refuses before it compiles; peers_test has the rest."""

import sys

import pytest

from tests import cli
from tests.tiers import later

REFUSED = [
    (["--presets=llama-374n"], "did you mean 'llama-374m'"),
    (
        ["--presets=rmt-tiny"],
        "--presets=rmt-tiny: the model is not a Llama, and only Llamas are compared with MaxText",
    ),
    (["--topologies=v5e:3x3"], "--topologies='v5e:3x3' is not a topology of v5e"),
    *later(
        (["--seq_lens=64"], "--seq_lens=64 must be a power of two from 128 to 1,048,576"),
        (["--seq_lens=3000"], "--seq_lens=3000 must be a power of two from 128 to 1,048,576"),
        (["--topologies=h100"], "--topologies 'h100' is unknown"),
        (["--presets="], "--presets= is empty; leave it out"),
    ),
]


@pytest.mark.parametrize("flags,message", REFUSED)
def test_refused(flags, message):
    assert message in cli.fail("peer_report", *flags)


def test_maxtext_must_be_installed(tmp_path):
    """The command says whether MaxText is missing or this Python is too old for it."""
    hide = (
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *more: None if name == 'maxtext' else find(name, *more)"
    )
    process = cli.start("peer_report", f"--workdir={tmp_path}/peers", first=hide)
    _, errors = process.communicate()
    too_old = "error: MaxText needs Python 3.12 or later, and this is Python 3.11"
    missing = "error: MaxText is not installed; pip install 'rmt_tpu[peers]' installs it"
    expected = too_old if sys.version_info < (3, 12) else missing
    assert process.returncode == 1 and errors.splitlines()[-1] == expected
    assert not (tmp_path / "peers").exists()
