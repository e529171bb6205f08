"""README.md is short, and its figures are those of the code."""

import dataclasses
import re
from pathlib import Path

import pytest

import rmt_tpu
from rmt_tpu import cost

# The source tree itself: under Bazel, this file is a link to there.
ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_at_most_130_lines():
    assert len(TEXT.splitlines()) <= 130


def test_twice_the_residual_costs_what_it_and_its_picture_say():
    """The figures are of the preset's own length of 512 tokens."""
    model = rmt_tpu.preset("rmt-305m")
    store = dataclasses.replace(model.store, key_dim=2 * model.store.key_dim)
    wide = model.replace(store=store)
    parameters = [sum(cost.parameters(config).values()) for config in (model, wide)]
    flops = [cost.flops_per_token(config, 512) for config in (model, wide)]
    more = [f"{100 * (after / before - 1):.1f}%" for before, after in (parameters, flops)]
    picture = (ROOT / "docs/idea.svg").read_text(encoding="utf-8")
    assert "twice the residual costs rmt-305m {} more parameters and {} more FLOPs".format(
        *more
    ) in " ".join(TEXT.split())
    assert "twice rmt-305m&#39;s" in picture
    assert "residual is {} more parameters, {} more FLOPs".format(*more) in picture


@pytest.mark.parametrize("preset", ["gpt2-tiny", "rmt-tiny"])
def test_the_table_has_the_sizes_of_the_presets(preset):
    model = rmt_tpu.preset(preset)
    ((parameters, residual),) = re.findall(rf"^\| {preset} \| ([\d,]+) \| (\d+) \|", TEXT, re.M)
    assert int(parameters.replace(",", "")) == sum(cost.parameters(model).values())
    assert int(residual) == model.residual_size
