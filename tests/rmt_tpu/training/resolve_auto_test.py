"""What is "auto" in a run's model: what it becomes, and what of it a run that goes on keeps."""

import pytest

from rmt_tpu.config import PINNED_ON_RESUME, overrides
from rmt_tpu.config.presets import run
from rmt_tpu.training.run import resolve_auto

BF16 = {"model.compute_dtype": "bfloat16"}
BLOCKS = {"model.mixer": "block_attention", "model.mixer.layers_per_block": 1}
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
    model = resolve_auto(config, BF16 | dict(zip(PINNED_ON_RESUME, kept, strict=True))).model
    assert (model.remat, model.store.dtype) == (remat, dtype)


def test_a_run_in_float32_did_not_outgrow_int16():
    """It never had an int16 residual, and gets one where it goes on in bfloat16."""
    kept = dict(zip(PINNED_ON_RESUME, ("reversible", "float32"), strict=True))
    config = overrides.apply(run("rmt-tiny"), BF16)
    model = resolve_auto(config, kept | {"model.compute_dtype": "float32"}).model
    assert model.store.dtype == "int16"
