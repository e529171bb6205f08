"""What is known of devices that are not there."""

import pytest

from pallas_kernels import call, tuned
from pallas_kernels.compiler import TPUS


@pytest.mark.parametrize("name", TPUS)
def test_kernels_and_reports_know_the_same_chip(name):
    target = TPUS[name]
    hbm = int(target.bandwidth / target.clock / target.cores)
    for kind in (target.kind, tuned.slug(target.kind)):  # tables and tuning go by the latter
        with tuned.lowering_for(kind):
            assert call.chip() == (target.vmem, target.cores, target.matrix.size, hbm)


def test_of_an_unknown_device_the_largest_is_taken():
    with tuned.lowering_for("TPU v99"):
        assert call.chip() == tuple(map(max, zip(*call._CHIPS.values(), strict=True)))
