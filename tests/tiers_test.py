"""Tests of one group, or of one file, run on one worker."""

import os
from types import SimpleNamespace

import pytest

from tests import workers


@pytest.mark.xdist_group("named")
def test_a_group_is_named_to_the_workers(request):
    """Else each worker makes anew what the tests of a group share, and says nothing of it."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    assert alone or request.node.nodeid.endswith("@named")


def test_a_file_is_one_workers():
    """A file is one group, unless `xdist_group` moves a test to another."""
    options = {"dist": "loadgroup", "tx": ["popen"]}
    split = workers.scheduler(SimpleNamespace(getvalue=options.get), None)._split_scope
    assert split("tests/a_test.py::TestB::test_c[d@e]") == "tests/a_test.py"
    assert split("tests/a_test.py::test_c[d]@named") == "named"
    assert workers.scheduler(SimpleNamespace(getvalue={"dist": "no"}.get), None) is None
