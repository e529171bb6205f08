"""Tests of the choice of what a model keeps for its backward pass on TPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import Var

from pallas_kernels.target import lowering_for
from rmt_tpu import Decoder
from rmt_tpu.analysis.step_cost import TrainStep, step_costs
from rmt_tpu.config import overrides
from rmt_tpu.config.presets import run
from rmt_tpu.estimator import TARGETS
from rmt_tpu.training.remat_choice import Devices, keeps_products
from rmt_tpu.training.run import resolve_auto

SIZE = {"train.batch_size": 16, "data.seq_len": 512, "model.compute_dtype": "bfloat16"}
V5E = "TPU v5 lite"
NORMED = {"model.attention.normed": "both", "model.feed_forward.normed": "both"}
BLOCKS = {"model.mixer": "block_attention", "model.mixer.num_blocks": 2}
THIRDS = {"model.mixer.num_blocks": 16}  # A block of 3 sublayers ends within a layer.
GATED = {"model.attention.output_gate": True, "model.attention.num_kv_heads": 2}


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
        ("rmt-305m", {"train.batch_size": 96}, Devices(V5E, 1), "reversible_dots"),  # in 6 parts
        (
            "rmt-305m",
            {"train.batch_size": 96, "train.accumulate": 1},
            Devices(V5E, 1),
            "reversible",
        ),
        ("rmt-305m", {"train.mesh": "fsdp=2,key=2"}, Devices(V5E, 4), "reversible_dots"),
        ("rmt-305m", {"model.remat": "reversible"}, Devices(V5E, 1), "reversible"),
        ("rmt-305m", {"model.store.dtype": "bfloat16"}, Devices(V5E, 1), "full"),
        ("rmt-305m", {}, Devices("TPU v6 lite", 1), "reversible_dots"),
        ("rmt-305m", {}, Devices("TPU7x", 1), "reversible"),
        ("rmt-305m", {"train.mesh": "stage=2"}, Devices(V5E, 2), "full"),
        ("rmt-305m", {}, Devices("NVIDIA H200", 1), "reversible"),
        ("attnres-528m", {}, Devices(V5E, 1), "dots"),
        ("attnres-528m", {"train.batch_size": 64}, Devices(V5E, 1), "full"),
        ("rmt-attnres-305m", {}, Devices(V5E, 1), "dots"),
        ("rmt-attnres-305m", {}, Devices("TPU v6 lite", 1), "dots"),
        ("rmt-attnres-305m", {}, Devices("TPU7x", 1), "full"),
        ("rmt-attnres-305m", {"train.batch_size": 64}, Devices(V5E, 1), "full"),
        ("rmt-attnres-305m", THIRDS, Devices(V5E, 1), "full"),
        ("rmt-attnres-305m", {"model.mixer.query": "input"}, Devices(V5E, 1), "full"),
        ("gpt2-405m", {"model.mixer": "depth_lstm"}, Devices(V5E, 1), "full"),
        ("gpt2-405m", {"model.mixer": "hyper_connections"}, Devices(V5E, 1), "dots"),
        ("gpt2-160m", {"model.mixer": "mhc"}, Devices(V5E, 1), "dots"),
        ("gpt2-405m", {"model.mixer": "residual_scalars"}, Devices(V5E, 1), "dots"),
        ("gpt2-160m", {"model.mixer": "wide_streams"}, Devices(V5E, 1), "dots"),
        ("kimi-tiny", {"model.mixer": "sum"}, Devices(V5E, 1), "full"),
        ("llama-374m", {"model.attention.query_key_norm": True}, Devices(V5E, 1), "dots"),
        ("llama-374m", NORMED, Devices(V5E, 1), "dots"),
        ("rmt-305m", {"model.attention.output_gate": True}, Devices(V5E, 1), "reversible_dots"),
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
    assert keeps_products(config_of("rmt-attnres-305m", THIRDS), Devices(V5E, 1)) is None
    assert "memory is known" in keeps_products(config_of("gpt2-405m", {}), Devices("cpu", 1)).reason


def stacked_numbers(model, seq_len=256):
    """Count the 2-byte numbers per token that a pull-back has in stacks of all layers' values."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0))))

    def pull_back(params, tokens):
        return jax.vjp(lambda p: nnx.merge(graphdef, p)(tokens).sum(), params)[1]

    with lowering_for(V5E):
        program = jax.make_jaxpr(pull_back)(params, jnp.zeros((1, seq_len), int)).jaxpr
    kept = {v for v in program.outvars if isinstance(v, Var)} - {*program.invars}
    repeat = model.stacks[0].repeat
    stacks = [v.aval for v in kept if v.aval.shape[:1] == (repeat,) and seq_len in v.aval.shape]
    return sum(stack.size * stack.dtype.itemsize for stack in stacks) / (2 * seq_len * repeat)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("gpt2-tiny", {}),
        ("gpt2-tiny", {"model.attention.query_key_norm": True} | NORMED),
        ("gpt2-tiny", {"model.feed_forward.activation": "swiglu"} | GATED),
        ("gpt2-tiny", {"model.attention.query_key_norm": True} | GATED),
        ("rmt-tiny", GATED),
        ("rmt-tiny", BLOCKS),
    ],
)
def test_cores_keep_as_many_numbers_as_they_say(preset, changes):
    """All numbers here are of 2 bytes, or are log-sums, which count as two of them."""
    remat = "reversible_dots" if preset == "rmt-tiny" and changes != BLOCKS else "dots"
    model = config_of(preset, {"model.remat": remat} | changes).model
    model = resolve_auto(dataclasses.replace(run(preset), model=model)).model
    cores, rebuilt = model.stacks[0].cores, preset == "rmt-tiny"
    said = sum(core.kept_numbers(model.width, rebuilt=rebuilt) for core in cores)
    # In a vector model, the residual of each of the two sublayers is kept, and what each writes in
    # an RMT with blocks. An RMT keeps what one of its sublayers writes in a stack of this length,
    # and a float32 statistic of each norm.
    rest = 2 * model.width if not model.rebuilds_residual else model.width + 2 * 2 * 2
    assert stacked_numbers(model) == said + rest


