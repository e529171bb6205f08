"""The least of a decode step by hand, what is made of a compiled one, how the engine is timed."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from rmt_tpu.analysis import decode, decode_report
from rmt_tpu.analysis.decode import (
    STEPS,
    DecodeCase,
    DecodeLowerBound,
    DecodeRow,
    copies,
    estimate,
    lower_bound,
    measure,
)
from rmt_tpu.analysis.step_cost import InstructionCost, StepCost
from rmt_tpu.errors import UsageError
from rmt_tpu.estimator import BEST_GUESS, TARGETS, Failure, Job
from rmt_tpu.estimator.calibration import error_bar
from rmt_tpu.estimator.hlo import Bytes, Module

V5E = TARGETS["v5e"]
LAYERS, WIDTH, VOCAB = 24, 1024, 50257
FEED_FORWARD, UNEMBEDDING = 2 * LAYERS * WIDTH * 4 * WIDTH, WIDTH * VOCAB
EMBEDDINGS = 2 * WIDTH * 2  # a token's row and its position's
TOKEN = 98304  # bytes of keys and values, 2 L R D_v of two bytes


def test_the_least_of_a_transformer():
    products = 2 * (4 * LAYERS * WIDTH**2 + FEED_FORWARD + UNEMBEDDING)
    gains = 4 * (2 * LAYERS + 1) * WIDTH
    found = lower_bound(DecodeCase("gpt2-405m", 1, 512), "bfloat16")
    assert round(products / 1e6) == 707
    assert found.weights == products + gains + EMBEDDINGS
    assert found.cache == 512 * TOKEN
    embeddings = 2 * WIDTH * (VOCAB + 512)
    assert found.held == products + gains + embeddings + found.cache
    assert 0.707e9 < found.flops < 0.76e9
    assert round(1e3 * found.seconds(V5E.bandwidth, V5E.peak_flops), 3) == 0.925


def test_the_least_of_a_residual_matrix():
    products = 2 * (FEED_FORWARD + UNEMBEDDING)
    keys = 4 * (6 * LAYERS + 3) * 16 * 64
    gains = 4 * (2 * LAYERS + 1) * 64 * 64
    found = lower_bound(DecodeCase("rmt-305m", 32, 300), "bfloat16")
    assert round(products / 1e6) == 506
    assert found.weights == products + keys + gains + 32 * EMBEDDINGS
    assert found.cache == 32 * 300 * TOKEN, "and not of the 512 that a program has room for"
    embeddings = 2 * WIDTH * (VOCAB + 512)
    assert found.held == products + keys + gains + embeddings + 32 * 512 * TOKEN


def test_a_window_is_all_that_is_read_of_a_cache():
    whole, window = (
        lower_bound(DecodeCase("llama-tiny", 2, 64, changes), "bfloat16")
        for changes in ({}, {"model.attention.window": 16})
    )
    assert window.cache == whole.cache // 4 and window.held == whole.held


def test_every_core_has_its_own_cache():
    grouped = lower_bound(DecodeCase("llama-374m", 2, 64), "bfloat16")
    assert grouped.cache == 2 * 64 * LAYERS * 2 * 4 * 64 * 2  # four heads of keys
    latent = {"kind": "mla", "num_heads": 4, "head_dim": 32, "kv_rank": 40, "rope_dim": 8}
    cores = [latent, {"kind": "feed_forward", "hidden_dim": 64}]
    changes = {"model.stacks": [{"cores": cores, "repeat": 3}]}
    assert (
        lower_bound(DecodeCase("gpt2-tiny", 2, 64, changes), "bfloat16").cache
        == 2 * 64 * 3 * 48 * 2
    )


def test_experts_that_no_row_has_chosen_are_not_read():
    """Two experts of four for a row: of two rows, three on average."""
    experts = {"kind": "experts", "num_experts": 4, "top_k": 2, "hidden_dim": 64, "shared": 0}
    of_rows = {}
    for rows in (1, 2):
        changes = {"model.stacks": [{"cores": [experts], "repeat": 3}]}
        of_rows[rows] = lower_bound(DecodeCase("gpt2-tiny", rows, 64, changes), "bfloat16").weights
    embedding = 2 * 128  # of one row more
    assert of_rows[2] - of_rows[1] == 2 * 3 * (3 * 64 * 128) + embedding


def test_products_bind_where_there_are_many():
    many = DecodeLowerBound(weights=8, cache=2, held=100, flops=60)
    assert many.seconds(bandwidth=2.0, peak_flops=10.0) == 6.0
    assert many.seconds(bandwidth=1.0, peak_flops=10.0) == 10.0


def cost(cycles=2000.0, hbm=819):
    """A dispatch of one instruction."""
    by_model = {"least": cycles / 2, BEST_GUESS: cycles, "most": cycles * 1.5}
    attending = InstructionCost(
        "f", "attention", "", "", 1, by_model, Bytes(hbm), False, False, False
    )
    return StepCost("m", "v5e", (attending,), 7, 9, V5E.clock, V5E.bandwidth, 2, 0, (), 1.0)


def row(preset="gpt2-tiny", batch=2, context=64, **changes):
    needs, seconds = DecodeLowerBound(10, 6, 20, 5), 1e-6
    return DecodeRow(DecodeCase(preset, batch, context), "v5e", needs, seconds, **changes)


def test_figures_of_a_step():
    of = row(cost=cost())
    assert of.seconds == 2000 / V5E.clock / STEPS and of.of_bandwidth == 1e-6 / of.seconds
    assert of.span == pytest.approx((of.seconds / 2, of.seconds * 1.5))
    # Copies beside other work take no cycles, and yet their bytes have to come.
    moving = row(cost=cost(hbm=8190000 * STEPS))
    assert moving.seconds == pytest.approx(1e-5) and moving.span == pytest.approx((1e-5, 1e-5))
    timed = row(timed=True, times=(3e-6, 1e-6, 2e-6))
    assert timed.seconds == 2e-6 and timed.span == (1e-6, 3e-6) and timed.of_bandwidth == 0.5
    assert row(fault="is too large").seconds is None is row().of_bandwidth


def test_tables_and_picture(tmp_path):
    rows = [
        row(cost=cost(), copies=(12, 32_000_000)),
        row("rmt-tiny", cost=cost(1500.0)),
        row("rmt-tiny", batch=32, fault="does not fit"),
    ]
    text = decode_report.text(rows, "jax 1", largest=1)
    assert "Estimated, not measured" in text and error_bar(["v5e"]) in text
    lines = [line for line in text.splitlines() if line.startswith("| rmt-tiny | 2 | 64 |")]
    table, parts = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    ms = f"{1500 / V5E.clock / STEPS * 1e3:.3f}"
    assert table[5] == parts[3] == ms and table[7] == "0.75" and parts[3:] == [ms]
    assert "\nrmt-tiny, 32, 64: does not fit.\n" in text
    assert "| gpt2-tiny | 2 | 64 | 0 | 0.001 |" in text and text.count("| 1.5 | 4 |") == 1
    assert "## Most expensive instructions of 8 steps: gpt2-tiny, 2, 64, v5e" in text
    (ratio,) = decode_report.ratios(rows)
    assert ratio["ratio"] == pytest.approx(0.75) and ratio["presets"] == ["rmt-tiny", "gpt2-tiny"]
    values = json.loads(json.dumps([row.json() for row in rows]))
    assert values[0]["of_bandwidth"] == rows[0].of_bandwidth and values[2]["cost"] is None
    picture = tmp_path / "decode.png"
    decode_report.figure(rows, "jax 1").savefig(picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    slow = [dataclasses.replace(r, least_seconds=None, timed=True, times=(1e-3,)) for r in rows]
    (axes,) = decode_report.figure(slow, "jax 1").axes
    assert axes.get_ylabel() == "milliseconds per step"
    assert "Timed on this machine" in decode_report.text(slow, "jax 1")
    # A device of this machine beside an estimate.
    both = [dataclasses.replace(slow[0], device="host"), *rows]
    panels = decode_report.figure(both, "jax 1").axes
    assert [axes.get_title() for axes in panels] == ["host, timed", "v5e, estimated"]


def test_what_cannot_be_is_told_and_not_compiled(monkeypatch):
    asked = []

    def compiled(target, jobs, progress, buffers):
        for job in jobs:
            asked.append(job)
            yield Failure("the compiler has no more of it")

    monkeypatch.setattr(decode, "compile_jobs", compiled)
    cases = [
        DecodeCase("rmt-305m", 1, 513),
        DecodeCase("gpt2-405m", 256, 512),
        DecodeCase("prenorm-528m", 512, 512),
    ]
    rows = estimate(cases, V5E)
    assert asked == [Job("rmt_tpu.analysis.decode:lower", dataclasses.asdict(cases[1]))]
    assert [row.case for row in rows] == cases and not any(row.seconds for row in rows)
    assert rows[0].fault == "has only 512 learned positions"
    assert rows[1].fault == "the compiler has no more of it"
    assert rows[2].fault.startswith("does not fit: weights and cache take 21.")
    with pytest.raises(UsageError, match="rmt-305"):
        estimate([DecodeCase("rmt-304m", 1, 8)], V5E)


ENTRY = """
%slice (p: bf16[24,256,128]) -> bf16[256,128] {
  %p = bf16[24,256,128]{2,1,0} parameter(0)
  %s = bf16[1,256,128]{2,1,0} slice(%p), slice={[1:2], [0:256], [0:128]}
  ROOT %b = bf16[256,128]{1,0} bitcast(%s)
}

