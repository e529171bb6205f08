"""Tests of the memory traffic that is counted in programs compiled for a GPU."""

import pytest

from rmt_tpu.analysis import gpu_traffic


@pytest.mark.compile
def test_a_kernel_moves_little_more_than_the_least():
    (row,) = gpu_traffic.rows("h100", ["merge D=1024"])
    assert (row["op"], row["size"]) == ("depth_attention", "merge D=1024")
    plain, kernel = row["xla"], row["mosaic_gpu"]
    assert row["least"] <= kernel["bytes"] < 1.2 * row["least"] < plain["bytes"]
    assert 0 < kernel["launches"] < plain["launches"]


def test_an_unknown_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_traffic", "v5e"])
    with pytest.raises(SystemExit, match="2"):
        gpu_traffic.main()
    assert "'v5e'" in capsys.readouterr().err
