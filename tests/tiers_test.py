"""Tests of one group run on one worker."""

import os

import pytest


@pytest.mark.xdist_group("named")
def test_a_group_is_named_to_the_workers(request):
    """Else each worker makes anew what the tests of a group share, and says nothing of it."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    assert alone or request.node.nodeid.endswith("@named")
