"""Tests of the choice of what a model keeps for its backward pass on TPUs."""

import pytest

from rmt_tpu.analysis.step_cost import TrainStep, step_costs
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run
from rmt_tpu.estimator import TARGETS
from rmt_tpu.training.remat_choice import Devices, keeps_products
from rmt_tpu.training.run import resolve_auto

SIZE = {"train.batch_size": 16, "data.seq_len": 512, "model.compute_dtype": "bfloat16"}
V5E = "TPU v5 lite"


def config_of(preset, changes):
    return overrides.apply(run(preset), SIZE | changes)


@pytest.mark.parametrize(
    ("preset", "changes", "devices", "remat"),
    [
        ("gpt2-405m", {}, Devices(V5E, 1), "dots"),
        ("gpt2-405m", {"train.batch_size": 64}, Devices(V5E, 1), "full"),
        ("gpt2-405m", {"train.batch_size": 64, "train.accumulate": 4}, Devices(V5E, 1), "dots"),
        ("gpt2-405m", {"train.batch_size": 64, "train.mesh": "data=4"}, Devices(V5E, 4), "dots"),
        ("gpt2-405m", {"model.remat": "full"}, Devices(V5E, 1), "full"),
        ("gpt2-405m", {"train.mesh": "stage=2"}, Devices(V5E, 2), "full"),
        ("gpt2-405m", {}, Devices("TPU v5", 1), "dots"),
        ("gpt2-405m", {}, Devices("TPU v6 lite", 1), "full"),
        ("gpt2-405m", {}, Devices("TPU v4", 1), "full"),
        ("gpt2-405m", {}, Devices("NVIDIA H200", 1), "full"),
        ("gpt2-405m", {}, None, "full"),
        # Parameters and their state fill a device of their own, and not one of four.
        ("llama-1.2b", {}, Devices(V5E, 1), "full"),
        ("llama-1.2b", {"train.mesh": "data=4"}, Devices(V5E, 4), "full"),
        ("llama-1.2b", {"train.mesh": "fsdp=-1"}, Devices(V5E, 4), "dots"),
        ("llama-1.2b", {"train.mesh": "data=2,tensor=2"}, Devices("TPU v5", 4), "dots"),
        ("rmt-305m", {}, Devices(V5E, 1), "reversible_dots"),
        ("rmt-305m", {"train.batch_size": 96}, Devices(V5E, 1), "reversible"),
        ("rmt-305m", {"train.mesh": "fsdp=2,key=2"}, Devices(V5E, 4), "reversible_dots"),
        ("rmt-305m", {"model.remat": "reversible"}, Devices(V5E, 1), "reversible"),
        ("rmt-305m", {"model.store.dtype": "bfloat16"}, Devices(V5E, 1), "full"),
        ("rmt-305m", {}, Devices("TPU v6 lite", 1), "reversible_dots"),
        ("rmt-305m", {}, Devices("TPU7x", 1), "reversible"),
        ("rmt-305m", {"train.mesh": "stage=2"}, Devices(V5E, 2), "full"),
        ("rmt-305m", {}, Devices("NVIDIA H200", 1), "reversible"),
        ("attnres-528m", {}, Devices(V5E, 1), "dots"),
        ("attnres-528m", {"train.batch_size": 64}, Devices(V5E, 1), "full"),
        ("rmt-attnres-305m", {}, Devices(V5E, 1), "full"),
        ("gpt2-405m", {"model.mixer": "hyper_connections"}, Devices(V5E, 1), "full"),
        ("kimi-tiny", {"model.mixer": "sum"}, Devices(V5E, 1), "full"),
    ],
)
def test_products_are_kept_where_they_fit(preset, changes, devices, remat):
    assert resolve_auto(config_of(preset, changes), devices=devices).model.remat == remat


def test_a_run_that_goes_on_keeps_its_own():
    config, devices = config_of("gpt2-405m", {}), Devices(V5E, 1)
    for kept in ("full", "none"):
        resolved = resolve_auto(config, {"model.remat": kept}, devices)
        assert resolved.model.remat == kept


def test_the_reason_names_the_sizes():
    keeps = keeps_products(config_of("gpt2-405m", {}), Devices(V5E, 1))
    assert keeps.value and keeps.reason.startswith("a device would keep 4.0 GB for the backward")
    assert keeps_products(config_of("rmt-attnres-305m", {}), Devices(V5E, 1)) is None
    assert "memory is known" in keeps_products(config_of("gpt2-405m", {}), Devices("cpu", 1)).reason


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(
    ("preset", "size"),
    [("gpt2-405m", (16, 512)), ("rmt-305m", (16, 512)), ("llama-374m", (4, 2048))],
)
def test_the_estimate_is_near_the_compiled_program(preset, size):
    step = TrainStep(preset, *size)
    (cost,) = step_costs([step], TARGETS["v5e"])
    reason = keeps_products(step.config(V5E), Devices(V5E, 1)).reason
    needed = float(reason.partition("backward pass, ")[2].split(" ")[0])
    assert needed == pytest.approx((cost.argument_bytes + cost.temporary_bytes) / 1e9, rel=0.03)
