"""What is known of devices that are not there."""

import pytest

from pallas_kernels import chips, tuned
from rmt_tpu.estimator import TPUS


@pytest.mark.parametrize("name", TPUS)
def test_kernels_and_reports_know_the_same_chip(name):
    target = TPUS[name]
    for kind in (target.kind, tuned.slug(target.kind)):  # tables and tuning go by the latter
        with tuned.lowering_for(kind):
            chip = chips.chip()
        assert chip == chips.of_kind(kind)
        assert (chip.vmem, chip.cores, chip.unit) == (target.vmem, target.cores, target.matrix.size)
        assert (chip.clock, chip.bandwidth) == (target.clock, target.bandwidth)
        # The units at that clock have the peak that the maker states.
        assert target.peak_flops == pytest.approx(chip.peak_flops, rel=3e-3)


def test_bytes_that_come_to_a_core_in_a_cycle():
    assert [chips.of_kind(f"TPU {k}").hbm for k in ("v4", "v5e", "v5p", "v6e")] == [
        584,
        546,
        790,
        937,
    ]
    assert chips.of_kind("TPU7x").hbm == 1677 and chips.of_kind("cpu") is None


def test_of_an_unknown_device_the_largest_is_taken():
    known = [chips.of_kind(kind) for kind in ("TPU v4", *(t.kind for t in TPUS.values()))]
    with tuned.lowering_for("TPU v99"):
        assert chips.chip() == tuple(map(max, zip(*known, strict=True)))


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
        assert chips.chip() == chips.of_kind(same) is not None
