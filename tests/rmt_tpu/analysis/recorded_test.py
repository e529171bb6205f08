"""Reports of programs that a compiler made once, and the kernels of steps, are what they were.

After a change that is meant to change it, `python -m tests.rmt_tpu.analysis.recorded` writes it
anew.
"""

import re

import pytest

from tests.rmt_tpu.analysis import recorded, recorded_kernels, recorded_lists
from tests.tiers import later


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    recorded.unpack(folder)
    return folder


@pytest.mark.parametrize("name", recorded.REPORTS)
def test_a_report_is_as_it_was(name, folder):
    expected = (recorded.FOLDER / f"{name}.txt").read_text("utf-8")
    assert recorded.read_again(name, folder) == expected


AT_NIGHT = recorded_kernels.AT_NIGHT


@pytest.mark.parametrize(
    "name",
    [*(name for name in recorded_kernels.STEPS if name not in AT_NIGHT), *later(*AT_NIGHT)],
)
def test_kernels_of_a_step_have_the_blocks_that_they_had(name):
    expected = (recorded.FOLDER / f"{name}.txt").read_text("utf-8")
    if not recorded_kernels.HAS_BODIES:  # the emulator runs them instead: mosaic_gpu_test.py
        expected = re.sub(" body [0-9a-f]{8}", "", expected)
    assert recorded_kernels.report(name) == expected


@pytest.mark.parametrize("name", recorded_lists.LISTS)
def test_a_list_is_as_it_was(name):
    expected = (recorded.FOLDER / f"{name}.txt").read_text("utf-8")
    assert recorded_lists.LISTS[name]() == expected
