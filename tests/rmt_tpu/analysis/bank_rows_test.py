"""How much of the bank a step's kernels read on average, and what of it the cost counts."""

import pytest

from rmt_tpu.analysis import step_cost
from rmt_tpu.analysis.bank_rows import BankRows, Skipped, bank_rows
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run
from rmt_tpu.estimator import BEST_GUESS, HIGHEST, TARGETS, Assignment, Program
from rmt_tpu.estimator.hlo import Bytes, Module

ROW = "bf16[{rows},2,8,128]{{3,2,1,0:T(8,128)(2,1)}}"
BANK, OWN = ROW.format(rows=4), ROW.format(rows=1)
KERNEL = (
    'custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"QQ=="}}'
)
STEP = f"""\
HloModule step
%body (c: (s32[], {BANK})) -> (s32[], {BANK}) {{
  %c = (s32[], {BANK}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %bank = {BANK} get-tuple-element(%c), index=1
  %depth_sums.1 = {OWN} custom-call(%i, %bank, %bank), {KERNEL}
  %other.1 = {OWN} custom-call(%i, %bank), {KERNEL}
  ROOT %next = (s32[], {BANK}) tuple(%i, %bank)
}}
%condition (c: (s32[], {BANK})) -> pred[] {{
  %c = (s32[], {BANK}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %most = s32[] constant(6)
  ROOT %goes_on = pred[] compare(%i, %most), direction=LT
}}
ENTRY %main (a: (s32[], {BANK})) -> {OWN} {{
  %a = (s32[], {BANK}) parameter(0)
  %loop = (s32[], {BANK}) while(%a), condition=%condition, body=%body
  %end = {BANK} get-tuple-element(%loop), index=1
  ROOT %depth_sums.2 = {OWN} custom-call(%end), {KERNEL}
}}
"""


@pytest.mark.parametrize(
    ("preset", "changes", "rows"),
    [
        ("gpt2-tiny", {}, None),
        # Blocks of 6 of 48 sublayers: the passes read the embedding and 0 to 7 blocks.
        ("rmt-attnres-305m", {}, BankRows(9, 4.5)),
        # Each of 24 layers reads the embedding and the layers before it.
        ("gpt2-405m", {"model.mixer": "mudd"}, BankRows(25, 12.5)),
        # The deltas of 0 to 7 blocks; the embedding's row comes last and is no delta.
        (
            "gpt2-405m",
            {"model.mixer": "delta_attention", "model.mixer.num_blocks": 8},
            BankRows(9, 3.5),
        ),
    ],
)
def test_rows_that_exist_before_a_group(preset, changes, rows):
    assert bank_rows(overrides.apply(run(preset), changes).model) == rows


def test_only_passes_within_the_loop_over_layers_skip_rows():
    """The bank counts once, however often the kernel gets it."""
    bank = 4 * 2 * 8 * 128 * 2
    skipped = lambda rows, text=STEP: rows.skipped(Module(text), list(Module(text).run()))
    unread = Bytes(bank * 5 // 8, 0)
    assert skipped(BankRows(4, 1.5)) == {"depth_sums.1": Skipped(unread)}
    assert skipped(BankRows(5, 1.5)) == {}
    # Merges read the means of all sites, which may be as many as the bank's rows.
    merge = STEP.replace("depth_sums.1", "depth_attention_merge.1")
    assert skipped(BankRows(4, 1.5), merge) == {}
    means = f"%depth_attention_partial.1 = {BANK} custom-call"
    partial = STEP.replace(f"%depth_sums.1 = {OWN} custom-call", means)
    assert skipped(BankRows(4, 1.5), partial) == {"depth_attention_partial.1": Skipped(unread)}
    # A kernel that works row by row also executes less. This one gets the bank twice, and writes a
    # row.
    by_row = "depth_attention_matrices_measure"
    ((name, of_rows),) = skipped(BankRows(4, 1.5), STEP.replace("depth_sums", by_row)).items()
    assert (name, of_rows.bytes) == (f"{by_row}.1", unread)
    assert of_rows.schedule == pytest.approx(5 / 8 * 4 / 9, rel=0.01)


def test_the_highest_estimate_has_all_rows():
    program = Program(
        TARGETS["v5e"], Module(STEP), {}, {"argument": 1}, 1.0, [], Assignment((), (), 1, 1)
    )
    cost = lambda bank: step_cost.step_cost("x", 16, program, bank)
    of_all, on_average = cost(None), cost(BankRows(4, 1.5))
    assert on_average.by_model[HIGHEST] == of_all.by_model[HIGHEST]
    skipped = 6 * 4 * 2 * 8 * 128 * 2 * 5 // 8
    assert of_all.hbm_bytes - on_average.hbm_bytes == skipped
    per_byte = TARGETS["v5e"].clock / TARGETS["v5e"].bandwidth
    less = of_all.by_model[BEST_GUESS] - on_average.by_model[BEST_GUESS]
    assert less == pytest.approx(skipped * per_byte)