@pytest.mark.parametrize(
    ("mixer", "rows"),
    [
        ({"model.mixer": "sum"}, 2),
        ({"model.mixer": "residual_scalars"}, 5),
        ({"model.mixer": "residual_scalars", "model.mixer.values": False}, 3),
        ({"model.mixer": "wide_streams", "model.mixer.streams": 3}, 5),
        ({"model.mixer": "wide_streams", "model.mixer.streams": 8}, 10),
        ({"model.mixer": "highway"}, 3),
        ({"model.mixer": "highway", "model.mixer.form": "gated"}, 4),
    ],
)
def test_mixers_keep_at_most_as_many_residuals_as_they_say(mixer, rows):
    """The numbers are those of a layer's two sublayers, less what its cores keep."""
    model = config_of("gpt2-tiny", {"model.remat": "dots"} | mixer).model
    model = resolve_auto(dataclasses.replace(run("gpt2-tiny"), model=model)).model
    cores = sum(core.kept_numbers(model.width) for core in model.stacks[0].cores)
    assert stacked_numbers(model) == cores + rows * model.width
    assert rows <= 2 * model.mixer.kept_residuals


@pytest.mark.parametrize("mixer", ["hyper_connections", "mhc", "mhc_lite"])
def test_streams_are_kept_with_the_coefficients_of_a_write(mixer):
    """A token's m (m + 1) coefficients in float32 are too few to be counted."""
    model = config_of("gpt2-tiny", {"model.remat": "dots", "model.mixer": mixer}).model
    model = resolve_auto(dataclasses.replace(run("gpt2-tiny"), model=model)).model
    cores, m = sum(c.kept_numbers(model.width) for c in model.stacks[0].cores), model.mixer.streams
    kept = 2 * model.mixer.kept_residuals
    assert stacked_numbers(model) == cores + kept * model.width + 2 * m * (m + 1)


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
