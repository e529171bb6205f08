"""Tests of the plan of a train step: the target, and the choices that follow from it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

import sharding
from pallas_kernels.target import Target
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run as preset_run
from rmt_tpu.execution.plan import plan_of
from rmt_tpu.layers import choices
from rmt_tpu.residual.depth_attention import DepthAttention
from rmt_tpu.training.remat_choice import Devices
from rmt_tpu.training.run import resolve_auto


def plan(name, topology=None, *, mesh="data=1", **changes):
    changes = {path.replace("__", "."): value for path, value in changes.items()}
    config = overrides.apply(preset_run(name), {"model.compute_dtype": "bfloat16"} | changes)
    devices = jax.devices()
    if topology:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    devices = devices[: int(mesh.partition("=")[2])]
    config = overrides.apply(config, {"train.mesh": mesh})
    resolved = resolve_auto(config, devices=Devices(devices[0].device_kind, len(devices)))
    return plan_of(resolved, sharding.make_mesh(mesh, devices))


def values(found):
    return {
        name: value.value if isinstance(value, choices.Choice) else value
        for name, value in found._asdict().items()
    }


@pytest.mark.parametrize("topology, in_place", [("v5e:2x2", True), ("tpu7x:2x2x1", False)])
def test_an_rmt(topology, in_place):
    size = {"train__batch_size": 16, "data__seq_len": 512}
    found = plan("rmt-305m", topology, model__remat="reversible", **size)
    assert found.target.on_tpu
    assert values(found) | {"target": None} == {
        "target": None,
        "schedule": "reversible",
        "residual_dtype": "int16",
        "outputs_in_place": in_place,
        "products_in_turn": True,
        "kept_in_rows": True,
        "rereads_rebuilt": topology == "tpu7x:2x2x1",
        "parts": 1,
        "whole_blocks": None,
        "padded_width": None,
        "decode_kernels": True,
    }
    kept = plan("rmt-305m", topology, model__remat="reversible_dots")
    assert not kept.products_in_turn.value and "differentiates" in kept.products_in_turn.reason
    few = plan("rmt-134m", topology).outputs_in_place
    assert not few.value and ("12 vectors" in few.reason) == in_place
    told = found.lines()
    assert told["compiled for"] == found.target.kind
    assert told["outputs in place"].startswith("yes: " if in_place else "no: ")
    assert all(": " in line for name, line in told.items() if name != "compiled for")


def test_attention_over_depth():
    narrow = plan("attnres-tiny", model__store__dim=1168, model__norm="rmsnorm")
    assert values(narrow)["schedule"] == "banked"
    assert values(narrow)["padded_width"] == 1280 and "multiple" in narrow.padded_width.reason
    assert values(plan("attnres-tiny", model__store__dim=130))["padded_width"] == 130
    plain = plan("gpt2-tiny")
    assert values(plain)["schedule"] == "scanned" and plain.padded_width is None
    assert "rereads rebuilt" not in plain.lines()


def test_what_is_kept_is_in_rows_on_tpus():
    assert plan("gpt2-tiny", "v5e:2x2").kept_in_rows.value
    assert not plan("gpt2-tiny").kept_in_rows.value


def test_only_axes_that_divide_tokens_make_products_few():
    """64 tokens of a sequence are few, but `key` and `expert` divide the batch in training."""
    chosen = lambda mesh: plan("rmt-tiny", "v5e:2x2", mesh=mesh, data__seq_len=128).products_in_turn
    assert "64 tokens" in chosen("tensor=2").reason
    assert chosen("key=2") == chosen("expert=2") == chosen("data=1")
    assert "tokens," not in chosen("key=2").reason


def test_decoding_has_kernels_on_tpus():
    of = lambda name, *where, **mesh: plan(name, *where, **mesh).decode_kernels
    assert of("rmt-tiny", "v5e:2x2").value and of("attnres-tiny", "v5e:2x2").value
    assert not of("rmt-tiny").value and "TPUs" in of("rmt-tiny").reason
    assert of("rmt-tiny", "v5e:2x2", mesh="fsdp=2").value
    for name in ("gpt2-tiny", "rmt-attnres-tiny", "delta-tiny"):
        assert "store and mixer" in of(name, "v5e:2x2").reason and of(name, "v5e:2x2").value
        assert not of(name, "v5e:2x2", mesh="fsdp=2").value


@pytest.mark.parametrize("kind, most", [("TPU v6 lite", 16), ("TPU v5", 8), ("TPU7x", 8)])
def test_what_fills_half_of_a_chips_vmem_is_large(kind, most):
    size = lambda batch: int(np.prod((batch, 512, 64, 64))) * jnp.dtype(jnp.int16).itemsize
    found = [choices.rereads_rebuilt(Target(kind), size(b)).value for b in (most, most + 1)]
    assert found == [False, True]


@pytest.mark.parametrize(
    ("batch", "accumulate", "parts", "said"),
    [
        (16, None, 1, "^a residual of all tokens may stay"),
        (16, 2, 2, "^train.accumulate is 2$"),
        (32, None, 2, "^a residual of one part may stay in VMEM between two kernels$"),
        (32, 1, 1, " is 1; --set=train.accumulate=2 probably.* a residual of one part may"),
        (32, 2, 2, "^a residual of one part may stay in VMEM between two kernels$"),
        (48, None, 3, "of one part"),
        (40, None, 1, "less than 8192 tokens"),
    ],
)
def test_a_batch_has_parts_whose_residual_fits(batch, accumulate, parts, said):
    changes = {"train__batch_size": batch, "train__accumulate": accumulate}
    found = plan("rmt-305m", "v5e:2x2", data__seq_len=512, **changes).parts
    assert re.search(said, found.reason)
    assert found.value == parts
    elsewhere = plan("rmt-305m", "tpu7x:2x2x1", data__seq_len=512, **changes).parts
    assert elsewhere.value == (accumulate or 1)
    assert plan("gpt2-tiny", "v5e:2x2").parts is None


def test_parts_are_of_the_rows_of_one_device():
    """Rows that devices share by their tokens or D_k are divided over fewer devices."""

    def parts(mesh, rows, tokens):
        changes = {"train__batch_size": rows, "data__seq_len": tokens}
        changes |= {"model__attention__positions": "rope"}
        return plan("rmt-305m", "v5e:2x2", mesh=mesh, **changes).parts.value

    assert parts("fsdp=2", 64, 512) == 2 and parts("fsdp=2", 32, 512) == 1
    # A device has 8192 tokens of each row.
    assert parts("sequence=2", 2, 16384) == 2


def test_products_come_in_turn_where_that_is_faster():
    given = lambda kind, vectors=4, tokens=512: choices.products_in_turn(
        Target(kind), vectors, tokens
    )
    assert given("TPU v5").value and not given("TPU v6 lite").value
    assert not given("TPU v5", vectors=1).value and not given("TPU v5", tokens=100).value
    assert len({given("TPU v5", 1).reason, given("TPU v5", 4, 9).reason}) == 2


@pytest.mark.parametrize(
    ("blocks", "whole"),
    [
        ({"num_blocks": 8}, False),
        ({"num_blocks": 6}, True),
        ({"layers_per_block": 5}, True),
        ({"num_blocks": 1}, True),
        ({"sublayers_per_block": 1}, None),
    ],
)
def test_blocks_of_whole_layers(blocks, whole):
    """The plan of a model of 12 layers says the same as the groups that its mixer makes."""
    changes = {f"model__mixer__{name}": size for name, size in blocks.items()}
    for mixer in ("block_attention", "delta_attention"):
        found = plan("gpt2-160m", model__mixer=mixer, **changes).whole_blocks
        assert found == whole if whole is None else found.value == whole
    path = {f"model.mixer.{name}": size for name, size in blocks.items()}
    model = overrides.apply(
        preset_run("gpt2-160m"), {"model.mixer": "block_attention"} | path
    ).model
    assert DepthAttention(model).grouping(0, 2, 12).closed == bool(whole)