ENTRY %main (a: bf16[24,256,128]) -> bf16[256,128] {
  %a = bf16[24,256,128]{2,1,0} parameter(0)
  %hbm = bf16[256,128]{1,0} fusion(%a), kind=kLoop, calls=%slice
  %vmem = bf16[256,128]{1,0:S(1)} fusion(%a), kind=kLoop, calls=%slice
  %fetched = (bf16[256,128]{1,0:S(1)}, bf16[256,128]{1,0}, u32[]) copy-start(%hbm)
  %beside = (bf16[256,128]{0,1}, bf16[256,128]{1,0}, u32[]) copy-start(%hbm)
  %sum = bf16[256,128]{1,0} add(%hbm, %hbm)
  ROOT %turned = bf16[256,128]{0,1} copy(%sum)
}
"""


def test_copies_are_from_hbm_to_hbm():
    module, size = Module(ENTRY), 2 * 256 * 128
    assert copies(module, size) == (3, 3 * size), "the slice, the one beside, and the turned"
    assert copies(module, size + 1) == (0, 0)


class Fake:
    """An engine whose rounds of steps take 3 s, and whose first repeat compiles for 1000."""

    clock = 0.0

    def __init__(self, decoder, stop, *, slots, steps):
        self.slots, self.steps, self.first = slots, steps, True

    def run(self, requests):
        new = requests[0].sampling.max_tokens
        assert len(requests) == self.slots and len(requests[0].tokens) + new == 65
        Fake.clock += 500 + 1000 * self.first
        yield from range(self.slots)
        for number in range((new - 1) // self.steps):
            # The first one makes room, and another is held up by something else.
            Fake.clock += 3 + 50 * (number == 4) if number else 100 + 1000 * self.first
            yield from range(self.slots)
        self.first = False


def test_a_time_is_of_steps_alone(monkeypatch):
    monkeypatch.setattr(decode, "Engine", Fake)
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: Fake.clock))
    monkeypatch.setattr(decode, "random_decoder", lambda config: None)
    told = []
    (found,) = measure([DecodeCase("rmt-tiny", 2, 64)], 3, told.append)
    assert found.times == (3 / 8,) * 3 and found.timed and found.cost is None
    assert found.least_seconds is None, "nobody knows a CPU's bandwidth"
    assert told == ["cpu: rmt-tiny 2 64: 375.000 ms per step"]
    (large,) = measure([DecodeCase("gpt2-405m", 2**20, 512)], 3)
    assert large.fault.startswith("does not fit") and large.times == ()


@pytest.mark.compile
def test_small_steps():
    small = {"model.vocab_size": 512, "model.num_layers": 3}
    # Of three heads of 64 the cache has room for four; one layer's keys are more than VMEM.
    padded = small | {"model.attention.num_heads": 3, "model.attention.head_dim": 64}
    cases = [DecodeCase("rmt-tiny", 32, 128, small), DecodeCase("gpt2-tiny", 512, 512, padded)]
    found, large = estimate(cases, V5E)
    assert not found.fault and found.copies == (0, 0)
    assert 0 < found.of_bandwidth < 1 and found.span[0] <= found.seconds <= found.span[1]
    parts = {part for part, cycles in found.cost.parts.items() if cycles}
    assert {"embedding", "residual", "attention", "feed_forward", "loss"} <= parts
    # The cache is donated, and is in place.
    assert found.cost.temporary_bytes < found.least.cache / 3
    assert found.least.held <= found.cost.argument_bytes < 1.2 * found.least.held
    assert large.copies == (0, 0) and large.least.cache == 512 * 512 * 3 * 2 * 256 * 2
