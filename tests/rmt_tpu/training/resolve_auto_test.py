"""What is "auto" in a run's model: what it becomes, and what of it a run that goes on keeps."""

from dataclasses import replace

import pytest

from rmt_tpu.config import Experts, Stack, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.training.remat_choice import Devices
from rmt_tpu.training.run import resolve_auto

PINNED_MODEL = ("model.remat", "model.store.dtype")
BF16 = {"model.compute_dtype": "bfloat16"}
BLOCKS = {"model.mixer": "block_attention", "model.mixer.layers_per_block": 1}
SIZE = {"train.batch_size": 32, "data.seq_len": 512}
SMALL = {"model.init_std": 0.001}  # too fine for int16's steps


@pytest.mark.parametrize(
    ("preset", "changes", "remat", "dtype"),
    [
        ("rmt-tiny", {}, "reversible", "float32"),
        ("rmt-tiny", BF16, "reversible", "int16"),
        ("rmt-tiny", BF16 | SMALL, "reversible", "float32"),
        ("rmt-tiny", BF16 | {"model.remat": "full"}, "full", "bfloat16"),
        ("rmt-tiny", BF16 | {"model.store.dtype": "bfloat16"}, "full", "bfloat16"),
        ("rmt-tiny", BF16 | {"train.mesh": "data=2,stage=2"}, "full", "bfloat16"),
        ("rmt-tiny", BF16 | BLOCKS, "full", "bfloat16"),
        ("gpt2-tiny", BF16, "full", "bfloat16"),
    ],
)
def test_what_auto_becomes(preset, changes, remat, dtype):
    model = resolve_auto(overrides.apply(run(preset), changes)).model
    assert (model.remat, model.store.dtype) == (remat, dtype)


@pytest.mark.parametrize(
    ("kept", "changes", "remat", "dtype"),
    [
        (("full", "bfloat16"), {}, "full", "bfloat16"),  # of a run by older code
        (("reversible", "float32"), {}, "reversible", "float32"),  # which outgrew int16
        (("reversible", "int16"), {}, "reversible", "int16"),
        (("reversible", "float32"), {"model.store.dtype": "int16"}, "reversible", "int16"),
        (("full", "bfloat16"), {"model.remat": "reversible"}, "reversible", "int16"),
        (("reversible", "int16"), {"train.mesh": "stage=2"}, "full", "bfloat16"),
        (("reversible", "float32"), BLOCKS, "full", "bfloat16"),
    ],
)
def test_what_a_run_that_goes_on_keeps(kept, changes, remat, dtype):
    changes = {"model.remat": "reversible"} | changes if "model.store.dtype" in changes else changes
    config = overrides.apply(run("rmt-tiny"), BF16 | changes)
    model = resolve_auto(config, BF16 | dict(zip(PINNED_MODEL, kept, strict=True))).model
    assert (model.remat, model.store.dtype) == (remat, dtype)


def test_a_run_in_float32_did_not_outgrow_int16():
    """It never had an int16 residual, and gets one where it goes on in bfloat16."""
    kept = dict(zip(PINNED_MODEL, ("reversible", "float32"), strict=True))
    config = overrides.apply(run("rmt-tiny"), BF16)
    model = resolve_auto(config, kept | {"model.compute_dtype": "float32"}).model
    assert model.store.dtype == "int16"


@pytest.mark.parametrize(
    ("changes", "kept", "kind", "parts"),
    [
        ({}, {}, "TPU v5 lite", 2),
        ({}, {}, "TPU v5", 1),
        ({}, {}, "cpu", 1),
        ({}, {}, None, 1),
        ({"train.accumulate": 4}, {}, "TPU v5 lite", 4),
        # A run that goes on keeps its parts, also if it was started by code that chose none.
        ({}, {"train.accumulate": 1}, "TPU v5 lite", 1),
        ({}, {"train.accumulate": 4}, "TPU v5", 4),
        ({"train.accumulate": 2}, {"train.accumulate": 4}, "TPU v5", 2),
        # Another batch may not be divisible by them.
        ({"train.batch_size": 48}, {"train.accumulate": 32}, "TPU v5 lite", 3),
    ],
)
def test_the_parts_of_a_batch(changes, kept, kind, parts):
    """A residual matrix of 16 x 512 tokens fits in v5e's VMEM, and one of 32 x 512 does not."""
    config = overrides.apply(run("rmt-305m"), BF16 | SIZE | changes)
    resolved = resolve_auto(config, kept, kind and Devices(kind, 1))
    assert resolved.train.accumulate == resolved.train.parts == parts
    assert config.train.parts == changes.get("train.accumulate", 1)


def test_rows_that_a_mesh_does_not_divide_have_one_part():
    """The error about the mesh then names no parts, which nobody asked for."""
    parts = []
    for rows in (128, 130):
        changes = {"train.batch_size": rows, "train.mesh": "fsdp=4"}
        config = overrides.apply(run("rmt-134m"), BF16 | SIZE | changes)
        parts.append(resolve_auto(config, devices=Devices("TPU v5 lite", 4)).train.parts)
    assert parts == [1, 1]


@pytest.mark.parametrize("capacity, parts", [(None, 2), (1.5, 1)])
def test_a_batch_whose_experts_drop_choices_has_one_part(capacity, parts):
    """A part would drop other choices than the whole batch."""
    config = overrides.apply(run("rmt-305m"), BF16 | SIZE)
    (stack,) = config.model.stacks
    experts = Experts(num_experts=4, top_k=2, hidden_dim=64, capacity=capacity)
    stacks = (Stack((stack.cores[0], experts), stack.repeat),)
    config = replace(config, model=replace(config.model, stacks=stacks))
    assert resolve_auto(config, devices=Devices("TPU v5 lite", 1)).train.parts == parts


def test_devices_that_do_not_fit_the_mesh_choose_nothing():
    """A table of runs on other devices is made from their folders alone."""
    config = overrides.apply(run("rmt-305m"), BF16 | SIZE | {"train.mesh": "fsdp=64"})
    resolved = resolve_auto(config, devices=Devices("TPU v5 lite", 1))
    assert (resolved.train.parts, resolved.model.remat) == (1, "reversible")
