"""Our train step beside MaxText's: choices, outcomes that are kept, the table."""

import dataclasses
import json
import sys

import pytest

import pallas_kernels
from rmt_tpu.analysis import maxtext, peers
from rmt_tpu.errors import UsageError
from rmt_tpu.estimator import CompilerError, Failure, parse_topology
from rmt_tpu.storage import open_folder

V5E = parse_topology("v5e:1x1")
ROW = peers.Row("llama-tiny", 128, 2, "v5e:1x1")


def test_maxtext_gets_the_sizes_of_the_preset():
    row = peers.Row("llama-1.2b", 2048, 16, "v5e:2x2")
    values = maxtext.overrides_of(row.config(4), 4, "1024", "full")
    wanted = {
        "base_emb_dim": 2048,
        "base_num_query_heads": 32,
        "base_num_kv_heads": 8,
        "head_dim": 64,
        "base_mlp_dim": 8192,
        "base_num_decoder_layers": 16,
        "vocab_size": 50257,
        "logits_via_embedding": False,
        "rope_max_timescale": 500_000,
        "per_device_batch_size": 4.0,
        "max_target_length": 2048,
        "z_loss_multiplier": 1e-4,
        "sa_block_q": 1024,
        "remat_policy": "full",
    }
    assert wanted.items() <= values.items() and "sa_use_fused_bwd_kernel" not in values


@pytest.mark.parametrize("preset", ["gpt2-405m", "rmt-llama-311m", "llama-attnres-374m"])
def test_only_llamas_are_compared(preset):
    config = peers.Row(preset, 512, 1, "v5e:1x1").config(1)
    with pytest.raises(UsageError, match="is not a Llama"):
        maxtext.overrides_of(config, 1, "default", "full")


class Stopped:
    """A compiler that ends every job with the same failure, and counts the jobs."""

    message, error = "XlaRuntimeError: RESOURCE_EXHAUSTED: too large", "XlaRuntimeError"
    jobs = 0

    def __init__(self, target, *, buffers):
        assert buffers

    def compile(self, job):
        type(self).jobs += 1
        return Failure(self.message, self.error)

    def close(self):
        pass


@pytest.fixture
def stopped(monkeypatch):
    class Compiler(Stopped):
        pass

    monkeypatch.setattr(peers, "Worker", Compiler)
    return Compiler


def test_steps_that_do_not_fit_are_kept(stopped, tmp_path):
    lines = []
    steps = peers.sweep(ROW, "maxtext", V5E, open_folder(str(tmp_path)), progress=lines.append)
    assert {step.fault for step in steps} == {"does not fit in memory"}
    assert [step.choice.remat for step in steps[:3]] == list(maxtext.REMAT)
    assert [step.choice.weights for step in steps] == ["joined"] * 3 + ["default"] + ["joined"] * 2
    assert lines[0] == (
        "v5e:1x1 llama-tiny 128: maxtext, remat minimal_with_context, options own, attention 1024 "
        "fused, weights joined: does not fit in memory"
    )
    again = peers.sweep(ROW, "maxtext", V5E, open_folder(str(tmp_path)), compiles=2)
    assert again == steps[:2] and stopped.jobs == len(steps) == peers.MOST_COMPILES


@pytest.mark.parametrize("changed", ["source_hash", "tuned.fingerprint"])
def test_steps_of_other_code_or_tables_are_compiled_again(stopped, tmp_path, monkeypatch, changed):
    folder = open_folder(str(tmp_path))
    peers.sweep(ROW, "rmt_tpu", V5E, folder, compiles=1)
    monkeypatch.setattr(f"rmt_tpu.analysis.peers.{changed}", lambda *packages: "other")
    for _ in range(2):
        peers.sweep(ROW, "rmt_tpu", V5E, folder, compiles=1)
    assert stopped.jobs == 2 and len(list(tmp_path.iterdir())) == 2


def test_maxtexts_steps_outlive_changes_of_our_models(stopped, tmp_path, monkeypatch):
    folder = open_folder(str(tmp_path))
    for version in "first", "second":
        hashes = lambda *modules, v=version: v if pallas_kernels in modules else "the same"
        monkeypatch.setattr("rmt_tpu.analysis.peers.source_hash", hashes)
        for side in peers.SIDES:
            peers.sweep(ROW, side, V5E, folder, compiles=1)
    assert stopped.jobs == 3


