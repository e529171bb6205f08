"""What is known of devices that are not there."""

import pytest

from pallas_kernels.target import chip_of, lowering_for, slug, target
from rmt_tpu.estimator import TPUS


@pytest.mark.parametrize("name", TPUS)
def test_kernels_and_reports_know_the_same_chip(name):
    row = TPUS[name]
    for kind in (row.kind, slug(row.kind)):  # tables and tuning go by the latter
        with lowering_for(kind):
            chip = target().chip
        assert chip == chip_of(kind)
        assert (chip.vmem, chip.cores, chip.unit) == (row.vmem, row.cores, row.matrix.size)
        assert (chip.clock, chip.bandwidth) == (row.clock, row.bandwidth)
        # The units at that clock have the peak that the maker states.
        assert row.peak_flops == pytest.approx(chip.peak_flops, rel=3e-3)


def test_of_an_unknown_device_the_largest_is_taken():
    known = [chip_of(kind) for kind in ("TPU v4", *(t.kind for t in TPUS.values()))]
    with lowering_for("TPU v99"):
        assert target().chip == tuple(map(max, zip(*known, strict=True)))
    assert chip_of("cpu") is None


def test_kernels_take_no_more_vmem_than_the_chip_has():
    for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"):
        with lowering_for(kind):
            assert target().vmem_limit == 60 * 2**20 and target().vmem_part(58) == 58 * 2**20
    with lowering_for("TPU v4"):
        assert target().vmem_limit == 15 * 2**20 and target().vmem_part(32) == 8 * 2**20


@pytest.mark.parametrize(
    "name, same",
    [("TPU v5e", "TPU v5 lite"), ("TPU v5p", "TPU v5"), ("TPU v6e", "TPU v6 lite")],
)
def test_a_chip_is_known_by_each_of_its_names(name, same):
    assert slug(name) == slug(same)
    with lowering_for(name):
        assert target().chip == chip_of(same) is not None
