"""The least that a run needs, and the memory that there is."""

from types import SimpleNamespace

import jax
import pytest

import sharding
from rmt_tpu import cost, memory
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.errors import RunError
from rmt_tpu.training import memory_check
from rmt_tpu.training.run import prepare

TINY = {"model.num_layers": 3, "data.seq_len": 16, "train.batch_size": 8, "train.mesh": "fsdp=2"}


@pytest.fixture(scope="module")
def tiny():
    config = overrides.apply(preset_run("rmt-tiny"), TINY)
    return config, prepare(config, sharding.make_mesh("fsdp=2", jax.devices()[:2]))


def test_the_least(tiny):
    config, run = tiny
    needs = memory_check.lower_bound(config, run)
    parameters = 4 * sum(cost.parameters(config.model).values())
    assert parameters / 2 <= needs.gradients < 0.55 * parameters, "small ones are on both"
    assert 3 * needs.gradients <= needs.state < 3 * needs.gradients + 64
    vector = {"kind": "vector", "dim": config.model.residual_size}
    residuals = 8 * 16 * config.model.residual_size * 4
    assert needs.activations == 3 * residuals / 2 and needs.batch == 8 * 16 * (3 * 4 + 4)
    for changes, kept in [
        ({"model.remat": "reversible"}, residuals / 2),
        ({"train.accumulate": 4}, 3 * residuals / 8),
        ({"model.compute_dtype": "bfloat16"}, 3 * residuals / 4),
        ({"model.mixer": {"kind": "block_attention"}}, residuals / 2),
        ({"model.store": vector, "model.mixer": {"kind": "mhc"}}, 3 * residuals / 2),
    ]:
        assert memory_check.lower_bound(overrides.apply(config, changes), run).activations == kept


def test_a_batch_that_a_host_cannot_hold(tiny, monkeypatch):
    config, run = tiny
    needs = memory_check.lower_bound(config, run)
    on_both = 2 * needs.device + needs.batch
    monkeypatch.setattr(memory, "machine_bytes", lambda: on_both)
    assert memory_check.shortfall(config, run) is None
    monkeypatch.setattr(memory, "machine_bytes", lambda: on_both - 1)
    line = r"^--batch_size=8 of --seq_len=16 with .* on this machine, which has .* a batch\)"
    with pytest.raises(RunError, match=f"{line}: use a smaller --batch_size"):
        memory_check.check(config, run)


def test_a_batch_that_a_device_cannot_hold(tiny):
    config, run = tiny
    needs = memory_check.lower_bound(config, run)
    for stats, fits in [
        ({"bytes_limit": needs.device}, True),
        ({"bytes_limit": needs.device - 1}, False),
        ({}, True),
        (None, True),
    ]:
        device = SimpleNamespace(platform="tpu", memory_stats=lambda stats=stats: stats)
        mesh = SimpleNamespace(local_devices=[device] * 2, shape=run.mesh.shape, size=2)
        line = memory_check.shortfall(config, run._replace(mesh=mesh))
        assert line is None if fits else "MB on this device, which has" in line


def test_memory_of_a_control_group(tmp_path):
    folder, names = tmp_path / "cgroup", tmp_path / "groups"
    (folder / "memory/job/step").mkdir(parents=True)
    (folder / "pod/box").mkdir(parents=True)
    (folder / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder / "memory/job/memory.limit_in_bytes").write_text("700\n")
    (folder / "pod/memory.max").write_text("600\n")
    (folder / "pod/box/memory.max").write_text("max\n")
    found = lambda: sorted(memory._limits(names, folder))
    assert found() == [], "a machine without them"
    names.write_text("9:cpuset:/job\n4:memory:/job/step\n0::/pod/box\n")
    assert found() == [600, 700, 9223372036854771712]
    names.write_text("0::/of/the/host\n")  # a container sees its own folder only
    (folder / "memory.max").write_text("500\n")
    assert found() == [500]
    assert 2**27 < memory.machine_bytes() < 2**50


def test_advice_keeps_the_number_of_parts():
    """A run that chooses it would compute a smaller batch in fewer parts of the same size."""
    assert memory.train_advice(1).startswith("use a smaller --batch_size, --set=train.accumulate=2")
    given = memory.train_advice(16)
    assert "smaller --batch_size with --set=train.accumulate=16, " in given
    assert "--set=train.accumulate=17 or more" in given