@pytest.mark.parametrize("attention,share", [("default", 10 / 16), ("1024 fused", 3 / 4)])
def test_blocks_above_the_diagonal_are_skipped(attention, share):
    for kernel in ("splash_mha_fwd_segmented_residuals.4", "splash_mha_dkv_no_residuals"):
        assert maxtext.computed_share(kernel, attention, 2048) == share
    assert maxtext.computed_share("splash_mha_fwd_residuals", attention, 512) == 1.0


def test_blocks_of_two_sizes():
    """Each block of 1024 queries reads two more blocks of 512 keys than the one before."""
    assert maxtext.computed_share("splash_mha_fwd_residuals", "script", 4096) == 20 / 32
    assert maxtext.computed_share("splash_mha_dq_residuals", "script", 4096) == 12 / 16


def test_failures_of_every_choice_are_an_error(stopped, tmp_path):
    stopped.message, lines = "ValueError: no such option", []
    with pytest.raises(CompilerError, match="v5e:1x1 llama-tiny 128: rmt_tpu, .*no such option"):
        peers.sweep(ROW, "rmt_tpu", V5E, open_folder(str(tmp_path)), progress=lines.append)
    assert len(lines) == stopped.jobs == 3 and not list(tmp_path.iterdir())


def step(seconds, **values):
    by_model = {"least": 0.9 * seconds, "best guess": seconds, "most": 1.2 * seconds}
    return peers.Step(peers.Choice("full"), seconds=by_model, launches=1234, **values)


def test_the_table_has_the_fastest_steps():
    ours = [step(0.05, attention_seconds=0.01), step(0.04, sent_seconds=0.02, hidden_seconds=0.01)]
    theirs = [peers.Step(peers.Choice("none"), fault="does not fit in memory"), step(0.08)]
    row = peers.row_json(ROW, V5E, {"maxtext": theirs, "rmt_tpu": ours})
    row = json.loads(json.dumps(row))
    assert peers.ratio(row) == pytest.approx({"least": 0.5, "best guess": 0.5, "most": 0.5})
    *_, first, second, third = peers.table([row]).splitlines()
    assert first.startswith("| v5e:1x1 llama-tiny, 2 x 128 | maxtext | 72 / 80 / 96 | ")
    assert second.startswith("|  | rmt_tpu | 36 / 40 / 48 | ")
    assert second.endswith("| 0 | 20 (10 hidden) | 1,234 | remat full, options own; of 2 |")
    assert "**0.50 / 0.50 / 0.50**" in third
    row["sides"]["rmt_tpu"].append(
        dataclasses.asdict(peers.Step(peers.Choice("none"), "no option"))
    )
    assert "of 3 (1 failed) |" in peers.table([row]).splitlines()[-2]
    row["sides"]["maxtext"] = [dataclasses.asdict(theirs[0])]
    *_, first, second = peers.table([row]).splitlines()
    assert "| maxtext | does not fit in memory | - |" in first and peers.ratio(row) is None


@pytest.mark.compile
def test_our_step_is_compiled(tmp_path):
    folder = open_folder(str(tmp_path))
    first, second = steps = peers.sweep(ROW, "rmt_tpu", V5E, folder, compiles=2)
    assert [s.choice.remat for s in steps] == ["dots", "full"]
    for s in steps:
        assert s.product_seconds < s.seconds["least"] <= s.seconds["most"]
        assert s.attention_seconds > 0 and s.launches > 50 and not s.sent_seconds
    assert first.argument_bytes == second.argument_bytes
    assert first.product_seconds < second.product_seconds
    assert peers.sweep(ROW, "rmt_tpu", V5E, folder, compiles=2) == steps


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 12), reason="MaxText needs Python 3.12")
def test_maxtext_is_compiled(tmp_path):
    target = parse_topology("v5e:2x2")
    row = dataclasses.replace(ROW, seq_len=1024, batch_size=4, topology="v5e:2x2")
    (theirs,) = peers.sweep(row, "maxtext", target, open_folder(str(tmp_path)), compiles=1)
    (ours,) = peers.sweep(row, "rmt_tpu", target, open_folder(str(tmp_path)), compiles=1)
    for s in (theirs, ours):
        assert s.attention_seconds > 0 and s.sent_seconds > 0
    # The products that a model needs are the same.
    assert theirs.product_seconds == pytest.approx(ours.product_seconds, rel=0.3)
