"""The check of a device's kernels: it passes what is right, and sees each kind of mistake."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.shapes import Heads
from rmt_tpu.analysis import device_cases_layers as layers
from rmt_tpu.analysis import device_check, device_compare
from rmt_tpu.analysis.device_cases import cases
from tests import cli

SMALL = cases("small")
FORWARD, GRADIENT, STEP, EDGE = 1, 2, 3, 4
# The first case of these ops; they compile within a second or two.
FAST = ("store", "undo", "depth_attention_partial_backward", "token_rows", "logits")


def named(fast):
    """Of all cases; but for the first one of these ops they are slow."""
    first = [next(case for case in SMALL if case.op == op) for op in fast]
    marks = lambda case: () if case in first else pytest.mark.slow
    each = [pytest.param(case, id=f"{case.op} {case.size}", marks=marks(case)) for case in SMALL]
    return pytest.mark.parametrize("case", each)


@jax.custom_vjp
def with_wrong_gradient(x, fault):
    """x; its gradient is off by a tenth where the fault is that."""
    return x


with_wrong_gradient.defvjp(
    lambda x, fault: (x, fault),
    lambda fault, d: (jnp.where(fault == GRADIENT, d * 1.1, d).astype(d.dtype), None),
)


def faulty(case):
    """The case with a mistake in what is run; the equations it is held to are as they were.

    Which mistake is an argument, so that all are one program.
    """

    def function(implementation, fault, **inputs):
        last = max(k for k, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating))
        if case.gradients:
            inputs[last] = with_wrong_gradient(inputs[last], fault)
        out = dict(case.function(implementation, **inputs))
        for name in case.exact:
            at_once = out[name].at[(0,) * out[name].ndim].add(1)
            out[name] = jnp.where(fault == STEP, at_once, out[name])
        name = next(name for name, x in out.items() if jnp.issubdtype(x.dtype, jnp.floating))
        x = out[name]
        edge = x.at[(-1,) * x.ndim].set(jnp.nan)
        out[name] = jnp.where(fault == FORWARD, 1.1 * x, jnp.where(fault == EDGE, edge, x))
        out[name] = out[name].astype(x.dtype)
        return out

    reference = case.reference or (lambda **inputs: case.function("xla", **inputs))
    return dataclasses.replace(
        case,
        function=function,
        inputs=lambda: case.inputs() | {"fault": jnp.int32(0)},
        reference=lambda fault, **inputs: reference(**inputs),
    )


def test_linear_attention_that_ignores_documents_is_seen():
    case = dataclasses.replace(layers.delta((1, 67), Heads(1, 8), stepwise=True), gradients=False)
    of_one_document = lambda implementation, **inputs: case.function(
        implementation, **{k: 0 * x if k == "segment_ids" else x for k, x in inputs.items()}
    )
    assert device_check.check(case, "xla", timed=False).ok
    other = dataclasses.replace(case, function=of_one_document)
    row = device_check.check(other, "xla", timed=False)
    assert "read" in row.wrong


@named(FAST)
def test_each_kind_of_mistake_is_seen(case):
    ran = device_check.run(faulty(case), None)
    assert ran.implementation == "xla"
    compared = lambda got: device_compare.compare(case, ran.inputs, got, ran.want)

    def differing(fault):
        """What differs with this mistake in the program."""
        got = ran.program(ran.inputs | {"fault": jnp.int32(fault)}, ran.cotangents)
        return device_check.wrong(*compared(jax.device_get(got)))

    differences, _ = compared(ran.got)
    assert differing(0) == [] and len(differences) > 2 * case.gradients
    assert differing(FORWARD) and differing(EDGE)
    if case.gradients:
        wrong = differing(GRADIENT)
        assert wrong and all(name.startswith("d_") for name in wrong)
    if case.exact:
        assert differing(STEP) == [*case.exact]
    # Each result alone: a little off all over, off in one row, of the other sign, NaN at its edge.
    for name, x in ran.got.items():
        if name in case.exact or not np.any(ran.want[name]):
            continue
        edge, one_row = np.array(x, np.float64), np.array(x, np.float64)
        edge.flat[-1] = np.nan
        rows = one_row.reshape(-1, x.shape[-1])
        rows[np.argmax(np.max(np.abs(rows), axis=1))] *= 1.1
        for damaged in (x * 1.02, -x, one_row, edge):
            found = device_check.wrong(*compared(ran.got | {name: damaged}))
            assert found and {n.removesuffix(device_compare.MEAN) for n in found} == {name}


@named(())
def test_interpreted_kernels_of_tpus_pass(case):
    row = device_check.check(case, "pallas", interpret=True, timed=False)
    assert row.ok
    # A part of few tokens is served by no kernel.
    served = (case.op, case.size) != ("attention_to", "2x3 H=2 D=16 before=45")
    assert row.implementation == ("interpreted" if served else "xla")


def test_a_kernel_that_fails_is_a_row():
    def function(implementation, **inputs):
        raise RuntimeError("no room\nfor it | at all")

    broken = dataclasses.replace(SMALL[0], function=function)
    row = device_check.check(broken, None, timed=False)
    assert not row.ok and row.error == "RuntimeError: no room for it | at all"
    line = device_check.table([row], None).splitlines()[-1]
    assert line.endswith("| failed: RuntimeError: no room for it / at all |")


@pytest.mark.parametrize(
    "error, inconclusive",
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"), True),
        (MemoryError(), True),
        (RuntimeError("UNAVAILABLE: the device's connection was lost"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem."), False),
        (RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"), False),
        (RuntimeError("INTERNAL: an illegal memory access"), False),
        (ValueError("UNAVAILABLE: no rule"), False),
    ],
)
def test_which_errors_say_nothing_of_a_kernel(error, inconclusive):
    def function(implementation, **inputs):
        raise error

    row = device_check.check(dataclasses.replace(SMALL[0], function=function), None, timed=False)
    assert not row.ok and row.inconclusive == inconclusive


def test_table_and_record():
    good = device_check.CheckRow("a", "1", "xla", {"z": 0.01}, {"z": 0.02}, 1e-3, 2_000_000, 10)
    bad = device_check.CheckRow(
        "b", "2", "triton", {"z": math.nan, "y": 0.0}, {"z": 0.02, "y": 0.0}
    )
    rates = device_check.Rates(flops=1e12, bytes=4e9)
    first, second = device_check.table([good, bad], rates).splitlines()[2:]
    assert first == "| a | 1 | xla | 0.01 (z) | 0.02 | 1 | 50% of a copy | ok |"
    assert second == "| b | 2 | triton | nan (z) | 0.02 |  |  | differs: z |"
    values = device_check.record([good, bad], rates, jax.devices()[0])
    values = json.loads(json.dumps(values, allow_nan=False))
    assert values["rows"][1]["differences"] == {"z": None, "y": 0.0}
    assert values["rows"][1]["wrong"] == ["z"] and values["rows"][0]["ok"]
    assert values["device_kind"] == "cpu" and values["jax"] == jax.__version__


def test_the_guide_has_the_number_of_cases():
    guide = (cli.ROOT / "docs" / "hardware.md").read_text()
    assert f"It has {len(SMALL)} now" in guide


@pytest.mark.parametrize("M, G, alignment", [(128, 16, 16), (16, 4, 16), (320, 3, 16), (301, 3, 1)])
def test_some_rows_of_experts_are_checked_however_few(M, G, alignment):
    sizes = np.asarray(layers.grouped(M, 128, 128, G, alignment=alignment).inputs()["sizes"])
    assert sizes[1] == 0 < sizes.sum() <= M and not np.any(sizes % alignment)
