"""What is known of devices that are not there."""

import pytest

from pallas_kernels import chips, tuned
from pallas_kernels.compiler import TPUS


@pytest.mark.parametrize("name", TPUS)
def test_kernels_and_reports_know_the_same_chip(name):
    target = TPUS[name]
    hbm = int(target.bandwidth / target.clock / target.cores)
    for kind in (target.kind, tuned.slug(target.kind)):  # tables and tuning go by the latter
        with tuned.lowering_for(kind):
            assert chips.chip() == (target.vmem, target.cores, target.matrix.size, hbm)


def test_of_an_unknown_device_the_largest_is_taken():
    with tuned.lowering_for("TPU v99"):
        assert chips.chip() == tuple(map(max, zip(*chips._CHIPS.values(), strict=True)))


def test_kernels_take_no_more_vmem_than_the_chip_has():
    for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"):
        with tuned.lowering_for(kind):
            assert chips.vmem_limit() == 60 * 2**20 and chips.vmem_part(58) == 58 * 2**20
    with tuned.lowering_for("TPU v4"):
        assert chips.vmem_limit() == 15 * 2**20 and chips.vmem_part(32) == 8 * 2**20


@pytest.mark.parametrize(
    "name, same",
    [("TPU v5e", "TPU v5 lite"), ("TPU v5p", "TPU v5"), ("TPU v6e", "TPU v6 lite")],
)
def test_a_chip_is_known_by_each_of_its_names(name, same):
    assert tuned.slug(name) == tuned.slug(same)
    with tuned.lowering_for(name):
        assert chips.chip() == chips._CHIPS[tuned.slug(same)]
