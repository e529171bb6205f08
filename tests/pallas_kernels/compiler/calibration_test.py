"""Estimates beside published times: the statistics by hand, and what the data says of the model."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from pallas_kernels.compiler import DEVICES, Job, calibrate, calibration, compile_jobs, lower
from pallas_kernels.compiler.calibration import Row, agreement, error_bar, rows, spearman
from pallas_kernels.compiler.cost import program_cost

# In the source tree itself: under Bazel, this file is a link to there.
DOCUMENT = Path(__file__).resolve().parents[3] / "docs/benchmarks/estimates.md"


def test_the_correlation_of_ranks():
    assert spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(0.75**0.5)  # two share a rank


def row(published: float, cycles: int, moved: int = 1) -> Row:
    return Row("v6e", "attention", (1, 2), {}, published, 1.0, cycles, cycles, cycles, moved)


def test_the_agreement_by_hand():
    target = DEVICES["v6e"]
    clock, bandwidth = int(target.clock), int(target.bandwidth)
    # A second of cycles where two were measured, without what is beside; two of bytes for one.
    given = [row(3.0, clock), row(2.0, clock, 2 * bandwidth)]
    assert [r.measured for r in given] == [2, 1]
    assert [r.ratio for r in given] == pytest.approx([0.5, 2])
    found = agreement(given)
    assert (found.calls, found.least, found.most) == (2, 0.5, 2)
    assert found.mean == pytest.approx(1) and found.rank_correlation == pytest.approx(-1)
    assert agreement([]) is None


def test_the_rows_are_whole():
    content = calibration.PATH.read_text(encoding="utf-8")
    values = json.loads(content)
    assert calibration.text(values, rows()) == content
    assert values["versions"].keys() == {"jax", "libtpu"} and "tokamax" in values["source"]
    assert len({(r.target, r.op, r.shape) for r in rows()}) == len(rows())
    for r in rows():
        assert 0 < r.beside < r.published < 1 and r.op in calibrate._LOWER
        assert 0 < r.mxu_cycles <= r.cycles and 0 < r.bundles <= r.cycles
        # Queries, keys, values and results, each once or with the lanes that pad it.
        assert 4 <= r.bytes / (2 * np.prod(r.shape)) <= 8
        assert r.blocks["block_kv"] % r.blocks["block_kv_compute"] == 0
        floor = r.mxu_cycles / DEVICES[r.target].clock
        assert floor < r.measured  # nothing was measured faster than the matrix units are


def test_the_model_keeps_to_what_was_measured():
    """As far as it did when the rows were made."""
    of = {t: agreement([r for r in rows() if r.target == t]) for t in ("v5p", "v6e", "tpu7x")}
    for target, least, most, order in (("v5p", 0.76, 1.09, 0.99), ("v6e", 0.6, 1.09, 0.99)):
        assert of[target].calls == 18 and of[target].rank_correlation > order
        assert least < of[target].least and of[target].most < most
        long = [r.ratio for r in rows() if r.target == target and r.shape[1] >= 2048]
        assert 0.93 < min(long)
    assert 0.38 < of["tpu7x"].least and of["tpu7x"].most < 0.82  # of too little, it is told
    assert of["tpu7x"].calls == 9 and of["tpu7x"].rank_correlation > 0.89


def test_what_is_said_is_what_the_rows_give():
    assert calibration.table() in DOCUMENT.read_text(encoding="utf-8")
    found = agreement([r for r in rows() if r.target == "v6e"])
    line = error_bar(["v6e", "v5e", "v6e", "h100"])
    assert line == (
        f"estimates; the compiler's model gave {found.least:.1f} to {found.most:.1f} times the "
        f"measured time of {found.calls} attention calls on v6e; never compared with a measured "
        "time on v5e, h100 (docs/benchmarks/estimates.md)"
    )
    never = "estimates; never compared with a measured time on v5e (docs/benchmarks/estimates.md)"
    assert error_bar(["v5e"]) == never


def test_rows_are_made_again_only_with_the_kernels_that_were_timed(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert calibrate.main() == 1
    words = "tokamax is missing; pip install tokamax==0.0.12 brings the kernels\n"
    assert capsys.readouterr().err == words
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "argv", ["calibrate", "v7"])
    assert calibrate.main() == 2
    assert capsys.readouterr().err == "'v7' has no rows; legal: v5p, v6e, tpu7x\n"


def lower_attention(device: jax.Device, shape: list[int], block: int) -> jax.stages.Lowered:
    """As the calls that were timed, by the older kernel that jax has."""
    _, tokens, heads, _ = shape
    masks = [splash_attention_mask.FullMask((tokens, tokens))] * heads
    sizes = splash_attention_kernel.BlockSizes(block, block, block)

    def call(q, k, v):
        kernel = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask(masks),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
        )
        return jax.vmap(kernel)(q, k, v)

    batch, tokens, heads, size = shape
    array = jax.ShapeDtypeStruct((batch, heads, tokens, size), jnp.bfloat16)
    return lower(call, [array] * 3, device)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5p", "v6e"])
def test_a_call_compiled_today_takes_about_what_was_measured(target):
    shape = (16, 1024, 16, 128)
    (timed,) = [r for r in rows() if (r.target, r.shape) == (target, shape)]
    name = "tests.pallas_kernels.compiler.calibration_test:lower_attention"
    job = Job(name, {"shape": shape, "block": 1024})
    (program,) = compile_jobs(DEVICES[target], [job])
    (kernel,) = program_cost(program).kernels
    again = dataclasses.replace(timed, cycles=kernel.cycles, bytes=kernel.bytes.total)
    assert 0.7 < again.ratio < 1.4
