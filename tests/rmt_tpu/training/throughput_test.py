"""Speeds of steps: what a step's time makes of tokens and FLOPs."""

import types

import jax
import pytest

import sharding
from rmt_tpu import cost
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run
from rmt_tpu.training import throughput


def test_the_mfu_counts_what_a_causal_mask_leaves(monkeypatch):
    config = overrides.apply(run("rmt-tiny"), {"train.batch_size": 4, "data.seq_len": 64})
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(throughput, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(cost, "peak_flops", lambda kind: 1e9)
    mesh = sharding.make_mesh("data=2", jax.devices()[:2])
    row = throughput.Throughput(config, mesh).step_ended()
    assert row["throughput/step_seconds"] == 2
    assert row["throughput/tokens_per_second"] == 4 * 64 / 2
    flops = 3 * 4 * 64 * cost.causal_flops_per_token(config.model, 64)
    assert row["throughput/mfu"] == pytest.approx(flops / (2 * 2e9))
